"""Pack's figures 4 to 6 and tables 1 and 2 for bench/packing.py: steps of 1 to 8 models, in turn, packed and fused.

counts    1, 2, 4, … models of one architecture at one batch size (figures 4a and 5, table 1)
batches   2 models at several batch sizes (figures 4b and 5)
factors   2 models that differ in architecture, optimizer or batch size (figure 6, table 2)

The time of a step is that of one step of each model, T_s in the paper: by the seconds of the device that trials are
charged for, the median of a study's later units. In turn it is the sum over the models, each measured alone (eq. 1),
by the faster of eager steps and graphs. IMPV is eq. 3 against that; below 0 it is a loss. "other" is the seconds of a
study that are no steps at that pace (eq. 4): its opening, loading and evaluating, and all that it measures and makes.
"in turn" is such a study of two models, one after the other, and its "other" is table 1's.

Models of one architecture would be fused, so "packed" and "unlike", which is auto, have models that cannot be: each has
a name as an attribute. "fused" and "auto" have models that can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import penstock as ps
from bench.networks import Split
from bench.packed_models import MODELS
from bench.whole import DEVICE, Clock, Row, Whole, attempted, differs, whole
from penstock.speed.packing import improvement, switching
from penstock.trial import Config

UNITS = 6
TIMED = range(3, UNITS)  # the first units make faster steps, and the last has the writing of a state in it
STEPS = {"mlp3": 150, "mobilenet": 20, "resnet50": 10, "densenet121": 10}  # of a unit
PAIRS = [("mlp3", "mobilenet"), ("mobilenet", "densenet121"), ("resnet50", "mobilenet"), ("densenet121", "resnet50")]
WORST = 0.02  # how much slower than in turn auto may be
KINDS = ("counts", "batches", "factors")


@cache
def pictures(image: int, rows: int) -> Split:
    """Images of noise of 1,000 classes: their content does not change the speed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows + 32, 3, image, image, generator=generator)
    y = torch.randint(1000, (len(x),), generator=generator)
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])


class Pictures(ps.Task):
    eval_batch_size = 32

    def __init__(self, unit_steps: int, image: int, rows: int) -> None:
        self.unit_steps, self.image, self.rows = unit_steps, image, rows

    def data(self, config: Config) -> Split:
        return pictures(self.image, self.rows)

    def model(self, config: Config) -> nn.Module:
        made = MODELS[config["model"]](1000, self.image)
        made.name = config["name"]  # trials whose models have other names cannot be fused
        return made

    def optimizer(self, params: Iterable[Parameter], config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=config["lr"], momentum=0.9 if config["optimizer"] == "momentum" else 0.0)

    def loss(self, model: nn.Module, batch: Any, config: Config) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


@dataclass(frozen=True)
class Case:
    """Models that train at the same time: those of a space's grid, which differ in at most one thing but the rate."""

    name: str
    models: tuple[str, ...]
    batches: tuple[int, ...]
    optimizers: tuple[str, ...] = ("momentum",)
    count: int = 1  # of equal models

    def space(self, *, alike: bool) -> dict[str, Any]:
        """Trials that are alike have rates of their own, and others names."""
        rates = [1e-3 * (1 + i / 10) for i in range(self.count)] if alike else [1e-3]
        names = [""] if alike else [f"model {i}" for i in range(self.count)]
        axes = {"model": self.models, "batch_size": self.batches, "optimizer": self.optimizers}
        return {key: ps.grid(list(values)) for key, values in {**axes, "lr": rates, "name": names}.items()}

    @property
    def members(self) -> list[Case]:
        """Each of its models as a case of its own."""
        one = replace(self, count=1)
        apart = [
            replace(one, models=(model,), batches=(batch,), optimizers=(optimizer,), name=f"{model}, batch {batch}")
            for model in self.models
            for batch in self.batches
            for optimizer in self.optimizers
        ]
        named = [c if c.optimizers == ("momentum",) else replace(c, name=f"{c.name}, {c.optimizers[0]}") for c in apart]
        return named * self.count


