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
from typing import Any

from penstock.bundle import Bundle, Description, Device, Gathering, Job, Left, Measured, TrialFailed
from penstock.errors import StudyError
from penstock.executors.base import Executor, ExecutorEvent, refuse_collision, refuse_twins
from penstock.executors.local import find_devices
from penstock.executors.processes.forking import Forked, fork
from penstock.task import Task
from penstock.trial import Config


class ProcessExecutor(Executor):
    """``workers`` processes on this machine."""

    def __init__(self, job: Job, workers: int) -> None:
        self._began = time.monotonic()
        self._jobs: dict[str, bytes] = {}  # by study
        self.join(job)
        self._threads: int | None = None
        found = find_devices()
        if found[0].type == "cpu":
            self._threads = max(1, (found[0].threads or 1) // workers)
            memory = found[0].memory // workers
            self._devices = [Device(f"cpu:{i}", "cpu", memory, threads=self._threads) for i in range(workers)]
        elif workers > len(found):
            raise StudyError(
                f"workers={workers} needs as many devices, and this machine has {len(found)}: "
                f"use workers={len(found)} or fewer, one device each."
            )
        else:
            self._devices = found[:workers]
        if workers > 1 and isinstance(job.task, Task):
            self.modes = self.modes | {"distributed"}
        self._woken, self._wake = os.pipe()
        self._events: deque[ExecutorEvent] = deque()
        self._workers = {device.name: self._start(job.study, device) for device in self._devices}

    def join(self, job: Job) -> None:
        refuse_twins(job, self._jobs)
        self._jobs[job.study] = pickled(job, "worker processes")

    def _start(self, study: str, device: Device) -> _Process:
        return _Process(study, self._jobs[study], device, self._threads)

    def devices(self) -> Sequence[Device]:
        return self._devices

    def place(self, bundle: Bundle) -> None:
        self._give(bundle.devices[0], bundle)

    def _give(self, device: str, bundle: Bundle) -> None:
        worker = self._workers[device]
        if worker.running:
            refuse_collision(bundle, [worker.study])
        worker = self._serving(bundle.study, worker)
        declared = [(p.trial, p.attempt) for p in bundle.placements]
        worker.running += [one for one in declared if one not in worker.running]
        worker.send(("place", bundle))

    def _serving(self, study: str, worker: _Process) -> _Process:
        """The worker itself, or where it is another study's, a new one in its place."""
        if worker.study == study:
            return worker
        worker.process.kill()
        self._workers[worker.device.name] = self._start(study, worker.device)
        return self._workers[worker.device.name]

    def _gather(self, bundle: Bundle) -> None:
        """The first worker of a trial waits for the others."""
        (trial,) = ((p.trial, p.attempt) for p in bundle.placements)
        if trial in self._workers[bundle.devices[0]].running:  # it has not died since
            for rank, device in enumerate(bundle.devices[1:], 1):
                self._give(device, replace(bundle, rank=rank))

    def wait(self, timeout: float | None = None) -> list[ExecutorEvent]:
        while not self._events:
            workers = list(self._workers.values())
            ready = wait([self._woken, *(w.connection for w in workers), *(w.process.told for w in workers)], timeout)
            if not ready:
                return []
            for worker in workers:
                if worker.process.told in ready and worker.process.hear():
                    self._bury(worker)
                elif worker.connection in ready:
                    self._receive(worker)
            if self._woken in ready:
                os.read(self._woken, 4096)
                break
        return self._take()

    def _take(self) -> list[ExecutorEvent]:
        events = list(self._events)
        self._events.clear()
        return events

    def _receive(self, worker: _Process) -> None:
        try:
            kind, value = worker.connection.recv()
        except (EOFError, OSError):
            self._bury(worker)
            return
        self._take_in(worker, kind, value)

    def _take_in(self, worker: _Process, kind: str, value: Any) -> None:
        if kind == "broken":
            raise StudyError(f"A worker process could not start:\n{value}")
        if isinstance(value, Gathering):
            self._gather(value.bundle)
            return
        if isinstance(value, Left):
            self._left(worker.study, (value.trial, value.attempt))
        elif isinstance(value, Measured):
            value = replace(value, device=worker.device.name)  # to its worker, each of the CPU's devices is the CPU
        self._events.append(value)

    def _left(self, study: str, trial: tuple[int, int]) -> None:
        for worker in [one for one in self._workers.values() if one.study == study]:
            worker.running = [one for one in worker.running if one != trial]

    def _bury(self, worker: _Process) -> None:
        """Tell of a worker's death, after all that it had sent, and start another in its place."""
        with suppress(EOFError, OSError):
            while worker.process.status is not None and worker.connection.poll():
                self._take_in(worker, *worker.connection.recv())
        born, how = worker.process.pid is not None, worker.how_it_died()
        if not born:
            raise StudyError(f"A worker process could not start: {how}.")
        for trial, attempt in worker.running:
            self._events.append(TrialFailed(trial, attempt, how, died=True, study=worker.study))
            self._left(worker.study, (trial, attempt))  # its other workers notice by themselves
        self._workers[worker.device.name] = self._start(worker.study, worker.device)

    def wake(self) -> None:
        os.write(self._wake, b"!")

    def describe(
        self, configs: Sequence[Config], *, train: bool, trials: Sequence[int] = (), study: str = ""
    ) -> list[Description]:
        there = list(self._workers.values())
        own, idle = [one for one in there if one.study == study], [one for one in there if not one.running]
        worker = own[0] if own else self._serving(study, idle[-1])
        worker.send(("describe", (list(configs), train, list(trials))))
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

    def now(self) -> float:
        return time.monotonic() - self._began

    def close(self) -> None:
        for worker in self._workers.values():
            worker.process.kill()
        for end in (self._woken, self._wake):
            os.close(end)


class _Process:
    """One worker process, seen from the driver."""

    def __init__(self, study: str, job: bytes, device: Device, threads: int | None) -> None:
        self.study, self.device = study, device
        self.running: list[tuple[int, int]] = []  # (trial, attempt) of what it was given and has not given back
        self.process: Forked = fork("penstock.executors.processes.worker")
        self.connection: Connection[Any, Any] = self.process.connection
        self.send((device.name.split(":")[0] if device.type == "cpu" else device.name, threads))
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
            return f"worker process {pid} exited with status {code}"
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
            'keeping them as attributes, or use on="local" with workers=1.'
        ) from None
    return data


def _can(value: object) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
