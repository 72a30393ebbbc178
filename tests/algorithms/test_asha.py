"""ASHA: promotion against a brute-force oracle, concurrency, brackets."""

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.asha import ASHA
from penstock.errors import StudyError
from penstock.trial import Report, StartFrom
from tests.contracts.algorithms import AlgorithmContract, FakeSearch, Play, exhaustive, play


class TestContract(AlgorithmContract):
    trials = 30

    def algorithm(self) -> ASHA:
        return ASHA(max_budget=10, concurrency=4)


class TestBracketsContract(AlgorithmContract):
    trials = 20

    def algorithm(self) -> ASHA:
        return ASHA(max_budget=8, reduction=2, concurrency=6, brackets=3)


class Oracle:
    """Algorithm 2 of the paper by sorting whole rungs: what the members of each ask must be."""

    def __init__(self, reduction: int, concurrency: int, trials: int, ladders: list[list[int]], weights: list[int]):
        self.reduction, self.concurrency, self.trials = reduction, concurrency, trials
        self.ladders, self.weights = ladders, weights
        self.rungs = {(s, k): [] for s, ladder in enumerate(ladders) for k in range(len(ladder))}
        self.promoted = {rung: set() for rung in self.rungs}
        self.running: dict[int, tuple[int, int]] = {}
        self.bracket: list[int] = []

    def tell(self, number: int, score: float) -> None:
        self.rungs[self.running.pop(number)].append((score, number))

    def ask(self) -> list[tuple[int, int]]:
        """Promoted (number, budget), and how many new trials at each starting budget as (−1, budget)."""
        members = []
        while len(self.running) < self.concurrency:
            if (found := self._promotion()) is not None:
                number, (s, k) = found
                self.running[number] = (s, k + 1)
                members.append((number, self.ladders[s][k + 1]))
            elif len(self.bracket) < self.trials:
                drawn = Counter(self.bracket)
                share = [w / sum(self.weights) * (len(self.bracket) + 1) - drawn[s] for s, w in enumerate(self.weights)]
                s = max(range(len(share)), key=lambda s: (round(share[s], 9), -s))
                self.running[-1 - len(self.bracket)] = (s, 0)  # its number is not known before the groups are
                self.bracket.append(s)
                members.append((-1, self.ladders[s][0]))
            else:
                break
        return members

    def _promotion(self) -> tuple[int, tuple[int, int]] | None:
        for s, k in sorted(self.rungs, key=lambda rung: (-self.ladders[rung[0]][rung[1]], rung[0])):
            if k + 1 == len(self.ladders[s]):
                continue
            results = sorted(self.rungs[s, k], key=lambda result: (-result[0], result[1]))
            for score, number in results[: len(results) // self.reduction]:
                if number not in self.promoted[s, k] and math.isfinite(score):
                    self.promoted[s, k].add(number)
                    return number, (s, k)
        return None

    def name(self, number: int, s: int) -> None:
        """A new trial of bracket ``s`` got its number."""
        unnamed = next(n for n in sorted(self.running, reverse=True) if n < 0 and self.running[n] == (s, 0))
        self.running[number] = self.running.pop(unnamed)


@given(
    st.randoms(use_true_random=False),
    st.sampled_from([(3, [[1, 3, 9]], [9]), (2, [[1, 2, 4, 5]], [12]), (2, [[1, 2, 4], [2, 4], [4]], [4, 3, 3])]),
    st.integers(1, 7),
    st.integers(1, 30),
)
@exhaustive
def test_promotions_are_the_papers(random: Random, shape: tuple, concurrency: int, trials: int) -> None:
    reduction, ladders, weights = shape
    oracle = Oracle(reduction, concurrency, trials, ladders, weights)
    asha = ASHA(max_budget=ladders[0][-1], reduction=reduction, concurrency=concurrency, brackets=len(ladders))
    game = Play(asha, FakeSearch(trials=trials))
    while True:
        groups = game.log[-1][1]
        asked = [(-1 if m.start_from is None else m.trial, m.budget) for group in groups for m in group.members]
        assert Counter(asked) == Counter(oracle.ask())
        for group in groups:
            s = int(group.name.split()[1]) if group.name.startswith("bracket") else 0
            for member in group.members:
                if member.start_from is None:
                    oracle.name(member.trial, s)
        if not game.running:
            break
        number = random.choice(sorted(game.running))
        value = random.choice([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, math.nan])
        oracle.tell(number, -math.inf if math.isnan(value) else value)
        game.report(number, value)


def test_promotion_by_hand() -> None:
    game = Play(ASHA(max_budget=9, concurrency=1), FakeSearch(trials=9))
    for number, value in enumerate([3.0, 2.0]):
        game.report(number, value)
        assert list(game.groups) == ["rung 0"]  # ⌊1/3⌋ = ⌊2/3⌋ = 0
    game.report(2, 1.0)  # of three, the first is the best
    assert [(m.trial, m.budget, m.start_from) for m in game.groups["rung 1"]] == [(0, 3, StartFrom(0, 1))]
    game.report(0, 3.0)
    game.report(3, 9.0)  # now the top ⌊4/3⌋ = 1: 0's promotion is not undone, and 3 follows
    assert [(m.trial, m.budget) for m in game.groups["rung 1"]] == [(0, 3), (3, 3)]
    game.report(3, 9.0)
    game.report(4, 8.0)
    assert list(game.running) == [5]  # 4 is second, and ⌊5/3⌋ is still 1
    game.report(5, 7.0)
    assert list(game.running) == [4]  # ⌊6/3⌋ = 2: an earlier result becomes promotable as the rung grows


def test_the_highest_rung_is_served_first() -> None:
    game = Play(ASHA(max_budget=4, reduction=2, concurrency=4), FakeSearch(trials=12))
    for number in (0, 1, 2, 3):
        game.report(number, 1.0)
    assert [m.trial for m in game.groups["rung 1"]] == [0, 1]
    for number, unit in ((4, 1), (5, 1), (0, 2), (1, 2)):  # all before the next ask
        game.algorithm.tell(Report(number, unit, {"m": 1.0}))
    groups = game.algorithm.ask()
    assert [(group.name, [m.trial for m in group.members]) for group in groups] == [
        ("rung 2", [0]),
        ("rung 1", [2]),
        ("rung 0", [6, 7]),
    ]


def test_members_of_one_rung_asked_for_together_are_one_group() -> None:
    game = Play(ASHA(max_budget=9, concurrency=6), FakeSearch(trials=20))
    assert [(group.name, len(group.members)) for group in game.log[0][1]] == [("rung 0", 6)]


def test_concurrency_bounds_what_is_under_way() -> None:
    for concurrency in (1, 3, 8):
        game = Play(ASHA(max_budget=27, concurrency=concurrency), FakeSearch(trials=50)).finish()
        assert game.peak == concurrency


def test_only_what_cannot_go_further_is_dropped() -> None:
    game = play(ASHA(max_budget=9, concurrency=5), FakeSearch(trials=60), Random(1), fail=False)
    last: dict[int, Report] = {report.trial: report for report in game.reports}
    done = {n for n, report in last.items() if report.unit == 9 or not math.isfinite(report.metrics["m"])}
    assert set(game.dropped) == done
    assert len(done) < 60


def test_not_finite_counts_as_a_result_but_is_never_promoted() -> None:
    game = Play(ASHA(max_budget=3, concurrency=1), FakeSearch(trials=6))
    game.report(0, 1.0)
    game.report(1, math.nan)
    assert game.dropped == [1]
    game.report(2, None)
    assert [m.trial for m in game.groups["rung 1"]] == [0]
    game = Play(ASHA(max_budget=3, concurrency=1), FakeSearch(trials=6)).finish(lambda number: math.inf)
    assert list(game.groups) == ["rung 0"]


def test_the_last_rung_is_max_budget() -> None:
    game = Play(ASHA(max_budget=10, concurrency=4), FakeSearch(trials=100)).finish()
    assert {name: {m.budget for m in group} for name, group in game.groups.items()} == {
        "rung 0": {1},
        "rung 1": {3},
        "rung 2": {9},
        "rung 3": {10},
    }


def test_brackets_share_the_trials_as_hyperbands_do() -> None:
    game = Play(ASHA(max_budget=81, brackets=5, concurrency=8), FakeSearch(trials=286)).finish()
    drawn = Counter((name, m.budget) for name, m in game.asked if m.start_from is None)
    assert drawn == {
        ("bracket 0 rung 0", 1): 162,
        ("bracket 1 rung 0", 3): 68,
        ("bracket 2 rung 0", 9): 30,
        ("bracket 3 rung 0", 27): 16,
        ("bracket 4 rung 0", 81): 10,
    }
    firsts = [name.split()[1] for name, m in game.asked if m.start_from is None][:12]
    assert Counter(firsts) == {"0": 7, "1": 3, "2": 1, "3": 1}  # in proportion from the first trials on


class Counted(float):
    """A number that counts how often it is compared."""

    comparisons = 0

    def __neg__(self) -> "Counted":
        return Counted(-float(self))

    def __lt__(self, other: float) -> bool:
        Counted.comparisons += 1
        return float.__lt__(self, other)

    __hash__ = float.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return float.__eq__(self, other)


@pytest.mark.parametrize(("trials", "improving"), [(5_000, False), (2_000, True)])
def test_many_trials_take_n_log_n_comparisons(trials: int, improving: bool) -> None:
    """A decision looks at the best that waits and bisects, so it does not grow with the rung."""
    random, tells = Random(0), 0
    asha = ASHA(max_budget=81, concurrency=64)
    asha.begin(FakeSearch(trials=trials))
    Counted.comparisons = 0
    running = [m for group in asha.ask() for m in group.members]
    while running:
        place = random.randrange(len(running))
        running[place], running[-1] = running[-1], running[place]
        member = running.pop()
        value = member.trial if improving else random.random()
        asha.tell(Report(member.trial, member.budget, {"m": Counted(value)}))
        running += [m for group in asha.ask() for m in group.members]
        tells += 1
    assert tells > trials
    per_rung = 2 * math.log2(trials)  # a tuple's comparison is one == and one <
    assert Counted.comparisons < tells * per_rung * 7  # five rungs bisected at most, and a heap pushed and popped


def test_trials_are_needed() -> None:
    message = r"^ASHA needs trials=: how many configurations to try in all, e\.g\. Study\(\.\.\., trials=64\)\.$"
    with pytest.raises(StudyError, match=message):
        ASHA(max_budget=9).begin(FakeSearch())


@pytest.mark.parametrize(
    "settings",
    [
        {"max_budget": 0},
        {"max_budget": 2, "min_budget": 3},
        {"max_budget": 9, "reduction": 1},
        {"max_budget": 9, "concurrency": 0},
        {"max_budget": 9, "brackets": 0},
        {"max_budget": 9, "brackets": 4},
    ],
)
def test_settings_that_cannot_run_are_refused(settings: dict) -> None:
    with pytest.raises(StudyError, match="must be"):
        ASHA(**settings)


@pytest.mark.parametrize(("learns", "under_way"), [(False, 64), (True, 8)])
def test_without_a_concurrency_it_fills_a_bundle_unless_draws_learn_from_results(learns: bool, under_way: int) -> None:
    search = FakeSearch(trials=100)
    search.learns = learns
    algorithm = ASHA(max_budget=9)
    algorithm.begin(search)
    assert sum(len(group.members) for group in algorithm.ask()) == under_way
