"""The right power limit: measured for each limit (Zeus §4.2), or foreseen by a model where nothing may be set.

A table has the seconds of a step and the average power by limit; the choice follows from it by eq. 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.energy.cost import Draw, Objective

SLICE = 5.0  # seconds for which a limit is tried (§5)
ALL = 0.01  # the part of the training that is certain, below which all limits are tried
FIRST = 4  # limits that are tried where that would take longer
STEP = 25.0  # watts between two limits
LIMITS = 12  # at most


def limits(least: float, most: float) -> list[float]:
    """The limits to choose from, the greatest first: in steps of 25 W, or larger ones that make twelve at most.

    >>> limits(200.0, 700.0)[:3], limits(100.0, 250.0)
    ([700.0, 650.0, 600.0], [250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0])
    """
    step = STEP
    while (most - least) / step > LIMITS - 2:
        step += STEP
    found = [most - step * i for i in range(int((most - least) // step) + 1)]
    return found if found[-1] == least else [*found, least]


def first_limits(all: Sequence[float], certain: float) -> list[float]:
    """The limits to try first, where training for so many seconds is certain: all, or else four that are far apart.

    >>> first_limits([250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0], certain=600.0)
    [250.0, 200.0, 150.0, 100.0]
    """
    if len(all) <= FIRST or len(all) * SLICE <= ALL * certain:
        return list(all)
    last = len(all) - 1
    return [all[round(i * last / (FIRST - 1))] for i in range(FIRST)]


@dataclass
class Search:
    """Which limit to try next, and which one is best: ``tried`` has what each limit gave.

    >>> search = Search(Objective(1.0, 250.0), [250.0, 200.0, 150.0, 100.0], certain=1e6)
    >>> while (limit := search.next()) is not None:
    ...     search.tried[limit] = Draw(seconds=300.0 / (limit + 50.0), watts=limit)
    >>> search.best
    100.0
    """

    objective: Objective
    all: Sequence[float]
    certain: float
    tried: dict[float, Draw] = field(default_factory=dict)

    def next(self) -> float | None:
        """The limit to try; None where enough is known."""
        first = first_limits(self.all, self.certain)
        if left := [limit for limit in first if limit not in self.tried]:
            return left[0]
        at = self.all.index(self.objective.best_limit({limit: self.tried[limit] for limit in first}))
        beside = [self.all[i] for i in (at - 1, at + 1) if 0 <= i < len(self.all)]
        return next((limit for limit in beside if limit not in self.tried), None)

    @property
    def best(self) -> float:
        """The limit of least cost a step, of those that were tried (eq. 7)."""
        return self.objective.best_limit(self.tried)


@dataclass(frozen=True)
class Estimate:
    """What a limit is expected to give, as parts of a step's seconds and joules without it, and how far it may be off.

    ``known`` says that it was measured. Otherwise ``error`` is the standard error of both parts, 0 above the draw.
    """

    limit: float
    seconds: float
    joules: float
    known: bool = False
    error: float = 0.0


IDLE = 0.2  # of the greatest limit: what a device draws whatever its clock
EXPONENT = 2.0  # of the clock: the rest of the draw goes with this power of it
BOUND = 0.5  # of a step's time that goes with the clock's inverse
BELOW = 0.9  # of a limit that slows a device down: its average draw
DEEPEST = 0.65  # of the draw: what a lower limit does differs too much from job to job
ERRORS = ((0.9, 0.08), (0.8, 0.08), (0.7, 0.09), (0.0, 0.12))
"""The standard error of the model, by the least part of the draw that a limit leaves.

It was found, as the constants above were, on the V100 and A40 of the Zeus traces: see ``bench/limits.py``.
"""


def estimate(watts: float, limit: float, most: float) -> Estimate:
    """What a limit would do to a device that draws so many watts without one.

    A limit above the draw changes nothing. Below it the clock falls until the draw fits: power beyond the idle part
    goes with the square of the clock, and half of the time with its inverse.

    >>> estimate(500.0, 600.0, 700.0).joules
    1.0
    >>> round(estimate(500.0, 450.0, 700.0).seconds, 3), round(estimate(500.0, 450.0, 700.0).joules, 3)
    (1.083, 0.877)
    """
    drawn = limit * BELOW
    if drawn >= watts:
        return Estimate(limit, 1.0, 1.0)
    idle = min(IDLE * most, 0.9 * drawn)
    clock = ((drawn - idle) / (watts - idle)) ** (1 / EXPONENT)
    seconds = 1 - BOUND + BOUND / clock
    error = next(error for part, error in ERRORS if drawn / watts >= part)
    return Estimate(limit, seconds, seconds * drawn / watts, error=error)


def foreseen(
    watts: float, all: Sequence[float], objective: Objective, profile: Mapping[float, Draw] | None = None
) -> Estimate:
    """The limit that would cost least, and what it would give: by a profile, or else by the model."""
    if profile:
        best, none = profile[objective.best_limit(profile)], profile[max(profile)]
        return Estimate(
            objective.best_limit(profile), best.seconds / none.seconds, best.joules / none.joules, known=True
        )
    near = [estimate(watts, limit, max(all)) for limit in all if limit == max(all) or limit * BELOW >= DEEPEST * watts]
    draws = {one.limit: Draw(one.seconds, watts * one.joules / one.seconds) for one in near}
    best_limit = objective.best_limit(draws)
    return next(one for one in near if one.limit == best_limit)
