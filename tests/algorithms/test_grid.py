"""Grid search."""

from typing import Any, ClassVar

import pytest

from penstock.algorithms.grid import Grid
from penstock.domains import choice, quniform
from penstock.errors import StudyError
from tests.contracts.algorithms import AlgorithmContract, FakeSearch, Play


class TestContract(AlgorithmContract):
    space: ClassVar[dict[str, Any]] = {"x": quniform(0, 2, 1), "y": choice(["a", "b"]), "epochs": 3}

    def algorithm(self) -> Grid:
        return Grid(budget=3)


def test_one_group_of_every_config() -> None:
    search = FakeSearch()
    game = Play(Grid(budget=4), search)
    assert list(game.groups) == ["grid"]
    assert [member.config for member in game.groups["grid"]] == [
        search.space.grid_point(number) for number in range(search.space.grid_size())
    ]
    assert {member.budget for member in game.groups["grid"]} == {4}
    assert Grid(budget=4).trials(search) == 6


def test_a_trial_is_dropped_when_it_is_done() -> None:
    game = Play(Grid(budget=2), FakeSearch())
    game.report(4, 1.0, unit=1)
    assert game.dropped == []
    game.report(4, 1.0)
    game.report(1, None)
    assert game.dropped == [4, 1]


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "3"])
def test_a_budget_that_trains_nothing_is_refused(budget: object) -> None:
    with pytest.raises(StudyError, match="budget must be a whole number"):
        Grid(budget=budget)
