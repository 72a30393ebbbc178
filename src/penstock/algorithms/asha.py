"""ASHA: successive halving that never waits for a rung to be full."""

from __future__ import annotations

from bisect import bisect, insort
from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import isfinite
from typing import TYPE_CHECKING

from penstock.algorithms.base import check_count, needed_trials
from penstock.algorithms.hyperband import bracket_sizes
from penstock.algorithms.successive_halving import Rungs, rung_budgets
from penstock.errors import StudyError
from penstock.trial import Course, Later, Member, Report, Stage, StartFrom, TrialGroup

if TYPE_CHECKING:
    from penstock.algorithms.sampling import Search


@dataclass(eq=False)
class Rung:
    """The results at one budget of one bracket, as pairs (−score, number).

    The smallest pair is the best result; of equal scores, the lower number wins.
    """

    name: str
    budget: int
    above: Rung | None
    results: int = 0
    waiting: list[tuple[float, int]] = field(default_factory=list)  # results not promoted, as a heap
    promoted: list[tuple[float, int]] = field(default_factory=list)  # results promoted, sorted

    def take(self, number: int, score: float) -> None:
        self.results += 1
        if isfinite(score):
            heappush(self.waiting, (-score, number))

    def promote(self, reduction: int) -> int | None:
        """The best trial not promoted yet, where it is among the top ⌊k/η⌋ of the k results (ASHA, Algorithm 2)."""
        if not self.waiting:
            return None
        rank = bisect(self.promoted, self.waiting[0])  # only promoted trials can be ahead of the best that waits
        if rank >= self.results // reduction:
            return None
        best = heappop(self.waiting)
        insort(self.promoted, best)
        return best[1]


