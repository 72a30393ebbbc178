"""Random search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.algorithms.base import Granting, check_count, needed_trials
from penstock.trial import Course, Later, Member, Stage, TrialGroup

if TYPE_CHECKING:
    from penstock.algorithms.sampling import Search


UNLEARNED = 1000  # independent draws under way: enough for any cluster, and a study of a million trials starts at once


class Random(Granting):
    """As many configurations as the study has ``trials``, each trained to ``budget`` units (Bergstra & Bengio, 2012).

    Independent draws are asked for at once, up to a thousand. Where a sampler learns from results, at most
    ``concurrency`` trials are under way, so that a draw can know the results before it.

    >>> Random(budget=10)
    Random(budget=10, concurrency=8)
    """

    def __init__(self, *, budget: int, concurrency: int = 8) -> None:
        self.max_budget = check_count("budget", budget)
        self.concurrency = check_count("concurrency", concurrency)

    def settings(self) -> dict[str, object]:
        return {"budget": self.max_budget, "concurrency": self.concurrency}

    def stages(self, trials: int | None = None) -> list[Stage] | None:
        return None if trials is None else [Stage(trials, self.max_budget)]

    def outlook(self) -> list[Course]:
        undrawn = needed_trials(self, self.search) - self._drawn
        return [Course(("random",), (Later(undrawn, self.max_budget),))]

    def begin(self, search: Search) -> None:
        super().begin(search)
        self._drawn = 0
        needed_trials(self, search)

    def ask(self) -> list[TrialGroup]:
        room = needed_trials(self, self.search) - self._drawn
        ahead = self.concurrency if self.search.learns else UNLEARNED
        room = min(room, ahead - len(self._granted), self._room)
        if room <= 0:
            return []
        numbers = range(self._drawn, self._drawn + room)
        self._drawn += room
        members = [Member(n, self.search.draw(n), self.max_budget) for n in numbers]
        return [self._grant("random", members, open=self._drawn < needed_trials(self, self.search))]
