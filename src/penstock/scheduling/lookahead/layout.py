"""The records of a plan: waiting and running trials, the rungs that follow them, and the devices for all of these."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from penstock.scheduling.base import FULL, Assignment, Demand, Holding, View, kinds
from penstock.scheduling.capacity import everywhere
from penstock.speed.curve import Curve
from penstock.speed.model import Speed

LAST = 1 << 60
"""The place of later rungs in the order of asking: after every trial that waits now."""
SLOWER = 0.5
"""Of twice as many trials, the slowest takes longer by this part of the mean: units in LCBench differ that much."""
AHEAD = 100
"""The most trials of later rungs that a plan has; the next rung is always in it."""

BETTER = 1e-9
"""A plan is better only if it is shorter by this part: sums in another order differ by rounding."""


class Option(NamedTuple):
    """A share, the seconds that a trial takes at it, and its area: the device seconds."""

    share: float
    seconds: float
    area: float


@lru_cache
def options(curve: Curve, devices: int, alone: bool = False) -> tuple[Option, ...]:
    """The shares worth giving to a trial whose runtime is 1, narrowest first; whole devices if it must be ``alone``.

    A part of a device is left out where it saves no device seconds over a larger part. A number of devices is left out
    where it is no faster than a smaller number, or was not measured. To keep the list short, some counts above four
    trials a device are left out too.

    >>> [option.share for option in options(Curve(sharing=(1, 1.2, 3.5), scaling=(1, 0.6, 0.6)), devices=8)]
    [0.5, 1.0, 2.0]
    """
    found = [Option(1.0, 1.0, 1.0)]
    for p, seconds in enumerate(() if alone else curve.sharing[1:], 2):
        some = p <= 4 or p * found[0].share >= 1.5 or p == curve.most
        if some and seconds / p < found[0].area * (1 - BETTER):
            found.insert(0, Option(1 / p, seconds, seconds / p))
    for w in curve.counts[1:]:
        seconds = curve.at(w)
        if w <= devices and seconds < found[-1].seconds * (1 - BETTER):
            found.append(Option(float(w), seconds, w * seconds))
    return tuple(found)


@dataclass(frozen=True)
class Work:
    """A trial to plan: its runtime on a device of its own, and its options, narrowest first.

    ``trial`` is -1 in a later rung: its trials are not chosen yet. ``crew`` is the index of the trial's group among the
    site's crews. ``after`` is the least time that the rungs after this one take with all devices. ``left`` is the time
    of this rung and the rungs after it, where some trials are taken to be slow. A job with more time left should start
    sooner. ``rank`` is the runtime that jobs are ordered by.
    """

    trial: int
    crew: int
    runtime: float
    unit: float
    options: tuple[Option, ...]
    asked: int = 0
    priority: float = 0.0
    bytes: int = 0
    signature: str = ""
    after: float = 0.0
    left: float = 0.0
    rank: float = 0.0


@dataclass(frozen=True)
class Occupied:
    """A trial that has devices, given by their indices, until its ``end``."""

    job: Work
    share: float
    devices: tuple[int, ...]
    end: float


@dataclass(frozen=True)
class Crew:
    """A group under way: ``out`` counts its trials that are not done, ``rungs`` has the jobs of each later rung.

    The waiting jobs of the group have its ``after`` and ``left``.
    """

    out: int
    rungs: tuple[tuple[Work, ...], ...] = ()
    after: float = 0.0
    left: float = 0.0


@dataclass(frozen=True)
class Site:
    """The devices of a plan, by index: the free share of each, its free bytes, and the signature of the trials there.

    ``held`` are the running trials. ``unlike`` says whether trials of any signatures can share a device. ``moving`` is
    the seconds that a move costs a trial, infinite where trials cannot move.
    """

    free: tuple[float, ...]
    bytes: tuple[int, ...]
    kinds: tuple[str, ...]
    held: tuple[Occupied, ...]
    crews: tuple[Crew, ...]
    unlike: bool = False
    moving: float = math.inf


class Start(NamedTuple):
    """The start of a job on devices at a time: ``job`` is its index among waiting jobs, or -1 for a later rung's."""

    job: int
    option: Option
    devices: tuple[int, ...]
    time: float


@dataclass(frozen=True)
class Plan:
    """A layout in time: the last end of a trial, the sum of all ends, and the start of each job."""

    makespan: float
    ends: float
    starts: tuple[Start, ...]

    def beats(self, other: Plan) -> bool:
        """Whether this plan ends sooner, or at the same time with a smaller sum of ends."""
        if self.makespan < other.makespan * (1 - BETTER):
            return True
        return self.makespan <= other.makespan * (1 + BETTER) and self.ends < other.ends * (1 - BETTER)


