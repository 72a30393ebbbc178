"""Seconds that are not known exactly: distributions of times above 0, and sums of draws from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StudyError
from penstock.numeric import finite, shown

Family = Literal["gamma", "normal"]
Array = NDArray[np.float64]
FEW = 16  # draws of a normal family that are summed one by one; more draws have a sum that is normal itself


@dataclass(frozen=True)
class Draws:
    """Seconds with a ``mean`` and a standard deviation, ``std``; without a std, always the mean.

    The family "gamma" has draws above 0 whose sums are gamma, too; with std = mean its draws are exponential. Draws of
    the family "normal" are cut off at 0, so that their true mean, ``expected``, is above the mean given (RubberBand
    §6.1.1).

    >>> Draws(30.0).expected, round(Draws(4, 10, "normal").expected, 2)
    (30.0, 9.62)
    """

    mean: float
    std: float = 0.0
    family: Family = "gamma"

    def __post_init__(self) -> None:
        mean, std = finite(self.mean), finite(self.std)
        if mean is None or std is None or mean < 0 or std < 0 or (std > 0 and mean == 0):
            raise StudyError(
                "Seconds must have a mean of 0 or more and a spread (std) of 0 or more, which is 0 where the mean is; "
                f"got {shown(self.mean)} and {shown(self.std)}."
            )

    @property
    def expected(self) -> float:
        """The true mean of a draw."""
        return self._moments()[0]

    @property
    def deviation(self) -> float:
        """The true standard deviation of a draw."""
        return self._moments()[1]

    def totals(self, random: np.random.Generator, counts: Array) -> Array:
        """For each number of an array, the sum of as many draws; a part of a draw counts as that part of its mean."""
        counts = np.asarray(counts, dtype=float)
        if self.std == 0:
            return self.mean * counts
        if self.family == "gamma":
            shape = (self.mean / self.std) ** 2
            return random.gamma(np.maximum(counts * shape, 1e-300), self.std**2 / self.mean)
        mean, std = self._moments()
        sums = mean * counts + std * np.sqrt(counts) * random.standard_normal(counts.shape)
        few = (counts <= FEW) & (counts > 0)
        if few.any():
            whole = np.maximum(np.round(counts[few]).astype(int), 1)
            draws = np.add.reduceat(self._cut(random, int(whole.sum())), np.cumsum(whole) - whole)
            sums[few] = draws * counts[few] / whole
        return np.maximum(sums, 0.0)

    def draw(self, random: np.random.Generator, *shape: int) -> Array:
        """Draws in an array of that shape."""
        return self.totals(random, np.ones(shape))

    def _moments(self) -> tuple[float, float]:
        if self.std == 0 or self.family == "gamma":
            return float(self.mean), float(self.std)
        at = self.mean / self.std
        above = 0.5 * math.erfc(-at / math.sqrt(2))  # the part of the normal distribution above 0
        ratio = math.exp(-at * at / 2) / math.sqrt(2 * math.pi) / above
        return self.mean + self.std * ratio, self.std * math.sqrt(1 - ratio * (ratio + at))

    def _cut(self, random: np.random.Generator, count: int) -> Array:
        """Draws of the normal distribution above 0."""
        made = random.normal(self.mean, self.std, count)
        while (below := made <= 0).any():
            made[below] = random.normal(self.mean, self.std, int(below.sum()))
        return made


NOTHING = Draws(0.0)
ONE = Draws(1.0)
