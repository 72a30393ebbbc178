"""Hyperband: successive halving in brackets, from many short trials to few long ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.algorithms.successive_halving import Halving
from penstock.trial import Stage

if TYPE_CHECKING:
    from penstock.algorithms.sampling import Search


class Hyperband(Halving):
    """Brackets s = s_max … 0 of successive halving; bracket s halves s times (Li et al., 2018, Algorithm 1).

    The settings fix the number of trials.

    >>> sum(stage.trials for stage in Hyperband(max_budget=9).stages() if stage.budget == 9)
    5
    """

    def __init__(self, *, max_budget: int, min_budget: int = 1, reduction: int = 3, concurrency: int = 8) -> None:
        super().__init__(max_budget, min_budget, reduction, concurrency)

    def trials(self, search: Search) -> int:
        return sum(bracket_sizes(self.max_budget, self.min_budget, self.reduction))

    def stages(self, trials: int | None = None) -> list[Stage]:
        sizes = bracket_sizes(self.max_budget, self.min_budget, self.reduction)
        stages = []
        for s, n in zip(reversed(range(len(sizes))), sizes, strict=True):
            for i in range(s + 1):
                # n_i = ⌊n·η^−i⌋ trials to r_i = R·η^(i−s) units, rounded to the nearest whole number. Two rungs never
                # round to the same budget: r_i ≥ min_budget ≥ 1 and r_(i+1) ≥ 2·r_i lie at least a unit apart.
                parts = self.reduction ** (s - i)
                stages.append(Stage(n // self.reduction**i, (2 * self.max_budget + parts) // (2 * parts), bracket=s))
        return stages


def bracket_sizes(max_budget: int, min_budget: int, reduction: int) -> list[int]:
    """How many trials each bracket draws, from s = s_max = ⌊log_η(R/r)⌋ to 0: n = ⌈(s_max+1)/(s+1)·ηˢ⌉.

    >>> bracket_sizes(81, 1, 3)
    [81, 34, 15, 8, 5]
    """
    count = 1  # s_max + 1, counted in whole numbers: math.log(243, 3) is 4.999…
    while min_budget * reduction**count <= max_budget:
        count += 1
    return [-(-count * reduction**s // (s + 1)) for s in reversed(range(count))]
