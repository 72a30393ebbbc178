"""Successive halving in rungs, and the synchronous bracket that Hyperband and SyncBOHB are made of."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import groupby, pairwise
from math import isfinite
from typing import TYPE_CHECKING

from penstock.algorithms.base import AHEAD, Granting, check_count, needed_trials
from penstock.errors import StudyError
from penstock.numeric import shown
from penstock.trial import Config, Course, Later, Member, Report, Stage, StartFrom, TrialGroup

if TYPE_CHECKING:
    from penstock.algorithms.sampling import Search

CONCURRENCY = 8  # trials under way where draws learn from results
UNLEARNED = 64  # trials under way where draws do not learn


class Bracket:
    """One run of successive halving: n₀ trials to r₀ units, the best n₁ of them to r₁, and so on.

    A rung starts when every trial of the rung before has reported. Trials whose score is not finite go no further,
    even where the next rung then is smaller than planned.
    """

    def __init__(self, name: str, stages: list[Stage]) -> None:
        self._name = name
        self._stages = stages
        self._rung = 0
        self._best: list[tuple[float, int]] = []  # the trials ahead, as a heap of (score, −number), the worst first
        self.undrawn = stages[0].trials
        self.running = 0
        self.promoted: deque[int] = deque()  # trials of this rung that wait to be asked for

    @property
    def over(self) -> bool:
        return not (self.undrawn or self.running or self.promoted)

    @property
    def name(self) -> str:
        return f"{self._name}rung {self._rung}"

    @property
    def budget(self) -> int:
        return self._stages[self._rung].budget

    @property
    def reached(self) -> int:
        """The budget of the rung before."""
        return self._stages[self._rung - 1].budget

    @property
    def later(self) -> tuple[Later, ...]:
        """The rungs after this one."""
        rungs = self._stages[self._rung :]
        return tuple(Later(after.trials, after.budget - before.budget) for before, after in pairwise(rungs))

    @property
    def course(self) -> Course:
        """This rung and the rungs after it."""
        units = self.budget - (self.reached if self._rung else 0)
        rungs = (Later(self.undrawn + len(self.promoted), units), *self.later)
        names = (f"{self._name}rung {self._rung + k}" for k in range(len(rungs)))
        return Course(tuple(names), rungs, waits=True)

    def take(self, number: int, score: float) -> list[int]:
        """Take a trial's score at this rung's budget; gives the trials that now certainly go no further."""
        self.running -= 1
        out = []
        if isfinite(score):
            heappush(self._best, (score, -number))
        else:
            out.append(number)
        last = self._rung + 1 == len(self._stages)
        if len(self._best) > (0 if last else self._stages[self._rung + 1].trials):
            out.append(-heappop(self._best)[1])  # of equal scores, the higher number goes
        if not (self.running or self.undrawn or self.promoted or last):
            self.promoted = deque(sorted(-number for _, number in self._best))
            self._best = []
            self._rung += 1
        return out


class Rungs(Granting):
    """The base of all algorithms with rungs: their settings, and the configuration of each trial."""

    def __init__(self, max_budget: int, min_budget: int, reduction: int, concurrency: int | None) -> None:
        self.max_budget = check_count("max_budget", max_budget)
        self.min_budget = check_count("min_budget", min_budget)
        self.reduction = check_count("reduction", reduction, least=2)
        self.concurrency = None if concurrency is None else check_count("concurrency", concurrency)
        if self.max_budget < self.min_budget:
            raise StudyError(f"max_budget must be at least min_budget={min_budget}, got {max_budget}: swap them?")

    def _most(self) -> int:
        """How many trials may be under way."""
        if self.concurrency is not None:
            return min(self.concurrency, AHEAD)
        return CONCURRENCY if self.search.learns else UNLEARNED

    def begin(self, search: Search) -> None:
        super().begin(search)
        self._configs: list[Config] = []  # the config of each trial, by the trial's number

    def _draw(self, number: int) -> Config:
        return self.search.draw(number)


class Halving(Rungs):
    """The base of SuccessiveHalving and Hyperband: brackets made from the list that ``stages`` gives.

    Brackets of independent draws do not depend on each other and are asked for at once, up to ``AHEAD`` trials. Where a
    sampler learns from results, the brackets follow one another, and their first rungs are drawn as results come in,
    with at most ``concurrency`` trials under way.
    """

    def begin(self, search: Search) -> None:
        super().begin(search)
        stages = self.stages(needed_trials(self, search)) or []
        brackets = [(s, list(rungs)) for s, rungs in groupby(stages, key=lambda stage: stage.bracket)]
        self._brackets = [Bracket(f"bracket {s} " if len(brackets) > 1 else "", rungs) for s, rungs in brackets]
        self._bracket_of: list[Bracket] = []  # the bracket of each trial, by the trial's number

    def ask(self) -> list[TrialGroup]:
        groups = []
        for bracket in self._brackets:
            if bracket.over:
                continue
            promotions = self._promotions(bracket, self._room)
            if members := [*promotions, *self._draws(bracket, self._room - len(promotions))]:
                bracket.running += len(members)
                groups.append(self._grant(bracket.name, members, later=bracket.later))
            if self.search.learns:
                break
        return groups

    def outlook(self) -> list[Course]:
        courses = [bracket.course for bracket in self._brackets if not bracket.over]
        if not self.search.learns or not courses:
            return courses
        # Brackets that follow one another are the rungs of one course.
        groups = tuple(name for course in courses for name in course.groups)
        return [Course(groups, tuple(rung for course in courses for rung in course.rungs), waits=True)]

    def _take(self, report: Report) -> None:
        self._dropped += self._bracket_of[report.trial].take(report.trial, self.score(report))

    def _draws(self, bracket: Bracket, room: int) -> list[Member]:
        room = min(room, bracket.undrawn)
        if self.search.learns:
            room = min(room, max(0, self._most() - bracket.running))  # a later rung may exceed the limit
        bracket.undrawn -= room
        members = []
        for number in range(len(self._configs), len(self._configs) + room):
            self._configs.append(self._draw(number))
            self._bracket_of.append(bracket)
            members.append(Member(number, self._configs[number], bracket.budget))
        return members

    def _promotions(self, bracket: Bracket, room: int) -> list[Member]:
        numbers = [bracket.promoted.popleft() for _ in range(min(room, len(bracket.promoted)))]
        return [Member(n, self._configs[n], bracket.budget, StartFrom(n, bracket.reached)) for n in numbers]


class SuccessiveHalving(Halving):
    """Train all trials a little, the best 1/``reduction`` of them further, until ``max_budget`` (Jamieson & Talwalkar).

    Of n trials, ⌊n/ηᵏ⌋ are in rung k and train to r·ηᵏ units in all; the last rung trains to R, the ``max_budget``.
    With ``additive`` each rung trains r·ηᵏ units *more* instead, as RubberBand counts (§6: SHA(n=64, r=4, R=508)).
    Where n is too small for that many rungs, the last rung that holds a trial trains to R, so that at least one trial
    reaches R.

    >>> SuccessiveHalving(max_budget=9).stages(9)
    [Stage(trials=9, budget=1, bracket=0), Stage(trials=3, budget=3, bracket=0), Stage(trials=1, budget=9, bracket=0)]
    """

    grows = False  # the rungs are made from the number of trials

    def __init__(
        self, *, max_budget: int, min_budget: int = 1, reduction: int = 3, additive: bool = False, concurrency: int = 8
    ) -> None:
        super().__init__(max_budget, min_budget, reduction, concurrency)
        if not isinstance(additive, bool):
            raise StudyError(f"additive must be True or False, got {shown(additive)}.")
        self.additive = additive

    def stages(self, trials: int | None = None) -> list[Stage] | None:
        if trials is None:
            return None
        check_count("trials", trials)
        budgets = rung_budgets(self.max_budget, self.min_budget, self.reduction, self.additive)
        sizes = [n for k in range(len(budgets)) if (n := trials // self.reduction**k)]
        budgets[len(sizes) - 1] = self.max_budget
        return [Stage(n, r) for n, r in zip(sizes, budgets, strict=False)]


def rung_budgets(max_budget: int, min_budget: int, reduction: int, additive: bool = False) -> list[int]:
    """The rungs' budgets, each above the one before: r·ηᵏ (or its sum over the rungs so far) below R, then R.

    >>> rung_budgets(30, 1, 3), rung_budgets(30, 1, 3, additive=True)
    ([1, 3, 9, 27, 30], [1, 4, 13, 30])
    """
    budgets, work = [min_budget], min_budget
    while budgets[-1] < max_budget:
        work *= reduction
        budgets.append(min(max_budget, work + (budgets[-1] if additive else 0)))
    return budgets
