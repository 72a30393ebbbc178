"""The engine: carries an algorithm's trial groups to an executor and its reports back, by way of the log.

One loop: place what the scheduler assigns, wait for events, and for each event in turn: log it, apply it, tell the
algorithm, log what it wants next. Everything above the executor happens here, in one thread and in one order.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.bundle import Failed, Finished, Measured, Parted, Saved, Stopped
from penstock.engine.clocking import Pace
from penstock.engine.decisions import Decider, told
from penstock.engine.fusing import Fusing
from penstock.engine.limits import Deadline, Limit, soonest
from penstock.engine.placing import Placing
from penstock.errors import PenstockError, StudyError, TaskError
from penstock.executors.base import DeviceAdded, DeviceLost, Executor, ExecutorEvent
from penstock.log import events
from penstock.log.events import Event, Log
from penstock.log.history import History, TrialRecord
from penstock.log.states import States, needed
from penstock.scheduling.base import Scheduler
from penstock.scheduling.growing import Growing
from penstock.trial import Config, Report, StateRef, Usage

DRY = 3  # configs that are tried before the task is said to be at fault
RETRIES = 3  # of a trial whose worker died, before it is given up
WATCH = 0.25  # seconds after which whoever watches is shown the clock, though nothing happened
GRACE = 1.0  # seconds that a trial is given to stop once the deadline has passed


class Engine:
    """Runs one study from where its history stands until it is done, or a limit, or an interrupt."""

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
        fusing: Fusing | None = None,
        pace: Pace | None = None,
        growing: Growing | None = None,
        shards: int = 1,
        watch: Callable[[History], None] | None = None,
    ) -> None:
        self.log, self.history, self.decider = log, history, decider
        self.executor, self.limits = executor, limits
        self.states, self.fusing, self.watch = states, fusing, watch
        self.placing = Placing(
            executor,
            history,
            schedule,
            self._log,
            self.clock,
            self._intact,
            fusing=fusing,
            pace=pace,
            growing=growing,
            shards=shards,
        )
        self.used = history.clock  # seconds, by earlier drivers
        self.interrupted = False
        self.ending = False
        self.files: dict[int, set[str]] = {}  # the states there are that are still needed
        self.needless: set[str] = set()
        self.successors: set[str] = set()  # the states that took their place

    def interrupt(self) -> None:
        """Stop at the next boundary, with every state saved; may be called from a signal handler."""
        self.interrupted = True
        self.executor.wake()

    def clock(self) -> float:
        """Seconds the study has used, over all its drivers."""
        return self.used + self.executor.now()

    def run(self, opened: events.Opened, pending: list[Event]) -> str:
        """Take up the study, with the decisions that are pending, and go on to its end; gives the reason of that.

        One dry batch comes first: a task that cannot train leaves nothing in the log.
        """
        waiting = [e.config for e in pending if isinstance(e, events.Asked)]
        if not self.history.units and waiting:
            self._dry_batch(opened, waiting[:DRY])
        self._log(opened)
        self.placing.look()
        self._find_files()
        for record in self.history.trials:
            if record.status == "waiting":
                self.placing.queue(record)
        reason = "failed"
        try:
            for event in pending:
                self._log(event)
            reason = self._loop()
            if self.placing.running:
                self._stop_all(reason)
        except KeyboardInterrupt:
            reason = "interrupted"
            raise
        finally:
            self._log(events.Ended(reason, self.clock()))
            self.log.sync()
            self._delete()
            self.placing.pace.keep()
        return reason

    def _loop(self) -> str:
        while True:
            if self.interrupted:
                return "interrupted"
            clock = self.clock()
            for limit in self.limits:
                if limit.reached(self.history, clock):
                    return limit.reason
            left = soonest(self.limits, clock)
            self.placing.place()
            if not self.placing.running and not self.placing.waiting:
                return "done"
            self._delete()
            reasons_to_look = [left]
            if not self.executor.virtual:  # by the machine's clock, no step of a virtual one is too long to wait
                reasons_to_look += [self.log.tick(), None if self.watch is None else WATCH]
            for event in self.executor.wait(min((s for s in reasons_to_look if s is not None), default=None)):
                self._take(event)
            if self.watch is not None:
                self.history.clock = self.clock()
                self.watch(self.history)

    def _stop_all(self, reason: str) -> None:
        self.ending = True
        self.placing.stop()
        end = self.executor.now() + GRACE
        while self.placing.running:
            left = end - self.executor.now() if reason == Deadline.reason else None
            if left is not None and left <= 0:
                return  # a function between two reports: its last report stands
            for event in self.executor.wait(left):
                self._take(event)

    # What comes up

    def _take(self, event: ExecutorEvent) -> None:
        if isinstance(event, DeviceLost):
            self.placing.lose(event.device.name)
            return
        if isinstance(event, DeviceAdded):
            self.placing.look()
            return
        if isinstance(event, Measured):
            self._measured(event)
            return
        if isinstance(event, Parted):
            self.placing.spreading.parted(event)
            return
        place = self.placing.running.get(event.trial)
        if place is None or place.members[event.trial].attempt != event.attempt:
            return  # an older attempt: discarded, so that nothing is reported twice
        record = self.history.trials[event.trial]
        if isinstance(event, Report):
            if event.unit > record.reported:
                self.placing.acquit(event.trial)
            if self.fusing is None or len(place.members) == 1:
                unlike = place.mode == "processes"
                self.placing.pace.reported(event.trial, place.share, self.clock(), unlike=unlike)
            self._report(record, event)
        elif isinstance(event, Saved):
            self._log(events.Saved(event.trial, event.attempt, event.state, self.clock()))
        elif isinstance(event, Finished):
            self._finish(record, self.placing.left(event.trial).budget)
        elif isinstance(event, Stopped):
            self.placing.pace.stopped(event.trial, self.clock())
            self.placing.left(event.trial)
            if event.state is not None and event.state not in (record.state, record.start):
                self._log(events.Saved(event.trial, event.attempt, event.state, self.clock()))
            if not self.ending:  # its bundle was too large, or it is to have other devices
                self.placing.queue(record, moved=place)
        elif event.unwritten:
            raise StudyError(event.error)
        else:
            own = self.placing.blames(event.trial, died=event.died)
            self.placing.left(event.trial)
            self._fail(record, event, own)

    def _measured(self, event: Measured) -> None:
        """A worker knows what sharing a device costs the trials of a signature: bundles that are too large shrink."""
        fusing = None if event.kind == "scaling" else self.fusing  # what several devices give is not about sharing one
        if fusing is None:
            said = self.placing.pace.measured(event)
            event = replace(event, reason="; ".join((event.reason, *said)))
        self._log(replace(event, clock=self.clock()))
        if fusing is None:
            self.placing.spreading.settle(event.signature)
            return
        fusing.take(event, event.device)
        self.placing.shrink(event.signature, event.size, fusing.alike(event.device))

    def _report(self, record: TrialRecord, report: Report) -> None:
        metric = self.history.metric
        if metric not in report.metrics:
            said = _unknown_metric(metric, tuple(report.metrics))
            raise StudyError(f"{said} That was trial {record.number}, unit {report.unit}: report it with every unit.")
        if "budget" in report.metrics:
            raise StudyError("A metric cannot be called 'budget', which is a curve's own column: give it another name.")
        if report.unit > record.reported:
            metrics = dict(report.metrics)
            fields = (record.number, report.attempt, report.unit, metrics, report.state, report.usage, self.clock())
            self._log(events.Reported(*fields))
        elif report.state is not None:  # trained again: not reported twice, but the state is worth having
            self._log(events.Saved(record.number, report.attempt, report.state, self.clock()))

    def _finish(self, record: TrialRecord, budget: int) -> None:
        if record.status == "waiting":
            self.placing.queue(record)  # asked for again while it was leaving
        elif record.reported >= budget:
            return
        elif not record.curve:
            error = "The function returned without reporting: call trial.report(step, metric=value) once a unit."
            self._log(events.Failed(record.number, record.attempt, error, True, self.clock()))
        else:  # a function that returned early: its last metrics stand for its budget
            last = {k: v for k, v in record.curve[-1].items() if k != "budget"}
            self._log(events.Reported(record.number, record.attempt, budget, last, None, Usage(), self.clock()))

    def _fail(self, record: TrialRecord, event: Failed, own: bool) -> None:
        if event.died and record.reported >= record.granted:
            return  # it was about to leave: there is nothing to train again
        final = own and (not event.died or record.deaths >= RETRIES)
        error = event.error
        if final and event.died:
            error = f"{error}, and so did {RETRIES} retries"
        self._log(events.Failed(record.number, event.attempt, error, final, self.clock(), own))
        if not final:
            self.placing.queue(record)

    # The log, and what follows from a line of it

    def _log(self, event: Event) -> None:
        if isinstance(event, events.Asked):
            self._check(event)
        self.log.append(event)
        best, settled = self.history.best, self.history.settled
        self.history.apply(event)
        self.decider.search.apply(event)
        if isinstance(event, events.Asked):
            self.placing.queue(self.history.trials[event.trial])
            self._collect(event.trial)
        elif isinstance(event, events.Reported | events.Saved) and event.state is not None:
            self.files.setdefault(event.trial, set()).add(event.state.file)
            self._collect(event.trial)
        elif isinstance(event, events.Dropped):
            for number in event.trials:
                self._collect(number)
        elif isinstance(event, events.Failed) and event.final:
            self._collect(event.trial)
        if best is not self.history.best and best is not None:
            self._collect(best.number)
        if settled is not self.history.settled and settled is not None:
            self._collect(settled.number)
        while self.history.released:
            self._collect(_owner(self.history.released.pop()))
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

    def _dry_batch(self, opened: events.Opened, configs: list[Config]) -> None:
        """Try configs until one trains: an error of one config is its trial's, an error of all is the task's."""
        errors: list[Exception] = []
        for config in configs:
            try:
                (description,) = self.executor.describe([config], train=True)
            except PenstockError:
                raise
            except Exception as error:
                errors.append(error)
                continue
            metric = opened.settings["metric"]
            if description.metrics is not None and metric not in description.metrics:
                raise StudyError(_unknown_metric(metric, description.metrics))
            return
        first = "".join(traceback.format_exception(errors[0])).strip()
        raise TaskError(
            f"The task failed in a dry batch of each of the first {len(configs)} configs. With {configs[0]}:\n{first}"
        )

    # States that nothing can need any more

    def _find_files(self) -> None:
        unknown = []
        for name in self.states.names():
            if name.endswith(".pt") and _owner(name) < len(self.history.trials):
                self.files.setdefault(_owner(name), set()).add(name)
            else:
                unknown.append(name)  # cut short, or of a trial that the log does not know
        if unknown:
            self.states.delete(*unknown)
        for number in list(self.files):
            self._collect(number)

    def _collect(self, number: int) -> None:
        record, files = self.history.trials[number], self.files.get(number)
        if not files:
            return
        keep = {file for file in files if self.history.donors[file] > 0}
        keep.update(state.file for state in needed(record, self.history))
        if files - keep:
            self.needless |= files - keep
            self.successors |= files & keep
        self.files[number] = files & keep

    def _delete(self) -> None:
        """Delete needless states, once the lines and the states that made them needless are sure to outlive them."""
        if not self.needless or self.log.tick() is not None:
            return
        for file in self.successors - self.needless:
            self.states.sync(file)
        try:
            self.states.delete(*self.needless)
        except StudyError:  # a place that cannot be reached now: they are no reason to end a study
            return
        self.needless.clear()
        self.successors.clear()

    def _intact(self, state: StateRef) -> bool:
        return self.states.size(state.file) == state.bytes


def _owner(file: str) -> int:
    return int(file.split("-")[0])


def _unknown_metric(metric: str, known: tuple[str, ...]) -> str:
    return f"The study's metric {metric!r} is not reported by the task, which reports {', '.join(known) or 'nothing'}."
