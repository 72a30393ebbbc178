"""Table 4 of Pack for bench/packing.py: Hyperband over 1,056 configurations of a model, by each way to share a GPU.

The space is the paper's table 3, on 32×32 images: 11 batch sizes, 4 optimizers, 6 rates and 4 activations. R is 27 here
and the reduction 3: 49 trials of 357 units in all. A unit is 500 steps of MLP-3, or 50 of another model, times
--fraction. With few steps, what is made once for each kind of trial weighs more than in the paper's table.

eager is the paper's original: one trial after another, with plain steps. graph is the same with captured steps.
batch_size, random and nearest are packs (§5.3), and auto is what Penstock chooses. "agree" is the part of the reports
that differ by at most 1% from those of the first study of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import penstock as ps
from bench.networks import Split, images
from bench.packed_models import ACTIVATIONS, MODELS
from bench.whole import Clock, Row, Whole, agreeing, attempted, differs, whole
from penstock.trial import Config

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
}
SPACE = {
    "batch_size": ps.choice(list(range(20, 71, 5))),
    "optimizer": ps.choice(list(OPTIMIZERS)),
    "lr": ps.choice([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1]),
    "activation": ps.choice(list(ACTIVATIONS)),
}
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"sharing": "solo", "deterministic": True},
    "graph": {"sharing": "solo"},
    "batch_size": {"sharing": "packed", "packing": "batch_size"},
    "random": {"sharing": "packed", "packing": "random"},
    "nearest": {"sharing": "packed", "packing": "nearest"},
    "auto": {"sharing": "auto"},
}
EAGER, GRAPH = {"mlp3": 8.0}, 1.3  # goals of auto: times as fast as eager, of other models 3, and as graphs in turn
UNIT = {"mlp3": 500}  # steps; of other models 50


class Tuned(ps.Task):
    """A model of Pack on images as small as CIFAR's."""

    def __init__(self, model: str, unit_steps: int) -> None:
        self.named, self.unit_steps = model, unit_steps

    def data(self, config: Config) -> Split:
        return images()

    def model(self, config: Config) -> nn.Module:
        return MODELS[self.named](10, 32, ACTIVATIONS[config["activation"]])

    def optimizer(self, params: Iterable[Parameter], config: Config) -> torch.optim.Optimizer:
        return OPTIMIZERS[config["optimizer"]](params, lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any, config: Config) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


def rows(
    models: Sequence[str], ways: Sequence[str], fraction: float, clock: Clock, deadline: float, tiny: bool
) -> Iterator[Row]:
    hyperband = ps.Hyperband(max_budget=3 if tiny else 27, reduction=3)
    for model in models:
        steps = 1 if tiny else max(1, round(UNIT.get(model, 50) * fraction))
        task, ran = Tuned(model, steps), list[Whole]()
        rates: dict[str, float] = {}

        def study(way: str, task: Tuned = task, ran: list[Whole] = ran) -> Row:
            one = whole(task, SPACE, hyperband, deadline=deadline, **WAYS[way])
            ran.append(one)
            same = {"differs": differs(one, ran[0]), "agree": agreeing(one, ran[0], 0.01)}
            figures: Row = {"seconds": one.seconds, "steps": one.steps, "rate": one.rate, "memory": one.memory}
            return {**figures, **same, "complete": one.complete, "note": one.note}

        for way in ways:
            if clock.over():
                continue
            goal = False if way == "auto" else None  # not reached yet
            row: Row = {"part": "table4", "case": f"{model}, unit {steps}", "way": way, "reached": goal}
            row = attempted(row, partial(study, way))
            if "rate" in row:
                rates[way] = row["rate"]
                row["times"] = row["rate"] / rates["eager"] if "eager" in rates else None
                row["graphs"] = row["rate"] / rates["graph"] if "graph" in rates else None
            if way == "auto" and row.get("times") and row.get("graphs"):
                row["reached"] = row["complete"] and row["times"] >= EAGER.get(model, 3.0) and row["graphs"] >= GRAPH
            yield row
