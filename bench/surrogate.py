"""Does what is best for a narrow twin carry over, and what does that save? One part a claim.

    python bench/surrogate.py [PART …] [--json]

On a CPU, in minutes each:
  rates     the best learning rate by width, in the standard parametrization and in this one: MLP, SGD and Adam
  ranks     Spearman's correlation of 40 configs at S=8 with full width, beside that of another seed at full width
  transfer  makespan of a study on 8 simulated devices: eager transfer, transfer at the end, and no surrogates
  shards    makespan on 8 simulated devices, of which a target takes all and a surrogate one
  models    models of torchvision and of Hugging Face: their roles, and whether the coordinate check passes
By hand, on a machine with a GPU:
  figure1   rates again, for widths of 128 to 4,096
  whole     100 trials from end to end: surrogates, fused at full width, and one by one

Needs ../shared/data/images/mnist.npz (or PENSTOCK_DATA). The part models needs torchvision and transformers, as
bench/coverage.py says; it is run where it is named.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from bench.mnist import digits
from penstock.algorithms.spearman import spearman
from penstock.errors import PenstockError
from penstock.seeds import key
from penstock.space import Space
from penstock.surrogate.task import narrowed
from penstock.training.data import DataCache
from penstock.training.loop import Training
from penstock.trial import Config

WIDTH = 512  # of the target, on a CPU
STEPS = 150
ROWS = 6000
Row = dict[str, Any]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@cache
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Some of MNIST's digits, as rows of numbers; the file has them grouped by class, so they are drawn."""
    (x, y), _ = digits()
    some = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:ROWS]
    return x[some].flatten(1), y[some]


