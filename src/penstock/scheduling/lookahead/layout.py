"""What is planned: trials that wait or run, the rungs that follow them, and the devices that they are laid out on."""

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
"""When trials of later rungs ask: after all that wait now."""
ROOMY = 2
"""Trials for each free device up to which a trial whose seconds were not seen shares none."""
SLOWER = 0.5
"""By how much of the mean the slowest of twice as many trials is slower: units in LCBench differ that much."""
AHEAD = 100
"""Trials of rungs to come that are looked at."""

BETTER = 1e-9
"""A plan is better that is shorter by this part at least: sums in another order differ by rounding."""


class Option(NamedTuple):
    """A share, the seconds that a trial takes at it, and the device seconds."""

    share: float
    seconds: float
    area: float


@lru_cache
def options(curve: Curve, devices: int, alone: bool = False) -> tuple[Option, ...]:
    """What is worth giving a trial whose runtime is 1, narrowest first; whole devices where it is to be ``alone``.

    Sharing that does not save device seconds over sharing with fewer is left out, and so is a width that is no faster
    or was not measured. Of more than four to a device some counts stand for all.

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
    """A trial to plan: its runtime on a device of its own, and what it can be given, narrowest first.

    ``crew`` is the place of its group in the list of those. ``after`` are the seconds that the group's later rungs take
    at least, if they have all devices, and ``left`` are those with its own rung's, if some are slow: the larger, the
    sooner it should start. ``rank`` is the runtime that it is ordered by.
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
    """A trial on devices, by their places in the list, until it ends."""

    job: Work
    share: float
    devices: tuple[int, ...]
    end: float


@dataclass(frozen=True)
class Crew:
    """A group under way: how many of its trials are not done, and the jobs of each rung that follows.

    ``after`` and ``left`` are those of its jobs.
    """

    out: int
    rungs: tuple[tuple[Work, ...], ...] = ()
    after: float = 0.0
    left: float = 0.0


@dataclass(frozen=True)
class Site:
    """The devices of a plan, by their places: what is free on each, its free bytes, the signature of who is there.

    ``moving`` is what it costs a trial to move, infinite where none can.
    """

    free: tuple[float, ...]
    bytes: tuple[int, ...]
    kinds: tuple[str, ...]
    held: tuple[Occupied, ...]
    crews: tuple[Crew, ...]
    unlike: bool = False
    moving: float = math.inf


class Start(NamedTuple):
    """A job of the list, or -1 for one of a later rung, that starts on devices at a time."""

    job: int
    option: Option
    devices: tuple[int, ...]
    time: float


@dataclass(frozen=True)
class Plan:
    """What was laid out: the last end, the sum of the ends, who starts when with what."""

    makespan: float
    ends: float
    starts: tuple[Start, ...]

    def beats(self, other: Plan) -> bool:
        """It ends sooner, or at the same time with results that come sooner."""
        if self.makespan < other.makespan * (1 - BETTER):
            return True
        return self.makespan <= other.makespan * (1 + BETTER) and self.ends < other.ends * (1 - BETTER)


@dataclass(frozen=True)
class Policy:
    """How waiting trials are dealt with in a plan.

    Each is given the narrowest share by which it, and the rungs after it, end by the ``deadline``; without one, an
    equal part of what is free; or what is ``given`` to it, by its place in the list. ``order`` has those places;
    without one, the first to ask goes first. ``solo``: each is given one device.
    """

    deadline: float = math.inf
    order: tuple[int, ...] = ()
    given: Mapping[int, Option] = field(default_factory=dict)
    solo: bool = False


