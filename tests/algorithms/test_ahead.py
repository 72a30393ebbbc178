"""However many trials there are to be, an ask gives a bounded number of them, and the outcome stays the same."""

from __future__ import annotations

from collections.abc import Callable
from random import Random as Dice

import pytest

import penstock as ps
from penstock.algorithms import base, successive_halving
from penstock.algorithms.base import AHEAD, Algorithm
from penstock.algorithms.sampling import Search
from penstock.domains import randint
from penstock.space import Space
from tests.contracts.algorithms import FakeSearch, Play, play

MANY = 10**7
HUGE: list[tuple[Algorithm, int | None]] = [
    (ps.Random(budget=1), MANY),
    (ps.SuccessiveHalving(max_budget=9), MANY),
    (ps.Hyperband(max_budget=3**16), None),
    (ps.ASHA(max_budget=9, concurrency=MANY), MANY),
    (ps.BOHB(max_budget=9, concurrency=MANY), MANY),
    (ps.PBT(population=MANY, max_budget=MANY), None),
]


@pytest.mark.parametrize(("algorithm", "trials"), HUGE, ids=repr)
def test_an_ask_for_ten_million_trials_gives_a_part_of_them(algorithm: Algorithm, trials: int | None) -> None:
    search = FakeSearch(trials=trials)
    game = Play(algorithm, search)
    assert 1000 <= len(game.running) == len(search.drawn) <= AHEAD
    game.report(0, 1.0)
    assert len(search.drawn) <= AHEAD + 1
    assert len(game.running) <= AHEAD


def test_a_grid_of_a_million_configs_is_made_as_it_is_asked_for() -> None:
    space = Space.of({"x": randint(0, 1000), "y": randint(0, 1000)})
    game = Play(ps.Grid(budget=1), Search(space, "m", "max"))
    assert len(game.running) == AHEAD
    assert game.running[1234].config == {"x": 1, "y": 234}
    with pytest.raises(ps.SpaceError, match="Grid takes at most 1000000 configs, got 1000000000000"):
        Space.of({"x": randint(0, 10**6), "y": randint(0, 10**6)}).grid_size()


def test_generations_without_end_are_not_listed() -> None:
    assert ps.PBT(population=4, max_budget=10**12).stages() is None
    assert len(ps.PBT(population=4, max_budget=10, interval=3).stages() or []) == 4


SMALL: list[tuple[Callable[[], Algorithm], int | None]] = [
    (lambda: ps.Grid(budget=3), None),
    (lambda: ps.Random(budget=3), 20),
    (lambda: ps.SuccessiveHalving(max_budget=9), 20),
    (lambda: ps.Hyperband(max_budget=9), None),
    (lambda: ps.PBT(population=6, max_budget=4), None),
]


@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize(("make", "trials"), SMALL)
def test_fewer_trials_ahead_reach_the_same_budgets(
    make: Callable[[], Algorithm], trials: int | None, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Play(make(), FakeSearch(trials=trials)).finish()
    for module in (base, successive_halving):
        monkeypatch.setattr(module, "AHEAD", ahead)
    parts = Play(make(), FakeSearch(trials=trials)).finish()
    assert parts.reached == whole.reached
    assert sorted(parts.dropped) == sorted(whole.dropped)
    first = [group.members for _, groups in parts.log for group in groups]
    assert len(first[0]) <= ahead


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("make", "trials"), SMALL)
def test_fewer_trials_ahead_keep_the_contract(
    make: Callable[[], Algorithm], trials: int | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (base, successive_halving):
        monkeypatch.setattr(module, "AHEAD", 3)
    play(make(), FakeSearch(trials=trials), Dice(seed))
