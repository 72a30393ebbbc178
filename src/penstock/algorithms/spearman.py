"""How well one order of configs foretells another: Spearman's correlation, its interval, and how many to try again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import atanh, pi, sin, sqrt, tanh

import numpy as np
from numpy.typing import NDArray

ONE_SIDED = 1.645  # deviations that a normal number exceeds once in twenty
SAMPLES, MOST = 4000, 1000  # studies that are drawn, and the most trials of one


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The correlation of two lists' ranks; equal numbers share the mean of their ranks.

    >>> spearman([1, 2, 3, 4], [10, 20, 40, 30])
    0.8
    """
    a, b = _ranks(one), _ranks(other)
    a, b = a - a.mean(), b - b.mean()
    length = sqrt(float(a @ a) * float(b @ b))
    return round(float(a @ b) / length, 12) if length else 0.0


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    numbers = np.asarray(values, dtype=np.float64)
    return np.array([(numbers < one).sum() + ((numbers == one).sum() - 1) / 2 for one in numbers])


def interval(correlation: float, pairs: int) -> tuple[float, float]:
    """Where the true correlation lies with 90%, by Fisher's transformation with Bonett and Wright's deviation.

    >>> [round(end, 2) for end in interval(0.9, 16)]
    [0.73, 0.96]
    """
    if pairs < 4:
        return -1.0, 1.0
    if abs(correlation) == 1:
        correlation *= 1 - 1 / pairs**2
    off = ONE_SIDED * sqrt((1 + correlation**2 / 2) / (pairs - 3))
    return tanh(atanh(correlation) - off), tanh(atanh(correlation) + off)


@cache
def needed(correlation: float, trials: int, chance: float = 0.9) -> int:
    """How many of the best by one order must be tried again, to have the best by the other among them with a chance.

    >>> needed(0.9, 100), needed(0.8, 100)
    (6, 13)
    """
    if trials <= 1 or correlation >= 1:
        return 1
    trials = min(trials, MOST)
    pearson = 2 * sin(pi * max(correlation, 0.0) / 6)
    drawn = np.random.default_rng(0)
    places = []
    for _ in range(SAMPLES // 200):
        true = drawn.standard_normal((200, trials))
        seen = pearson * true + sqrt(max(0.0, 1 - pearson**2)) * drawn.standard_normal((200, trials))
        best = true.argmax(1)
        places.append((seen > seen[np.arange(200), best][:, None]).sum(1))
    return int(np.quantile(np.concatenate(places), chance, method="inverted_cdf")) + 1
