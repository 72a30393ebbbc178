"""Hyperband: the paper's brackets."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.hyperband import Hyperband, bracket_sizes
from penstock.errors import StudyError
from tests.contracts.algorithms import AlgorithmContract, FakeSearch, Play, exhaustive


class TestContract(AlgorithmContract):
    def algorithm(self) -> Hyperband:
        return Hyperband(max_budget=10, concurrency=4)


def test_the_papers_table() -> None:
    """Li et al., 2018, Table 1: R = 81, η = 3."""
    brackets: dict[int, list[tuple[int, int]]] = {}
    for stage in Hyperband(max_budget=81).stages():
        brackets.setdefault(stage.bracket, []).append((stage.trials, stage.budget))
    assert brackets == {
        4: [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
        3: [(34, 3), (11, 9), (3, 27), (1, 81)],
        2: [(15, 9), (5, 27), (1, 81)],
        1: [(8, 27), (2, 81)],
        0: [(5, 81)],
    }
    assert Hyperband(max_budget=81).trials(FakeSearch()) == 143


def test_brackets_run_as_the_table_says() -> None:
    game = Play(Hyperband(max_budget=81), FakeSearch()).finish()
    sizes = {4: [81, 27, 9, 3, 1], 3: [34, 11, 3, 1], 2: [15, 5, 1], 1: [8, 2], 0: [5]}
    expected = {f"bracket {s} rung {i}": n for s, rungs in sizes.items() for i, n in enumerate(rungs)}
    assert {name: len(group) for name, group in game.groups.items()} == expected
    assert sorted(game.dropped) == list(range(143))


def test_s_max_has_no_rounding_error() -> None:
    assert len(bracket_sizes(243, 1, 3)) == 6  # math.log(243, 3) is 4.999…
    assert len(bracket_sizes(242, 1, 3)) == 5
    assert len(bracket_sizes(10**15, 1, 10)) == 16
    assert bracket_sizes(5, 5, 3) == [1]


@given(st.integers(1, 2000), st.integers(1, 30), st.integers(2, 6))
@exhaustive
def test_every_rung_of_any_settings_trains_something(max_budget: int, min_budget: int, reduction: int) -> None:
    max_budget = max(max_budget, min_budget)
    stages = Hyperband(max_budget=max_budget, min_budget=min_budget, reduction=reduction).stages()
    for first, then in itertools.pairwise(stages):
        if first.bracket == then.bracket:
            assert first.budget < then.budget
            assert first.trials > then.trials >= 1
    assert stages[0].budget >= min_budget
    assert {stage.budget for stage in stages if stage.bracket == 0} == {max_budget}


def test_budgets_are_rounded_to_whole_units() -> None:
    stages = Hyperband(max_budget=100).stages()
    assert [stage.budget for stage in stages if stage.bracket == 4] == [1, 4, 11, 33, 100]


def test_independent_brackets_are_asked_for_at_once_and_do_not_wait_for_each_other() -> None:
    game = Play(Hyperband(max_budget=9), FakeSearch())
    assert [group.name for group in game.log[0][1]] == [f"bracket {s} rung 0" for s in (2, 1, 0)]
    for number in [m.trial for m in game.groups["bracket 1 rung 0"]]:
        game.report(number, float(number))
    assert "bracket 1 rung 1" in game.groups
    assert "bracket 2 rung 1" not in game.groups


def test_a_bracket_only_promotes_its_own() -> None:
    game = Play(Hyperband(max_budget=9), FakeSearch()).finish(float)
    rungs = {name: [m.trial for m in group] for name, group in game.groups.items()}
    assert rungs == {
        "bracket 2 rung 0": list(range(9)),
        "bracket 2 rung 1": [6, 7, 8],
        "bracket 2 rung 2": [8],
        "bracket 1 rung 0": list(range(9, 14)),
        "bracket 1 rung 1": [13],
        "bracket 0 rung 0": [14, 15, 16],
    }


def test_brackets_of_a_sampler_that_learns_follow_one_another() -> None:
    search = FakeSearch(learns=True)
    game = Play(Hyperband(max_budget=9, concurrency=2), search)
    names: list[str] = []
    while game.running:
        brackets = {name.split(" rung")[0] for name, m in game.asked if m.trial in game.running}
        assert len(brackets) == 1
        names += [name for name in brackets if name not in names]
        if any(m.start_from is None for m in game.running.values()):
            assert len(game.running) <= 2
        game.report(min(game.running), 1.0)
    assert names == ["bracket 2", "bracket 1", "bracket 0"]
    assert len(search.drawn) == Hyperband(max_budget=9).trials(search)


def test_settings_that_cannot_run_are_refused() -> None:
    with pytest.raises(StudyError, match="max_budget must be at least min_budget=3"):
        Hyperband(max_budget=2, min_budget=3)
