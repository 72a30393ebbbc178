"""Population based training: the worst of a population go on from copies of the best."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import islice, pairwise
from math import ceil, isfinite
from typing import TYPE_CHECKING

from penstock.algorithms.base import Granting, check_count
from penstock.errors import StudyError
from penstock.numeric import finite, shown
from penstock.seeds import key
from penstock.trial import Config, Course, Later, Member, Report, Stage, StartFrom, TrialGroup

if TYPE_CHECKING:
    from penstock.algorithms.sampling import Search


FORESEEN = 10_000  # generations that are listed before they come


class PBT(Granting):
    """A population that trains in generations of ``interval`` units (Jaderberg et al., 2017, §3 and §4.1.1).

    After each generation each trial of the bottom ``quantile`` *exploits*: it takes over the weights, optimizer state
    and configuration of a trial of the top ``quantile`` (truncation selection). Then it *explores*: that configuration
    is perturbed. Trials that failed or are not finite are always replaced so, where there is a finite trial to copy.

    >>> len(PBT(population=4, max_budget=10, interval=3).stages())
    4
    """

    def __init__(self, *, population: int, max_budget: int, interval: int = 1, quantile: float = 0.25) -> None:
        self.population = check_count("population", population, least=2)
        self.max_budget = check_count("max_budget", max_budget)
        self.interval = check_count("interval", interval)
        if self.interval > self.max_budget:
            raise StudyError(f"interval must be at most max_budget={max_budget}, got {interval}: swap them?")
        part = finite(quantile)
        if part is None or not 0 < part <= 0.5:
            raise StudyError(f"quantile must be above 0 and at most 0.5 (the worse half), got {shown(quantile)}.")
        self.quantile = part

    def trials(self, search: Search) -> int:
        return self.population

    def stages(self, trials: int | None = None) -> list[Stage] | None:
        """The generations; None where there are too many to list."""
        budgets = self._budgets(0)
        return None if len(budgets) > FORESEEN else [Stage(self.population, self._capped(b)) for b in budgets]

    def _budgets(self, after: int) -> range:
        """The generations' budgets beyond one; the last budget may be beyond ``max_budget``."""
        return range(after + self.interval, self.max_budget + self.interval, self.interval)

    def _capped(self, budget: int) -> int:
        return min(budget, self.max_budget)

    def begin(self, search: Search) -> None:
        super().begin(search)
        self._generation = -1
        self._budget = 0
        self._configs: dict[int, Config] = {}
        self._next: Iterator[Member] = iter(())  # the members of this generation that wait to be asked for
        self._size = 0  # members of this generation
        self._reports: list[Report] = []  # the reports of this generation at its budget
        search.space.perturb({}, search.seed, 0, 0)  # a space that cannot be perturbed is refused before any training

    def ask(self) -> list[TrialGroup]:
        if self._generation < 0:
            self._open_generation()
            budget, self._size = self._budget, self.population
            self._next = (Member(n, self.search.draw(n), budget) for n in range(self.population))
        # After the first generation all are asked for at once: a donor's state is there until the donor reports again.
        members = list(islice(self._next, self._room if self._generation == 0 else None))
        if not members:
            return []
        self._configs.update((member.trial, member.config) for member in members)
        return [self._grant(f"generation {self._generation}", members, later=self._later())]

    def outlook(self) -> list[Course]:
        later = self._later()
        first = self._generation + 1
        return [Course(tuple(f"generation {first + i}" for i in range(len(later))), later, waits=True)]

    def _later(self) -> tuple[Later, ...]:
        """The generations after this one, as far as they are foreseen."""
        ahead = self._budgets(self._budget)[:FORESEEN] if self._budget < self.max_budget else ()
        budgets = [self._budget, *map(self._capped, ahead)]
        return tuple(Later(self.population, b - a) for a, b in pairwise(budgets))

    def _take(self, report: Report) -> None:
        self._reports.append(report)
        if self._budget == self.max_budget:
            self._dropped.append(report.trial)
        elif len(self._reports) == self._size:
            unit, reports = self._budget, self._reports
            self._open_generation()
            members = self._exploit_and_explore(unit, reports)
            self._next, self._size = iter(members), len(members)

    def _open_generation(self) -> None:
        self._generation += 1
        self._budget = min(self._budget + self.interval, self.max_budget)
        self._reports = []

    def _exploit_and_explore(self, unit: int, reports: list[Report]) -> list[Member]:
        ranking = sorted(reports, key=lambda report: (-self.score(report), report.trial))
        finite = {report.trial: isfinite(self.score(report)) for report in ranking}
        # The cut is at most half, so that no trial is both copied and replaced. It is computed as a fraction, because
        # 0.07·100 as a float is above 7.
        cut = min(ceil(Fraction(str(self.quantile)) * len(ranking)), len(ranking) // 2)
        donors = [report.trial for report in ranking[:cut] if finite[report.trial]]
        bottom = {report.trial for report in ranking[len(ranking) - cut :]}
        members = []
        for report in sorted(reports, key=lambda report: report.trial):
            number = report.trial
            if donors and (number in bottom or not finite[number]):
                donor = donors[key(self.search.seed, "donor", number, self._generation) % len(donors)]
                config = self.search.space.perturb(self._configs[donor], self.search.seed, number, self._generation)
                members.append(Member(number, config, self._budget, StartFrom(donor, unit)))
            elif report.metrics:
                members.append(Member(number, self._configs[number], self._budget, StartFrom(number, unit)))
            else:  # the trial failed, so it has no state to go on from, and there is no finite trial to copy
                self._dropped.append(number)
        return members
