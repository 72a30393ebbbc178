"""Worker processes on this machine, one device each; on a machine without accelerators they divide its cores.

A worker is forked from a process that has imported torch and nothing of the user's (``forking.py``): it starts in
milliseconds, the user's script is not run again in it, and no lock or thread of the driver is copied. It has one end of
a pipe, which closes when either side dies.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

from penstock.bundle import Bundle, Description, Device, Gathering, Job, Left, Limited, Measured, TrialFailed
from penstock.errors import StudyError
from penstock.executors.base import Executor, ExecutorEvent, refuse_collision, refuse_twins
from penstock.executors.metering import Key, Metering, uuids
from penstock.executors.processes.forking import Forked, fork
from penstock.executors.processes.seats import Seat, find_seats
from penstock.task import Task
from penstock.trial import Config


class ProcessExecutor(Executor):
    """``workers`` processes on this machine."""

    beside: ClassVar[bool] = False  # whether several worker processes share a device

    def __init__(self, job: Job, workers: int, seats: Sequence[Seat] | None = None) -> None:
        self._began = time.monotonic()
        self._jobs: dict[str, bytes] = {}  # by study
        self.join(job)
        seats = seats or find_seats(workers)
        self._seats = {seat.device.name: seat for seat in seats}
        if workers > 1 and isinstance(job.task, Task) and not seats[0].sliced:
            self.modes = self.modes | {"distributed"}  # between slices of a GPU there is no NCCL
        self._workers: dict[str, Process] = {}
        self._meters: Metering = Metering.of(
            uuids([seat.device for seat in seats]), users=self._users if self.beside else None
        )
        self._woken, self._wake = os.pipe()
        self._events: deque[ExecutorEvent] = deque()
        self._workers |= {name: self._start(job.study, name) for name in self._seats}

    def join(self, job: Job) -> None:
        refuse_twins(job, self._jobs)
        self._jobs[job.study] = pickled(job, "worker processes")

    def _start(self, study: str, name: str) -> Process:
        """A new worker of a study, by the name of its device."""
        return Process(study, self._jobs[study], name, self._seats[name])

    def devices(self) -> Sequence[Device]:
        return [seat.device for seat in self._seats.values()]

    def _users(self) -> dict[int, Key]:
        """What each worker process trains, by its number; where it has one trial."""
        there = [(one.process.known, one.study, one.running) for one in list(self._workers.values())]
        return {pid: (study, *trials[0]) for pid, study, trials in there if pid is not None and len(trials) == 1}

    def place(self, bundle: Bundle) -> None:
        self._meters.placed(bundle)
        self._give(bundle.devices[0], bundle)

    def _give(self, device: str, bundle: Bundle) -> None:
        worker = self._workers[device]
        if worker.running:
            refuse_collision(bundle, [worker.study])
        worker = self._serving(bundle.study, worker)
        declared = [(p.trial, p.attempt) for p in bundle.placements]
        worker.running += [one for one in declared if one not in worker.running]
        worker.send(("place", bundle))

    def _serving(self, study: str, worker: Process) -> Process:
        """The worker itself, or where it is another study's, a new one in its place."""
        if worker.study == study:
            return worker
        worker.process.kill()
        self._workers[worker.name] = self._start(study, worker.name)
        return self._workers[worker.name]

    def _gather(self, bundle: Bundle) -> None:
        """The first worker of a trial waits for the others."""
        (trial,) = ((p.trial, p.attempt) for p in bundle.placements)
        if trial in self._workers[bundle.devices[0]].running:  # it has not died since
            for rank, device in enumerate(bundle.devices[1:], 1):
                self._give(device, replace(bundle, rank=rank))

    def wait(self, timeout: float | None = None) -> list[ExecutorEvent]:
        end = None if timeout is None else time.monotonic() + timeout
        while not self._events:
            if due := self._meters.due():
                return list(due)
            workers = list(self._workers.values())
            told: list[Any] = [self._woken, *(w.connection for w in workers), *(w.process.told for w in workers)]
            left = [None if end is None else max(0.0, end - time.monotonic()), self._meters.within]
            ready = wait(told, min([seconds for seconds in left if seconds is not None], default=None))
            if not ready and (end is None or time.monotonic() < end):
                continue
            if not ready:
                return []
            for worker in workers:
                if self._workers.get(worker.name) is not worker:
                    continue  # it went with another
                if worker.process.told in ready and worker.process.hear():
                    self._bury(worker)
                elif worker.connection in ready:
                    self._receive(worker)
            if self._woken in ready:
                os.read(self._woken, 4096)
                break
        return self._take()

    def _take(self) -> list[ExecutorEvent]:
        events = [self._meters.took(event) for event in self._events]
        self._events.clear()
        return [*events, *self._meters.due()]

    def _receive(self, worker: Process) -> None:
        try:
            kind, value = worker.connection.recv()
        except (EOFError, OSError):
            self._bury(worker)
            return
        self._take_in(worker, kind, value)

    def _take_in(self, worker: Process, kind: str, value: Any) -> None:
        if kind == "broken":
            raise StudyError(f"A worker process could not start:\n{value}")
        if kind == "lost":
            worker.said = value
        if kind in ("lost", "ready"):
            return
        if isinstance(value, Gathering):
            self._gather(value.bundle)
            return
        if isinstance(value, Left):
            self._left(worker.study, (value.trial, value.attempt))
        elif isinstance(value, Measured | Limited):
            value = replace(value, device=worker.seat.device.name)  # its worker knows the name that torch has there
        self._events.append(value)

    def _left(self, study: str, trial: tuple[int, int]) -> None:
        for worker in [one for one in self._workers.values() if one.study == study]:
            worker.running = [one for one in worker.running if one != trial]

    def _bury(self, worker: Process) -> None:
        """Tell of a worker's death, after all that it had sent, and start another in its place."""
        with suppress(EOFError, OSError):
            while worker.process.status is not None and worker.connection.poll():
                self._take_in(worker, *worker.connection.recv())
        born, how = worker.process.pid is not None, worker.how_it_died()
        if not born:
            raise StudyError(f"A worker process could not start: {how}.")
        self._lose(worker, how)

    def _lose(self, worker: Process, how: str) -> None:
        for trial, attempt in worker.running:
            self._events.append(TrialFailed(trial, attempt, how, died=True, study=worker.study))
            self._left(worker.study, (trial, attempt))  # its other workers notice by themselves
        self._workers[worker.name] = self._start(worker.study, worker.name)

    def wake(self) -> None:
        os.write(self._wake, b"!")

    def describe(
        self,
        configs: Sequence[Config],
        *,
        train: bool,
        trials: Sequence[int] = (),
        study: str = "",
        variants: Sequence[str] = (),
    ) -> list[Description]:
        worker = self._describer(study)
        worker.send(("describe", (list(configs), train, list(trials), list(variants))))
        while True:
            try:
                kind, value = worker.connection.recv()
            except (EOFError, OSError):
                if not train:  # the next wait tells of its death; these trials are described as unlike any other
                    self._bury(worker)
                    return [Description()] * len(configs)
                raise StudyError(f"The worker process that tried a dry batch died: {worker.how_it_died()}") from None
            if kind == "described":
                if isinstance(value, Exception):
                    raise value
                descriptions: list[Description] = value
                return descriptions
            self._take_in(worker, kind, value)

    def _describer(self, study: str) -> Process:
        """A worker of a study; without one, an idle worker of another study gives its place."""
        there = list(self._workers.values())
        own, idle = [one for one in there if one.study == study], [one for one in there if not one.running]
        return own[0] if own else self._serving(study, idle[-1])

    def now(self) -> float:
        return time.monotonic() - self._began

    def close(self) -> None:
        self._meters.close()
        for worker in self._workers.values():
            worker.process.kill()
        for end in (self._woken, self._wake):
            os.close(end)


