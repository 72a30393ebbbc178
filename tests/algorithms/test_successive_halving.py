"""Successive halving: the papers' rungs, and who is promoted."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.successive_halving import SuccessiveHalving, rung_budgets
from penstock.errors import StudyError
from penstock.trial import StartFrom
from tests.contracts.algorithms import AlgorithmContract, FakeSearch, Play, exhaustive


class TestContract(AlgorithmContract):
    trials = 20
    grows = False  # its rungs are made from the number

    def algorithm(self) -> SuccessiveHalving:
        return SuccessiveHalving(max_budget=7, reduction=2, concurrency=5)


class TestAdditiveContract(AlgorithmContract):
    trials = 16
    grows = False

    def algorithm(self) -> SuccessiveHalving:
        return SuccessiveHalving(max_budget=12, min_budget=2, reduction=3, additive=True)


def rungs(trials: int, **settings: int) -> list[tuple[int, int]]:
    return [(stage.trials, stage.budget) for stage in SuccessiveHalving(**settings).stages(trials)]


def test_rungs() -> None:
    assert rungs(81, max_budget=81) == [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)]
    assert rungs(100, max_budget=10) == [(100, 1), (33, 3), (11, 9), (3, 10)]
    assert rungs(5, max_budget=5, min_budget=5) == [(5, 5)]
    assert SuccessiveHalving(max_budget=9).stages() is None


def test_rubberbands_rungs_train_that_much_more() -> None:
    """RubberBand §6.1.1: SHA(n=64, r=4, R=508, η=2), of which the whole R is 4 + 8 + … + 256."""
    budgets = [4, 12, 28, 60, 124, 252, 508]
    expected = list(zip([64, 32, 16, 8, 4, 2, 1], budgets, strict=True))
    assert rungs(64, max_budget=508, min_budget=4, reduction=2, additive=True) == expected
    assert rungs(512, max_budget=4096, min_budget=4, reduction=2, additive=True)[-2:] == [(2, 2044), (1, 4096)]
    assert rungs(32, max_budget=50, additive=True) == [(32, 1), (10, 4), (3, 13), (1, 50)]


def test_max_budget_goes_to_the_last_rung_that_holds_a_trial() -> None:
    assert rungs(5, max_budget=81) == [(5, 1), (1, 81)]
    assert rungs(2, max_budget=81) == [(2, 81)]
    assert rungs(8, max_budget=100, reduction=2, additive=True) == [(8, 1), (4, 3), (2, 7), (1, 100)]


@given(st.integers(1, 500), st.integers(1, 20), st.integers(2, 6), st.booleans())
@exhaustive
def test_every_rung_trains_something(max_budget: int, min_budget: int, reduction: int, additive: bool) -> None:
    budgets = rung_budgets(max(max_budget, min_budget), min_budget, reduction, additive)
    assert budgets[0] == min_budget
    assert budgets[-1] == max(max_budget, min_budget)
    assert all(low < high for low, high in itertools.pairwise(budgets))


def test_a_rung_starts_when_the_one_before_has_reported() -> None:
    game = Play(SuccessiveHalving(max_budget=9), FakeSearch(trials=9))
    for number in range(8):
        game.report(number, float(number))
        assert list(game.groups) == ["rung 0"]
    game.report(8, 7.0)
    assert [(m.trial, m.budget, m.start_from) for m in game.groups["rung 1"]] == [
        (6, 3, StartFrom(6, 1)),
        (7, 3, StartFrom(7, 1)),
        (8, 3, StartFrom(8, 1)),
    ]
    configs = {m.trial: m.config for m in game.groups["rung 0"]}
    assert all(m.config == configs[m.trial] for m in game.groups["rung 1"])


def test_of_equals_the_first_is_promoted() -> None:
    game = Play(SuccessiveHalving(max_budget=9), FakeSearch(trials=9)).finish(lambda number: 1.0, order=max)
    assert [[m.trial for m in group] for group in game.groups.values()] == [list(range(9)), [0, 1, 2], [0]]


def test_losers_are_dropped_as_soon_as_they_are_certain_to_lose() -> None:
    game = Play(SuccessiveHalving(max_budget=3), FakeSearch(trials=6))
    game.report(0, 5.0)
    game.report(1, 3.0)
    assert game.dropped == []  # both may still be among the two best
    game.report(2, 4.0)
    assert game.dropped == [1]
    game.report(3, math.nan)
    assert game.dropped == [1, 3]
    game.report(4, 6.0)
    assert game.dropped == [1, 3, 2]
    game.report(5, 0.0)
    assert game.dropped == [1, 3, 2, 5]
    game.finish()
    assert game.dropped == [1, 3, 2, 5, 0, 4]  # the last rung's are dropped when they are done


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, -4.5, math.nan, math.inf, None]), min_size=9, max_size=30), st.data()
)
@exhaustive
def test_promoted_are_the_best_finite_ones(values: list, data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(["min", "max"]))
    order = data.draw(st.permutations(range(len(values))))
    game = Play(SuccessiveHalving(max_budget=9), FakeSearch(trials=len(values), mode=mode))
    for number in order:
        game.report(number, values[number])
    finite = [n for n, value in enumerate(values) if value is not None and math.isfinite(value)]
    best = sorted(finite, key=lambda n: (values[n] if mode == "min" else -values[n], n))[: len(values) // 3]
    assert sorted(game.running) == sorted(best)
    assert sorted(game.dropped) == sorted(set(range(len(values))) - set(best))


def test_one_trial_at_a_time_fills_the_first_rung_before_the_next_starts() -> None:
    game = Play(SuccessiveHalving(max_budget=9, concurrency=1), FakeSearch(trials=9, learns=True)).finish()
    assert [(name, len(group)) for name, group in game.groups.items()] == [("rung 0", 9), ("rung 1", 3), ("rung 2", 1)]


def test_a_sampler_that_learns_fills_the_first_rung_as_results_come_in() -> None:
    game = Play(SuccessiveHalving(max_budget=9, concurrency=2), FakeSearch(trials=9, learns=True))
    assert sorted(game.running) == [0, 1]
    game.report(0, 1.0)
    assert sorted(game.running) == [1, 2]
    game.finish()
    assert [len(group) for group in game.groups.values()] == [9, 3, 1]


def test_trials_are_needed() -> None:
    with pytest.raises(StudyError, match="SuccessiveHalving needs trials="):
        SuccessiveHalving(max_budget=9).begin(FakeSearch())


@pytest.mark.parametrize(
    "settings",
    [
        {"max_budget": 0},
        {"max_budget": 2, "min_budget": 3},
        {"max_budget": 2, "min_budget": 0},
        {"max_budget": 9, "reduction": 1},
        {"max_budget": 9, "reduction": 2.5},
        {"max_budget": 9, "concurrency": 0},
    ],
)
def test_settings_that_cannot_run_are_refused(settings: dict) -> None:
    with pytest.raises(StudyError, match="must be"):
        SuccessiveHalving(**settings)
