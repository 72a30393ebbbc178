"""Random search."""

import pytest

from penstock.algorithms.random import Random
from penstock.errors import StudyError
from tests.contracts.algorithms import AlgorithmContract, FakeSearch, Play


class TestContract(AlgorithmContract):
    trials = 10

    def algorithm(self) -> Random:
        return Random(budget=3, concurrency=4)


def test_independent_draws_are_one_group() -> None:
    game = Play(Random(budget=5, concurrency=2), FakeSearch(trials=7))
    assert len(game.log[0][1]) == 1
    assert [member.trial for member in game.log[0][1][0].members] == list(range(7))
    assert {member.budget for member in game.running.values()} == {5}


def test_a_sampler_that_learns_draws_as_results_come_in() -> None:
    search = FakeSearch(trials=7, learns=True)
    game = Play(Random(budget=2, concurrency=3), search)
    assert sorted(game.running) == [0, 1, 2]
    game.report(1, 1.0, unit=1)
    assert len(search.drawn) == 3
    game.report(1, 1.0)
    assert sorted(game.running) == [0, 2, 3]
    game.finish()
    assert (game.peak, len(search.drawn)) == (3, 7)


def test_trials_are_needed() -> None:
    with pytest.raises(StudyError, match=r"^Random needs trials=: how many .* Study\(\.\.\., trials=64\)\.$"):
        Random(budget=3).begin(FakeSearch())


@pytest.mark.parametrize("settings", [{"budget": 0}, {"budget": 2.0}, {"budget": 2, "concurrency": 0}])
def test_settings_that_cannot_run_are_refused(settings: dict) -> None:
    with pytest.raises(StudyError, match="must be a whole number of at least 1"):
        Random(**settings)
