"""PBT: who copies whom, and what becomes of the config."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.pbt import PBT
from penstock.errors import SpaceError, StudyError
from penstock.space import Space
from penstock.trial import Member, Stage, StartFrom
from tests.contracts.algorithms import AlgorithmContract, FakeSearch, Play, exhaustive


class TestContract(AlgorithmContract):
    def algorithm(self) -> PBT:
        return PBT(population=6, max_budget=7, interval=3)


class TestPairContract(AlgorithmContract):
    def algorithm(self) -> PBT:
        return PBT(population=2, max_budget=3, quantile=0.5)


def generation(values: list[float | None], **settings: float) -> tuple[Play, dict[int, Member]]:
    """The game after one generation with these results, and the members of the next by number."""
    game = Play(PBT(population=len(values), max_budget=9, **settings), FakeSearch(seed=5))
    for number, value in enumerate(values):
        assert list(game.groups) == ["generation 0"]
        game.report(number, value)
    return game, dict(game.running)


def test_generations() -> None:
    assert PBT(population=4, max_budget=10, interval=4).stages() == [Stage(4, 4), Stage(4, 8), Stage(4, 10)]
    assert PBT(population=4, max_budget=4, interval=4).stages() == [Stage(4, 4)]
    assert PBT(population=4, max_budget=10).trials(FakeSearch()) == 4
    game = Play(PBT(population=4, max_budget=10, interval=4), FakeSearch()).finish()
    assert list(game.groups) == ["generation 0", "generation 1", "generation 2"]
    assert game.dropped == [0, 1, 2, 3]


def test_the_worst_go_on_from_the_best_with_a_perturbed_config() -> None:
    game, members = generation([4.0, 1.0, 8.0, 3.0, 2.0, 7.0, 6.0, 5.0], interval=2)
    configs = {m.trial: m.config for m in game.groups["generation 0"]}
    for loser in (1, 4):
        donor = members[loser].start_from.trial
        assert donor in (2, 5)
        assert members[loser].start_from == StartFrom(donor, 2)
        assert members[loser].config == FakeSearch().space.perturb(configs[donor], 5, loser, 1)
    for number in (0, 2, 3, 5, 6, 7):
        assert members[number].start_from == StartFrom(number, 2)
        assert members[number].config == configs[number]
    assert {m.budget for m in members.values()} == {4}


def test_a_copied_config_is_the_trials_own_from_then_on() -> None:
    game, members = generation([1.0, 2.0, 3.0, 4.0])
    taken = members[0].config
    assert taken["of"] == game.groups["generation 0"][3].config
    for number, value in enumerate([9.0, 0.0, 1.0, 2.0]):  # trial 0 is now the best
        game.report(number, value)
    assert game.running[0].config == taken
    assert game.running[1].start_from == StartFrom(0, 2)
    assert game.running[1].config["of"] == taken


def test_donors_are_chosen_by_seed_number_and_generation() -> None:
    donors = set()
    for seed in range(40):
        game = Play(PBT(population=8, max_budget=2), FakeSearch(seed=seed))
        for number in range(8):
            game.report(number, float(number))
        assert {game.running[n].start_from.trial for n in (0, 1)} <= {6, 7}
        donors.add((game.running[0].start_from.trial, game.running[1].start_from.trial))
    assert len(donors) == 4


@pytest.mark.parametrize(
    ("population", "quantile", "copies"),
    [(4, 0.25, 1), (5, 0.25, 2), (3, 0.5, 1), (2, 0.1, 1), (100, 0.07, 7), (10, 0.3, 3), (9, 0.5, 4)],
)
def test_how_many_copy(population: int, quantile: float, copies: int) -> None:
    _, members = generation([float(n) for n in range(population)], quantile=quantile)
    losers = [n for n, m in members.items() if m.start_from.trial != n]
    assert losers == list(range(copies))
    assert {members[n].start_from.trial for n in losers} <= set(range(population - copies, population))


def test_trials_that_failed_or_are_not_finite_are_all_replaced() -> None:
    _, members = generation([None, math.nan, 2.0, math.inf])
    assert {n: m.start_from.trial for n, m in members.items()} == {0: 2, 1: 2, 2: 2, 3: 2}


def test_without_a_finite_one_everyone_who_has_a_state_goes_on() -> None:
    game, members = generation([math.nan, None, math.inf, math.nan])
    assert {n: m.start_from.trial for n, m in members.items()} == {0: 0, 2: 2, 3: 3}
    assert game.dropped == [1]
    for number in (0, 2, 3):
        game.report(number, {0: 1.0, 2: None, 3: 3.0}[number])
    assert {n: m.start_from.trial for n, m in game.running.items()} == {0: 0, 2: 3, 3: 3}


def test_the_last_one_standing_goes_on_alone() -> None:
    game, _ = generation([math.nan, None])
    game.report(0, 5.0)
    assert game.running[0].start_from == StartFrom(0, 2)


values = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf]))


@given(st.lists(values, min_size=2, max_size=12), st.floats(0.01, 0.5))
@exhaustive
def test_nobody_copies_from_below(results: list[float | None], quantile: float) -> None:
    _, members = generation(results, quantile=quantile)
    finite = [n for n, value in enumerate(results) if value is not None and math.isfinite(value)]
    for number, member in members.items():
        donor = member.start_from.trial
        if donor != number:
            assert donor in finite
            assert number not in finite or results[number] <= results[donor]
            assert members[donor].start_from.trial == donor  # a donor goes on as it is
    if finite:
        assert sorted(members) == list(range(len(results)))
        assert all(members[n].start_from.trial != n for n in range(len(results)) if n not in finite)


def test_a_space_that_cannot_be_perturbed_is_refused_before_training() -> None:
    space = Space.of(lambda trial: {"x": trial.suggest_float("x", 0, 1)})
    with pytest.raises(SpaceError, match="PBT needs a dict"):
        PBT(population=2, max_budget=9).begin(FakeSearch(space=space))


@pytest.mark.parametrize(
    "settings",
    [
        {"population": 1, "max_budget": 9},
        {"population": 2.0, "max_budget": 9},
        {"population": 4, "max_budget": 0},
        {"population": 4, "max_budget": 9, "interval": 0},
        {"population": 4, "max_budget": 9, "interval": 10},
        {"population": 4, "max_budget": 9, "quantile": 0.0},
        {"population": 4, "max_budget": 9, "quantile": 0.6},
        {"population": 4, "max_budget": 9, "quantile": math.nan},
    ],
)
def test_settings_that_cannot_run_are_refused(settings: dict) -> None:
    with pytest.raises(StudyError, match="must be"):
        PBT(**settings)
