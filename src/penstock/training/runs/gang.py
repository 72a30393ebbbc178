"""One trial on several workers: the run of each worker. The first worker decides and tells; the others follow it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from penstock.bundle import (
    Bundle,
    Gathering,
    Limited,
    Measured,
    Parted,
    StateSaved,
    TrialFinished,
    TrialStopped,
    WorkerEvent,
    limited_as,
)
from penstock.speed.curve import doublings
from penstock.task import cannot_share
from penstock.training.runs.base import SAVING, Events, OneTrial, explain, failed, out_of_memory
from penstock.trial import Report, StateRef, Usage

if TYPE_CHECKING:
    from penstock.training.limiting import Limiter
    from penstock.training.spread.data_parallel import Distributed
    from penstock.training.spread.gang import Gang
    from penstock.training.spread.limiting import Together
    from penstock.training.worker import Worker

TALK = 0.1  # seconds after which the first worker says again whether to go on
WARM, TIMED, ROUNDS = 2, 4, 2  # on each number of devices: steps before timed ones, timed steps, and rounds
FREE = 1e-9


class GangRun(OneTrial):
    """One trial on several workers. Once they have met, only the first heeds an order to leave."""

    def __init__(self, worker: Worker, bundle: Bundle) -> None:
        super().__init__(worker, bundle)
        self.first = bundle.rank == 0
        self.sharded = worker.job.shards(self.placement.variant) > 1  # no single device holds the model
        self._state: StateRef | None = self.placement.state
        self._parts = 0  # how many parts a batch is taken in, once the trial trains
        self._quiet = 0  # steps until the first worker says again whether to go on
        self._began = time.perf_counter()  # of the time that the next report counts
        self._entry = worker.account.open(0)
        self._limits: Together | None = None  # of all devices, while they train to the end
        self._limited: Limited | None = None  # what is to be told of them
        self._left = 0  # steps to what was granted

    @property
    def alike(self) -> tuple[str, int]:
        return limited_as(self.bundle.signature, len(self.bundle.devices)), 1

    @property
    def settled(self) -> bool:
        return self._limits is not None and self.steps > 0

    @property
    def certain(self) -> int:
        return self._left

    def limit(self, limiter: Limiter) -> Limited | None:
        """All devices have one limit, which the workers agree on when they talk; before that, each has its prior."""
        found, self._limited = self._limited, None
        return limiter.boundary(self) if self._limits is None else found

    def events(self) -> Events:
        from penstock.training.spread.gang import Gang

        worker, bundle, count = self.worker, self.bundle, len(self.bundle.devices)
        gang: Gang | None = None
        run: Distributed | None = None
        said = list[WorkerEvent]()
        try:
            if self.first:
                gang, meeting = Gang.open(worker.host, count, worker.torch_device)
                yield Gathering(replace(bundle, meeting=meeting))
            else:
                gang = Gang.join(bundle.meeting, bundle.rank, count, worker.torch_device)
            run = worker.trials.begin_spread(self.placement)
            self._entry = worker.account.open(run.step)
            for _ in gang.waits():
                yield None
                if self.leaving:  # the trial is to be elsewhere, and so may be the worker that this one waits for
                    yield from self._end(None)
                    return
            gang.connect(worker.host)
            yield from self._train(gang, run)
        except Exception as error:
            if self.first:
                said += self._failed(error if gang is None else gang.behind(error), run)
            elif gang is not None:
                gang.blame(error, explain(error))
        finally:  # nothing holds the error any more, nor the tensors that it held
            if run is not None:
                run.leave()
            if gang is not None:
                gang.leave()
        yield from said[:-1]
        self._over = True
        yield from said[-1:]

    def _train(self, gang: Gang, run: Distributed) -> Events:
        """Train to the end, on all devices; or first on 1, 2, 4, … of them, to time each number."""
        from penstock.training.spread.gang import Unspreadable

        signature, known = self.bundle.signature, self.worker.spreadable
        # A model in shares is compared each time, and so is a short batch, which tells less of its parts than others.
        known_here = signature in known and not self.sharded and run.full
        checked, self._parts = gang.hear(known_here, self.worker.parts.get(signature, 1))
        if not checked:
            run.check(gang, self._parts)
            known.add(signature)
        if self._parts > (1 if self.bundle.measure else gang.count) and (reason := run.divide(self._parts)):
            raise Unspreadable(f"a batch does not fit into memory, nor can it be taken in parts: {reason}")
        if self.bundle.measure:
            yield from self._measure(gang, run)
            if self._over:
                return
        elif checked:
            run.join(gang)
        yield from self._steps(run, None)

    def _measure(self, gang: Gang, run: Distributed) -> Events:
        """Train a few steps on 1, 2, 4, … of the devices, twice, as other programs may use them too; then join all."""
        counts = doublings(gang.count)
        parts = {count: gang.first(count) for count in counts}
        seconds: dict[int, list[float]] = {count: [] for count in counts}
        for turn, count in enumerate(counts * ROUNDS):
            part = parts[count]
            if part is None:
                continue  # this worker is not among these
            if turn > 0:
                run.take_over(part)
            run.join(part)
            yield from self._steps(run, seconds[count])
            if self._over:
                return
        if self.first:
            scaling = {count: median(times) for count, times in seconds.items()}
            said = f"a step takes {', '.join(_said(*one) for one in scaling.items())}"
            yield self._measured(scaling, "; ".join(filter(None, [said, self.bundle.reason])))

    def _steps(self, run: Distributed, timed: list[float] | None) -> Events:
        """Train until the trial is to leave, or until enough steps are timed."""
        worker, trial, attempt = self.worker, self.placement.trial, self.placement.attempt
        saved = stepped = time.perf_counter()
        steps = run.steps()
        if timed is None and worker.job.power == "limit":
            from penstock.training.spread.limiting import Together

            self._limits = Together(run.gang, worker.limiter, worker.device)
        self._quiet, taken = 0, list[float]()
        run.time_steps(taken if timed is not None else None)
        try:
            for metrics in steps:
                now = time.perf_counter()
                self.steps += 1
                ends = due = leaves = 0
                if self._quiet <= 0 or metrics is not None:
                    quiet = max(1, min(1000, int(TALK / max(now - stepped, FREE))))
                    ends = metrics is not None and (run.unit >= self.budget or worker.job.reached(metrics))
                    due = now - saved > worker.trials.save_cost / SAVING
                    ends, due, leaves, self._quiet = run.gang.hear(ends, due, self.leaving, quiet)
                    if self._limits is not None:
                        self._left = (self.budget - run.unit) * run.unit_length
                        self._limited = self._limits.boundary(self, ends=bool(ends or leaves)) or self._limited
                self._quiet -= 1
                if ends or due or leaves:
                    saved = self._save(run)
                if metrics is not None and self.first:
                    state = self._state if ends or due or leaves else None
                    seconds = (now - self._began) * len(self.bundle.devices)  # all are held, however few are measured
                    worker.account.charge([self._entry], seconds)
                    usage = worker.account.usage(self._entry, run.step, worker.account.peak_bytes())
                    yield Report(trial, run.unit, metrics, attempt, state, usage)
                    self._began = now
                elif due and not leaves and self.first and self._state is not None:
                    yield StateSaved(trial, attempt, self._state)
                if ends or leaves:
                    yield from self._end(run, finished=bool(ends))
                    return
                yield None
                if timed is not None and len(taken) == WARM + TIMED:
                    timed += taken[WARM:]
                    return
                stepped = time.perf_counter()
        finally:
            run.time_steps(None)
            steps.close()

    def _used(self, run: Distributed | None) -> Usage:
        """What the trial used since its last report; all devices are held, however few are measured."""
        now = time.perf_counter()
        self.worker.account.charge([self._entry], (now - self._began) * len(self.bundle.devices))
        self._began = now
        return self.worker.account.usage(self._entry, self._entry.step if run is None else run.step, None)

    def _end(self, run: Distributed | None, *, finished: bool = False) -> Events:
        self._over = True
        if self.first and finished:
            yield TrialFinished(self.placement.trial, self.placement.attempt)
        elif self.first:
            yield TrialStopped(self.placement.trial, self.placement.attempt, self._state, usage=self._used(run))

    def _failed(self, error: Exception, run: Distributed | None) -> Iterator[WorkerEvent]:
        """Tell the trial's end: by its own error on any worker, by a worker's death, or as it cannot be spread.

        Where memory ran out on a worker, all come together again from the last state, and take smaller parts.
        """
        from penstock.training.spread.gang import Apart, Gone, Unspreadable

        trial, attempt = self.placement.trial, self.placement.attempt
        smaller = run is not None and self._parts > 0 and not self.sharded and out_of_memory(error)
        if run is not None and smaller:
            self.worker.parts[self.bundle.signature] = 2 * max(self._parts, run.seat[1])
        elif isinstance(error, Apart):
            yield Parted(self.bundle.devices, str(error))
        if self.sharded and isinstance(error, Unspreadable):
            error = Unspreadable(cannot_share(self.worker.job.task, str(error)))
        elif isinstance(error, Unspreadable):
            yield self._measured({1: 1.0}, f"never on several devices: {error}")
        if smaller or (isinstance(error, Apart | Unspreadable) and not self.sharded):
            yield TrialStopped(trial, attempt, self._state, usage=self._used(run))
        else:
            died = out_of_memory(error) or isinstance(error, Gone | Apart)
            yield replace(failed(self.placement, error), died=died, usage=self._used(run))

    def _save(self, run: Distributed) -> float:
        if (state := run.told_state()) is not None:
            self._state = self.worker.trials.save(self.placement, state)
        return time.perf_counter()

    def _measured(self, scaling: dict[int, float], reason: str) -> Measured:
        return Measured(
            self.bundle.signature,
            self.worker.device,
            "scaling",
            scaling,
            min(scaling, key=lambda w: (scaling[w], w)),
            reason,
        )


def _said(count: int, seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms on {count} {'device' if count == 1 else 'devices'}"
