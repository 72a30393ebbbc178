"""Trials that share a device in worker processes of their own: under MPS on a GPU, and on the cores of a CPU.

A device's first worker begins with the study, and each further one with the first trial that needs it. A worker that
is idle takes the next trial. Any trial can be beside any other, functions too.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from penstock.bundle import Bundle, BundleMode, Description, Job, Measured, TrialFailed
from penstock.executors.base import refuse_collision
from penstock.executors.processes.executor import Process, ProcessExecutor
from penstock.executors.processes.mps import Daemon, Refused, under_mps
from penstock.executors.processes.seats import Seat, find_seats
from penstock.trial import Config

CLIENTS = 47  # MPS takes 48 processes on a device, and one more than train may be asked what trials are like
CONTEXT = 2**29  # bytes of a device that a process takes before its trial does: CUDA's context and torch's kernels
CONTEXTS = 4  # contexts may take one of so many parts of a device's memory


class TrialProcesses(ProcessExecutor):
    """Workers on ``workers`` devices of this machine, a process for each trial of a "processes" bundle.

    ``active_threads`` is the most percent of a GPU's threads that one of them may use under MPS.
    """

    modes: frozenset[BundleMode] = frozenset({"solo", "fused", "packed", "processes"})
    beside = True

    def __init__(self, job: Job, workers: int = 1, active_threads: float | None = None) -> None:
        seats = find_seats(workers)
        self.processes = most(seats)
        self._active_threads = active_threads
        self._given: dict[str, set[tuple[str, str]]] = {}  # by device: study and name of the parts of its bundle
        self._daemons: dict[str, Daemon | None] = {}  # by device; None where its processes take turns
        self._started: list[Daemon] = []
        self._said = False  # whether it was said that processes take turns
        try:
            super().__init__(job, workers, divided(seats, self.processes))
        except BaseException:
            self._quit()
            raise
        self.modes = TrialProcesses.modes  # a trial that spans devices has no process of its own

    # Bundles

    def place(self, bundle: Bundle) -> None:
        if bundle.mode != "processes":
            super().place(bundle)
            return
        self._meters.placed(bundle)
        (device,) = bundle.devices
        here = [one for one in self._on(device) if one.running]
        refuse_collision(bundle, [one.study for one in here])
        parts = {part.name: part for part in bundle.parts}
        for worker in here:
            if worker.part is not None:
                part = parts.get(worker.part.name, replace(worker.part, placements=()))
                if part != worker.part:
                    worker.part = part
                    worker.send(("place", part))
        given = self._given.get(device, set())
        self._given[device] = {(bundle.study, name) for name in parts}  # a trial that has left has another part then
        for name, part in parts.items():
            if (bundle.study, name) not in given:
                self._begin(part)

    def _on(self, device: str) -> list[Process]:
        return [one for one in self._workers.values() if one.seat.device.name == device]

    def _begin(self, part: Bundle) -> None:
        """Give a part to a worker of its own: an idle one, or else a new one."""
        worker = self._idle(part.study, part.devices[0])
        worker.part = part
        worker.running = [(one.trial, one.attempt) for one in part.placements]
        worker.send(("place", part))

    def _idle(self, study: str, device: str) -> Process:
        idle = [one for one in self._on(device) if not one.running]
        if own := [one for one in idle if one.study == study]:
            return own[0]
        if idle:
            return self._serving(study, idle[0])
        names = (f"{device}#{i}" if i else device for i in count())
        name = next(name for name in names if name not in self._workers)
        self._workers[name] = self._start(study, name)
        return self._workers[name]

    def _give(self, device: str, bundle: Bundle) -> None:
        if device not in self._workers:
            self._workers[device] = self._start(bundle.study, device)
        super()._give(device, bundle)

    def _describer(self, study: str) -> Process:
        """An idle worker, because a busy one answers after its step, and a function after its unit."""
        return self._idle(study, next(iter(self._seats)))

    def describe(
        self,
        configs: Sequence[Config],
        *,
        train: bool,
        trials: Sequence[int] = (),
        study: str = "",
        variants: Sequence[str] = (),
    ) -> list[Description]:
        found = super().describe(configs, train=train, trials=trials, study=study, variants=variants)
        if self.devices()[0].type == "cpu":
            return found
        return [replace(one, beside=max(one.beside, one.bytes or 0) + CONTEXT) for one in found]

    # Deaths

    def _take_in(self, worker: Process, kind: str, value: Any) -> None:
        linked, device = under_mps(worker.seat.environment), worker.seat.device.name
        if kind == "broken" and linked:
            worker.said = value
            self._take_turns(device, f"a process could not begin: {value.strip().splitlines()[-1]}")
            return
        if isinstance(value, TrialFailed) and value.died:
            others = sum(bool(one.running) for one in self._on(device)) - 1
            if others > 0:
                why = f"memory has no room for more than {others} processes at once"
                self._events.append(Measured("pack", device, "packing", {}, others, why, "processes"))
        super()._take_in(worker, kind, value)

    def _lose(self, worker: Process, how: str) -> None:
        """Only under MPS can another process have ended this one."""
        alone = not under_mps(worker.seat.environment)
        del self._workers[worker.name]
        if not alone:
            self._leave_faulty(worker)
        for trial, attempt in worker.running:
            self._events.append(TrialFailed(trial, attempt, how, died=True, study=worker.study, alone=alone))

    def _leave_faulty(self, worker: Process) -> None:
        """A client of MPS died: end idle clients, which a fault breaks unseen; after a fault, use another daemon."""
        device, mine = worker.seat.device.name, worker.seat.environment.items()
        for other in self._on(device):
            if not other.running and under_mps(other.seat.environment):
                other.process.kill()
                del self._workers[other.name]
        daemon = self._daemons.get(device)
        if worker.said and daemon is not None and daemon.environment.items() <= mine:
            del self._daemons[device]

    # MPS

    def _start(self, study: str, name: str) -> Process:
        seat = self._seats[name.partition("#")[0]]
        device = seat.device.name
        if seat.device.type != "cpu" and device not in self._daemons:
            self._daemons[device] = self._daemon(seat)
            if (first := self._client(study, name)) is not None:
                return first
        return self._client(study, name, proven=True) or Process(study, self._jobs[study], name, seat)

    def _daemon(self, seat: Seat) -> Daemon | None:
        """The daemon of a device; None where MPS refuses."""
        try:
            daemon = Daemon(uuid(seat), self._active_threads)
        except Refused as error:
            self._take_turns(seat.device.name, str(error))
            return None
        self._started.append(daemon)
        return daemon

    def _client(self, study: str, name: str, *, proven: bool = False) -> Process | None:
        """A worker under the device's daemon. Before that is ``proven``, wait until MPS has taken the worker."""
        seat = self._seats[name.partition("#")[0]]
        daemon = self._daemons.get(seat.device.name)
        if daemon is None:
            return None
        inside = "cuda:0" if "CUDA_VISIBLE_DEVICES" in daemon.environment else seat.torch
        seat = replace(seat, torch=inside, environment={**seat.environment, **daemon.environment})
        worker = Process(study, self._jobs[study], name, seat)
        if proven:
            return worker
        try:
            kind, value = worker.connection.recv()
        except (EOFError, OSError):
            kind, value = "broken", worker.how_it_died()
        if kind == "ready":
            limit = "" if self._active_threads is None else f", each with {self._active_threads:g}% of the threads"
            self._tell(seat.device.name, f"MPS runs their kernels side by side{limit}")
            return worker
        worker.process.kill()
        self._take_turns(seat.device.name, f"a process could not begin: {value.strip().splitlines()[-1]}")
        return None

    def _take_turns(self, device: str, why: str) -> None:
        """From now on start a device's processes without MPS; say once that they take turns."""
        self._daemons[device] = None
        if self._said:
            return
        self._said = True
        unused = "" if self._active_threads is None else ", and active_threads= has no effect"
        said = f"they take turns on {device}{unused}, because MPS cannot be used: {why}"
        warnings.warn(f'With sharing="processes" {said}.', stacklevel=2)
        self._tell(device, said)

    def _tell(self, device: str, said: str) -> None:
        self._events.append(Measured("pack", device, "packing", {}, self.processes, said, "processes"))

    def close(self) -> None:
        super().close()
        self._quit()

    def _quit(self) -> None:
        while self._started:
            self._started.pop().close()


def most(seats: Sequence[Seat]) -> int:
    """How many processes a device can have: a CPU one for each thread, an accelerator one for each of its cores."""
    first = seats[0].device
    if first.type == "cpu":
        return first.threads or 1
    least = min(seat.device.memory for seat in seats)
    return max(1, min(CLIENTS, _cores() // len(seats), least // CONTEXTS // CONTEXT))


def divided(seats: Sequence[Seat], processes: int) -> list[Seat]:
    """Seats whose threads, or whose parts of the machine's cores, are divided among so many processes."""
    made = []
    for seat in seats:
        threads = max(1, (seat.threads or _cores() // len(seats)) // processes)
        device = replace(seat.device, threads=threads) if seat.device.type == "cpu" else seat.device
        made.append(replace(seat, threads=threads, device=device))
    return made


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def uuid(seat: Seat) -> str:
    """What CUDA calls a device in every process, whichever devices that process sees; "" where torch does not say."""
    if seat.sliced or not seat.torch.startswith("cuda"):
        return seat.environment.get("CUDA_VISIBLE_DEVICES", "")
    import torch

    found = getattr(torch.cuda.get_device_properties(seat.torch), "uuid", None)
    return "" if found is None else f"GPU-{found}"
