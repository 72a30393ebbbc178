"""The engine: carries an algorithm's trial groups to an executor and its reports back, by way of the log.

It takes a batch of events and says what it wants next; whoever drives it waits. For each event in turn: log it, apply
it, tell the algorithm, log what it wants next. Everything above the executor happens here, in one thread and in one
order. It owns neither the loop nor the executor, so that one driver may run several studies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.bundle import (
    Left,
    Limited,
    Measured,
    Metered,
    Parted,
    StateSaved,
    TrialFailed,
    TrialFinished,
    TrialStopped,
)
from penstock.engine.clocking import Pace
from penstock.engine.collecting import Collecting
from penstock.engine.decisions import Decider, told
from penstock.engine.dry import dry_batch, unknown_metric
from penstock.engine.following import Following
from penstock.engine.limits import Deadline, Energy, Limit, Target, soonest
from penstock.engine.placing import Placing
from penstock.errors import StudyError
from penstock.executors.base import DeviceAdded, DeviceLost, Executor, ExecutorEvent, NodeAdded, NodeLost
from penstock.log import events
from penstock.log.events import Event
from penstock.log.history import History, TrialRecord
from penstock.log.messages import say
from penstock.log.states import States
from penstock.log.writer import Log
from penstock.numeric import legible, shown
from penstock.scheduling.base import Scheduler
from penstock.scheduling.growing import Growing
from penstock.scheduling.packs import Packing
from penstock.trial import Report, Usage

DRY = 3  # configs that are tried before the task is said to be at fault
RETRIES = 3  # of a trial whose worker died, before it is given up
WATCH = 0.25  # seconds after which whoever watches is shown the clock, though nothing happened
LONGEST = 1e6  # seconds of one wait: the system's timers take no more than 24 days
GRACE = 1.0  # seconds that a trial is given to stop once the deadline has passed


@dataclass(frozen=True)
class Wanted:
    """What an engine wants next: events of its study, or to end, for a reason.

    It wants to be asked again once it has taken events, or after ``within`` seconds.
    """

    within: float | None = None
    end: str | None = None


class Engine:
    """One study, from where its history stands until it is done, or a limit, or an interrupt.

    Where its executor serves other studies too, the engine is opened with the ``devices`` that are its own.
    """

    def __init__(
        self,
        log: Log,
        history: History,
        decider: Decider,
        executor: Executor,
        schedule: Scheduler,
        *,
        states: States,
        limits: Sequence[Limit] = (),
        pace: Pace | None = None,
        spreads: bool = False,
        growing: Growing | None = None,
        shards: int = 1,
        watch: Callable[[History], None] | None = None,
        devices: Collection[str] | None = None,
        packing: Packing | None = None,
        following: Following | None = None,
        observing: Callable[[History], list[Limited]] | None = None,
    ) -> None:
        self.study = log.dir.name
        self.log, self.history, self.decider = log, history, decider
        self.executor, self.limits, self.watch = executor, limits, watch
        self.observing = observing  # says at the end what power limits would give
        self.collecting = Collecting(history, states, log)
        self.placing = Placing(
            executor,
            history,
            schedule,
            self._log,
            self.clock,
            self.collecting,
            pace=pace,
            spreads=spreads,
            growing=growing,
            goal="target" if any(isinstance(limit, Target) for limit in limits) else "end",
            shards=shards,
            later=decider.later,
            study=self.study,
            own=devices,
            packing=packing,
            following=following,
        )
        self._threads: Measured | None = None  # as the dry batch showed
        self.used = history.clock  # seconds, by earlier drivers
        self.interrupted = False
        self._ending: str | None = None  # the reason, once every trial was told to leave
        self._grace = 0.0  # the executor's clock at which a trial that has not left is left behind

    def interrupt(self) -> None:
        """Stop at the next boundary, with every state saved; may be called from a signal handler."""
        self.interrupted = True
        self.executor.wake()

    def clock(self) -> float:
        """Seconds the study has used, over all its drivers."""
        return self.used + self.executor.now()

    def run(self, opened: events.Opened, pending: list[Event]) -> str:
        """Take up the study, with the decisions that are pending, and go on to its end; gives the reason of that."""
        self.check(opened, pending)
        reason = "failed"
        try:
            self.open(opened, pending)
            while (wanted := self.next()).end is None:
                self.take(self.executor.wait(wanted.within))
            reason = wanted.end
        except KeyboardInterrupt:
            reason = "interrupted"
            raise
        finally:
            self.close(reason)
        return reason

    # What a driver calls

    def check(self, opened: events.Opened, pending: Sequence[Event]) -> None:
        """One dry batch before a study's first line: a task that cannot train leaves nothing in the log."""
        waiting = [(e.config, e.variant) for e in pending if isinstance(e, events.Asked)]
        if not self.history.units and waiting:
            self._threads = dry_batch(self.executor, self.study, opened.settings["metric"], waiting[:DRY])

    def open(self, opened: events.Opened, pending: Iterable[Event]) -> None:
        """Take up the study, with the decisions that are pending."""
        self._log(opened)
        if self._threads is not None and self.history.threads is None:  # else the study keeps what it began with
            self._log(replace(self._threads, clock=self.used))
        if self.placing.following is not None:
            self.placing.following.begin()
        self.placing.pace.open(self.used)
        self.placing.look()
        self.collecting.find()
        for event in pending:
            self._log(event)
        self.placing.take_up()

    def next(self) -> Wanted:
        """Place what can be placed, and say what is wanted next. At an end, every trial is made to leave first."""
        if self._ending is None:
            reason = self._reason()
            if reason is None:
                self.placing.place()
                if not self.placing.running and not self.placing.waiting:
                    reason = "failed" if 0 < len(self.history.trials) == self.history.counts["failed"] else "done"
            if reason is not None:
                self._ending, self._grace = reason, self.executor.now() + GRACE
                self.placing.bundling.stop()
        if self._ending is not None:
            left = self._grace - self.executor.now() if self._ending in (Deadline.reason, Energy.reason) else None
            over = left is not None and left <= 0  # a function between two reports: its last report stands
            return Wanted(left, self._ending if over or not self.placing.running else None)
        self.collecting.delete()
        if self.watch is not None:
            self.history.clock = self.clock()
            self.watch(self.history)
        limit, look = soonest(self.limits, self.clock()) if self.limits else None, self.log.look()
        if self.placing.following is not None and (within := self.placing.following.within) is not None:
            limit = within if limit is None else min(limit, within)
        if self.executor.virtual:  # by the machine's clock, no step of a virtual one is too long to wait
            return Wanted(limit)
        reasons_to_look = (limit, self.log.tick(), look, None if self.watch is None else WATCH, LONGEST)
        return Wanted(min([seconds for seconds in reasons_to_look if seconds is not None]))

    def take(self, batch: Sequence[ExecutorEvent]) -> bool:
        """Log and apply this study's events of a batch, in their order; says whether there are any."""
        own = [event for event in batch if self._owns(event)]
        for event in own:
            self._take(event)
        return bool(own)

    def close(self, reason: str) -> None:
        """Lay the study down."""
        self.placing.tell_solo(last=True)
        for line in self.executor.settle():
            self._take(line)
        for limited in self.observing(self.history) if self.observing is not None else ():
            self._log(replace(limited, clock=self.clock()))
        self._log(events.Ended(reason, self.clock()))
        self.log.sync()
        self.collecting.delete()
        self.collecting.sweep()
        self.placing.pace.keep()

    def _reason(self) -> str | None:
        if self.interrupted:
            return "interrupted"
        if self.placing.following is not None and self.placing.following.stopped:
            return Deadline.reason
        if not self.limits:
            return None
        clock = self.clock()
        return next((limit.reason for limit in self.limits if limit.reached(self.history, clock)), None)

    # What comes up

    def _owns(self, event: ExecutorEvent) -> bool:
        """Whether an event is about a trial of this study, or about a device that the study may use."""
        match event:
            case DeviceAdded(device) | DeviceLost(device):
                return self.placing.owns(device.name)
            case NodeAdded() | NodeLost():
                return True
            case Measured() | Metered() | Limited():
                return self.placing.owns(event.device)
            case _:
                return event.study == self.study

    def _take(self, event: ExecutorEvent) -> None:
        if isinstance(event, DeviceLost):
            self.placing.lose(event.device.name)
            return
        if isinstance(event, DeviceAdded | NodeAdded | NodeLost):
            self.placing.look()
            return
        if isinstance(event, Measured):
            said = self.placing.measured(event)
            if event.kind in ("trying", "refusing"):
                return  # it is kept for later studies: nothing in this one follows from it
            self._log(replace(event, clock=self.clock(), reason="; ".join((event.reason, *said))))
            return
        if isinstance(event, Metered):
            self.placing.pace.metered(event)
        if isinstance(event, Limited) and (why := self.placing.pace.limited(event)):
            warnings.warn(why, stacklevel=2)
        if isinstance(event, Metered | Limited):
            self._log(replace(event, clock=self.clock()))
            return
        if isinstance(event, Parted):
            self.placing.elastic.parted(event)
            return
        if isinstance(event, TrialFailed) and event.died:
            self.collecting.died(event.trial, event.attempt)
        place = self.placing.running.get(event.trial)
        if place is None or place.members[event.trial].attempt != event.attempt:
            if isinstance(event, Report | Left):
                self._charge(event)
            return  # an older attempt: discarded, so that nothing is reported twice
        record = self.history.trials[event.trial]
        if isinstance(event, Report):
            if event.unit > record.reported:
                self.placing.acquit(event.trial)
            unlike = place.mode in ("processes", "packed")
            self.placing.pace.reported(event.trial, place.share, self.clock(), unlike=unlike, usage=event.usage)
            if self.placing.following is not None:
                self.placing.following.reported(event.trial)
            self._report(record, event)
        elif isinstance(event, StateSaved):
            self._log(events.Saved(event.trial, event.attempt, event.state, self.clock()))
        elif isinstance(event, TrialFinished):
            self._charge(event)
            self._finish(record, min(place.members[event.trial].budget, record.granted))
        elif isinstance(event, TrialStopped):
            moved = place if event.trial in self.placing.bundling.moving else None  # else its bundle was too large
            self.placing.pace.stopped(event.trial, self.clock())
            self.placing.left(event.trial)
            if event.state is not None and event.state not in (record.state, record.start):
                self._log(events.Saved(event.trial, event.attempt, event.state, self.clock()))
            self._log(events.Stopped(event.trial, event.attempt, self.clock(), _metered(event.usage)))
            if self._ending is None:
                self.placing.ask(record, moved=moved)
        elif event.unwritten:
            raise StudyError(event.error)
        else:
            own = self.placing.blames(event.trial, died=event.died, alone=event.alone)
            self.placing.left(event.trial)
            if event.lost:
                self.collecting.lose(event.lost)
            self._fail(record, event, own and not event.lost)

    def _report(self, record: TrialRecord, report: Report) -> None:
        metric = self.history.metric
        for name in report.metrics:
            if not isinstance(name, str) or name != legible(name):
                raise StudyError(f"A metric's name must be text that can be printed, got {shown(name)}.")
        if metric not in report.metrics:
            said = unknown_metric(metric, tuple(report.metrics))
            raise StudyError(f"{said} That was trial {record.number}, unit {report.unit}: report it with every unit.")
        if "budget" in report.metrics:
            raise StudyError("A metric cannot be called 'budget', which is a curve's own column: give it another name.")
        if report.unit > record.reported:
            metrics = dict(report.metrics)
            fields = (record.number, report.attempt, report.unit, metrics, report.state, report.usage, self.clock())
            self._log(events.Reported(*fields))
            return
        self._charge(report)
        if report.state is not None:  # trained again: not reported twice, but the state is worth having
            self._log(events.Saved(record.number, report.attempt, report.state, self.clock()))

    def _charge(self, event: Report | Left) -> None:
        """Log what a trial used where no other line tells it."""
        if (usage := _metered(event.usage)) is not None and event.trial < len(self.history.trials):
            self._log(events.Charged(event.trial, event.attempt, usage, self.clock()))

    def _finish(self, record: TrialRecord, budget: int) -> None:
        if record.curve and record.status != "waiting" and record.reported < budget:
            # A function that returned early: its last metrics stand for its budget.
            last = {k: v for k, v in record.curve[-1].items() if k != "budget"}
            self._log(events.Reported(record.number, record.attempt, budget, last, None, Usage(), self.clock()))
        self.placing.left(record.number)
        self.history.turns.settle()
        if record.status == "waiting":
            self.placing.ask(record)  # asked for again while it was leaving
        elif not record.curve:
            error = "The function returned without reporting: call trial.report(step, metric=value) once a unit."
            self._log(events.Failed(record.number, record.attempt, error, True, self.clock()))

    def _fail(self, record: TrialRecord, event: TrialFailed, own: bool) -> None:
        if event.died and record.reported >= record.granted:
            self._charge(event)
            return  # it was about to leave: there is nothing to train again
        final = own and (not event.died or record.deaths >= RETRIES)
        error = legible(event.error)
        if final and event.died:
            error = f"{error}, and so did {RETRIES} retries"
        self._log(events.Failed(record.number, event.attempt, error, final, self.clock(), own, _metered(event.usage)))
        if not final:
            self.placing.ask(record)

    # The log, and what follows from a line of it

    def _log(self, event: Event) -> None:
        if isinstance(event, events.Asked):
            self._check(event)
        self.log.append(event)
        kept = self.history.kept_or_next
        self.history.apply(event)
        self.decider.search.apply(event)
        say(self.study, event, self.history)
        if isinstance(event, events.Asked):
            self.placing.ask(self.history.trials[event.trial])
            self.collecting.look(event.trial)
        elif isinstance(event, events.Reported | events.Saved) and event.state is not None:
            self.collecting.add(event.trial, event.state)
        elif isinstance(event, events.Dropped):
            for number in event.trials:
                self.collecting.look(number)
        elif isinstance(event, events.Failed) and event.final:
            self.collecting.look(event.trial)
        if kept != (now := self.history.kept_or_next):
            for record in kept:
                if record not in now:
                    self.collecting.look(record.number)
        self.collecting.release()
        if (report := told(event, self.history)) is not None:
            for decision in self.decider.after(report):
                self._log(decision)

    def _check(self, asked: events.Asked) -> None:
        """Refuse an algorithm's group that asks for what is asked for already, or done."""
        if asked.trial >= len(self.history.trials):
            return
        record = self.history.trials[asked.trial]
        if record.status in ("waiting", "running") and record.reported < record.granted:
            raise StudyError(
                f"The groups {record.group!r} and {asked.group!r} both claim trial {asked.trial}: an algorithm asks "
                f"for a trial again only once it has reported its budget, here {record.granted}."
            )
        reported = record.reported if asked.start_from is None else asked.start_from[1]
        if asked.budget <= reported:
            raise StudyError(
                f"The group {asked.group!r} asks for trial {asked.trial} to {asked.budget} units, and it has reported "
                f"{reported} units already: an algorithm asks for more."
            )


def _metered(usage: Usage) -> Usage | None:
    """A usage that has joules, or says why it has none: without a meter, logs stay as earlier readers know them."""
    return None if usage.joules is None and not usage.unmetered else usage
