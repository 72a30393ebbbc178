"""Recurring jobs of Zeus's traces, and jobs and devices drawn by a seed, run by the policies that users' jobs run.

A trace has the epochs that runs of a batch size needed to reach the target, and the seconds and watts of an epoch at
each power limit. Needs ../shared/data/systems/zeus (or PENSTOCK_DATA).
"""

from __future__ import annotations

import csv
import heapq
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from math import isnan
from pathlib import Path
from statistics import fmean

import numpy as np

from penstock.energy.batch_size import Past, Policy, Run, Terms
from penstock.energy.cost import Draw, Objective

DATA = Path(os.environ.get("PENSTOCK_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
DRY = 0.002  # of a run: what the dry steps of an untried size cost
JOBS = {  # dataset, network, optimizer, target, the most epochs, default batch size (Zeus, table 1)
    "ShuffleNet": ("cifar100", "shufflenetv2", "adadelta", 0.6, 100, 1024),
    "ResNet-50": ("imagenet", "resnet50", "adadelta", 0.65, 100, 256),
    "BERT-QA": ("squad", "bert_base_uncased", "adamw", 84.0, 6, 32),
    "DeepSpeech2": ("librispeech", "deepspeech2", "adamw", 40.0, 16, 192),
    "NeuMF": ("movielens-1m", "ncf", "adam", 0.41, 100, 1024),
    "BERT-SA": ("sentiment140", "bert_base_uncased", "adamw", 0.84, 10, 128),
}
GPUS = ("v100", "a40")


@dataclass(frozen=True)
class Trace:
    """A job on a device: ``epochs`` that runs of each size needed (None: never), and an epoch's draws by limit."""

    name: str
    default: int
    max_budget: int
    epochs: Mapping[int, Sequence[int | None]]
    draws: Mapping[int, Mapping[float, Draw]]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self.draws))

    @property
    def limits(self) -> tuple[float, ...]:
        return tuple(sorted({limit for draws in self.draws.values() for limit in draws}))

    @property
    def recurrences(self) -> int:
        """2·|B|·|P|, as in the paper (§6.2)."""
        return 2 * len(self.sizes) * len(self.limits)

    def objective(self, eta: float) -> Objective:
        return Objective(eta, max(self.limits))

    def unit_cost(self, size: int, eta: float, limit: float | None = None) -> float:
        """The cost of an epoch, at the best limit unless one is given."""
        draws, objective = self.draws[size], self.objective(eta)
        return objective.epoch_cost(draws) if limit is None else objective.unit_cost(draws[limit])

    def profiled(self, size: int, eta: float) -> float:
        """The cost of a first epoch that is trained at each limit in turn (§4.2)."""
        return fmean(self.objective(eta).unit_cost(draw) for draw in self.draws[size].values())

    def terms(self, eta: float, recurrences: int | None = None) -> Terms:
        costs = {size: self.unit_cost(size, eta) for size in self.sizes}
        before = self.objective(eta).unit_cost(self.draws[self.default][max(self.draws[self.default])])
        return Terms(self.sizes, self.default, self.max_budget, recurrences or self.recurrences, costs, before)

    def mean(self, size: int, eta: float) -> float:
        """The mean cost of a run at the best limit; infinite where most runs miss the target."""
        reached = [e for e in self.epochs[size] if e is not None and e <= self.max_budget]
        if 2 * len(reached) <= len(self.epochs[size]):
            return float("inf")
        missed = (len(self.epochs[size]) - len(reached)) / len(reached) * self.max_budget
        return (fmean(reached) + missed) * self.unit_cost(size, eta)

    def default_mean(self, eta: float) -> float:
        """The mean cost of a run of the default size at the greatest limit."""
        return self.mean(self.default, eta) / self.unit_cost(self.default, eta) * self.terms(eta).default_cost

    def best(self, eta: float) -> float:
        return min(self.mean(size, eta) for size in self.sizes)


@cache
def rows(name: str) -> list[dict[str, str]]:
    with open(DATA / "systems" / "zeus" / f"{name}.csv") as file:
        return list(csv.DictReader(file))


