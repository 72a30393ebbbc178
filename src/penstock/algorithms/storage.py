"""The event log as an Optuna storage: samplers see a study through it, and people through ``seen``.

Optuna's own storages refuse to change a finished trial. Here a trial is complete from its first result on, with the
value of its deepest result, and a later report deepens it. A sampler takes a pending trial for a bad one; so a trial
that is paused, or that runs on after a promotion, must not be pending.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from threading import RLock
from typing import Any, NoReturn

from optuna.distributions import BaseDistribution
from optuna.exceptions import DuplicatedStudyError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from penstock.domains import Choice, Domain, Range, mark
from penstock.errors import StudyError
from penstock.log.events import Asked, Event, Failed, Opened, Reported, Wrote
from penstock.space import Space
from penstock.trial import Config, Mode, plain, score

STUDY = 0  # the id of the one study
EPOCH = datetime(1970, 1, 1)  # Optuna wants dates, and a study has only a clock that began at zero (invariant 6)
LAST = 1e11  # seconds after the epoch that a date can have
USER = "user:"  # begins the keys of Optuna's user attributes; all other keys are of its system attributes


@dataclass
class StoredTrial:
    """A trial as Optuna's storages know it."""

    number: int
    start: float
    config: Config | None = None
    params: dict[str, Any] = field(default_factory=dict)
    distributions: dict[str, BaseDistribution] = field(default_factory=dict)
    values: dict[int, float] = field(default_factory=dict)  # by unit
    end: float = 0.0
    failed: bool = False
    frozen: dict[int | None, FrozenTrial] = field(default_factory=dict)  # by the view's budget; cleared by a change


