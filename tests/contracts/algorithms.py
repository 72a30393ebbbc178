"""The suite that every algorithm passes: inherit ``AlgorithmContract`` and say how to make one."""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.samplers import BaseSampler, RandomSampler

from penstock.algorithms.base import Algorithm
from penstock.algorithms.sampling import Search
from penstock.domains import choice, loguniform
from penstock.log.events import Asked, Event, Failed, Reported, Wrote
from penstock.seeds import key
from penstock.space import Space
from penstock.trial import Config, Member, Metrics, Mode, Report, TrialGroup, Usage, reached

exhaustive = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,  # a failure on one machine is a failure on every other
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


class FakeSpace:
    """A grid of six, and a perturbation that shows what it was made of."""

    constants: ClassVar[Config] = {"epochs": 3}

    def grid_size(self) -> int:
        return 6

    def grid_point(self, number: int) -> Config:
        return {"x": number // 2, "y": "ab"[number % 2]}

    def perturb(self, config: Config, seed: int, number: int, generation: int) -> Config:
        return {"x": config.get("x"), "y": "p", "of": config, "for": (seed, number, generation)}


@dataclass
class FakeSearch:
    """A search whose configs show how they were drawn; samplers cannot serve numbers out of order, so it refuses."""

    trials: int | None = None
    learns: bool = False
    mode: Mode = "max"
    seed: int = 0
    metric: str = "m"
    space: FakeSpace = field(default_factory=FakeSpace)
    drawn: list[str | int] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        """There is no sampler that could learn from it."""

    def write(self, event: Wrote) -> None:
        """There is no log that could keep it."""

    def restart(self, numbers: object) -> None:
        """Forget what was drawn."""
        self.drawn.clear()

    def _draw(self, number: int, by: str | int) -> Config:
        assert number == len(self.drawn), "trials are drawn in the order of their numbers, each once"
        self.drawn.append(by)
        return {"x": key(self.seed, number) % 1000, "y": by, **self.space.constants}

    def draw(self, number: int) -> Config:
        return self._draw(number, "draw")

    def independent(self, number: int) -> Config:
        return self._draw(number, "independent")

    def draw_at(self, number: int, budget: int) -> Config:
        return self._draw(number, budget)


class Play:
    """An engine without devices: hands reports to an algorithm and checks each answer against the contract."""

    def __init__(self, algorithm: Algorithm, search: Any) -> None:
        self.algorithm, self.search = algorithm, search
        self.log: list[tuple[list[int], list[TrialGroup]]] = []  # what each report (first: none) was answered with
        self.reports: list[Report] = []
        self.asked: list[tuple[str, Member]] = []
        self.running: dict[int, Member] = {}
        self.reached: dict[int, int] = {}  # units reported, by trial
        self.stateless: set[int] = set()  # those whose last report was a failure
        self.dropped: list[int] = []
        self.peak = 0
        algorithm.begin(search)
        self._pull()

    @property
    def groups(self) -> dict[str, list[Member]]:
        groups = defaultdict(list)
        for name, member in self.asked:
            groups[name].append(member)
        return groups

    def report(self, number: int, value: float | None = None, unit: int | None = None) -> None:
        """A report at ``unit`` (the granted budget, unless told); of a failure, where there is no value."""
        granted = self.running[number].budget
        unit = granted if unit is None else unit
        metrics: Metrics = {} if value is None else {"m": value}
        self.reports.append(Report(number, unit, metrics))
        if value is None:
            self.search.apply(Failed(number, 0, "", final=True, clock=0.0))
        else:
            self.search.apply(Reported(number, 0, unit, {"m": value}, None, Usage(), clock=0.0))
        self.reached[number] = unit
        over = unit == granted or reached(metrics, "m", self.search.mode, self.algorithm.until)
        if over:
            del self.running[number]
        (self.stateless.add if value is None else self.stateless.discard)(number)
        self.algorithm.tell(self.reports[-1])
        self._pull()
        if not over:
            assert self.log[-1] == ([], []), "a report below the granted budget changes no decision"

    def finish(self, value: Any = lambda number: float(key("value", number) % 10**6), order: Any = min) -> Play:
        """Report everything at its budget until the search is over; ``value`` of a trial's number."""
        while self.running:
            number = order(self.running)
            self.report(number, value(number))
        return self

    def _pull(self) -> None:
        drops = self.algorithm.drops()
        assert self.algorithm.drops() == [], "each drop is named once"
        for number in drops:
            assert number in self.reached, "only trials that were asked for are dropped"
            assert number not in self.running, "a trial under way is not dropped"
            assert number not in self.dropped, "each drop is named once"
            self.dropped.append(number)
        groups = self.algorithm.ask()
        assert self.algorithm.ask() == [], "each member is given out once"
        self.log.append((drops, groups))
        assert len({group.name for group in groups}) == len(groups), "one ask gives one group of a name"
        for group in groups:
            assert group.members, "no group is empty"
            for member in group.members:
                self._check(member)
                self.search.apply(Asked(member.trial, member.config, member.budget, group.name, member.start_from))
                self.asked.append((group.name, member))
                self.running[member.trial] = member
                self.reached.setdefault(member.trial, 0)
        self.peak = max(self.peak, len(self.running))

    def _check(self, member: Member) -> None:
        number, start_from = member.trial, member.start_from
        assert number not in self.running, "a member is not asked for while it is under way"
        assert number not in self.dropped, "a dropped trial is not asked for again"
        assert member.budget <= self.algorithm.max_budget
        if number not in self.reached:
            assert number == len(self.reached), "trials are numbered in the order in which they are first asked for"
            assert start_from is None
            return
        assert member.budget > self.reached[number], "a budget lies above the units reported"
        assert start_from is not None
        assert start_from.unit == self.reached[start_from.trial], "a state is the last one its trial reported"
        assert start_from.trial not in self.stateless, "a trial that failed has no state"
        assert start_from.trial not in self.dropped, "the state of a dropped trial may be gone"


def play(algorithm: Algorithm, search: Any, random: Random, *, nan: bool = True, fail: bool = True) -> Play:
    """Reports in any order: unit by unit or at once, with ties, not finite, and failures."""
    game = Play(algorithm, search)
    bad = random.choice([0, 1, 5]) if nan or fail else 0  # of ten
    whole = random.choice([True, False])
    steps = 0
    while game.running:
        number = random.choice(sorted(game.running))
        granted = game.running[number].budget
        luck = random.randrange(10)
        value: float | None = float(random.randrange(8))
        if luck < bad:
            bads = [*([math.nan, math.inf, -math.inf] if nan else []), *([None] if fail else [])]
            value = random.choice(bads)
        unit = granted if value is None or whole else random.randrange(game.reached[number], granted) + 1
        game.report(number, value, unit)
        steps += 1
        assert steps < 20_000, "the search ends"
    return game


def replay(algorithm: Algorithm, search: Any, reports: list[Report]) -> list[tuple[list[int], list[TrialGroup]]]:
    """The answers to reports that were given before."""
    game = Play(algorithm, search)
    for report in reports:
        game.report(report.trial, report.metrics.get("m"), report.unit)
    return game.log


class AlgorithmContract:
    """Every algorithm keeps these, whatever the order of its reports."""

    trials: int | None = None  # Study(trials=...), where the algorithm needs it
    grows = True  # whether a larger number of them is taken up
    space: ClassVar[dict[str, Any]] = {"x": loguniform(1e-3, 1), "y": choice(["a", "b"]), "epochs": 3}

    def algorithm(self) -> Algorithm:
        raise NotImplementedError

    def sampler(self, learns: bool) -> BaseSampler | None:
        return RandomSampler() if learns else None

    def search(self, learns: bool = False) -> Search:
        return Search(Space.of(self.space), "m", "max", trials=self.trials, sampler=self.sampler(learns))

    def fake(self, learns: bool, mode: Mode = "max") -> FakeSearch:
        """As ``search``, without the cost of a sampler: that is what allows many examples."""
        return FakeSearch(self.trials, learns=self.sampler(learns) is not None, mode=mode)

    def total(self) -> int | None:
        fixed = self.algorithm().trials(self.search())
        return self.trials if fixed is None else fixed

    @given(random=st.randoms(use_true_random=False), learns=st.booleans(), mode=st.sampled_from(["min", "max"]))
    @exhaustive
    def test_any_order_of_results_keeps_the_contract_and_ends(self, random: Random, learns: bool, mode: Mode) -> None:
        game = play(self.algorithm(), self.fake(learns, mode), random)
        assert len({member.trial for _, member in game.asked}) == self.total()

    @given(random=st.randoms(use_true_random=False), learns=st.booleans())
    @exhaustive
    def test_the_same_order_gives_the_same_answers_and_begin_forgets(self, random: Random, learns: bool) -> None:
        algorithm = self.algorithm()
        first = play(algorithm, self.fake(learns), random)
        for again in (algorithm, self.algorithm()):
            assert replay(again, self.fake(learns), first.reports) == first.log

    def test_real_samplers_keep_the_contract_too(self) -> None:
        for seed in range(6):
            first = play(self.algorithm(), self.search(learns=seed % 2 == 0), Random(seed))
            assert len({member.trial for _, member in first.asked}) == self.total()
            assert replay(self.algorithm(), self.search(learns=seed % 2 == 0), first.reports) == first.log

    @given(random=st.randoms(use_true_random=False))
    @exhaustive
    def test_begin_in_the_middle_of_a_search_forgets_it(self, random: Random) -> None:
        algorithm = self.algorithm()
        game = Play(algorithm, self.fake(False))
        for _ in range(random.randrange(12)):
            if game.running:
                game.report(random.choice(sorted(game.running)), 1.0)
        expected = Play(self.algorithm(), self.fake(False)).finish()
        assert Play(algorithm, self.fake(False)).finish().log == expected.log

    @given(random=st.randoms(use_true_random=False), learns=st.booleans())
    @exhaustive
    def test_stages_are_what_is_asked_when_nothing_fails(self, random: Random, learns: bool) -> None:
        stages = self.algorithm().stages(self.total())
        if stages is None:
            return
        game = play(self.algorithm(), self.fake(learns), random, nan=False, fail=False)
        asked = Counter((len(group), budget) for group in game.groups.values() for budget in {m.budget for m in group})
        assert asked == Counter((stage.trials, stage.budget) for stage in stages)

    def test_every_trial_that_reaches_max_budget_is_dropped(self) -> None:
        game = Play(self.algorithm(), self.search()).finish()
        done = {m.trial for _, m in game.asked if m.budget == game.algorithm.max_budget}
        assert done
        assert done <= set(game.dropped)

    def test_all_failing_ends_the_search(self) -> None:
        game = Play(self.algorithm(), self.search()).finish(lambda number: None)
        assert sorted(game.dropped) == list(range(self.total() or 0))

    def test_a_report_after_its_budget_is_ignored(self) -> None:
        game = Play(self.algorithm(), self.search())
        while game.running:
            number = min(game.running)
            game.report(number, float(number))
            if number not in game.running:
                game.algorithm.tell(game.reports[-1])
        assert game.log == Play(self.algorithm(), self.search()).finish(float).log

    @pytest.mark.parametrize("learns", [True, False])
    def test_a_study_taken_up_again_may_have_more_trials(self, learns: bool) -> None:
        search, total = self.fake(learns), self.total() or 0
        game = Play(self.algorithm(), search)
        game.report(0, 1.0)
        search.trials = total + 5
        game.finish()
        assert len({member.trial for _, member in game.asked}) == total + 5 * (self.trials is not None and self.grows)
        search.trials = 2  # what is drawn is drawn
        assert game.algorithm.ask() == []

    def test_settings_make_an_equal_algorithm_and_hold_no_state(self) -> None:
        algorithm = self.algorithm()
        before = algorithm.settings()
        Play(algorithm, self.search()).finish()
        assert algorithm.settings() == before
        assert set(before) == set(inspect.signature(type(algorithm)).parameters)
        assert type(algorithm)(**before).settings() == before
        assert json.loads(json.dumps(before)) == before