class Scene:
    """What is planned for: the devices, by their places, the trials that hold them, those that wait, and later rungs.

    Rungs to come count where a study is to end soon. Where it is to reach a target soon, the longest grant is the most
    urgent: it is what results of a high budget come from.
    """

    def __init__(
        self, view: View, running: Iterable[Holding], demands: Iterable[Demand], speed: Speed, ahead: int = AHEAD
    ) -> None:
        self.view, self.speed = view, speed
        room, there = everywhere(view), kinds(view.running.values())
        self.names = list(room)
        self._places = {name: i for i, name in enumerate(self.names)}
        self._options: dict[tuple[int, bool], tuple[Option, ...]] = {}  # by the curve's id: hashing it is slow
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
        roomy = len(demands) <= ROOMY * sum(share > 1 - FULL for share in self.site.free)
        guesses, largest = _guesses(demands, speed), self._largest()
        able = [demand for demand in demands if demand.bytes <= largest]
        self.jobs = [self._job(demand, crews[self._crews[demand.group]], guesses, roomy) for demand in able]

    def options(self, demand: Demand, runtime: float) -> tuple[Option, ...]:
        """What a trial can be given."""
        curve, alone = self.speed.curve(demand.trial), not demand.signature and not self.view.unlike
        known = self._options.get((id(curve), alone))
        if known is None:
            known = self._options[id(curve), alone] = options(curve, len(self.names), alone)
        return tuple([Option(share, runtime * seconds, runtime * area) for share, seconds, area in known])

    def held(self, job: Work, one: Assignment, seconds: float) -> Occupied:
        """A job that was begun, and takes so many seconds from now."""
        return Occupied(
            job, one.share, tuple(self._places[name] for name in one.devices if name in self._places), seconds
        )

    def begun(self, more: Sequence[Occupied]) -> Site:
        """The site with more trials begun."""
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
        """What a plan begins with."""
        return [
            Assignment(self.jobs[start.job].trial, tuple(self.names[d] for d in start.devices), start.option.share)
            for start in plan.starts
            if start.time == 0
        ]

    def _job(self, demand: Demand, crew: Crew, guesses: Mapping[float, float], roomy: bool) -> Work:
        unit = self.speed.unit(demand.trial)
        runtime = demand.units * unit
        ours, guess = self.options(demand, runtime), demand.position == (0, 0) and unit in guesses
        if guess and roomy:  # it may take far longer than its like: a device of its own costs the others little
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
        """A group and ``most`` of its later rungs: of any of its members, each of their mean seconds a unit."""
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
        """The seconds that trials like one take at least, if they have all devices."""
        ours = self.options(one, 1.0)
        return max(longest * ours[-1].seconds, runtimes * ours[0].area / len(self.names))

    def _follower(self, one: Demand, crew: int, runtime: float, unit: float, after: float, left: float) -> Work:
        ours = self.options(one, runtime)
        return Work(-1, crew, runtime, unit, ours, LAST, one.priority, one.bytes, one.signature, after, left, runtime)

    def _largest(self) -> int:
        """The bytes of the largest device that is free once all that ends has ended; what others have is theirs."""
        free, bytes = list(self.site.free), list(self.site.bytes)
        for held in self.site.held:
            for d in held.devices:
                free[d] += min(1.0, held.share)
                bytes[d] += held.job.bytes
        return max((b for left, b in zip(free, bytes, strict=True) if left > 1 - FULL), default=-1)


def _slowest(trials: int) -> float:
    """How many times as long as the mean the slowest of trials takes whose seconds were not seen, as a rule.

    Of two brackets with as many units to go one after another, the one that trains many trials far has more left: any
    of them may be a slow one.
    """
    return 1 + SLOWER * math.log2(max(1, trials))


def _guesses(demands: Collection[Demand], speed: Speed) -> dict[float, float]:
    """What to order trials by whose seconds a unit were not seen: their mean, by the seconds that are assumed of each.

    Seconds that all trials of a signature share before they have trained are the mean of their kind. That is good
    enough to plan with, and no reason to have one of them overtake another.
    """
    kinds: defaultdict[str, list[float]] = defaultdict(list)
    for demand in demands:
        if demand.position == (0, 0):
            kinds[demand.signature].append(speed.unit(demand.trial))
    shared = [unit for units in kinds.values() if len({*units}) == 1 for unit in units]
    return dict.fromkeys(shared, sum(shared) / max(1, len(shared)))


def _rungs(members: Mapping[str, Sequence[Demand]], ahead: int) -> int:
    """How many rungs to look ahead: all, or as many as make no more trials than are looked at, and one at least."""
    laters = [ours[0].later for ours in members.values()]
    most, count = max(map(len, laters), default=0), 0
    for rung in range(most):
        count += sum(later[rung].trials for later in laters if rung < len(later))
        if count > ahead:
            return max(1, rung)
    return most
