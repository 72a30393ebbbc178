"""32 unlike models for bench/packing.py: four trials each of four ResNets and four perceptrons, of widths of their own.

In turn, eager and as graphs, is by hand: the time of a step of each model alone (bench/ways.py), added up. The studies
train the same number of steps of each model, and their rate is that of the whole study; "later" is their rate from the
second quarter of each trial on, by the seconds that trials are charged for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

import penstock as ps
from bench.networks import Batch, Images, Network, ResNet18
from bench.steps import steps_a_second
from bench.ways import Step, eager, graph
from bench.whole import DEVICE, Clock, Row, Whole, attempted, differs, whole
from penstock.trial import Config

KINDS = [f"resnet {width}" for width in (4, 8, 12, 16)] + [f"perceptron {width}" for width in (256, 512, 768, 1024)]
RATES = [0.003, 0.005, 0.01, 0.02]
UNITS = 4
WAYS = ("eager", "graph", "auto", "packed")
GOALS = {"tf32": 2_000, "bf16": 3_000}  # model steps a second
PRECISIONS = {"tf32": "fp32", "bf16": "bf16"}  # as tasks have them


class Narrow(ResNet18):
    def __init__(self, width: int) -> None:
        self.width = width


class Unlike(Images):
    """A ResNet-18 of a small width, or a perceptron of two hidden layers."""

    def __init__(self, precision: str, unit_steps: int, batch_size: int) -> None:
        self.precision = precision  # type: ignore[assignment]
        self.unit_steps, self.batch_size = unit_steps, batch_size

    def model(self, config: Config) -> nn.Module:
        kind, width = config["kind"].split()
        if kind == "resnet":
            return Narrow(int(width)).model(config)
        w = int(width)
        hidden = [nn.Linear(3072, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(w, 10))

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch, config)}


def in_turn(make: Callable[[Network, int, str], Step], task: Unlike, kinds: Sequence[str]) -> float:
    """Model steps a second of all kinds one after another, each by itself."""
    seconds = 0.0
    for kind in kinds:
        config: Config = {"kind": kind, "lr": RATES[0], "momentum": 0.9}
        network = Network(kind, DEVICE, task.batch_size, 0.1, (task, config))
        batches: list[Batch] = network.batches(task.precision)
        seconds += 1 / steps_a_second(make(network, 1, task.precision), batches, network)
    return len(kinds) / seconds


def rows(
    precisions: Sequence[str], ways: Sequence[str], steps: int, clock: Clock, deadline: float, tiny: bool
) -> Iterator[Row]:
    steps = 2 * UNITS if tiny else steps
    kinds, rates, batch = (["resnet 4", "perceptron 256"], RATES[:2], 32) if tiny else (KINDS, RATES, 256)
    space = {"kind": ps.grid(kinds), "lr": ps.grid(rates), "momentum": 0.9}
    for precision in precisions:
        task = Unlike(PRECISIONS[precision], max(1, steps // UNITS), batch)
        reference: float | None = None
        ran: list[Whole] = []

        def hand(way: str, task: Unlike = task) -> Row:
            return {"rate": in_turn({"eager": eager, "graph": graph}[way], task, kinds), "note": "by hand"}

        def study(way: str, task: Unlike = task, ran: list[Whole] = ran, goal: int = GOALS[precision]) -> Row:
            one = whole(task, space, ps.Grid(budget=UNITS), deadline=deadline, sharing=way)
            ran.append(one)
            figures: Row = {"seconds": one.seconds, "rate": one.rate, "later": one.later(1), "memory": one.memory}
            reached = one.complete and one.rate >= goal
            return {**figures, "differs": differs(one, ran[0]), "reached": reached, "note": one.note}

        for way in ways:
            if clock.over() or (way == "graph" and DEVICE.type != "cuda"):
                continue
            goal = False if way in ("packed", "auto") else None  # not reached yet
            row: Row = {"part": "unlike", "case": precision, "way": way, "reached": goal}
            fill = hand if way in ("eager", "graph") else study
            row = attempted(row, partial(fill, way))
            reference = row.get("rate") if way == "eager" else reference
            row["times"] = row["rate"] / reference if reference and row.get("rate") else None
            yield row
