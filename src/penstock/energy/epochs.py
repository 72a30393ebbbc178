"""What is believed of Epochs(b), the units that a run of each batch size needs to reach its target.

Units are learned apart from the cost of a unit, which is measured: so a belief holds on another device too (Zeus §7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from penstock.energy.batch_size import Run

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

SLOPES = np.linspace(-0.3, 1.0, 27)  # κ: by which power of the batch size the units grow
MISFITS = np.array([-1.34, -0.53, 0.0, 0.53, 1.34])  # of a size from that line, in deviations
MISFIT = 0.0
CV, CV_WEIGHT = 0.07, 4  # the prior coefficient of variation of a run's units, and how many runs it counts for
ROUNDING = 1 / 12  # the variance of units that are counted whole
TINY = 1e-300  # where every slope has become impossible, they stay so, and all are as likely again
WINDOW = 10  # runs of a size that count
SURPRISE, SURPRISES = 3.0, 2  # deviations beyond which a run surprises; surprises in a row that are a change


@dataclass(frozen=True)
class Belief:
    """The runs that still count, and the coefficient of variation that all sizes share.

    ``reached`` has the units of runs that reached the target, by size, and ``stopped`` those of runs that did not.
    """

    default: int
    reached: Mapping[int, tuple[int, ...]]
    stopped: Mapping[int, tuple[int, ...]]
    cv: float
    freedom: int

    def mean(self, size: int) -> float:
        """The mean units of a size that has reached the target."""
        return float(np.mean(self.reached[size]))

    def deviation(self, size: int) -> float:
        """The deviation of that mean."""
        mean, count = self.mean(size), len(self.reached[size])
        return float(np.sqrt(((self.cv * mean) ** 2 + ROUNDING) / count))

    def draw(self, size: int, generator: np.random.Generator) -> float:
        """A mean of a size, drawn from the belief about it."""
        return self.mean(size) + self.deviation(size) * float(generator.standard_t(self.freedom))

    def foresee(self, size: int) -> tuple[Array, Array, Array]:
        """What an untried size may need: equally likely units of a run, each with the mean behind it and its weight."""
        means = self._means(size)
        weights = self.slopes() * self._stops(size, means)
        weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(means), 1 / len(means))
        spread, quantiles = self._spread(means), _quantiles(self.freedom)
        units = means[:, None] + spread[:, None] * quantiles
        count = len(quantiles)
        return units.ravel(), np.repeat(means, count), np.repeat(weights / count, count)

    def slopes(self) -> Array:
        """The weight of each slope κ, by all runs that reached the target or were stopped."""
        weights = np.ones(len(SLOPES))
        for size in sorted({*self.reached, *self.stopped} - {self.default}):
            means = self._means(size)
            weights = weights * self._stops(size, means)
            if units := self.reached.get(size):
                seen = self._spread(means) * np.sqrt(1 / len(units) + 1 / len(self.reached[self.default]))
                weights = weights * _density((self.mean(size) - means) / seen, self.freedom) / seen
            weights = weights / max(weights.sum(), TINY)
        return weights

    def _means(self, size: int) -> Array:
        """log Epochs(b) = log Epochs(b₀) + κ·log(b/b₀), for each slope."""
        made: Array = self.mean(self.default) * (size / self.default) ** SLOPES
        return made

    def _spread(self, means: Array) -> Array:
        """The deviation of a run's units."""
        made: Array = np.sqrt((self.cv * means) ** 2 + ROUNDING)
        return made

    def _stops(self, size: int, means: Array) -> Array:
        """How likely the stops of a size are by its mean units."""
        likely = np.ones_like(means)
        for units in self.stopped.get(size, ()):
            likely = likely * (1 - _below((units + 0.5 - means) / self._spread(means), self.freedom))
        return likely


def believe(default: int, runs: Sequence[Run]) -> Belief:
    """The belief after some runs, in the order in which they ended.

    Two surprises of a size in a row are a change, such as drift: all runs before the first of them are forgotten.
    """
    kept = list[Run]()
    units: dict[int, list[int]] = {}
    expected: dict[int, tuple[int, float, float]] = {}  # by size whose last run surprised: its place, and what does not
    cv, freedom = CV, CV_WEIGHT
    for run in runs:
        if run.units == 0:
            continue
        if run.size in expected or units.get(run.size):
            seen = units.get(run.size, [0])[-WINDOW:]
            mean = float(np.mean(seen))
            # One unit more or less is no surprise: a target may be passed just before a unit's end, or just after.
            off = SURPRISE * float(np.sqrt((cv * mean) ** 2 * (1 + 1 / len(seen)) + ROUNDING)) + 1
            at, least, most = expected.get(run.size, (len(kept), mean - off, mean + off))
            above, below = run.units > most, run.reached and run.units < least
            if not (above or below):
                expected.pop(run.size, None)
            elif run.size not in expected:
                expected[run.size] = (
                    at,
                    least if below else -1.0,
                    most if above else inf,
                )  # a change has one direction
            else:
                kept, expected = kept[at:], {}
                units = _by_size(kept)
        kept.append(run)
        if run.reached:
            units.setdefault(run.size, []).append(run.units)
        cv, freedom = _variation(units)
    reached = {size: tuple(some[-WINDOW:]) for size, some in units.items()}
    stopped: dict[int, tuple[int, ...]] = {}
    for run in kept:
        if not run.reached and run.units:
            stopped[run.size] = (*stopped.get(run.size, ()), run.units)[-WINDOW:]
    return Belief(default, reached, stopped, cv, freedom)


def _by_size(runs: Sequence[Run]) -> dict[int, list[int]]:
    units: dict[int, list[int]] = {}
    for run in runs:
        if run.reached:
            units.setdefault(run.size, []).append(run.units)
    return units


def _variation(units: Mapping[int, Sequence[int]]) -> tuple[float, int]:
    """The one coefficient of variation of all sizes, and its degrees of freedom."""
    squares, freedom = CV_WEIGHT * CV**2, CV_WEIGHT
    for some in units.values():
        last = some[-WINDOW:]
        mean = sum(last) / len(last)
        squares += sum((one / mean - 1) ** 2 for one in last)
        freedom += len(last) - 1
    return float(np.sqrt(squares / freedom)), freedom


@lru_cache(maxsize=256)
def _table(freedom: int) -> tuple[Array, Array]:
    """Student's distribution: points, and the probability of less than each."""
    points = np.sinh(np.linspace(-6, 6, 2001))  # dense in the middle, and out to 200
    density = _density(points, freedom)
    steps = np.diff(points) * (density[1:] + density[:-1]) / 2
    below = np.concatenate([[0.0], np.cumsum(steps)])
    return points, below / below[-1]


@lru_cache(maxsize=256)
def _quantiles(freedom: int) -> Array:
    points, below = _table(freedom)
    made: Array = np.interp((np.arange(9) + 0.5) / 9, below, points)
    return made


def _density(values: Array, freedom: int) -> Array:
    """Student's density, but for its factor."""
    made: Array = (1 + values**2 / freedom) ** (-(freedom + 1) / 2)
    return made


def _below(values: Array, freedom: int) -> Array:
    points, below = _table(freedom)
    made: Array = np.interp(values, points, below)
    return made
