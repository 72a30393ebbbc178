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

from penstock.algorithms.recurring import TRIES
from penstock.energy.batch_size import Choice, Default, Past, Policy, Run, Terms
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


@dataclass(frozen=True)
class Setting:
    """How a job is replayed.

    ``told`` is the number of recurrences that the policy believes in, and ``recurrences`` the true one: 2·|B|·|P|
    unless given. With ``jit`` False the best limit of a size is found by a whole run at each limit. ``drawn`` gives the
    units that a run of a size needs in a recurrence. ``known`` are runs of another device. With ``gap`` recurrences are
    submitted at random times, so many runs of the default apart in the mean, whatever still runs.
    """

    told: int | None = None
    recurrences: int | None = None
    jit: bool = True
    drawn: Drawn | None = None
    known: tuple[Run, ...] = ()
    gap: float | None = None


PLAIN = Setting()


def simulate(made: Trace, policy: Policy, eta: float, seed: int, how: Setting = PLAIN) -> Outcome:
    """Run a job's recurrences with a policy.

    A policy that does not learn from dry steps trains the first epoch of each size at all limits in turn, as Zeus does;
    one that does pays for these steps.
    """
    return _Replay(made, policy, eta, seed, how).run()


class _Replay:
    def __init__(self, made: Trace, policy: Policy, eta: float, seed: int, how: Setting) -> None:
        self.made, self.policy, self.eta, self.seed, self.how = made, policy, eta, seed, how
        self.many = how.recurrences or made.recurrences
        self.terms = made.terms(eta, how.told or self.many)
        self.costs, self.luck = [0.0] * self.many, np.random.default_rng([seed, 1])
        spent = DRY * made.default_mean(eta) * (len(made.sizes) - 1) if policy.learns else 0.0
        self.costs[0] += spent
        self.past = Past(how.known, spent=spent)
        self.tried: dict[int, int] = defaultdict(int)  # runs by size
        self.heap: list[tuple[float, int, int, Run | None, tuple[Run, ...]]] = []
        self.order, self.decisions = count(), count()

    def run(self) -> Outcome:
        """Submit all recurrences and let them end."""
        at = 0.0
        for number in range(self.many if self.how.gap is not None else 1):
            heapq.heappush(self.heap, (at, next(self.order), number, None, ()))
            if self.how.gap is not None:
                seconds = self.made.draws[self.made.default][max(self.made.limits)].seconds
                mean = fmean(e for e in self.made.epochs[self.made.default] if e is not None)
                at += float(self.luck.exponential(self.how.gap * mean * seconds))
        while self.heap:
            now, _, number, run, stopped = heapq.heappop(self.heap)
            if run is None:
                self._start(now, number, ())
                continue
            self.past = self.past.with_run(run)
            self.costs[number] += run.cost
            if not run.reached:
                self._start(now, number, (*stopped, run))
            elif self.how.gap is None and number + 1 < self.many:
                heapq.heappush(self.heap, (now, next(self.order), number + 1, None, ()))
        return Outcome(self.past.runs[len(self.how.known) :], tuple(self.costs))

    def _start(self, now: float, number: int, stopped: tuple[Run, ...]) -> None:
        made, eta = self.made, self.eta
        while True:
            draw = np.random.default_rng([self.seed, 2, next(self.decisions)])
            choice = self.policy.choose(self.terms, self.past, stopped, draw)
            if len(stopped) >= TRIES:
                choice = Choice(made.default)
            limit = choice.limit
            if not self.how.jit and self.tried[choice.size] < len(made.limits):
                limit = made.limits[-1 - self.tried[choice.size]]
            unit = made.unit_cost(choice.size, eta, limit)
            if (paid := choice.units(unit, made.max_budget)) > 0:
                break
            # Not one unit could be paid: another choice is made at once.
            run = Run(choice, number, 0, 0.0, False)
            self.past, stopped = self.past.with_run(run), (*stopped, run)
        if self.how.drawn is None:
            needed = made.epochs[choice.size][int(self.luck.integers(len(made.epochs[choice.size])))]
        else:
            needed = self.how.drawn(choice.size, number, self.luck)
        reached = needed is not None and needed <= paid
        units = needed if needed is not None and reached else paid
        cost = unit * units
        if not self.policy.learns and choice.limit is None and self.how.jit and not self.tried[choice.size]:
            cost += 0.0 if isinstance(self.policy, Default) else made.profiled(choice.size, eta) - unit
        self.tried[choice.size] += 1
        self.past = replace(self.past, running=(*self.past.running, choice))
        seconds = units * made.draws[choice.size][max(made.draws[choice.size])].seconds
        run = Run(choice, number, units, cost, reached)
        heapq.heappush(self.heap, (now + seconds, next(self.order), number, run, stopped))


def drawn_job(seed: int) -> Trace:
    """A job and a device that no trace has: a size below some needs more epochs, and above some, too."""
    rng = np.random.default_rng([7, seed])
    sizes = [2 ** int(k) for k in range(3, 13)]
    first = int(rng.integers(0, 4))
    sizes = sizes[first : first + int(rng.integers(4, 8))]
    default = int(rng.choice(sizes))
    fewest, below, above = (
        rng.uniform(4, 40),
        rng.choice(sizes) / rng.uniform(2, 30),
        rng.choice(sizes) * rng.uniform(1, 8),
    )
    cv = rng.uniform(0, 0.12)
    epochs: dict[int, list[int | None]] = {}
    for size in sizes:
        mean = fewest * (1 + below / size) * (1 + (size / above) ** rng.uniform(0.8, 1.2)) * np.exp(0.08 * rng.normal())
        epochs[size] = [max(1, round(mean * (1 + cv * rng.normal()))) for _ in range(10)]
    most = 4 * max(e for e in epochs[default] if e is not None)
    epochs = {size: [e if e is not None and e <= most else None for e in some] for size, some in epochs.items()}
    top = float(rng.choice([250, 300, 400, 700]))
    idle, step, row = top * rng.uniform(0.15, 0.3), rng.uniform(20, 200), rng.uniform(0.5, 2)
    draws: dict[int, dict[float, Draw]] = {}
    for size in sizes:
        seconds = 10_000 / size * (step + row * size) / 1000
        load = row * size / (step + row * size)
        watts = idle + (top - idle) * (0.2 + 0.85 * load)
        draws[size] = {}
        for limit in np.linspace(max(0.35 * top, 1.2 * idle), top, 7):
            part = min(1.0, (limit - idle) / (watts - idle))
            slower = 1 + load * (part ** (-1 / 3) - 1) if part < 1 else 1.0
            draws[size][float(limit)] = Draw(seconds * slower, min(watts, float(limit)))
    return Trace(f"job {seed}", default, most, epochs, draws)
