"""How far the times that a study sees are from the times that its plan was made of."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from penstock.planning.spec import Times

TOLERANCE = 0.1  # by which times may leave the plan's before it is made anew
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

    def all(self, under_way: Iterable[tuple[float, float]]) -> float:
        """How many times as long as planned units take; ``under_way`` are the seconds of units so far, and planned."""
        seconds, planned = self._seconds, self._planned
        for so_far, whole in under_way:
            seconds, planned = seconds + max(so_far, whole), planned + whole
        return seconds / planned if planned else 1.0

    def left(self, under_way: Collection[tuple[float, float]], spread: float, own: float) -> bool:
        """Whether units leave the plan by more than chance: ``spread`` is a unit's deviation, ``own`` that of a trial.

        Both are parts of the mean.
        """
        units, trials = self._units + len(under_way), max(1, len(self._seen), len(under_way))
        if not units:
            return False
        chance = SURE * math.hypot(spread / math.sqrt(units), own / math.sqrt(trials))
        return abs(self.all(under_way) - 1) > max(TOLERANCE, chance)


def spreads(times: tuple[Times, ...]) -> tuple[float, float]:
    """The deviations of a unit and of a trial, as parts of the mean; the largest of several signatures."""
    units = max(one.unit.deviation / one.unit.expected for one in times)
    trials = max(one.factor.deviation / one.factor.expected for one in times)
    means = [one.unit.expected for one in times]
    return units, math.hypot(trials, (max(means) - min(means)) / max(means))