class ASHA(Rungs):
    """Asynchronous successive halving (Li et al., 2020): a trial in its rung's top 1/``reduction`` goes on at once.

    A promotion is never undone. Where no trial can be promoted, a new configuration starts, until the study's
    ``trials`` are drawn. ``concurrency`` is the number of trials under way at a time, whatever the number of devices.
    Its default is 64, enough to fill a fused bundle, or 8 with a sampler, so that a draw can know the results before
    it. With several ``brackets``, bracket s starts at r·ηˢ units, and the brackets divide the trials as Hyperband's do.

    >>> ASHA(max_budget=27)
    ASHA(max_budget=27, min_budget=1, reduction=3, concurrency=None, brackets=1)
    """

    def __init__(
        self,
        *,
        max_budget: int,
        min_budget: int = 1,
        reduction: int = 3,
        concurrency: int | None = None,
        brackets: int = 1,
    ) -> None:
        super().__init__(max_budget, min_budget, reduction, concurrency)
        self.brackets = check_count("brackets", brackets)
        most = len(bracket_sizes(self.max_budget, self.min_budget, self.reduction))
        if brackets > most:
            raise StudyError(
                f"brackets must be at most {most}, got {brackets}: bracket {brackets - 1} would start at "
                f"{min_budget}·{reduction}^{brackets - 1} units, beyond max_budget={max_budget}."
            )

    def begin(self, search: Search) -> None:
        super().begin(search)
        self._weights = bracket_sizes(self.max_budget, self.min_budget, self.reduction)[: self.brackets]
        self._drawn = [0] * self.brackets
        rungs = [self._rungs(s) for s in range(self.brackets)]
        self._brackets = rungs
        self._lowest = [bracket[0] for bracket in rungs]
        # Promotions look from the highest rung down, so that the most promising trials are the first to be served.
        self._promoting = sorted((r for bracket in rungs for r in bracket[:-1]), key=lambda rung: -rung.budget)
        self._rung_of: list[Rung] = []  # the rung of each trial, by the trial's number
        needed_trials(self, search)

    def ask(self) -> list[TrialGroup]:
        trials = needed_trials(self, self.search)
        # None stands for a new trial: new trials are numbered later, in the order of the groups.
        wanted: dict[Rung, list[int | None]] = {}
        for _ in range(self._most() - len(self._granted)):
            for rung in self._promoting:
                if (number := rung.promote(self.reduction)) is not None:
                    assert rung.above is not None
                    wanted.setdefault(rung.above, []).append(number)
                    break
            else:
                if sum(self._drawn) >= trials:
                    break
                wanted.setdefault(self._lowest[self._next_bracket()], []).append(None)
        more = sum(self._drawn) < trials
        return [
            self._grant(rung.name, [self._member(rung, number) for number in numbers], open=more)
            for rung, numbers in wanted.items()
        ]

    def expected(self, trials: int | None = None) -> list[Stage] | None:
        """The rungs as they are sure to be filled: of k results, ⌊k/η⌋ are promoted at the end.

        >>> [(stage.trials, stage.budget) for stage in ASHA(max_budget=9).expected(9)]
        [(9, 1), (3, 3), (1, 9)]
        """
        if trials is None:
            return None
        stages, weights = list[Stage](), bracket_sizes(self.max_budget, self.min_budget, self.reduction)
        weights = weights[: self.brackets]
        for s in range(len(weights)):
            results = round(trials * sum(weights[: s + 1]) / sum(weights)) - round(
                trials * sum(weights[:s]) / sum(weights)
            )
            for budget in rung_budgets(self.max_budget, self.min_budget * self.reduction**s, self.reduction):
                if results:
                    stages.append(Stage(results, budget, bracket=s))
                results //= self.reduction
        return stages

    def outlook(self) -> list[Course]:
        undrawn = needed_trials(self, self.search) - sum(self._drawn)
        under_way = Counter(self._rung_of[number].name for number in self._granted)
        return [
            self._course(bracket, round(undrawn * weight / sum(self._weights)), under_way)
            for bracket, weight in zip(self._brackets, self._weights, strict=True)
        ]

    def _course(self, bracket: list[Rung], undrawn: int, under_way: Counter[str]) -> Course:
        """One bracket's trials to come. Results to come in a rung are promoted as often as its results so far.

        That is more often than one in η, because a promotion is never undone. At the end a rung is sure to have
        promoted ⌊k/η⌋ of its k results.
        """
        rungs, to_come, below = [], undrawn, 0
        for rung in bracket:
            rungs.append(Later(to_come, rung.budget - below))
            results = under_way[rung.name] + to_come
            sure = (rung.results + results) // self.reduction - len(rung.promoted)
            rate = (len(rung.promoted) + 1) / (rung.results + self.reduction)  # one in η before there is any result
            to_come, below = max(0, sure, round(results * rate)), rung.budget
        return Course(tuple(rung.name for rung in bracket), tuple(rungs))

    def _take(self, report: Report) -> None:
        number = report.trial
        rung, score = self._rung_of[number], self.score(report)
        rung.take(number, score)
        if rung.above is None or not isfinite(score):
            self._dropped.append(number)

    def _rungs(self, s: int) -> list[Rung]:
        budgets = rung_budgets(self.max_budget, self.min_budget * self.reduction**s, self.reduction)
        name = f"bracket {s} rung" if self.brackets > 1 else "rung"
        rungs: list[Rung] = []
        for k in reversed(range(len(budgets))):
            rungs.insert(0, Rung(f"{name} {k}", budgets[k], rungs[0] if rungs else None))
        return rungs

    def _next_bracket(self) -> int:
        """The bracket furthest behind its share of the trials drawn."""
        drawn, total = sum(self._drawn) + 1, sum(self._weights)
        s = max(range(self.brackets), key=lambda s: self._weights[s] * drawn - self._drawn[s] * total)
        self._drawn[s] += 1
        return s

    def _member(self, rung: Rung, number: int | None) -> Member:
        start_from = None
        if number is None:
            number = len(self._configs)
            self._configs.append(self._draw(number))
            self._rung_of.append(rung)
        else:
            start_from = StartFrom(number, self._rung_of[number].budget)
            self._rung_of[number] = rung
        return Member(number, self._configs[number], rung.budget, start_from)
