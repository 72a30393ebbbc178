"""The search that an algorithm is given: the space, the goal, the seed, and configs drawn when it asks for them.

A draw is a function of (seed, number, results so far) and of nothing else, whichever sampler makes it. Each draw
begins from a copy of the sampler as the user made it, with every random generator in it seeded anew. So a replayed log
gives the same draws again, and a study that skipped some draws goes on as if it had made them.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from logging import ERROR, getLogger
from types import ModuleType
from typing import TYPE_CHECKING, Any

from penstock.domains import Domain, Range
from penstock.errors import PenstockError, StudyError, told
from penstock.log.events import Asked, Dropped, Event, Wrote
from penstock.numeric import shown
from penstock.seeds import key
from penstock.space import Space
from penstock.trial import Config, Mode, StartFrom

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from penstock.algorithms.storage import LogStorage

ROUNDING = 1e-9  # by which part of its bound a sampler's value may lie outside of a range


class Search:
    """Draws configs: from the space alone, or by a sampler that learns from the results it has seen.

    The user's sampler is left as it is, and its own seed is not used: ``seed`` is the study's. ``preset`` holds configs
    from a log, by the trial's number; they are not drawn. ``replay`` adds to them, also for a search that begins anew,
    whose trials are of another variant. Optuna is imported only for a sampler.

    >>> Search(Space.of(lambda trial: {"lr": trial.suggest_float("lr", 1, 1)}), "loss", "min").draw(0)
    {'lr': 1.0}
    """

    def __init__(
        self,
        space: Space,
        metric: str,
        mode: Mode,
        *,
        seed: int = 0,
        trials: int | None = None,
        sampler: BaseSampler | None = None,
        preset: Mapping[int, Config] | None = None,
    ) -> None:
        self.space, self.metric, self.mode, self.seed, self.trials = space, metric, mode, seed, trials
        self.write: Callable[[Wrote], None] = lambda event: None  # the engine sets it
        self.numbers: Numbers | None = None  # where the study has other trials beside those that are drawn here
        self._presets = {"": dict(preset or {})}  # by variant
        self._sampler: BaseSampler | None = None
        self._storage: LogStorage | None = None
        if sampler is not None:
            self._learn(sampler)

    @property
    def learns(self) -> bool:
        """Whether draws depend on results."""
        return self._sampler is not None

    def draw(self, number: int) -> Config:
        """The config of a new trial: the sampler's, or an independent draw where there is no sampler."""
        return self.independent(number) if self._sampler is None else self._sample(number, None)

    def draw_at(self, number: int, budget: int) -> Config:
        """The sampler's config for a new trial, from the results at one budget only (BOHB)."""
        return self._sample(number, budget)

    def independent(self, number: int) -> Config:
        """A config that depends on no result; the sampler knows of it as pending."""
        if number in self._preset:
            return self._tell(number, self.space.restore(self._preset[number]))
        return self._tell(number, self.space.draw(self.seed, number))

    def replay(self, number: int, config: Config, variant: str = "") -> None:
        """Keep a trial's config from a log, to be used when that trial of a variant is drawn."""
        self._presets.setdefault(variant, {})[number] = config

    @property
    def _preset(self) -> Mapping[int, Config]:
        return self._presets.get("" if self.numbers is None else self.numbers.variant, {})

    def apply(self, event: Event) -> None:
        """Take one event of the log."""
        if self._storage is not None:
            own = event if self.numbers is None else self.numbers.inward(event)
            if own is not None:
                self._storage.apply(own)

    def restart(self, numbers: Numbers) -> None:
        """Begin anew, with trials that the study has under other ``numbers``."""
        self.numbers = numbers
        if self._sampler is not None:
            self._learn(self._sampler)

    def _learn(self, sampler: BaseSampler) -> None:
        from optuna.samplers import BaseSampler

        from penstock.algorithms.storage import LogStorage

        if not isinstance(sampler, BaseSampler):
            raise StudyError(
                f"sampler must be an Optuna sampler such as optuna.samplers.TPESampler(), got {sampler!r}."
            )
        if getattr(sampler, "_constraints_func", None) is not None:
            raise StudyError(
                f"{type(sampler).__name__} has a constraints_func, which Penstock cannot call: leave it out, "
                "and report a worse metric where a constraint is broken."
            )
        self._sampler = deepcopy(sampler)
        self._storage = LogStorage("penstock", self.metric, self.mode, self.space, lambda event: self.write(event))

    def _sample(self, number: int, budget: int | None) -> Config:
        if number in self._preset:
            return self.independent(number)
        import optuna

        storage = self._storage
        assert storage is not None, "Study gives a sampler to an algorithm that draws from one"
        with storage.view(budget), _quietly(), _named(self._sampler, number):
            sampler = deepcopy(self._sampler)
            reseed(sampler, self.seed, number)
            study = optuna.Study(storage.name, storage, sampler, optuna.pruners.NopPruner())
            if self.space.function is None:
                trial = study.ask(self.space.distributions())
                for name, domain in self.space.domains.items():
                    self._check(name, domain, trial.params[name])
                config = self.space.finish(trial.params)
            else:
                trial = study.ask()

                def answer(name: str, domain: Domain) -> Any:
                    with _named(self._sampler, number):
                        value = trial._suggest(name, domain.distribution())
                        self._check(name, domain, value)
                        return domain.real(value)

                config, _ = self.space.suggest(answer, number)
        assert trial.number == number, f"trial {number} was drawn when it was the turn of {trial.number}"
        return self._tell(number, config)

    def _check(self, name: str, domain: Domain, value: Any) -> None:
        """Refuse a sampler's value outside of its range, but for rounding; Optuna refuses what is not in a choice."""
        if not isinstance(domain, Range):
            return
        noise = ROUNDING * max(abs(domain.low), abs(domain.high))
        if not domain.low - noise <= value <= domain.high + noise:
            raise StudyError(
                f"The sampler {type(self._sampler).__name__} must give {name} from {domain.low} to {domain.high}, got "
                f"{shown(value)}: choose another sampler, or mend it, then run the study again."
            )

    def _tell(self, number: int, config: Config) -> Config:
        if self._storage is not None:
            self._storage.apply(Asked(number, config, budget=0, group=""))
        return config


