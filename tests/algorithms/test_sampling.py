"""Drawing from samplers: the same events give the same configs, and a sampler sees what it should."""

from __future__ import annotations

import copy
import logging
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.samplers import (
    BaseSampler,
    BruteForceSampler,
    CmaEsSampler,
    GPSampler,
    GridSampler,
    NSGAIIISampler,
    NSGAIISampler,
    PartialFixedSampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from optuna.samplers._lazy_random_state import LazyRandomState

import penstock as ps
from penstock.algorithms.sampling import Search, reseed
from penstock.algorithms.storage import STUDY
from penstock.errors import StudyError
from penstock.log.events import Asked, Event, Failed, Reported, Wrote, decode, encode
from penstock.space import Space
from penstock.trial import Config, Usage

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

NUMBERS = Space.of({"lr": ps.loguniform(1e-4, 1), "momentum": ps.uniform(0, 0.99), "layers": ps.randint(1, 9)})
MIXED = Space.of(
    {
        "lr": ps.loguniform(1e-4, 1),
        "dropout": ps.quniform(0, 0.5, 0.1),
        "hidden": ps.qloguniform(16, 512, 16),
        "act": ps.choice(["relu", dict, (64, 32)]),
        "epochs": 3,
    }
)


def conditional(trial: Any) -> dict[str, Any]:
    if trial.suggest_categorical("act", ["relu", dict, (64, 32)]) == "relu":
        trial.suggest_int("slope", 1, 64, log=True)
    trial.suggest_float("dropout", 0.05, 0.5, step=0.1)
    return {"rate": 10 * trial.suggest_float("lr", 1e-4, 1, log=True)}


def gp() -> GPSampler:
    sampler = GPSampler(n_startup_trials=20)
    sampler._n_preliminary_samples, sampler._n_local_search = 64, 2  # what is tested does not depend on its effort
    return sampler


SAMPLERS: dict[str, Callable[[], BaseSampler]] = {
    "tpe": lambda: TPESampler(n_startup_trials=5),
    "independent tpe": lambda: TPESampler(n_startup_trials=5, multivariate=False),
    "gp": gp,
    "cma-es": lambda: CmaEsSampler(n_startup_trials=5),
    "qmc": lambda: QMCSampler(scramble=True, warn_asynchronous_seeding=False),
    "nsga-ii": lambda: NSGAIISampler(population_size=5),
    "nsga-iii": lambda: NSGAIIISampler(population_size=5),
    "random": RandomSampler,
    "partial": lambda: PartialFixedSampler({"lr": 0.5}, TPESampler(n_startup_trials=5)),
}


class Run:
    """A study in small: draws and reports, with everything logged and fed back, as the engine does."""

    def __init__(self, space: Space = NUMBERS, sampler: BaseSampler | None = None, seed: int = 0) -> None:
        self.search = Search(space, "loss", "min", seed=seed, sampler=sampler)
        self.search.write = self.wrote
        self.log: list[Event] = []
        self.configs: list[Config] = []
        self._wrote: list[Event] = []

    def wrote(self, event: Wrote) -> None:
        self._wrote.append(event)

    def feed(self, event: Event) -> None:
        self.log.append(decode(encode(event, 0), 0))
        self.search.apply(event)

    def draw(self, how: Callable[..., Config] | None = None, *more: int) -> Config:
        number = len(self.configs)
        config = (how or self.search.draw)(number, *more)
        self.configs.append(config)
        events, self._wrote = [*self._wrote, Asked(number, config, 1, "rung 0")], []
        for event in events:
            self.feed(event)
        return config

    def report(self, number: int, value: float | None = None, unit: int = 1) -> None:
        if value is None:
            value = abs(math.log10(self.configs[number]["lr"]) + 2)
        self.feed(Reported(number, 1, unit, {"loss": value}, None, Usage(), float(len(self.log))))

    def go(self, count: int) -> Run:
        """Draw with up to three pending; one diverges, one fails, one goes deeper."""
        for n in range(len(self.configs), count):
            self.draw()
            if n >= 3:
                self.report(n - 3, math.nan if n == 9 else None)
            if n == 12:
                self.feed(Failed(12, 1, "boom", True, 0.0))
            if n == 14:
                self.report(2, 0.0, unit=3)
        return self


def states(search: Search) -> list[str]:
    assert search._storage is not None
    return [trial.state.name for trial in search._storage.get_all_trials(STUDY)]


# The same events give the same configs


def without_values(log: list[Event]) -> list[Any]:
    """CMA-ES pickles memory it never set, so what it writes differs where what it draws does not."""
    return [(event.trial, event.key) if isinstance(event, Wrote) else event for event in log]


@pytest.mark.parametrize("space", [NUMBERS, MIXED, Space.of(conditional)], ids=["numbers", "mixed", "function"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_replay_draws_the_same(name: str, space: Space) -> None:
    first = Run(space, SAMPLERS[name]()).go(27)
    again = Run(space, SAMPLERS[name]()).go(27)
    assert again.configs == first.configs
    assert without_values(again.log) == without_values(first.log)
    for config in first.configs:
        space.check(config)
    if name != "partial":
        assert len({repr(config) for config in first.configs}) > 15
        assert Run(space, SAMPLERS[name](), seed=1).go(8).configs != first.configs[:8]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_study_resumed_from_its_log_goes_on_as_if_it_had_not_stopped(name: str) -> None:
    whole = Run(MIXED, SAMPLERS[name]()).go(27)
    part = Run(MIXED, SAMPLERS[name]()).go(24)
    resumed = Run(MIXED, SAMPLERS[name]())
    for event in part.log:
        if isinstance(event, Asked):
            resumed.search.replay(event.trial, event.config)
    for event in part.log:
        if isinstance(event, Asked):
            config = resumed.search.draw(event.trial)
            resumed.configs.append(config)
            assert not resumed._wrote, "nothing was drawn"
        resumed.search.apply(event)
    assert resumed.configs == part.configs, "with the real objects in them"
    assert resumed.go(27).configs == whole.configs


def test_a_preset_config_is_not_drawn() -> None:
    config = MIXED.draw(9, 9)
    search = Search(MIXED, "loss", "min", sampler=TPESampler(), preset={1: config})
    assert search.draw(0) != config
    assert search.draw(1) == config
    assert states(search) == ["RUNNING"] * 2
    assert Search(MIXED, "loss", "min", preset={0: config}).draw(0) == config
    assert search.draw(2) != config


def test_a_draw_depends_on_its_number_and_the_results_but_not_on_the_draws_before() -> None:
    one, other = Run(NUMBERS, TPESampler()), Run(NUMBERS, TPESampler())
    one.draw()
    other.draw(other.search.independent)
    other.feed(Asked(0, one.configs[0], 1, "rung 0"))
    assert one.draw() == other.draw()
    assert one.configs[0] != one.configs[1]


def test_the_users_sampler_is_left_alone_and_its_seed_unused() -> None:
    sampler = TPESampler(seed=1, n_startup_trials=2)
    before = copy.deepcopy(vars(sampler))
    configs = Run(NUMBERS, sampler).go(8).configs
    assert vars(sampler)["_gamma"] is before["_gamma"] is None
    assert sampler._rng.rng.randint(10**6) == TPESampler(seed=1)._rng.rng.randint(10**6)
    assert Run(NUMBERS, TPESampler(seed=2, n_startup_trials=2)).go(8).configs == configs
    run = Run(NUMBERS, sampler)
    sampler._n_startup_trials = 99
    assert run.go(8).configs == configs, "and what happens to it later has no effect"


def test_every_generator_inside_a_sampler_is_seeded() -> None:
    class Strategy:
        def __init__(self) -> None:
            self.rng = LazyRandomState()

        def __call__(self, *args: Any) -> dict[str, Any]:
            return {}

    class Mine(RandomSampler):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [np.random.default_rng(), {"a": np.random.RandomState()}, (random.Random(), TPESampler())]
            self.strategy = Strategy()
            self.again = self.strategy

        def state(self) -> list[float]:
            numpy, legacy, (python, tpe) = self.parts  # type: ignore[misc]
            generators = [self._rng.rng, legacy["a"], tpe._rng.rng, tpe._random_sampler._rng.rng, self.strategy.rng.rng]
            return [numpy.random(), python.random(), *(generator.rand() for generator in generators)]

    def drawn(seed: int, number: int) -> list[float]:
        sampler = Mine()
        reseed(sampler, seed, number)
        return sampler.state()

    assert drawn(0, 1) == drawn(0, 1)
    for other in (drawn(0, 2), drawn(1, 1)):
        assert not set(drawn(0, 1)) & set(other)
    assert len(set(drawn(0, 1))) == 7, "no two of them run in step"


def test_qmc_takes_one_point_after_the_other_of_one_sequence() -> None:
    sampler = QMCSampler(scramble=True, warn_asynchronous_seeding=False)
    configs = Run(Space.of({"lr": ps.uniform(0, 1)}), sampler).go(17).configs
    cells = sorted(int(config["lr"] * 16) for config in configs[1:])  # the first is drawn before the space is known
    assert cells == list(range(16))


@pytest.mark.parametrize(
    "sampler", [BruteForceSampler, lambda: GridSampler({"a": [0, 1, 2], "b": ["x", "y"]})], ids=["brute force", "grid"]
)
def test_samplers_that_enumerate_see_what_is_pending(sampler: Callable[[], BaseSampler]) -> None:
    run = Run(Space.of({"a": ps.randint(0, 3), "b": ps.choice(["x", "y"])}), sampler())
    assert len({repr(run.draw()) for _ in range(6)}) == 6


# What a sampler sees


def test_pending_configs_are_running_with_their_parameters() -> None:
    run = Run(NUMBERS, TPESampler())
    config = run.search.draw(0)
    drawn = run.search.independent(1)
    assert states(run.search) == ["RUNNING", "RUNNING"], "before anything is logged"
    assert run.search._storage is not None
    assert [trial.params for trial in run.search._storage.get_all_trials(STUDY)] == [config, drawn]
    assert drawn == NUMBERS.draw(0, 1)


def test_a_sampler_learns_from_the_config_that_was_trained() -> None:
    run = Run(MIXED, SAMPLERS["tpe"]()).go(30)
    assert run.search._storage is not None
    for config, trial in zip(run.configs, run.search._storage.get_all_trials(STUDY), strict=True):
        assert MIXED.finish(trial.params) == config
        assert trial.params["hidden"] % 16 == 0


def test_tpe_searches_where_results_are_good() -> None:
    run = Run(NUMBERS, TPESampler()).go(60)
    late = [abs(math.log10(config["lr"]) + 2) for config in run.configs[30:]]
    assert sum(late) / len(late) < 0.5, "an independent draw is 1.0 off on average"


def test_a_draw_at_a_budget_sees_its_results_only() -> None:
    for budget, best in ((1, 1e-3), (3, 1e-1)):
        run = Run(NUMBERS, TPESampler(n_startup_trials=0))
        for n in range(40):
            config = run.draw(run.search.independent)
            run.report(n, abs(math.log10(config["lr"]) + (1 if n % 2 else 3)), unit=3 if n % 2 else 1)
        logs = [math.log10(run.draw(run.search.draw_at, budget)["lr"]) for _ in range(10)]
        assert abs(sum(logs) / 10 - math.log10(best)) < 0.5
        assert states(run.search) == ["COMPLETE"] * 40 + ["RUNNING"] * 10, "the view ends with the draw"


def test_a_preset_config_comes_before_a_draw_at_a_budget() -> None:
    search = Search(NUMBERS, "loss", "min", sampler=TPESampler(), preset={0: NUMBERS.draw(5, 5)})
    assert search.draw_at(0, 3) == NUMBERS.draw(5, 5)


# Without a sampler, and in the way


def test_without_a_sampler_draws_are_independent() -> None:
    search = Search(NUMBERS, "loss", "min", seed=3, trials=8)
    assert not search.learns
    assert [search.draw(n) for n in range(5)] == [NUMBERS.draw(3, n) for n in range(5)]
    search.apply(Asked(0, {}, 1, ""))
    assert Search(NUMBERS, "loss", "min", sampler=RandomSampler()).learns


def test_optuna_is_silent_and_the_users_verbosity_kept() -> None:
    class Noisy(RandomSampler):
        def sample_independent(self, *args: Any) -> Any:
            warnings.warn("experimental", optuna.exceptions.ExperimentalWarning, stacklevel=1)
            logging.getLogger("optuna.samplers").warning("independent")
            return super().sample_independent(*args)

    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    logger = logging.getLogger("optuna")
    logger.addHandler(handler)
    optuna.logging.set_verbosity(logging.DEBUG)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            filters = list(warnings.filters)
            Run(MIXED, Noisy()).go(5)
            assert warnings.filters == filters
        assert not heard
        assert optuna.logging.get_verbosity() == logging.DEBUG
        logging.getLogger("optuna.samplers").info("heard again")
        assert len(heard) == 1
    finally:
        logger.removeHandler(handler)
        optuna.logging.set_verbosity(logging.INFO)


def test_the_users_verbosity_is_kept_after_an_error_too() -> None:
    def broken(trial: Any) -> None:
        raise ZeroDivisionError

    level = logging.getLogger("optuna").level
    with pytest.raises(ps.SpaceError, match="raised ZeroDivisionError"):
        Search(Space.of(broken), "loss", "min", sampler=TPESampler()).draw(0)
    assert logging.getLogger("optuna").level == level


@pytest.mark.parametrize("sampler", ["tpe", TPESampler, 3])
def test_what_is_not_a_sampler_is_refused(sampler: Any) -> None:
    with pytest.raises(
        StudyError, match=r"sampler must be an Optuna sampler such as optuna.samplers.TPESampler\(\), got"
    ):
        Search(NUMBERS, "loss", "min", sampler=sampler)


def test_constraints_are_refused_rather_than_ignored() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = TPESampler(constraints_func=lambda trial: [0.0])
    with pytest.raises(StudyError, match="TPESampler has a constraints_func, which Penstock cannot call: leave it out"):
        Search(NUMBERS, "loss", "min", sampler=sampler)


def test_drawing_out_of_order_is_noticed() -> None:
    with pytest.raises(AssertionError, match="trial 4 was drawn when it was the turn of 0"):
        Search(NUMBERS, "loss", "min", sampler=RandomSampler()).draw(4)
