"""How far the times that a study sees are from the times that its plan was made of, and how long its trials take."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.planning.cloud import Instance
from penstock.planning.spec import Job, Times
from penstock.planning.standing import Rest

LEAST = 0.01  # of a unit: what is left of a trial that is about to end
SOON = 1e-3  # seconds: the least time to wait for a moment that has all but come
TOLERANCE = 0.1  # by which times may leave the plan's before it is made anew
EVEN = 1e-6  # times that differ by a smaller part are equal
SURE = 3.0  # standard errors by which a mean of few units may be off by chance


@dataclass
class Drift:
    """Compares each unit's seconds with the plan's, for each trial and for all together.

    Of trials that run at once, the quick ones report first. So a unit that is not done counts too, as the plan has it,
    or as it is by now where that is longer.

    >>> drift = Drift()
    >>> drift.add(0, seconds=30.0, planned=10.0)
    >>> drift.of(0), drift.all([]), drift.all([(5.0, 10.0)])
    (3.0, 3.0, 2.0)
    """

    _seen: dict[int, tuple[float, float]] = field(default_factory=dict)  # by trial: seconds, and seconds planned
    _units: int = 0
    _seconds: float = 0.0
    _planned: float = 0.0

    def add(self, trial: int, seconds: float, planned: float) -> None:
        """Take a unit of a trial."""
        before = self._seen.get(trial, (0.0, 0.0))
        self._seen[trial] = before[0] + seconds, before[1] + planned
        self._units, self._seconds, self._planned = self._units + 1, self._seconds + seconds, self._planned + planned

    def of(self, trial: int, unseen: float = 1.0) -> float:
        """How many times as long as planned a trial's units take; ``unseen`` before it has shown any."""
        seconds, planned = self._seen.get(trial, (0.0, 0.0))
        return seconds / planned if planned else unseen

    def knows(self, trial: int) -> bool:
        """Whether a trial has shown how long its units take."""
        return trial in self._seen

    def all(self, under_way: Iterable[tuple[float, float]]) -> float:
        """How many times as long as planned units take; ``under_way`` are the seconds of units so far, and planned."""
        seconds, planned = self._seconds, self._planned
        for so_far, whole in under_way:
            seconds, planned = seconds + max(so_far, whole), planned + whole
        return seconds / planned if planned else 1.0

    def left(
        self, under_way: Collection[tuple[float, float]], spread: float, own: float, slack: float = math.inf
    ) -> bool:
        """Whether units leave the plan by more than chance: ``spread`` is a unit's deviation, ``own`` that of a trial.

        Both are parts of the mean. ``slack`` is by how much longer they may take, where that is less than the
        tolerance.
        """
        units, trials = self._units + len(under_way), max(1, len(self._seen), len(under_way))
        if not units:
            return False
        chance = SURE * math.hypot(spread / math.sqrt(units), own / math.sqrt(trials))
        more = self.all(under_way) - 1
        return abs(more) > max(TOLERANCE if more < 0 else min(TOLERANCE, slack), chance, EVEN)


def spreads(times: tuple[Times, ...]) -> tuple[float, float]:
    """The deviations of a unit and of a trial, as parts of the mean; the largest of several signatures."""
    units = max(one.unit.deviation / one.unit.expected for one in times)
    trials = max(one.factor.deviation / one.factor.expected for one in times)
    means = [one.unit.expected for one in times]
    return units, math.hypot(trials, (max(means) - min(means)) / max(means))


class _Unit(NamedTuple):
    """A unit that trains: since when, whether it is the first of a placement, and on what part of which devices."""

    since: float
    first: bool
    type: Instance
    share: float


class Units:
    """The units that trials train, or have trained last: how long each takes, and how long the rest will take.

    Seconds are those of the ``job`` that is planned, times what was seen of a trial.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._drift = Drift()
        self._going: dict[int, _Unit] = {}  # by trial

    def planned(self, job: Job) -> None:
        """The rest is planned anew, with the times that were seen."""
        self.job, self._drift = job, Drift()

    def entered(self, trial: int, clock: float, type: Instance, share: float) -> None:
        """A trial was placed on devices of a type, or on a part of one."""
        self._going[trial] = _Unit(clock, True, type, share)

    def reported(self, trial: int, clock: float) -> None:
        """A trial has reported a unit: compare its seconds with the plan's."""
        one = self._going[trial]
        self._going[trial] = one._replace(since=clock, first=False)
        self._drift.add(trial, clock - one.since, self._whole(one))

    def seconds(self, type: Instance, share: float) -> float:
        """The seconds of a unit on so many devices of a type, or on a part of one, as the plan has them."""
        times = self.job.on(type)
        weight = sum(one.weight for one in times)
        return sum(one.weight * one.unit.expected * one.curve.at(share) for one in times) / weight

    def overlong(self, trial: int, clock: float) -> float:
        """The clock at which a unit that does not end will have taken longer by another quarter than planned."""
        one = self._going[trial]
        whole = self._whole(one)
        quarters = max(4, math.floor(4 * (clock - one.since) / whole + SOON))
        return one.since + whole * (quarters + 1) / 4

    def left(self, trial: int, units: int, clock: float) -> Rest:
        """What is left of a running trial that has so many units to train."""
        one = self._going[trial]
        slower, unit = self._drift.of(trial), self.seconds(one.type, one.share)
        begun = self._whole(one) * slower - (clock - one.since)
        return self._rest(trial, begun + max(0, units - 1) * unit * slower, units, one.type, unit)

    def waiting(self, trial: int, units: int, type: Instance, share: float) -> Rest:
        """What is left of a trial that waits for devices."""
        unit = self.seconds(type, share)
        seconds = units * unit * self._drift.of(trial) + self.job.start.expected
        return self._rest(trial, seconds, units, type, unit)

    def ratio(self, running: Collection[int], clock: float) -> float:
        """How many times as long as planned all units took, those included that the running trials train."""
        return self._drift.all(self._under_way(running, clock))

    def off(self, running: Collection[int], clock: float, slack: float) -> str:
        """Why units leave the plan, if they do; ``slack`` is by what part longer they may take in all."""
        under_way = self._under_way(running, clock)
        if not self._drift.left(under_way, *spreads(next(iter(self.job.times.values()))), slack):
            return ""
        return f"Units take {self._drift.all(under_way):.2f} times as long as planned."

    def parts(self, trial: int, units: int, clock: float, unit: float, ratio: float) -> float:
        """What is left of a running trial, in units of so many seconds; ``ratio`` is what is taken before it has shown
        any."""
        one, slower = self._going[trial], self._drift.of(trial, ratio)
        begun = max(0.0, self._whole(one) * slower - (clock - one.since))
        return max(LEAST, (begun + max(0, units - 1) * self.seconds(one.type, one.share) * slower) / unit)

    def _under_way(self, running: Collection[int], clock: float) -> list[tuple[float, float]]:
        """The seconds so far of each unit that trains, and those that the plan has."""
        there = [self._going[trial] for trial in running]
        return [(clock - one.since, self._whole(one)) for one in there]

    def _whole(self, one: _Unit) -> float:
        """The seconds of a unit of a running trial, as the plan has them."""
        return self.seconds(one.type, one.share) + one.first * self.job.start.expected

    def _rest(self, trial: int, seconds: float, units: int, type: Instance, unit: float) -> Rest:
        each, own = spreads(self.job.on(type))
        own = 0.0 if self._drift.knows(trial) else own * units * unit
        return Rest(seconds, own**2 + units * (each * unit) ** 2)
