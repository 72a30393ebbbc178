"""The course that a scheduler's decisions take: who runs where and until when, if every trial runs as predicted.

A trial at a share takes what the speed model says, whoever else is on its devices: the constant-share model of Fluid
§4.1. Nothing else is simplified: a running trial's progress is known in whole units, and it moves at the end of one.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from penstock.scheduling.base import FULL, Assignment, Demand, Holding, Room, Scheduler, View, kinds
from penstock.scheduling.capacity import everywhere
from penstock.speed.model import Speed

NEARLY = 1 - 1e-6
"""A unit that was not reported is not done: its trial still has its devices."""
SAME = 1e-9
"""Times that differ by less, relatively, are one instant."""


@dataclass(frozen=True)
class Stretch:
    """A trial on its devices from ``start`` to ``end``, in seconds from now."""

    trial: int
    devices: tuple[str, ...]
    share: float
    start: float
    end: float


@dataclass(frozen=True)
class Course:
    """What happens: stretches in the order of their ends, and the trials that wait for ever."""

    stretches: tuple[Stretch, ...]
    waiting: tuple[int, ...] = ()

    @property
    def makespan(self) -> float:
        """When the last one ends; infinite where somebody waits for ever."""
        if self.waiting:
            return math.inf
        return self.stretches[-1].end if self.stretches else 0.0

    @property
    def ends(self) -> float:
        """When each one ends, all added up."""
        return sum({stretch.trial: stretch.end for stretch in self.stretches}.values())


@dataclass
class _Run:
    holding: Holding
    placed: float
    begun: float  # later than placed by what moving costs
    unit: float

    @property
    def end(self) -> float:
        return self.begun + self.holding.demand.units * self.unit

    def done(self, now: float) -> int:
        """Whole units trained."""
        return max(0, math.floor((now - self.begun) / self.unit + SAME))

    def boundary(self, now: float) -> float:
        """When it can leave: at the end of a unit, and not before the first."""
        units = max(1, math.ceil((now - self.begun) / self.unit - SAME))
        return self.begun + units * self.unit


def course(scheduler: Scheduler, view: View, demands: Collection[Demand], speed: Speed) -> Course:
    """Carry a scheduler's decisions out to the end, as the engine does: it is asked again at every change.

    A trial that moves leaves at the end of a unit, waits with what is left, asked for anew, and loses ``speed.moving``
    when it starts again.

    >>> from penstock.executors.base import Device
    >>> from penstock.scheduling.fifo import fifo
    >>> from penstock.speed.model import UNKNOWN
    >>> one = View({"gpu 0": Device("gpu 0", "h200", 8)}, {}, {"gpu 0": Room(1.0, 8)})
    >>> made = course(fifo, one, [Demand(0, "g", 2), Demand(1, "g", 3)], UNKNOWN)
    >>> [(stretch.trial, stretch.start, stretch.end) for stretch in made.stretches]
    [(0, 0.0, 2.0), (1, 2.0, 5.0)]
    """
    waiting = {demand.trial: demand for demand in demands}
    asked = max((demand.asked for demand in waiting.values()), default=0) + 1
    room = everywhere(view)
    runs = {trial: _under_way(holding, speed) for trial, holding in view.running.items()}
    moved: set[int] = set()
    stretches: list[Stretch] = []
    now = 0.0
    while waiting or runs:
        running = {trial: _seen(run, now) for trial, run in runs.items()}
        left = {name: one for name, one in room.items() if one.share > FULL}
        leaving = []
        seen = replace(view, running=running, room=left, kinds=kinds(running.values()))
        for one in scheduler(seen, waiting.values(), speed):
            if one.trial in runs:
                leaving.append(one.trial)
            elif _fits(one, waiting[one.trial], room):
                demand = waiting.pop(one.trial)
                _take(room, one, demand.bytes)
                begun = now + (speed.moving if one.trial in moved else 0.0)
                runs[one.trial] = _Run(Holding(demand, one), now, begun, speed.seconds(one.trial, one.share))
        if not runs:
            break
        times = [run.end for run in runs.values()] + [runs[trial].boundary(now) for trial in leaving]
        now = max(now, min(times))
        edge = now + SAME * max(1.0, now)
        for trial in [trial for trial, run in runs.items() if run.end <= edge]:
            run = runs.pop(trial)
            _take(room, run.holding.assignment, run.holding.demand.bytes, -1)
            stretches.append(Stretch(trial, *_where(run), run.placed, now))
        for trial in leaving:
            if trial in runs and runs[trial].boundary(now) <= edge:
                run = runs.pop(trial)
                _take(room, run.holding.assignment, run.holding.demand.bytes, -1)
                stretches.append(Stretch(trial, *_where(run), run.placed, now))
                waiting[trial] = replace(_seen(run, now).demand, asked=asked)
                asked += 1
                moved.add(trial)
    return Course(tuple(stretches), tuple(waiting))


def _under_way(holding: Holding, speed: Speed) -> _Run:
    unit = speed.seconds(holding.demand.trial, holding.at)
    return _Run(holding, 0.0, -unit * holding.done, unit)


def _seen(run: _Run, now: float) -> Holding:
    """What the engine knows of it: the units that it has reported, and how long ago that was."""
    done = run.done(now)
    part = min(NEARLY, max(0.0, (now - run.begun) / run.unit - done))
    demand = run.holding.demand
    return replace(run.holding, demand=replace(demand, units=demand.units - done) if done else demand, done=part)


def _where(run: _Run) -> tuple[tuple[str, ...], float]:
    return run.holding.assignment.devices, run.holding.assignment.share


def _fits(one: Assignment, demand: Demand, room: dict[str, Room]) -> bool:
    share = min(1.0, one.share) - FULL
    return all(room[name].share >= share and room[name].bytes >= demand.bytes for name in one.devices)


def _take(room: dict[str, Room], one: Assignment, bytes: int, sign: int = 1) -> None:
    for name in one.devices:
        left = room[name]
        room[name] = Room(left.share - sign * min(1.0, one.share), left.bytes - sign * bytes)