@dataclass(frozen=True)
class Policy:
    """How a plan treats waiting jobs.

    A job gets the option that ``given`` has for its index. A job without such an option gets the narrowest option by
    which the job and the rungs after it end by the ``deadline``. Without a deadline, the job gets an equal part of the
    room. ``order`` has the indices of the jobs; without it, jobs go by priority and in the order of asking. ``solo``
    gives each job one device.
    """

    deadline: float = math.inf
    order: tuple[int, ...] = ()
    given: Mapping[int, Option] = field(default_factory=dict)
    solo: bool = False


class Scene:
    """The input of a plan: the devices, the running trials, the waiting trials as jobs, and the later rungs.

    Later rungs count where a study is to end soon. They do not count where it is to reach a target soon. Then the
    longest trial is the most urgent, because results of a high budget reach the target.
    """

    def __init__(
        self, view: View, running: Iterable[Holding], demands: Iterable[Demand], speed: Speed, ahead: int = AHEAD
    ) -> None:
        self.view, self.speed = view, speed
        room, there = everywhere(view), kinds(view.running.values())
        self.names = list(room)
        self._places = {name: i for i, name in enumerate(self.names)}
        self._options: dict[tuple[int, bool], tuple[Option, ...]] = {}  # by the curve's id: hashing a curve is slow
        self._crews: dict[str, int] = {}
        running, demands = list(running), list(demands)
        members: dict[str, list[Demand]] = {}
        for demand in (*(one.demand for one in running), *demands):
            self._crews.setdefault(demand.group, len(self._crews))
            members.setdefault(demand.group, []).append(demand)
        crews = [self._crew(ours, _rungs(members, ahead)) for ours in members.values()]
        self.site = Site(
            tuple(room[name].share for name in self.names),
            tuple(room[name].bytes for name in self.names),
            tuple(there.get(name, "") for name in self.names),
            tuple(self._under_way(one) for one in running),
            tuple(crews),
            view.unlike,
            speed.moving,
        )
        roomy = len(demands) <= sum(share > 1 - FULL for share in self.site.free)
        guesses, largest = _guesses(demands, speed), self._largest()
        able = [demand for demand in demands if demand.bytes <= largest]
        self.jobs = [self._job(demand, crews[self._crews[demand.group]], guesses, roomy) for demand in able]

    def options(self, demand: Demand, runtime: float) -> tuple[Option, ...]:
        """The options of a trial with this runtime."""
        curve, alone = self.speed.curve(demand.trial), not demand.signature and not self.view.unlike
        known = self._options.get((id(curve), alone))
        if known is None:
            known = self._options[id(curve), alone] = options(curve, len(self.names), alone)
        return tuple([Option(share, runtime * seconds, runtime * area) for share, seconds, area in known])

    def held(self, job: Work, one: Assignment, seconds: float) -> Occupied:
        """A job that has its devices, and ends in so many seconds."""
        return Occupied(
            job, one.share, tuple(self._places[name] for name in one.devices if name in self._places), seconds
        )

    def begun(self, more: Sequence[Occupied]) -> Site:
        """The site once more jobs have begun."""
        free, bytes, there = list(self.site.free), list(self.site.bytes), list(self.site.kinds)
        for one in more:
            for d in one.devices:
                if free[d] > 1 - FULL:
                    there[d] = one.job.signature
                free[d] -= min(1.0, one.share)
                bytes[d] -= one.job.bytes
        held = (*self.site.held, *more)
        return replace(self.site, free=tuple(free), bytes=tuple(bytes), kinds=tuple(there), held=held)

    def now(self, plan: Plan) -> list[Assignment]:
        """The assignments that begin a plan."""
        return [
            Assignment(self.jobs[start.job].trial, tuple(self.names[d] for d in start.devices), start.option.share)
            for start in plan.starts
            if start.time == 0
        ]

    def _job(self, demand: Demand, crew: Crew, guesses: Mapping[float, float], roomy: bool) -> Work:
        unit = self.speed.unit(demand.trial)
        runtime = demand.units * unit
        ours, guess = self.options(demand, runtime), demand.position == (0, 0) and unit in guesses
        if guess and roomy:  # the trial may be slow, and where devices are many, one of its own costs the others little
            ours = tuple([option for option in ours if option.share >= 1])
        return Work(
            demand.trial,
            self._crews[demand.group],
            runtime,
            unit,
            ours,
            demand.asked,
            demand.priority,
            demand.bytes,
            demand.signature,
            crew.after,
            crew.left,
            demand.units * guesses[unit] if guess else runtime,
        )

    def _under_way(self, one: Holding) -> Occupied:
        demand = one.demand
        unit = self.speed.unit(demand.trial)
        runtime = (demand.units - one.done) * unit
        ours = self.options(demand, runtime)
        crew, bytes, signature = self._crews[demand.group], demand.bytes, demand.signature
        job = Work(demand.trial, crew, runtime, unit, ours, bytes=bytes, signature=signature)
        return self.held(job, one.assignment, runtime * self.speed.curve(demand.trial).at(one.at))

    def _crew(self, ours: Sequence[Demand], most: int) -> Crew:
        """A group with at most ``most`` later rungs; their jobs copy its members in turn, at a mean speed."""
        if self.view.goal == "target":
            return Crew(len(ours))
        units = [self.speed.unit(one.trial) for one in ours]
        unit = sum(units) / len(ours)
        crew, rungs, after, left = self._crews[ours[0].group], list[tuple[Work, ...]](), 0.0, 0.0
        like = [(id(self.speed.curve(one.trial)), one.signature, one.bytes) for one in ours]
        first = dict(reversed(list(zip(like, ours, strict=True))))
        for place, rung in reversed(list(enumerate(ours[0].later))):
            runtime = rung.units * unit
            left += self._least(ours[0], runtime * _slowest(rung.trials), rung.trials * runtime)
            if place < most:
                jobs = {kind: self._follower(one, crew, runtime, unit, after, left) for kind, one in first.items()}
                rungs.append(tuple([jobs[like[i % len(like)]] for i in range(rung.trials)]))
            after += self._least(ours[0], runtime, rung.trials * runtime)
        runtimes = [one.units * seconds for one, seconds in zip(ours, units, strict=True)]
        unseen = sum(one.position == (0, 0) for one in ours)
        left += self._least(ours[0], max(runtimes) * _slowest(unseen), sum(runtimes))
        return Crew(len(ours), tuple(reversed(rungs)), after, left)

    def _least(self, one: Demand, longest: float, runtimes: float) -> float:
        """The least seconds that trials like ``one`` take with all devices, by their longest runtime and the sum."""
        ours = self.options(one, 1.0)
        return max(longest * ours[-1].seconds, runtimes * ours[0].area / len(self.names))

    def _follower(self, one: Demand, crew: int, runtime: float, unit: float, after: float, left: float) -> Work:
        ours = self.options(one, runtime)
        return Work(-1, crew, runtime, unit, ours, LAST, one.priority, one.bytes, one.signature, after, left, runtime)

    def _largest(self) -> int:
        """The most bytes that one device has free once the running trials have ended.

        A device that other parts of the schedule use is not wholly free even then, and does not count.
        """
        free, bytes = list(self.site.free), list(self.site.bytes)
        for held in self.site.held:
            for d in held.devices:
                free[d] += min(1.0, held.share)
                bytes[d] += held.job.bytes
        return max((b for left, b in zip(free, bytes, strict=True) if left > 1 - FULL), default=-1)