class Digits(ps.Task):
    """Two hidden layers on MNIST's digits."""

    batch_size = 64

    def __init__(self, width: int = WIDTH) -> None:
        self.width = width

    def data(self, config: Config) -> Any:
        x, y = rows()
        return (x[: ROWS * 5 // 6], y[: ROWS * 5 // 6]), (x[ROWS * 5 // 6 :], y[ROWS * 5 // 6 :])

    def model(self, config: Config) -> nn.Module:
        width = self.width
        return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    def optimizer(self, params: Any, config: Config) -> torch.optim.Optimizer:
        if config["optimizer"] == "SGD":
            return torch.optim.SGD(params, lr=config["lr"], momentum=config.get("momentum", 0.0))
        return torch.optim.Adam(params, lr=config["lr"], betas=(config.get("momentum", 0.9), 0.999))

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)


def standard(width: int) -> ps.Task:
    """The same network at another width, in the standard parametrization."""
    return Digits(width)


def trained(task: ps.Task, config: Config, seed: int, cache: DataCache) -> float:
    """The mean training loss of the last steps of a trial; infinite where it diverges."""
    training = Training(task, 0, config, cache.get(config), seed=seed, device=DEVICE, metric="loss", mode="min")
    steps, losses = 0, list[float]()
    while steps < STEPS:
        for batch in training.batches():
            steps += 1
            if steps > STEPS:
                break
            losses.append(float(training.backward(batch).detach()))
            training.step_optimizer()
            training.count_step()
            if not math.isfinite(losses[-1]):
                return math.inf
    return sum(losses[-STEPS // 5 :]) / (STEPS // 5)


def rates(widths: Sequence[int] = (64, 512), seeds: int = 2) -> Iterator[Row]:
    """The learning rate whose loss is least, by width, parametrization and optimizer; the widest is the target."""
    grid = {"SGD": [2.0**n for n in range(-8, 3)], "Adam": [2.0**n for n in range(-15, -3)]}
    target = max(widths)
    for optimizer, tried in grid.items():
        for ours in (False, True):
            best: dict[int, float] = {}
            for width in widths:
                task: ps.Task = Digits(target)
                if width != target:
                    task = narrowed(task, ps.Surrogate(scale=target // width)) if ours else standard(width)
                data = DataCache(Digits(target), 0, DEVICE)
                found = {
                    lr: sum(trained(task, {"lr": lr, "optimizer": optimizer}, seed, data) for seed in range(seeds))
                    for lr in tried
                }
                best[width] = min(found, key=lambda lr: found[lr])
            move = max(best.values()) / min(best.values())
            kind = "this one" if ours else "standard"
            yield {"what": f"{optimizer}, {kind}: best rates {best}", "moves by": move}


def configs(optimizer: str, count: int) -> list[Config]:
    """Configs drawn around the good ones."""
    low, high = (1e-3, 1.0) if optimizer == "SGD" else (1e-5, 1e-2)
    rng = np.random.default_rng(key(0, optimizer))
    return [
        {
            "optimizer": optimizer,
            "lr": float(np.exp(rng.uniform(math.log(low), math.log(high)))),
            "momentum": float(rng.uniform(0.5, 0.95)),
        }
        for _ in range(count)
    ]


def ranks(count: int = 40) -> Iterator[Row]:
    """Spearman's correlation of configs' losses at S=8 with those at full width, beside that of another seed."""
    data = DataCache(Digits(), 0, DEVICE)
    for optimizer in ("SGD", "Adam"):
        tried = configs(optimizer, count)
        full = [trained(Digits(), one, 0, data) for one in tried]
        again = [trained(Digits(), one, 1, data) for one in tried]
        others = {
            "surrogates": narrowed(Digits(), ps.Surrogate(scale=8)),
            "narrow, standard": standard(WIDTH // 8),
        }
        yield {"what": f"{optimizer}: seed against seed at full width", "spearman": spearman(full, again)}
        for name, task in others.items():
            losses = [trained(task, one, 0, data) for one in tried]
            regret = full[int(np.argmin(losses))] - min(full)
            yield {"what": f"{optimizer}: {name} at S=8", "spearman": spearman(full, losses), "regret": regret}


def transfer() -> Iterator[Row]:
    """Makespan on 8 simulated devices, on which a unit at full width takes eight times a surrogate's."""

    def seconds(task: ps.Task) -> dict[str, float]:
        made = {1: task, 8: narrowed(task, ps.Surrogate(scale=8))}
        found = {}
        for scale, own in made.items():
            signature = _signature(own)
            found[signature] = 80.0 if scale == 1 else 10.0
        return found

    task = Digits(128)
    units = seconds(task)
    for name, surrogate in {
        "eager transfer": ps.Surrogate(scale=8, best=4, eager=0.5),
        "transfer at the end": ps.Surrogate(scale=8, best=4, eager=1.0),
        "no surrogates": None,
    }.items():
        with tempfile.TemporaryDirectory() as scratch:
            result = ps.Study(
                task,
                {"lr": ps.loguniform(1e-3, 1), "optimizer": "SGD"},
                metric="loss",
                mode="min",
                algorithm=ps.Random(budget=9),
                trials=27,
                surrogate=surrogate,
                dir=scratch,
            ).run(on=ps.Simulated(devices=8, unit_seconds=units, kept=False), sharing="solo", progress=False)
            yield {"what": name, "seconds": result.seconds, "best loss": result.best.metrics["loss"]}


class Sharded(Digits):
    """A target that eight devices hold together."""

    shards = 8
    unit_steps = 4  # the simulated clock does not count them


def shards() -> Iterator[Row]:
    """What surrogates save where a target takes all of 8 devices: table 2 of Hydro has 78.5 times for GPT-3 XL at S=16.

    A unit takes a target 40 s on its 8 devices. It takes a surrogate alone 5 s on one device, and 16 that are fused
    12.5 s. That is 64 times fewer device seconds, and matrices have 256 times fewer numbers: they do not fill a device.
    """
    curve = ps.Curve(sharing=tuple(1 + 0.1 * n for n in range(16)))
    target = Sharded(512)
    twin = _signature(narrowed(target, ps.Surrogate(scale=16)))
    units = {"": 40.0, twin: 5.0}  # trials in shares are not described, so they have no signature
    spent: dict[str, float] = {}
    for name, surrogate in {
        "every trial in shares": None,
        "surrogates on one device each, solo": ps.Surrogate(scale=16, best=4),
        "surrogates on one device each, fused": ps.Surrogate(scale=16, best=4),
    }.items():
        with tempfile.TemporaryDirectory() as scratch:
            result = ps.Study(
                target,
                {"lr": ps.loguniform(1e-3, 1), "optimizer": "SGD"},
                metric="loss",
                mode="min",
                algorithm=ps.Random(budget=9),
                trials=100,
                surrogate=surrogate,
                dir=scratch,
            ).run(
                on=ps.Simulated(devices=8, unit_seconds=units, curve=curve, kept=False),
                sharing="auto" if surrogate is None else name.rpartition(" ")[2],
                progress=False,
            )
        spent[name] = result.seconds
        yield {"what": name, "seconds": result.seconds, "times as fast": next(iter(spent.values())) / result.seconds}


def models() -> Iterator[Row]:
    """What becomes of models that users have at S=4, or at S=2 where that makes a layer too narrow."""
    from bench.zoo.model import Zoo
    from bench.zoo.wide import models as wide
    from penstock.surrogate.examine import examine

    for model in wide():
        space = Space.of({"lr": ps.loguniform(model.lr / 4, model.lr * 4), "decay": 0.0})
        for scale in (4, 2):
            began = time.perf_counter()
            try:
                found = examine(Zoo(model, dtype=torch.float32), space, ps.Surrogate(scale=scale))
                roles = Counter(part.role for part in found.parts.values())
                steepest = max(found.slopes, key=lambda one: abs(one.slope))
                said = f"{'failed' if found.wrong else 'passed'} at S={scale}, steepest {steepest.layer}"
                numbers: Row = {"slope": steepest.slope, **dict(roles.items())}
            except PenstockError as error:
                said, numbers = f"refused at S={scale}: {error}", {}
                if scale == 4 and "narrower than" in said:
                    continue
            took = time.perf_counter() - began
            yield {"what": f"{model.family} {model.name}: {said}", "seconds": took, **numbers}
            break


def _signature(task: ps.Task) -> str:
    from penstock.bundle import Job
    from penstock.training.worker import Worker

    with tempfile.TemporaryDirectory() as scratch:
        worker = Worker(Job(task, 0, "loss", "min", Path(scratch)), "cpu")  # type: ignore[arg-type]
        return worker.describe({"lr": 0.1, "optimizer": "SGD"}, train=False).signature or ""


def figure1() -> Iterator[Row]:
    """Hydro's figure 1: the best learning rate for widths of 128 to 4,096."""
    yield from rates((128, 512, 1024, 4096), seeds=1)


def whole() -> Iterator[Row]:
    """100 trials from end to end at width 4,096: surrogates, fused at full width, and solo."""
    ways: Mapping[str, tuple[ps.Surrogate | None, str]] = {
        "surrogates": (ps.Surrogate(scale=8), "auto"),
        "full width, auto": (None, "auto"),
        "full width, solo, of 8 trials": (None, "solo"),
    }
    for name, (surrogate, sharing) in ways.items():
        with tempfile.TemporaryDirectory() as scratch:
            trials = 8 if "of 8" in name else 100
            began = time.perf_counter()
            result = ps.Study(
                Digits(4096),
                {"lr": ps.loguniform(1e-3, 1), "momentum": ps.uniform(0.5, 0.95), "optimizer": "SGD"},
                metric="loss",
                mode="min",
                algorithm=ps.ASHA(max_budget=27, min_budget=3),
                trials=trials,
                surrogate=surrogate,
                dir=scratch,
            ).run(sharing=sharing, progress=False)
            took = (time.perf_counter() - began) * 100 / trials
            yield {"what": name, "seconds of 100 trials": took, "best loss": result.best.metrics["loss"]}


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "rates": rates,
    "ranks": ranks,
    "transfer": transfer,
    "shards": shards,
    "models": models,
    "figure1": figure1,
    "whole": whole,
}
ON_A_CPU = ("rates", "ranks", "transfer", "shards")


def main(arguments: list[str]) -> None:
    wanted = [one for one in arguments if not one.startswith("--")] or list(ON_A_CPU)
    if unknown := [one for one in wanted if one not in PARTS]:
        raise SystemExit(f"The parts are {', '.join(PARTS)}, got {', '.join(unknown)}.")
    for part in wanted:
        began = time.process_time()
        for row in PARTS[part]():
            show({"part": part, **row}, "--json" in arguments)
        show({"part": part, "what": "CPU time", "seconds": time.process_time() - began}, "--json" in arguments)


def show(row: Row, as_json: bool) -> None:
    if as_json:
        print(json.dumps(row), flush=True)
        return
    numbers = "  ".join(f"{name} {one:.4g}" for name, one in row.items() if isinstance(one, int | float))
    print(f"{row['part']:9} {row['what']:70} {numbers}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
