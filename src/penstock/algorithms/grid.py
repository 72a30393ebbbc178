"""Grid search: every combination of the space's values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.algorithms.base import Granting, check_count
from penstock.trial import Member, Stage, TrialGroup

if TYPE_CHECKING:
    from penstock.algorithms.sampling import Search


class Grid(Granting):
    """Every configuration of the space's grid, each trained to ``budget`` units.

    >>> Grid(budget=10)
    Grid(budget=10)
    """

    samples = False

    def __init__(self, *, budget: int) -> None:
        check_count("budget", budget)
        self.max_budget = budget

    def settings(self) -> dict[str, object]:
        return {"budget": self.max_budget}

    def trials(self, search: Search) -> int:
        return len(search.space.grid())

    def stages(self, trials: int | None = None) -> list[Stage] | None:
        return None if trials is None else [Stage(trials, self.max_budget)]

    def begin(self, search: Search) -> None:
        super().begin(search)
        self._waiting = search.space.grid()

    def ask(self) -> list[TrialGroup]:
        members = [Member(n, config, self.max_budget) for n, config in enumerate(self._waiting)]
        self._waiting = []
        return [self._grant("grid", members)] if members else []
