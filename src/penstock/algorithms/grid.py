"""Grid search: every combination of the space's values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.algorithms.base import Granting, check_count
from penstock.trial import Course, Member, Stage, TrialGroup

if TYPE_CHECKING:
    from penstock.algorithms.sampling import Search


class Grid(Granting):
    """Every configuration of the space's grid, each trained to ``budget`` units.

    >>> Grid(budget=10)
    Grid(budget=10)
    """

    samples = False

    def __init__(self, *, budget: int) -> None:
        self.max_budget = check_count("budget", budget)

    def settings(self) -> dict[str, object]:
        return {"budget": self.max_budget}

    def trials(self, search: Search) -> int:
        return search.space.grid_size()

    def stages(self, trials: int | None = None) -> list[Stage] | None:
        return None if trials is None else [Stage(trials, self.max_budget)]

    def outlook(self) -> list[Course]:
        return []  # every trial is asked for at once

    def begin(self, search: Search) -> None:
        super().begin(search)
        self._size = search.space.grid_size()
        self._asked = 0

    def ask(self) -> list[TrialGroup]:
        numbers = range(self._asked, min(self._asked + self._room, self._size))
        self._asked += len(numbers)
        members = [Member(n, self.search.space.grid_point(n), self.max_budget) for n in numbers]
        return [self._grant("grid", members)] if members else []