class Numbers:
    """The trials of a search among all of a study's, whose task has the name ``variant``."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.outer: list[int] = []  # the study's number of each trial
        self.inner: dict[int, int] = {}

    def add(self, outer: int) -> int:
        """Take in the next trial; gives the study's number of it."""
        self.inner[outer] = len(self.outer)
        self.outer.append(outer)
        return outer

    def inward(self, event: Event) -> Event | None:
        """An event as the search knows it; None where it is about another trial."""
        if isinstance(event, Dropped):
            return Dropped(tuple(self.inner[trial] for trial in event.trials if trial in self.inner))
        trial = getattr(event, "trial", None)
        if trial is None:
            return event
        if trial not in self.inner:
            return None
        if isinstance(event, Asked):
            start = event.start_from and StartFrom(self.inner[event.start_from[0]], event.start_from[1])
            event = replace(event, start_from=start, variant="")
        own: Any = event
        return replace(own, trial=self.inner[trial])  # type: ignore[no-any-return]

    def outward(self, event: Event) -> Event:
        """An event that a sampler wrote, as the study knows it."""
        if isinstance(event, Wrote) and event.trial is not None:
            return replace(event, trial=self.outer[event.trial])
        return event


def reseed(sampler: object, seed: int, number: int) -> None:
    """Seed every random generator inside a sampler, and inside its parts, for one draw.

    >>> from optuna.samplers import RandomSampler
    >>> sampler = RandomSampler()
    >>> reseed(sampler, seed=0, number=1)
    >>> sampler._rng.rng.randint(100)
    45
    """
    from numpy.random import Generator, RandomState
    from optuna import Study
    from optuna.samplers import QMCSampler
    from optuna.samplers._lazy_random_state import LazyRandomState
    from optuna.trial import FrozenTrial

    seen: set[int] = set()

    def visit(part: Any, path: str) -> None:
        if id(part) in seen or isinstance(part, type | ModuleType | FrozenTrial | Study):
            return
        seen.add(id(part))
        fresh = key(seed, "sampler", number, path)
        if isinstance(part, LazyRandomState):
            part.rng.seed(fresh % 2**32)
        elif isinstance(part, RandomState):
            part.seed(fresh % 2**32)
        elif isinstance(part, Generator):
            part.bit_generator.state = type(part.bit_generator)(fresh).state
        elif isinstance(part, random.Random):
            part.seed(fresh)
        elif isinstance(part, dict):
            for name, inner in part.items():
                visit(inner, f"{path}.{name}")
        elif isinstance(part, list | tuple):
            for index, inner in enumerate(part):
                visit(inner, f"{path}.{index}")
        elif hasattr(part, "__dict__"):
            if isinstance(part, QMCSampler):
                part._seed = key(seed, "sampler", path)  # all draws are points of one scrambled sequence
            visit(vars(part), path)

    visit(sampler, "")


@contextmanager
def _named(sampler: object, number: int) -> Iterator[None]:
    """Say which sampler raised an error; an error of Penstock says so itself."""
    try:
        yield
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        raise StudyError(
            f"The sampler {type(sampler).__name__} raised {told(error)}, when it was asked for the config of trial "
            f"{number}: choose another sampler, or mend it, then run the study again."
        ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    logger = getLogger("optuna")
    level = logger.level
    logger.setLevel(ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
