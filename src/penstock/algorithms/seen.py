"""A study as people see it through Optuna: plots, importances and optuna-dashboard.

A sampler judges a trial by its deepest result, as results at different budgets do not compare. A person is shown the
best report of each trial, by the same rule as everywhere else (``log/ranking.py``), and real dates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from penstock.algorithms.sampling import Numbers
from penstock.algorithms.storage import EPOCH, LAST, LogStorage, StoredTrial
from penstock.algorithms.transfer import CHECK, RACE
from penstock.log.events import Asked, Charged, Event, Failed, Opened, Stopped
from penstock.log.history import History
from penstock.log.ranking import sound
from penstock.log.reader import read
from penstock.trial import Mode


class SeenStorage(LogStorage):
    """One study to be looked at. ``began`` of each opening gives the dates; a log without it begins in 1970."""

    def __init__(self, name: str, metric: str, mode: Mode) -> None:
        super().__init__(name, metric, mode, None)
        self._history = History()
        self._openings: list[tuple[float, datetime]] = [(0.0, EPOCH)]  # the clock and the date of each opening

    def apply(self, event: Event) -> None:
        """Take one event of the log."""
        with self._lock:
            super().apply(event)
            self._history.apply(event)
            if isinstance(event, Charged | Stopped | Failed) and event.trial in self._trials:
                self._trials[event.trial].frozen.clear()  # its joules are others now
            if isinstance(event, Opened) and (began := event.settings.get("began")) is not None:
                self._openings.append((event.clock, datetime.fromtimestamp(min(max(began, 0.0), LAST))))

    def _freeze(self, trial: StoredTrial) -> FrozenTrial:
        """A trial with its joules as an attribute of the user's, where its devices were metered."""
        made, record = super()._freeze(trial), self._history.trials[trial.number]
        if record.joules is not None:
            made.set_user_attr("joules", record.joules)
            made.set_user_attr("device_seconds", record.device_seconds)
        return made

    def _result(self, trial: StoredTrial) -> tuple[TrialState, float | None]:
        """A trial by its best report. A trial that diverged has the worst value, and one that failed has none."""
        record = self._history.trials[trial.number]
        if sound(record):
            return TrialState.COMPLETE, record.metrics[self.metric]
        if record.diverged:
            return TrialState.COMPLETE, float("-inf") if self.mode == "max" else float("inf")
        return (TrialState.FAIL if record.status == "failed" else TrialState.RUNNING), None

    def _date(self, clock: float) -> datetime:
        clock = min(max(clock, 0.0), LAST)
        since, began = max(one for one in self._openings if one[0] <= clock)
        return began + timedelta(seconds=clock - since)


def read_study(dir: Path) -> optuna.Study:
    """The study of a folder as Optuna sees it, for its plots and importances; nothing can be written to it."""
    events = list(read(dir / "log.jsonl"))
    settings = next(event.settings for event in events if isinstance(event, Opened))
    storage = SeenStorage(dir.name, settings["metric"], settings["mode"])
    for event in drawn_alone(events):
        storage.apply(event)
    return optuna.Study(dir.name, storage)


def drawn_alone(events: Sequence[Event]) -> Iterator[Event]:
    """A study's events; where it has surrogates, those of the search that began last, by its own numbers."""
    asked = [event for event in events if isinstance(event, Asked)]
    searched = [event for event in asked if event.group != CHECK and not event.group.startswith(RACE)]
    if not any(event.variant for event in searched):
        yield from events
        return
    numbers = Numbers(searched[-1].variant)
    for event in searched:
        if event.variant == numbers.variant and event.trial not in numbers.inner:
            numbers.add(event.trial)
    yield from filter(None, map(numbers.inward, events))