class Process:
    """One worker process, seen from the driver, which knows it by a ``name``."""

    def __init__(self, study: str, job: bytes, name: str, seat: Seat) -> None:
        self.study, self.name, self.seat = study, name, seat
        self.running: list[tuple[int, int]] = []  # (trial, attempt) of what it was given and has not given back
        self.part: Bundle | None = None  # the part of a bundle that it was given, where each has a process of its own
        self.said = ""  # the error that it leaves with
        self.process: Forked = fork("penstock.executors.processes.worker", seat.environment)
        self.connection: Connection[Any, Any] = self.process.connection
        self.send((seat.torch, seat.threads))
        with suppress(OSError):  # it died at birth, which the next wait will say
            self.connection.send_bytes(job)

    def send(self, message: object) -> None:
        with suppress(OSError):  # it died, which the next wait will say
            self.connection.send(message)

    def how_it_died(self) -> str:
        pid, code = self.process.pid, self.process.wait()
        self.process.close()
        if pid is None:
            return "the process that workers are forked from has ended, and says why on stderr"
        if code is None:
            return f"worker process {pid} was lost with the process that it was forked from"
        if code >= 0:
            return f"worker process {pid} exited with status {code}" + (f": {self.said}" if self.said else "")
        return f"worker process {pid} was killed by {signal.Signals(-code).name}"


def pickled(job: Job, whom: str) -> bytes:
    """A job as it is sent to workers; where that cannot be, which attribute of the task is why."""
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(job)
    except Exception as error:
        task = getattr(job.task, "function", job.task)
        unable = [f"its attribute {name!r}" for name, value in getattr(task, "__dict__", {}).items() if not _can(value)]
        raise StudyError(
            f"The task cannot be sent to {whom}: {', '.join(unable) or 'it'} cannot be pickled "
            f"({type(error).__name__}: {error}). Open files, locks and connections inside its methods instead of "
            'keeping them as attributes, or use on="local" with workers=1 and without sharing="processes".'
        ) from None
    return data


def _can(value: object) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