def cases(kinds: Sequence[str], models: Sequence[str], counts: Sequence[int], batches: Sequence[int]) -> list[Case]:
    first = batches[0]
    found = []
    if "counts" in kinds:
        found += [
            Case(f"{n} {model}, batch {first}", (model,), (first,), count=n)
            for model in models
            for n in counts
            if n > 1
        ]
    if "batches" in kinds:
        found += [Case(f"2 {model}, batch {b}", (model,), (b,), count=2) for model in models for b in batches[1:]]
    if "factors" in kinds:
        found += [Case(f"{a}, {b}, batch {first}", (a, b), (first,)) for a, b in PAIRS if {a, b} <= {*models}]
        found += [Case(f"{m}, batch {first}, 2 optimizers", (m,), (first,), ("momentum", "sgd")) for m in models]
        found += [Case(f"{m}, batches {first}, {first + 18}", (m,), (first, first + 18)) for m in models]
    return found


class Figures:
    """Runs the cases; the time of each model alone is measured once."""

    def __init__(self, repeats: int, clock: Clock, deadline: float, tiny: bool) -> None:
        self.repeats, self.clock, self.deadline, self.tiny = repeats, clock, deadline, tiny
        self.alone: dict[str, dict[str, float]] = {}  # seconds of a step by the case's name and the way

    def task(self, case: Case) -> Pictures:
        """As many steps in a unit as the slowest of its models has."""
        steps = 2 if self.tiny else min(STEPS[model] for model in case.models)
        return Pictures(steps, 32, 40) if self.tiny else Pictures(steps, 224, 2 * max(*case.batches, 100))

    def study(self, case: Case, *, alike: bool, before: list[Whole], **how: Any) -> Row:
        """The means over repeated studies of a case."""
        runs = []
        for _ in range(self.repeats):
            ran = whole(self.task(case), case.space(alike=alike), ps.Grid(budget=UNITS), deadline=self.deadline, **how)
            runs.append(ran)
            before.append(ran)
        each = [ran.step_seconds(TIMED) for ran in runs]
        found = [sum(one.values()) for one in each]
        other = [
            switching(ran.seconds, [ran.taken[trial] * seconds for trial, seconds in one.items()])
            for ran, one in zip(runs, each, strict=True)
        ]
        return {
            "seconds": mean(ran.seconds for ran in runs),
            "ms": 1e3 * mean(found),
            "spread": (max(found) - min(found)) / mean(found),
            "other": mean(other),
            "memory": max((ran.memory or 0 for ran in runs), default=0) or None,
            "differs": differs(runs[0], before[0]),
            "note": runs[0].note,
        }

    def by_itself(self, member: Case) -> Iterator[Row]:
        """The steps of one model alone, eager and as a graph, where they are not known yet."""
        if member.name in self.alone:
            return
        known = self.alone[member.name] = {}
        before: list[Whole] = []
        for way, how in {"eager": {"deterministic": True}, "graph": {}}.items():
            if way == "graph" and DEVICE.type != "cuda":
                continue
            row: Row = {"part": "models", "case": member.name, "way": way}
            row = attempted(row, partial(self.study, member, alike=True, before=before, sharing="solo", **how))
            if "ms" in row:
                known[way] = row["ms"]
            yield row

    def rows(self, case: Case) -> Iterator[Row]:
        for member in case.members:
            yield from self.by_itself(member)
        known = [self.alone[member.name] for member in case.members]
        eager = sum(one.get("eager", float("nan")) for one in known)
        best = sum(min(one.values(), default=float("nan")) for one in known)
        first: dict[bool, list[Whole]] = {True: [], False: []}  # the studies of models that are alike, and of others
        ways = [("in turn", "solo", False)] if len(known) == 2 else []  # two models, as in table 1
        ways += [("packed", "packed", False), ("unlike", "auto", False)]
        ways += [("fused", "fused", True), ("auto", "auto", True)] if case.count > 1 else []
        for way, sharing, alike in ways:
            if self.clock.over():
                continue
            row: Row = {"part": "models", "case": case.name, "way": way, "in_turn": best, "eager": eager}
            row = attempted(row, partial(self.study, case, alike=alike, before=first[alike], sharing=sharing))
            if "ms" in row:
                row |= {"times": eager / row["ms"], "impv": improvement(best / row["ms"])}
            if sharing == "auto" and best == best:
                row["reached"] = row.get("ms", float("inf")) <= (1 + WORST) * best
            yield row


def rows(chosen: list[Case], repeats: int, clock: Clock, deadline: float, tiny: bool) -> Iterator[Row]:
    figures = Figures(repeats, clock, deadline, tiny)
    for case in chosen:
        if not clock.over():
            yield from figures.rows(case)
