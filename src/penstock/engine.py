"""The engine: carries an algorithm's trial groups to an executor and its reports back, by way of the log.

One loop: place what the scheduler assigns, wait for events, and for each event in turn: log it, apply it, tell the
algorithm, log what it wants next. Everything above the executor happens here, in one thread and in one order.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock import events
from penstock.bundle import Bundle, BundleMode, Failed, Finished, Measured, Placement, Saved, Stopped
from penstock.decisions import Decider, told
from penstock.errors import PenstockError, StudyError, TaskError
from penstock.events import Event, Log
from penstock.executors.base import DeviceAdded, DeviceLost, Executor, ExecutorEvent
from penstock.fusing import Fusing
from penstock.history import History, TrialRecord
from penstock.scheduling.base import Assignment, Demand, Scheduler, View
from penstock.scheduling.grouping import Candidate, Running, group
from penstock.trial import Config, Report, StateRef, Usage, score

DRY = 3  # configs that are tried before the task is said to be at fault
RETRIES = 3  # of a trial whose worker died, before it is given up
WATCH = 0.25  # seconds after which whoever watches is shown the clock, though nothing happened
GRACE = 1.0  # seconds that a trial is given to stop once the deadline has passed


@dataclass(frozen=True)
class Limits:
    """When a study stops before its algorithm is done."""

    deadline: float | None = None
    target: float | None = None


@dataclass
class _Running:
    bundle: _Bundle
    placement: Placement


@dataclass
class _Bundle:
    name: str
    devices: tuple[str, ...]
    mode: BundleMode
    signature: str
    size: int | None = None
    reason: str = ""


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
        states: Path,
        limits: Limits,
        fusing: Fusing | None = None,
        watch: Callable[[History], None] | None = None,
    ) -> None:
        self.log, self.history, self.decider = log, history, decider
        self.executor, self.schedule, self.limits = executor, schedule, limits
        self.states, self.fusing, self.watch = states, fusing, watch
        self.used = history.clock  # seconds, by earlier drivers
        self.interrupted = False
        self.waiting: dict[int, Demand] = {}
        self.running: dict[int, _Running] = {}
        self.asked = 0  # how often a trial was queued
        self.bundles = 0  # how many there have been
        self.ending = False
        self.files: dict[int, set[str]] = {}  # the states on disk that are still needed
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
        self._find_files()
        for record in self.history.trials:
            if record.status == "waiting":
                self._queue(record)
        reason = "failed"
        try:
            for event in pending:
                self._log(event)
            reason = self._loop()
            if self.running:
                self._stop_all(reason)
        except KeyboardInterrupt:
            reason = "interrupted"
            raise
        finally:
            self._log(events.Ended(reason, self.clock()))
            self.log.sync()
            self._delete()
        return reason

    def _loop(self) -> str:
        while True:
            if self.interrupted:
                return "interrupted"
            if self._target_reached():
                return "target"
            left = None if self.limits.deadline is None else self.limits.deadline - self.clock()
            if left is not None and left <= 0:
                return "deadline"
            self._place()
            if not self.running and not self.waiting:
                return "done"
            self._delete()
            reasons_to_look = (left, self.log.tick(), None if self.watch is None else WATCH)
            for event in self.executor.wait(min((s for s in reasons_to_look if s is not None), default=None)):
                self._take(event)
            if self.watch is not None:
                self.history.clock = self.clock()
                self.watch(self.history)

    # What goes down

    def _place(self) -> None:
        if not self.waiting:
            return
        if self.fusing is not None:
            self._place_fused(self.fusing)
            return
        devices = self.executor.devices()
        if len(self.running) >= len(devices):
            return
        view = View(devices, [Assignment(trial, one.bundle.devices) for trial, one in self.running.items()])
        for assignment in self.schedule(view, self.waiting.values(), None):
            self._start(self._bundle(assignment.devices, "solo"), (assignment.trial,))

    def _place_fused(self, fusing: Fusing) -> None:
        """Trials of one signature share a device, in bundles as large as was measured to pay."""
        there = {one.bundle.name: one.bundle for one in self.running.values()}
        running = [Running(b.name, b.devices[0], b.signature or None, self._count(b)) for b in there.values()]
        devices = [device.name for device in self.executor.devices()]
        if len(there) >= len(devices) and not any(self._open(bundle, fusing) for bundle in there.values()):
            return
        fusing.describe([self.history.trials[trial] for trial in self.waiting])
        for reason in fusing.refusals():
            self._log(events.Measured("", "", "solo", 1, {}, None, reason, self.clock()))
        waiting = [self._candidate(demand, fusing) for demand in self.waiting.values()]
        for gathering in group(devices, running, waiting, fusing.limit):
            if gathering.bundle is not None:
                self._start(there[gathering.bundle], gathering.trials)
                continue
            signature = gathering.signature or ""
            size = fusing.size(signature, gathering.device) if signature else 1
            fused = len(gathering.trials) > 1 if size is None else size > 1  # a lone trial shows nothing about fusing
            bundle = self._bundle((gathering.device,), "fused" if fused else "solo", signature if fused else "")
            bundle.size, bundle.reason = size, fusing.reason(signature, gathering.device) if fused else ""
            self._start(bundle, gathering.trials)

    def _candidate(self, demand: Demand, fusing: Fusing) -> Candidate:
        record, description = self.history.trials[demand.trial], fusing.of(demand.trial)
        state = record.state or record.start
        position = (0, 0) if state is None else (state.unit, state.step)
        return Candidate(demand.trial, description.signature, position, description.batch_size, demand.asked)

    def _open(self, bundle: _Bundle, fusing: Fusing) -> bool:
        room = fusing.limit(bundle.signature, bundle.devices[0]) if bundle.signature else 1
        return bundle.mode == "fused" and self._count(bundle) < room

    def _count(self, bundle: _Bundle) -> int:
        return sum(one.bundle is bundle for one in self.running.values())

    def _bundle(self, devices: tuple[str, ...], mode: BundleMode, signature: str = "") -> _Bundle:
        self.bundles += 1
        return _Bundle(f"bundle {self.bundles}", devices, mode, signature)

    def _start(self, bundle: _Bundle, trials: tuple[int, ...]) -> None:
        """Log that trials enter a bundle, and declare it."""
        for trial in trials:
            del self.waiting[trial]
            record = self.history.trials[trial]
            state, attempt = record.state or record.start, record.attempt + 1
            if state is not None and not self._intact(state):
                if record.copied_at >= 0:
                    error = (
                        f"Its state {state.file} is gone, and it had taken over another trial's: it cannot begin again."
                    )
                    self._log(events.Failed(trial, record.attempt, error, True, self.clock()))
                    continue
                state = None  # it begins again and repeats exactly; what it reports again is not logged twice
            self._log(events.Placed(trial, attempt, bundle.devices, bundle.mode, state, self.clock()))
            inherited = state is not None and state == record.start
            placement = Placement(trial, attempt, record.config, record.granted, state, inherited)
            self.running[trial] = _Running(bundle, placement)
        self._declare(bundle)

    def _declare(self, bundle: _Bundle, most: int | None = None) -> None:
        placements = [one.placement for one in self.running.values() if one.bundle is bundle][:most]
        if placements or most == 0:
            self.executor.place(Bundle(placements=tuple(placements), **vars(bundle)))

    def _stop_all(self, reason: str) -> None:
        self.ending = True
        for bundle in {one.bundle.name: one.bundle for one in self.running.values()}.values():
            self._declare(bundle, 0)
        end = self.executor.now() + GRACE
        while self.running:
            left = end - self.executor.now() if reason == "deadline" else None
            if left is not None and left <= 0:
                return  # a function between two reports: its last report stands
            for event in self.executor.wait(left):
                self._take(event)

    # What comes up

    def _take(self, event: ExecutorEvent) -> None:
        if isinstance(event, DeviceAdded | DeviceLost):
            return  # the next placement asks the executor what devices there are
        if isinstance(event, Measured):
            self._measured(event)
            return
        one = self.running.get(event.trial)
        if one is None or one.placement.attempt != event.attempt:
            return  # an older attempt: discarded, so that nothing is reported twice
        record = self.history.trials[event.trial]
        if isinstance(event, Report):
            self._report(record, event)
        elif isinstance(event, Saved):
            self._log(events.Saved(event.trial, event.attempt, event.state, self.clock()))
        elif isinstance(event, Finished):
            del self.running[event.trial]
            self._finish(record, one.placement.budget)
        elif isinstance(event, Stopped):
            del self.running[event.trial]
            if event.state is not None and event.state not in (record.state, record.start):
                self._log(events.Saved(event.trial, event.attempt, event.state, self.clock()))
            if not self.ending:  # its bundle was too large
                self._queue(record)
        else:
            del self.running[event.trial]
            self._fail(record, event)

    def _measured(self, event: Measured) -> None:
        """A worker knows how many trials of a signature to train together: bundles that are larger shrink."""
        assert self.fusing is not None
        self._log(events.Measured(**vars(event), clock=self.clock()))
        there = {one.bundle.name: one.bundle for one in self.running.values()}
        ours = [bundle for bundle in there.values() if bundle.signature == event.signature]
        for bundle in ours:
            self.fusing.take(event, bundle.devices[0])
            bundle.size = event.size
            if self._count(bundle) > event.size:
                self._declare(bundle, event.size if event.size > 1 else 0)

    def _report(self, record: TrialRecord, report: Report) -> None:
        metric = self.history.metric
        if metric not in report.metrics:
            raise StudyError(_unknown_metric(metric, tuple(report.metrics)))
        if "budget" in report.metrics:
            raise StudyError("A metric cannot be called 'budget', which is a curve's own column: give it another name.")
        if report.unit > record.reported:
            metrics = dict(report.metrics)
            fields = (record.number, report.attempt, report.unit, metrics, report.state, report.usage, self.clock())
            self._log(events.Reported(*fields))
        elif report.state is not None:  # trained again: not reported twice, but the state is worth having
            self._log(events.Saved(record.number, report.attempt, report.state, self.clock()))

    def _finish(self, record: TrialRecord, budget: int) -> None:
        if record.reported >= budget:
            if record.granted > record.reported:
                self._queue(record)  # asked for again while it was leaving
        elif not record.curve:
            error = "The function returned without reporting: call trial.report(step, metric=value) once a unit."
            self._log(events.Failed(record.number, record.attempt, error, True, self.clock()))
        else:  # a function that returned early: its last metrics stand for its budget
            last = {k: v for k, v in record.curve[-1].items() if k != "budget"}
            self._log(events.Reported(record.number, record.attempt, budget, last, None, Usage(), self.clock()))

    def _fail(self, record: TrialRecord, event: Failed) -> None:
        final = not event.died or record.deaths >= RETRIES
        error = event.error
        if final and event.died:
            error = f"{error}, and so did {RETRIES} retries"
        self._log(events.Failed(record.number, event.attempt, error, final, self.clock()))
        if not final:
            self._queue(record)

    # The log, and what follows from a line of it

    def _log(self, event: Event) -> None:
        self.log.append(event)
        best, settled = self.history.best, self.history.settled
        self.history.apply(event)
        self.decider.search.apply(event)
        if isinstance(event, events.Asked):
            self._queue(self.history.trials[event.trial])
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

    def _queue(self, record: TrialRecord) -> None:
        if record.number in self.running:
            return  # it is queued when it has left its bundle
        self.asked += 1
        units = record.granted - record.reported
        self.waiting[record.number] = Demand(record.number, record.group, units, self.asked)

    def _target_reached(self) -> bool:
        best, target = self.history.best, self.limits.target
        if best is None or target is None:
            return False
        return best.best_score >= score({"": target}, "", self.history.mode)

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
        for path in self.states.glob("*") if self.states.is_dir() else ():
            if path.suffix == ".pt" and _owner(path.name) < len(self.history.trials):
                self.files.setdefault(_owner(path.name), set()).add(path.name)
            else:
                path.unlink()  # cut short, or of a trial that the log does not know
        for number in list(self.files):
            self._collect(number)

    def _collect(self, number: int) -> None:
        record, files = self.history.trials[number], self.files.get(number)
        if not files:
            return
        keep = {file for file in files if self.history.donors[file] > 0}
        if record.state is not None and record.status in ("waiting", "running", "paused"):
            keep.add(record.state.file)
        if record.best_state is not None and (record is self.history.best or record is self.history.settled):
            keep.add(record.best_state.file)
        if files - keep:
            self.needless |= files - keep
            self.successors |= files & keep
        self.files[number] = files & keep

    def _delete(self) -> None:
        """Delete needless states, once the lines and the states that made them needless are sure to outlive them."""
        if not self.needless or self.log.tick() is not None:
            return
        for file in self.successors - self.needless:
            with (self.states / file).open("rb") as state:
                os.fsync(state.fileno())
        for file in self.needless:
            (self.states / file).unlink(missing_ok=True)
        self.needless.clear()
        self.successors.clear()

    def _intact(self, state: StateRef) -> bool:
        path = self.states / state.file
        return path.exists() and path.stat().st_size == state.bytes


def _owner(file: str) -> int:
    return int(file.split("-")[0])


def _unknown_metric(metric: str, known: tuple[str, ...]) -> str:
    return f"The study's metric {metric!r} is not reported by the task, which reports {', '.join(known) or 'nothing'}."