def trace(job: str, gpu: str) -> Trace:
    """One of the paper's six jobs on one of the two devices of its traces."""
    *ours, target, most, default = JOBS[job]
    draws: dict[int, dict[float, Draw]] = defaultdict(dict)
    epochs: dict[int, list[int | None]] = defaultdict(list)
    for row in rows(f"summary_power_{gpu}"):
        if [row["dataset"], row["network"], row["optimizer"]] == ours:
            limit, draw = float(row["power_limit"]), Draw(float(row["time_per_epoch"]), float(row["average_power"]))
            draws[int(row["batch_size"])][limit] = draw
    for row in rows("summary_train"):
        same = [row["dataset"], row["network"], row["optimizer"]] == ours and float(row["target_metric"]) == target
        if same and int(row["batch_size"]) in draws:
            value = float(row["target_epoch"])
            epochs[int(row["batch_size"])].append(None if isnan(value) else int(value))
    return Trace(f"{job} {gpu}", default, most, epochs, {size: draws[size] for size in sorted(epochs)})


def pairs() -> list[Trace]:
    """The twelve pairs of a job and a device."""
    return [trace(job, gpu) for gpu in GPUS for job in JOBS]


@dataclass(frozen=True)
class Outcome:
    """All runs of a job in the order in which they ended, and the cost of each recurrence, profiling included."""

    runs: tuple[Run, ...]
    costs: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.costs)


Drawn = Callable[[int, int, np.random.Generator], int | None]


def simulate(
    made: Trace,
    policy: Policy,
    eta: float,
    seed: int,
    *,
    told: int | None = None,
    recurrences: int | None = None,
    profiles: bool = False,
    drawn: Drawn | None = None,
    known: Sequence[Run] = (),
    workers: int = 1,
) -> Outcome:
    """Run a job's recurrences with a policy.

    ``told`` is the number of recurrences that the policy believes in. With ``profiles`` the first epoch of each size is
    trained at all limits in turn, as Zeus does it; otherwise a policy that learns from dry steps pays for these.
    ``drawn`` gives the epochs of a run of a size in a recurrence, from the trace unless given. ``workers`` recurrences
    overlap, on a device each.
    """
    terms, many = made.terms(eta, told or recurrences), recurrences or made.recurrences
    luck, costs = np.random.default_rng([seed, 1]), [0.0] * many
    pick = drawn or (lambda size, at, rng: made.epochs[size][int(rng.integers(len(made.epochs[size])))])
    dry = sum(terms.unit_costs.values()) / len(terms.sizes)
    spent = 0.0
    if policy.learns:  # each size is timed for 0.2% of a run of the default
        spent = DRY * made.default_mean(eta) * (len(terms.sizes) - 1) if dry else 0.0
        costs[0] += spent
    past, seen, begun, numbers = Past(tuple(known), spent=spent), set[int](), count(), count()
    heap: list[tuple[float, int, Run, tuple[Run, ...]]] = []

    def start(now: float, recurrence: int, stopped: tuple[Run, ...]) -> None:
        nonlocal past
        while True:
            choice = policy.choose(terms, past, stopped, np.random.default_rng([seed, 2, next(numbers)]))
            unit = made.unit_cost(choice.size, eta, choice.limit)
            needed = pick(choice.size, recurrence, luck)
            paid = choice.units(unit, made.max_budget)
            reached = needed is not None and needed <= paid
            units = needed if reached and needed is not None else paid
            cost = unit * units
            if profiles and units and choice.size not in seen:
                seen.add(choice.size)
                cost += made.profiled(choice.size, eta) - unit
            run = Run(choice, recurrence, units, cost, reached)
            if units:
                break
            past = past.with_run(run)  # not one unit could be paid: another choice is made at once
            stopped = (*stopped, run)
        past = replace(past, running=(*past.running, choice))
        heapq.heappush(
            heap,
            (now + units * made.draws[choice.size][max(made.draws[choice.size])].seconds, next(begun), run, stopped),
        )

    at = 0
    while at < many and len(heap) < workers:
        start(0.0, at, ())
        at += 1
    while heap:
        now, _, run, stopped = heapq.heappop(heap)
        past = past.with_run(run)
        costs[run.recurrence] += run.cost
        if not run.reached:
            start(now, run.recurrence, (*stopped, run))
        elif at < many:
            start(now, at, ())
            at += 1
    return Outcome(past.runs[len(known) :], tuple(costs))
