"""The state of a study so far: the fold of its log's events, kept by the engine and read by reports and results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.log.cost import Bill
from penstock.log.events import (
    SOLO,
    Asked,
    Charged,
    Devices,
    Dropped,
    Ended,
    Event,
    Failed,
    Limited,
    Measured,
    Metered,
    Opened,
    Placed,
    Planned,
    Reported,
    Saved,
    Stopped,
)
from penstock.log.meters import Meters
from penstock.log.ranking import Leaders
from penstock.log.turns import Turns
from penstock.trial import Config, Leg, Metrics, Mode, StartFrom, StateRef, Status, Usage, reached, scale_of, score


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
    joules: float | None = None  # None as long as nobody told any
    unmetered: str = ""  # why some of its joules are not known, where others are
    since: float = 0.0  # the study's clock at its last placement or report
    error: str | None = None
    start: StateRef | None = None  # a donor's state, until the trial has one of its own
    state: StateRef | None = None  # the trial's own latest state
    copied_at: int = -1  # the unit after which it last took over a donor's state
    legs: tuple[Leg, ...] = ()  # the training behind that state
    best_score: float = float("-inf")
    best_unit: int = 0
    best_config: Config | None = None  # the config at the best report; PBT changes configs
    best_state: StateRef | None = None  # the state that holds the weights of its best report, or is nearest to it
    over: bool = False  # its study is done, so that a paused trial will not go on unless the study gets more trials
    diverged: bool = False  # it reported a metric that is not finite, and has taken over no donor's state since

    def charge(self, usage: Usage) -> None:
        """Count what it used."""
        self.device_seconds += usage.device_seconds
        if usage.joules is not None:
            self.joules = (self.joules or 0.0) + usage.joules
        self.unmetered = usage.unmetered or self.unmetered

    @property
    def metrics(self) -> Metrics:
        """The metrics at the best report, or at the last one where none was finite."""
        rows = [row for row in self.curve if row["budget"] == self.best_unit] or self.curve[-1:]
        return {k: v for k, v in rows[-1].items() if k != "budget"} if rows else {}

    @property
    def measured(self) -> Config:
        """The config at the best report: PBT may have changed the trial's config since."""
        return self.best_config or self.config

    @property
    def outcome(self) -> Status:
        """The status that people are told: a paused trial that will not go on is stopped."""
        return "stopped" if self.over and self.status == "paused" else self.status

    @property
    def standing(self) -> str:
        """The outcome, and for a stopped trial the rung at which it was stopped."""
        return f"stopped at {self.group}" if self.outcome == "stopped" and self.group else self.outcome

    @property
    def scale(self) -> int:
        """How many times narrower its model is than the study's."""
        return scale_of(self.variant)

    def forget_best(self) -> None:
        """Count no report so far: only later ones may be the best."""
        self.best_score, self.best_unit, self.best_config, self.best_state = float("-inf"), 0, None, None

    def row(self, **more: Any) -> dict[str, Any]:
        """The trial as a row of a table, with ``more`` columns after its number.

        A metric whose name another column has is named ``metrics.NAME``.
        """
        narrow = {"scale": self.scale} if self.variant else {}
        first = {"number": self.number, **more, **narrow, "state": self.outcome, "budget": self.reported}
        energy = {} if self.joules is None else {"joules": self.joules}
        last = {"device_seconds": self.device_seconds, **energy, "error": self.error}
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
        self._leaders, self._narrow = self._new_leaders(1)  # of targets, and of surrogates
        self.simulated = False  # whether a driver ran it on a simulated cluster
        self.ended: str | None = None
        self.weights: dict[str, float] = {}  # weights of groups, where they are not 1
        self.mode_of: dict[int, str] = {}  # the mode that each trial was last placed in
        self.types: dict[str, str] = {}  # types of devices, by name
        self.devices = 0  # how many devices there are
        self.measured: dict[tuple[str, str, str], Measured] = {}  # by signature, device type and kind
        self.threads: int | None = None  # how many threads a worker on a CPU computes with, where that was chosen
        self.donors: Counter[str] = Counter()  # by state file: how many trials still wait to begin from it
        self.turns = Turns(self.trials)  # the order in which trials wait and run
        self.bill = Bill()
        self.meters = Meters()
        self.planned: Planned | None = None  # the plan that is followed
        self.given: Planned | None = None  # the plan that the user gave, of which that one was made
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

    @property
    def solo(self) -> str:
        """How many trials train solo and why, on one line; empty where that was not said."""
        said = self.measured.get((SOLO, "", "sharing"))
        return "" if said is None else said.reason

    @property
    def cost(self) -> float | None:
        """The cost so far, over all drivers; None where the log tells none."""
        return self.bill.total(self.clock) if self.bill.priced else None

    @property
    def costs(self) -> dict[str, Any]:
        """The cost so far, and that which the plan expects in all; empty where neither is known."""
        if self.cost is None and self.planned is None:
            return {}
        plan = {} if self.planned is None else self.planned.plan
        return {"so_far": self.cost, "expected": plan.get("cost"), "currency": plan.get("currency", "")}

    @property
    def best(self) -> TrialRecord | None:
        """The best trial by the one rule of ``ranking``."""
        return self._leaders.ranking.best

    @property
    def targets(self) -> list[TrialRecord]:
        """The trials of the study's own task: all trials, where it has no surrogates."""
        return [record for record in self.trials if not record.variant]

    @property
    def surrogates(self) -> list[TrialRecord]:
        """The trials of narrower twins."""
        return [record for record in self.trials if record.variant]

    @property
    def kept(self) -> tuple[TrialRecord, ...]:
        """The best trials, as many as the study keeps the best states of."""
        return self._leaders.ranking.top

    @property
    def kept_surrogates(self) -> tuple[TrialRecord, ...]:
        """The best surrogates, as many."""
        return self._narrow.ranking.top

    @property
    def kept_or_next(self) -> tuple[TrialRecord, ...]:
        """The trials whose best states are kept: the best ones, and those that follow where one of them diverges.

        So it is with surrogates, among each other.
        """
        return self._leaders.top + self._narrow.top

    def apply(self, event: Event) -> None:
        """Take one event. Events of a trial's older attempts are never logged."""
        self.clock = max(self.clock, getattr(event, "clock", 0.0))
        if isinstance(event, Reported) and reached(event.metrics, self.metric, self.mode, self.settings.get("until")):
            self.trials[event.trial].granted = event.unit  # it goes no further
        self.turns.apply(event)
        self.bill.apply(event)
        if isinstance(event, Opened):
            self._settle()
            self._opened(event.settings)
            for record in self.trials:
                record.over = False
                # Trials that the last driver had not finished wait for this driver.
                if record.status in ("running", "paused") and record.reported < record.granted:
                    self._mark(record, "waiting")
        elif isinstance(event, Asked):
            self._asked(event)
        elif isinstance(event, Placed):
            record = self.trials[event.trial]
            record.attempt, record.since = event.attempt, event.clock
            self._mark(record, "running")
            self.mode_of[event.trial] = event.mode
        elif isinstance(event, Measured):
            type = self.types.get(event.device, event.device)
            self.measured[event.signature or event.reason, type, event.kind] = event
            if event.kind == "threads":
                self.threads = event.size
        elif isinstance(event, Devices):
            self.devices = len(event.devices)
            self.types.update({device["name"]: device["type"] for device in event.devices})
        elif isinstance(event, Planned):
            self.planned, self.given = event, event if event.given else self.given
        elif isinstance(event, Reported):
            self._reported(event)
        elif isinstance(event, Saved):
            self._save(self.trials[event.trial], event.state)
        elif isinstance(event, Failed):
            record = self.trials[event.trial]
            record.deaths += event.own
            record.error = event.error
            if event.usage is not None:
                record.charge(event.usage)
            self._mark(record, "failed" if event.final else "waiting")
        elif isinstance(event, Stopped):
            if event.usage is not None:
                self.trials[event.trial].charge(event.usage)
        elif isinstance(event, Charged):
            self.trials[event.trial].charge(event.usage)
        elif isinstance(event, Metered | Limited):
            self.meters.apply(event)
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
                record.over = event.reason == "done" and record.reported >= record.granted

    @property
    def joules(self) -> float | None:
        """The joules of all devices, over all drivers; None where nobody could tell any."""
        used = [record.joules for record in self.trials if record.joules is not None]
        if not used and self.meters.joules is None:
            return None
        return max(self.meters.joules or 0.0, self.meters.idle + sum(used))

    def _settle(self) -> None:
        """Charge joules that a driver left behind when it was killed to the trials that trained then, equally."""
        running = [record for record in self.trials if record.status == "running"]
        used = sum(record.joules or 0.0 for record in self.trials)
        left = (self.meters.joules or 0.0) - self.meters.idle - used
        for record in running if left > 0 else ():
            record.charge(Usage(joules=left / len(running)))

    def _opened(self, settings: dict[str, Any]) -> None:
        self.settings, self.ended = settings, None
        self.simulated = self.simulated or str(settings.get("run", {}).get("on")).startswith("Simulated")
        if (keep := int(settings.get("keep") or 1)) != self._leaders.ranking.count:
            self._leaders, self._narrow = self._new_leaders(keep)
            for record in self.trials:
                self._rank(record)

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
            if record.diverged:  # it can be the best again, but by later reports alone: its best state is not kept
                record.forget_best()
            record.copied_at, record.reported, record.state, record.diverged = origin.unit, origin.unit, None, False
            self._release(record)
            donor = self.trials[origin.trial]
            record.start, record.legs = donor.state, ()
            if record.start is not None:
                self.donors[record.start.file] += 1
                record.legs = (*donor.legs, Leg(donor.number, donor.config, record.start.unit))

    def _reported(self, event: Reported) -> None:
        record = self.trials[event.trial]
        record.reported, record.deaths, record.error = event.unit, 0, None
        record.curve.append({"budget": event.unit, **event.metrics})
        record.charge(event.usage)
        record.since = event.clock
        self.units += 1
        value = score(event.metrics, self.metric, self.mode)
        if value == float("-inf"):
            record.diverged = True
        elif value > record.best_score:
            record.best_score, record.best_unit, record.best_config = value, event.unit, record.config
            own = record.state is not None and record.state.unit > record.copied_at
            # A function need not save a state with each report: its last state is the nearest to its best report.
            record.best_state = record.state if own and self.settings.get("kind") == "function" else None
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

    def _new_leaders(self, keep: int) -> tuple[Leaders, Leaders]:
        return Leaders(self.trials, keep, narrow=False), Leaders(self.trials, keep, narrow=True)

    def _rank(self, record: TrialRecord) -> None:
        (self._narrow if record.variant else self._leaders).show(record)

    def _mark(self, record: TrialRecord, status: Status) -> None:
        self.counts[record.status] -= 1
        self.counts[status] += 1
        record.status = status
        if status in ("finished", "stopped", "failed"):
            self._release(record)
            self._rank(record)
