"""Population based training: the worst of a population go on from copies of the best."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import ceil, isfinite
from typing import TYPE_CHECKING

from penstock.algorithms.base import Granting, check_count
from penstock.errors import StudyError
from penstock.seeds import key
from penstock.trial import Config, Later, Member, Report, Stage, StartFrom, TrialGroup

if TYPE_CHECKING:
    from penstock.algorithms.sampling import Search


class PBT(Granting):
    """A population that trains in generations of ``interval`` units (Jaderberg et al., 2017, §3 and §4.1.1).

    After each generation each trial of the bottom ``quantile`` *exploits*: it takes over the weights, optimizer state
    and configuration of a trial of the top ``quantile`` (truncation selection). Then it *explores*: that configuration
    is perturbed. Trials that failed or are not finite are always replaced so, where there is a finite trial to copy.

    >>> len(PBT(population=4, max_budget=10, interval=3).stages())
    4
    """

    def __init__(self, *, population: int, max_budget: int, interval: int = 1, quantile: float = 0.25) -> None:
        check_count("max_budget", max_budget)
        check_count("population", population, least=2)
        check_count("interval", interval)
        if interval > max_budget:
            raise StudyError(f"interval must be at most max_budget={max_budget}, got {interval}: swap them?")
        if not 0 < quantile <= 0.5:
            raise StudyError(f"quantile must be above 0 and at most 0.5 (the worse half), got {quantile!r}.")
        self.population = population
        self.max_budget = max_budget
        self.interval = interval
        self.quantile = quantile

    def trials(self, search: Search) -> int:
        return self.population

    def stages(self, trials: int | None = None) -> list[Stage]:
        budgets = range(self.interval, self.max_budget + self.interval, self.interval)
        return [Stage(self.population, min(budget, self.max_budget)) for budget in budgets]

    def begin(self, search: Search) -> None:
        super().begin(search)
        self._generation = -1
        self._budget = 0
        self._configs: dict[int, Config] = {}
        self._next: list[Member] = []  # the generation that waits to be asked for
        self._reports: list[Report] = []  # the reports of this generation at its budget
        search.space.perturb({}, search.seed, 0, 0)  # a space that cannot be perturbed is refused before any training

    def ask(self) -> list[TrialGroup]:
        if self._generation < 0:
            self._open_generation()
            self._next = [Member(n, self.search.draw(n), self._budget) for n in range(self.population)]
        members, self._next = self._next, []
        if not members:
            return []
        self._configs = {member.trial: member.config for member in members}
        budgets = [stage.budget for stage in self.stages()]
        later = tuple(Later(self.population, b - a) for a, b in pairwise(budgets) if a >= self._budget)
        return [self._grant(f"generation {self._generation}", members, later=later)]

    def _take(self, report: Report) -> None:
        self._reports.append(report)
        if self._budget == self.max_budget:
            self._dropped.append(report.trial)
        elif not self._granted:
            unit, reports = self._budget, self._reports
            self._open_generation()
            self._next = self._exploit_and_explore(unit, reports)

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
