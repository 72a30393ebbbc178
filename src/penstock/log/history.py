"""The state of a study so far: the fold of its log's events, kept by the engine and read by reports and results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.log.events import Asked, Devices, Dropped, Ended, Event, Failed, Measured, Opened, Placed, Reported, Saved
from penstock.trial import Config, Metrics, Mode, StartFrom, StateRef, Status, score


@dataclass(eq=False)
class TrialRecord:
    """One trial: its config and how far it has come."""

    number: int
    config: Config
    status: Status = "waiting"
    group: str = ""
    priority: float = 0.0
    open: bool = False
    variant: str = ""  # the task that it trains, where a study has several
    granted: int = 0
    reported: int = 0
    attempt: int = 0
    deaths: int = 0  # deaths of its workers that count against this trial, since its last report
    curve: list[dict[str, float]] = field(default_factory=list)
    device_seconds: float = 0.0
    error: str | None = None
    start: StateRef | None = None  # a donor's state, until the trial has one of its own
    state: StateRef | None = None  # the trial's own latest state
    copied_at: int = -1  # the unit after which it last took over a donor's state
    best_score: float = float("-inf")
    best_unit: int = 0
    best_config: Config | None = None  # the config at the best report; PBT changes configs
    best_state: StateRef | None = None  # the state that holds the weights of its best report
    diverged: bool = False  # the trial reported a metric that is not finite, so it is never the best

    @property
    def metrics(self) -> Metrics:
        """The metrics at the best report, or at the last one where none was finite."""
        rows = [row for row in self.curve if row["budget"] == self.best_unit] or self.curve[-1:]
        return {k: v for k, v in rows[-1].items() if k != "budget"} if rows else {}

    @property
    def measured(self) -> Config:
        """The config at the best report: PBT may have changed the trial's config since."""
        return self.best_config or self.config

    def row(self) -> dict[str, Any]:
        """The trial as a row of a table; a metric whose name another column has is named ``metrics.NAME``."""
        first = {"number": self.number, "state": self.status, "budget": self.reported}
        last = {"device_seconds": self.device_seconds, "error": self.error}
        config = {f"config.{name}": value for name, value in self.measured.items()}
        return {**first, **config, **apart(self.metrics, {*first, *last}), **last}


def apart(metrics: Metrics, taken: Collection[str]) -> dict[str, float]:
    """Metrics under names that are not ``taken``.

    >>> apart({"error": 0.1, "loss": 0.2}, {"error"})
    {'metrics.error': 0.1, 'loss': 0.2}
    """
    return {f"metrics.{name}" if name in taken else name: value for name, value in metrics.items()}


