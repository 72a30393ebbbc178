"""BOHB and SyncBOHB: where draws come from."""

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from statistics import median

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.samplers import TPESampler

from penstock.algorithms.bohb import BOHB, Model, SyncBOHB
from penstock.algorithms.sampling import Search
from penstock.domains import uniform
from penstock.errors import StudyError
from penstock.space import Space
from tests.contracts.algorithms import AlgorithmContract, FakeSearch, Play


class TestContract(AlgorithmContract):
    trials = 20

    def algorithm(self) -> BOHB:
        return BOHB(max_budget=9, concurrency=4)

    def sampler(self, learns: bool) -> TPESampler:
        return self.algorithm().default_sampler()


class TestSyncContract(AlgorithmContract):
    def algorithm(self) -> SyncBOHB:
        return SyncBOHB(max_budget=9, concurrency=4)

    def sampler(self, learns: bool) -> TPESampler:
        return self.algorithm().default_sampler()


def model(results: dict[int, int], draws: int = 300) -> list[str | int]:
    search = FakeSearch(learns=True)
    model = Model(search)
    model.draw(0)  # shows that two parameters are tuned, next to a constant
    for budget, count in results.items():
        for _ in range(count):
            model.take(budget, 1.0)
    for number in range(1, draws + 1):
        model.draw(number)
    return search.drawn[1:]


def test_draws_are_independent_until_a_budget_has_enough_results() -> None:
    """|D_b| ≥ N_min + 2, where N_min = 2 + 1 for two parameters."""
    assert set(model({1: 4, 3: 4})) == {"independent"}
    assert set(model({1: 5, 3: 4})) == {"independent", 1}


def test_the_deepest_budget_with_enough_results_is_used() -> None:
    assert set(model({1: 50, 3: 7, 9: 5, 27: 4})) == {"independent", 9}


def test_a_third_stays_independent_by_a_key_of_seed_and_number() -> None:
    drawn = model({1: 50}, draws=3000)
    assert 900 < Counter(drawn)["independent"] < 1100
    assert [by == "independent" for by in drawn] == [by == "independent" for by in model({9: 50}, draws=3000)]


def test_only_finite_results_count() -> None:
    search = FakeSearch(learns=True)
    model = Model(search)
    model.draw(0)
    for _ in range(100):
        model.take(1, -math.inf)
    for number in range(1, 20):
        model.draw(number)
    assert set(search.drawn) == {"independent"}


@pytest.mark.parametrize("algorithm", [BOHB(max_budget=27), SyncBOHB(max_budget=27)])
def test_draws_move_to_deeper_budgets_as_results_come_in(algorithm: BOHB | SyncBOHB) -> None:
    search = FakeSearch(trials=100, learns=True)
    game = Play(algorithm, search)
    results: Counter[int] = Counter()
    while game.running:
        number = min(game.running)
        results[game.running[number].budget] += 1
        before = len(search.drawn)
        game.report(number, float(number))
        enough = [budget for budget, count in results.items() if count >= 5]
        assert set(search.drawn[before:]) <= {"independent", max(enough, default="independent")}
    assert len(set(search.drawn)) >= 3


def test_reports_below_the_granted_budget_teach_nothing() -> None:
    search = FakeSearch(trials=60, learns=True)
    game = Play(BOHB(max_budget=9, min_budget=9), search)
    for number in range(8):
        for unit in range(1, 9):
            game.report(number, 1.0, unit)
    for number in range(4):
        game.report(number, 1.0)
    assert set(search.drawn) == {"independent"}


def test_bohb_runs_all_of_hyperbands_brackets() -> None:
    game = Play(BOHB(max_budget=81), FakeSearch(trials=143, learns=True)).finish()
    drawn = Counter(name for name, m in game.asked if m.start_from is None)
    assert list(drawn.values()) == [81, 34, 15, 8, 5]
    assert SyncBOHB(max_budget=81).trials(FakeSearch()) == 143


def test_bohb_needs_trials() -> None:
    with pytest.raises(StudyError, match="BOHB needs trials="):
        BOHB(max_budget=9).begin(FakeSearch())


def test_the_default_sampler_is_joint_tpe() -> None:
    for algorithm in (BOHB(max_budget=9), SyncBOHB(max_budget=9)):
        sampler = algorithm.default_sampler()
        assert isinstance(sampler, TPESampler)
        assert sampler._multivariate
        assert sampler._n_startup_trials == 0


def test_the_good_are_n_min_at_least_and_then_fifteen_percent() -> None:
    sampler = BOHB(max_budget=9).default_sampler()
    study = optuna.create_study(sampler=sampler)
    uniform = FloatDistribution(0, 1)
    for number in range(30):
        trial = study.ask({"x": uniform, "y": uniform})
        study.tell(trial, float(number))
    assert [sampler._gamma(n) for n in (5, 20, 26, 27, 100)] == [3, 3, 3, 4, 15]


@pytest.mark.parametrize("make", [lambda: BOHB(max_budget=9), lambda: SyncBOHB(max_budget=27)])
def test_configs_of_the_model_are_better_than_independent_ones(make: Callable[[], BOHB | SyncBOHB]) -> None:
    """With Optuna's TPE: the best is at (0.3, 0.3), which a third of the draws cannot know."""
    space = Space.of({"x": uniform(0, 1), "y": uniform(0, 1)})
    distances: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(4):
        algorithm = make()
        search = Search(space, "m", "min", seed=seed, trials=60, sampler=algorithm.default_sampler())
        game, configs = Play(algorithm, search), {}
        while game.running:
            configs |= {member.trial: member.config for member in game.running.values()}
            number = min(game.running)
            game.report(number, sum(abs(value - 0.3) for value in configs[number].values()))
        for number, config in configs.items():
            distances[config == space.draw(seed, number)].append(sum(abs(value - 0.3) for value in config.values()))
    independent, model = distances[True], distances[False]
    assert min(len(independent), len(model)) >= 80
    assert median(model) < 0.75 * median(independent)


def test_optuna_is_not_imported_before_it_is_used() -> None:
    code = "import sys, penstock.algorithms.bohb; sys.exit('optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