class LogStorage(BaseStorage):
    """One study, fed by ``apply``; a trial's id is its number.

    Attributes that a sampler writes go to ``write``. Without it the storage is read-only: a dashboard's notes about the
    study are forgotten with the storage, and nothing else can be written. Without a ``space``, the parameters' domains
    come from the log's description of the space, and from the configs where the log has no description.

    >>> storage = LogStorage("digits", "accuracy", "max", None)
    >>> storage.apply(Asked(0, {"lr": 0.1}, budget=1, group="rung 0"))
    >>> [trial.state.name for trial in storage.get_all_trials(STUDY)]
    ['RUNNING']
    """

    def __init__(
        self, name: str, metric: str, mode: Mode, space: Space | None, write: Callable[[Wrote], None] | None = None
    ) -> None:
        self.name, self.metric, self.mode, self.space = name, metric, mode, space
        self._write = write
        self._trials: dict[int, StoredTrial] = {}
        self._attrs: dict[int | None, dict[str, Any]] = {None: {"study:metric_names": [metric]}}
        self._described: Space | None = None
        self._to_describe = False
        self._clock = 0.0
        self._budget: int | None = None
        self._lock = RLock()  # Optuna asks for it: a dashboard is fed and read in different threads

    def apply(self, event: Event) -> None:
        """Take one event of the log, or one that is about to be in it."""
        with self._lock:
            self._clock = max(self._clock, getattr(event, "clock", 0.0))
            if isinstance(event, Opened) and self.space is None:
                self._described = Space.read(event.settings.get("space"))
            elif isinstance(event, Asked):
                self._ask(event)
            elif isinstance(event, Wrote):
                self._put(event)
            elif isinstance(event, Reported):
                trial = self._changing(event.trial)
                # A trial that diverged has the worst value, so that samplers learn to keep away from its config.
                value = score(event.metrics, self.metric, self.mode)
                trial.values[event.unit] = value if self.mode == "max" else -value
                trial.end = self._clock
            elif isinstance(event, Failed) and event.final:
                trial = self._changing(event.trial)
                trial.failed, trial.end = True, self._clock

    @contextmanager
    def view(self, budget: int | None) -> Iterator[None]:
        """Show only the results at one budget, and the trials that have no result at all yet; None shows all."""
        before, self._budget = self._budget, budget
        try:
            yield
        finally:
            self._budget = before

    def _ask(self, event: Asked) -> None:
        known = self._trials.setdefault(event.trial, StoredTrial(event.trial, self._clock))
        if known.config is not None and mark(known.config) == mark(event.config) and not known.failed:
            return
        trial = self._changing(event.trial)
        trial.config, trial.failed = event.config, False
        if self.space is None:
            self._to_describe = True
        else:
            trial.params, trial.distributions = self.space.params(event.config)

    def _put(self, event: Wrote) -> None:
        attrs = self._attrs.get(event.trial, {})  # a trial's attributes are written before the trial is asked for
        self._attrs[event.trial] = {**attrs, event.key: event.value}
        if event.trial in self._trials:
            self._changing(event.trial)

    def _changing(self, number: int) -> StoredTrial:
        trial = self._trials[number]
        trial.frozen.clear()
        return trial

    def _describe(self) -> None:
        """Give trials their parameters; a guessed space depends on all configs, so this waits until trials are read."""
        trials = [trial for trial in self._trials.values() if trial.config is not None]
        space = self._described or guess([trial.config for trial in trials if trial.config])
        for trial in trials:
            trial.params, trial.distributions = space.params(trial.config or {})
            trial.frozen.clear()
        self._to_describe = False

    def _frozen(self, trial: StoredTrial) -> FrozenTrial:
        if self._budget not in trial.frozen:
            trial.frozen[self._budget] = self._freeze(trial)
        return trial.frozen[self._budget]

    def _freeze(self, trial: StoredTrial) -> FrozenTrial:
        state, value = self._result(trial)
        attrs = self._attrs.get(trial.number, {})
        return FrozenTrial(
            number=trial.number,
            trial_id=trial.number,
            state=state,
            value=value,
            datetime_start=self._date(trial.start),
            datetime_complete=self._date(trial.end) if state.is_finished() else None,
            params=dict(trial.params),
            distributions=dict(trial.distributions),
            user_attrs=_user(attrs),
            system_attrs=_system(attrs),
            intermediate_values=dict(sorted(trial.values.items())),
        )

    def _result(self, trial: StoredTrial) -> tuple[TrialState, float | None]:
        """A trial as a sampler judges it, by its deepest result or by its result at the view's budget."""
        unit = self._budget or max(trial.values, default=0)
        if unit in trial.values:
            return TrialState.COMPLETE, trial.values[unit]
        if trial.values or trial.failed:
            return TrialState.FAIL, None  # hides a trial without a result at this budget: samplers pass over failures
        return TrialState.RUNNING, None

    def _date(self, clock: float) -> datetime:
        return EPOCH + timedelta(seconds=min(max(clock, 0.0), LAST))

    # Methods by which Optuna reads

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        with self._lock:
            if self._to_describe:
                self._describe()
            trials = [self._frozen(self._trials[number]) for number in sorted(self._trials)]
        if states is not None:
            trials = [trial for trial in trials if trial.state in states]
        return copy.deepcopy(trials) if deepcopy else trials

    def get_trial(self, trial_id: int) -> FrozenTrial:
        with self._lock:
            if self._to_describe:
                self._describe()
            return self._frozen(self._trials[trial_id])

    def get_study_id_from_name(self, study_name: str) -> int:
        if study_name != self.name:
            raise KeyError(f"This log holds the study {self.name!r}, not {study_name!r}.")
        return STUDY

    def get_study_name_from_id(self, study_id: int) -> str:
        return self.name

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return [StudyDirection.MAXIMIZE if self.mode == "max" else StudyDirection.MINIMIZE]

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        return _user(self._attrs[None])

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        return _system(self._attrs[None])

    def get_all_studies(self) -> list[FrozenStudy]:
        attrs, directions = self._attrs[None], self.get_study_directions(STUDY)
        return [FrozenStudy(self.name, None, _user(attrs), _system(attrs), STUDY, directions=directions)]

    # Methods by which Optuna writes

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        if self._write is None or template_trial is not None:
            self._refuse("add trials")
        with self._lock:
            number = len(self._trials)
            self._trials[number] = StoredTrial(number, self._clock)
            return number

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        if self._write is None:
            self._refuse("change parameters")
        with self._lock:
            trial = self._changing(trial_id)
            trial.params = {**trial.params, param_name: distribution.to_external_repr(param_value_internal)}
            trial.distributions = {**trial.distributions, param_name: distribution}

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        self._wrote(Wrote(None, USER + key, plain(value)))

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self._wrote(Wrote(None, key, plain(value)))

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._wrote(Wrote(trial_id, USER + key, plain(value)))

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._wrote(Wrote(trial_id, key, plain(value)))

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        self._refuse("set results")

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        self._refuse("set results")

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        if study_name == self.name:
            raise DuplicatedStudyError(f"This log holds the study {self.name!r} already.")
        self._refuse("add a study")

    def delete_study(self, study_id: int) -> None:
        self._refuse("delete it")

    def _wrote(self, event: Wrote) -> None:
        if self._write is None and event.trial is not None:
            self._refuse("change trials")
        with self._lock:
            self._put(event)
        if self._write is not None:
            self._write(event)

    def _refuse(self, what: str) -> NoReturn:
        raise StudyError(f"Optuna can look at the study {self.name!r} but not {what}: only Penstock writes its log.")


def guess(configs: Iterable[Config]) -> Space:
    """A space that holds all the configs, for plots of a study whose own space is not at hand.

    >>> guess([{"lr": 0.001}, {"lr": 1.0}]).domains["lr"].log
    True
    """
    columns: dict[str, list[Any]] = {}
    for config in configs:
        for name, value in config.items():
            columns.setdefault(name, []).append(value)
    return Space({name: _domain(values) for name, values in columns.items()}, {})


def _domain(values: list[Any]) -> Domain:
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return Choice(tuple({mark(value): value for value in values}.values()))
    low, high = min(values), max(values)
    whole = all(isinstance(value, int) for value in values)
    return Range(low, high, 1 if whole else None, log=0 < 100 * low <= high, whole=whole)


def _user(attrs: dict[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(USER): value for key, value in attrs.items() if key.startswith(USER)}


def _system(attrs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attrs.items() if not key.startswith(USER)}