def _slowest(trials: int) -> float:
    """The usual time of the slowest of so many trials, as a multiple of their mean, where no times were seen.

    Two brackets may have equal numbers of units to go. The bracket with more trials in its long rungs has more time
    left, because any of these trials may be slow.
    """
    return 1 + SLOWER * math.log2(max(1, trials))


def _guesses(demands: Collection[Demand], speed: Speed) -> dict[float, float]:
    """The mean that orders all trials whose seconds a unit were not seen, by the seconds that are assumed of each.

    Before trials of a signature have trained, all are assumed to take the mean of their signature. That is good enough
    to plan with, but no reason why a trial should overtake a trial of another signature. So all such trials are ordered
    by one common mean.
    """
    assumed: defaultdict[str, list[float]] = defaultdict(list)
    for demand in demands:
        if demand.position == (0, 0):
            assumed[demand.signature].append(speed.unit(demand.trial))
    shared = [unit for units in assumed.values() if len({*units}) == 1 for unit in units]
    return dict.fromkeys(shared, sum(shared) / max(1, len(shared)))


def _rungs(members: Mapping[str, Sequence[Demand]], ahead: int) -> int:
    """How many later rungs to plan: all, or as many as have at most ``ahead`` trials together, but at least one."""
    laters = [ours[0].later for ours in members.values()]
    most, count = max(map(len, laters), default=0), 0
    for rung in range(most):
        count += sum(later[rung].trials for later in laters if rung < len(later))
        if count > ahead:
            return max(1, rung)
    return most