class History:
    """All trials of a study and where the study stands; ``apply`` takes the next event."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.trials: list[TrialRecord] = []
        self.counts: Counter[Status] = Counter()
        self.clock = 0.0  # seconds used, over all drivers
        self.units = 0
        self.best: TrialRecord | None = None
        self.settled: TrialRecord | None = None  # the best trial that can no longer diverge, in case ``best`` does
        self.ended: str | None = None
        self.weights: dict[str, float] = {}  # weights of groups, where they are not 1
        self.mode_of: dict[int, str] = {}  # the mode that each trial was last placed in
        self.types: dict[str, str] = {}  # types of devices, by name
        self.measured: dict[tuple[str, str, str], Measured] = {}  # by signature, device type and kind
        self.donors: Counter[str] = Counter()  # by state file: how many trials still wait to begin from it
        self.released: set[str] = set()  # state files that a trial no longer waits for, so they may be deleted

    @classmethod
    def of(cls, events: Iterable[Event]) -> History:
        """The history that some events make."""
        history = cls()
        for event in events:
            history.apply(event)
        return history

    @property
    def metric(self) -> str:
        return str(self.settings["metric"])

    @property
    def mode(self) -> Mode:
        return "max" if self.settings["mode"] == "max" else "min"

    def apply(self, event: Event) -> None:
        """Take one event. Events of a trial's older attempts are never logged."""
        self.clock = max(self.clock, getattr(event, "clock", 0.0))
        if isinstance(event, Opened):
            self.settings, self.ended = event.settings, None
            for record in self.trials:  # trials that the last driver had not finished wait for this driver
                if record.status in ("running", "paused") and record.reported < record.granted:
                    self._mark(record, "waiting")
        elif isinstance(event, Asked):
            self._asked(event)
        elif isinstance(event, Placed):
            record = self.trials[event.trial]
            record.attempt = event.attempt
            self._mark(record, "running")
            self.mode_of[event.trial] = event.mode
        elif isinstance(event, Measured):
            type = self.types.get(event.device, event.device)
            self.measured[event.signature or event.reason, type, event.kind] = event
        elif isinstance(event, Devices):
            self.types.update({device["name"]: device["type"] for device in event.devices})
        elif isinstance(event, Reported):
            self._reported(event)
        elif isinstance(event, Saved):
            self._save(self.trials[event.trial], event.state)
        elif isinstance(event, Failed):
            record = self.trials[event.trial]
            record.deaths += event.own
            record.error = event.error
            self._mark(record, "failed" if event.final else "waiting")
            self._rank(record)
        elif isinstance(event, Dropped):
            deepest = int(self.settings.get("max_budget", 0))
            for number in event.trials:
                record = self.trials[number]
                if record.status != "failed":
                    self._mark(record, "finished" if record.reported >= deepest else "stopped")
        elif isinstance(event, Ended):
            self.ended = event.reason
            for record in self.trials:
                if record.status == "running":
                    self._mark(record, "paused")

    def _asked(self, event: Asked) -> None:
        if event.trial == len(self.trials):
            self.trials.append(TrialRecord(event.trial, event.config))
            self.counts["waiting"] += 1
        record = self.trials[event.trial]
        record.config, record.granted, record.group = event.config, event.budget, event.group
        record.priority, record.open, record.variant = event.priority, event.open, event.variant
        if event.weight != 1:
            self.weights[event.group] = event.weight
        self._mark(record, "waiting")
        if event.start_from is not None and event.start_from[0] != event.trial:
            origin = StartFrom(*event.start_from)
            record.copied_at, record.reported, record.state, record.diverged = origin.unit, origin.unit, None, False
            self._release(record)
            record.start = self.trials[origin.trial].state
            if record.start is not None:
                self.donors[record.start.file] += 1

    def _reported(self, event: Reported) -> None:
        record = self.trials[event.trial]
        record.reported, record.deaths, record.error = event.unit, 0, None
        record.curve.append({"budget": event.unit, **event.metrics})
        record.device_seconds += event.usage.device_seconds
        self.units += 1
        value = score(event.metrics, self.metric, self.mode)
        if value == float("-inf"):
            record.diverged = True
        elif value > record.best_score:
            record.best_score, record.best_unit, record.best_state = value, event.unit, None
            record.best_config = record.config
        if event.state is not None:
            self._save(record, event.state)
        if event.unit >= record.granted:
            self._mark(record, "paused")
        self._rank(record)

    def _save(self, record: TrialRecord, state: StateRef) -> None:
        record.state = state
        self._release(record)
        # A donor's weights replaced the trial's own at ``copied_at``: the best report must be later than that.
        if state.unit >= record.best_unit > record.copied_at:
            record.best_state = state

    def _release(self, record: TrialRecord) -> None:
        if record.start is not None:
            self.donors[record.start.file] -= 1
            self.released.add(record.start.file)
            record.start = None

    def _rank(self, record: TrialRecord) -> None:
        if self.best is record and not _sound(record):
            self.best = None
            for other in self.trials:
                self.best = _better(self.best, other)
        else:
            self.best = _better(self.best, record)

    def _mark(self, record: TrialRecord, status: Status) -> None:
        self.counts[record.status] -= 1
        self.counts[status] += 1
        record.status = status
        if status in ("finished", "stopped", "failed"):
            self._release(record)
        if status in ("finished", "stopped"):
            self.settled = _better(self.settled, record)


def _sound(record: TrialRecord) -> bool:
    """Whether a trial can be best: it reported, never diverged, and did not fail before its weights were saved."""
    lost = record.status == "failed" and record.best_state is None
    return record.best_unit > 0 and not record.diverged and not lost


def _better(best: TrialRecord | None, record: TrialRecord) -> TrialRecord | None:
    if not _sound(record):
        return best
    if best is None or (record.best_score, -record.number) > (best.best_score, -best.number):
        return record
    return best
