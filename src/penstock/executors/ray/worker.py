"""A worker on a Ray cluster: an actor that holds one device for as long as its study has it, and a little longer.

A thread of its own trains; the actor's methods only pass orders in and events out, so that a worker answers while it
trains. A worker that does not answer has hung. After its study a worker rests: its imports are done, and the next study
of the same program starts faster with it. The rest ends with that study, with a study of another program, or after a
while.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock import __version__
from penstock.bundle import Bundle, Device, Job, Limited, WorkerEvent
from penstock.errors import PenstockError
from penstock.executors.ray.held import HeldStates, sees
from penstock.executors.ray.meters import Meterable, Reader, Reading
from penstock.executors.ray.studies import others
from penstock.executors.serving import Order, serve
from penstock.log.states import Folder, States
from penstock.task import Task

GLANCE = 0.5  # seconds after which a resting worker looks again whether a study wants its device
Told = tuple[
    WorkerEvent | Limited | Reading, bytes | None
]  # an event, and its state's content where the driver has to store it


@dataclass(frozen=True)
class Hello:
    """A worker's word once it is ready: its node and device, or in ``broken`` why it could not start."""

    node: str
    pid: int
    host: str
    python: str
    penstock: str
    device: str
    type: str
    memory: int
    number: int | None  # the accelerator's number on its node
    shared: bool  # whether the worker sees the driver's states
    labels: Mapping[str, str] = field(default_factory=dict)  # the labels of its node
    meter: Meterable = field(default_factory=Meterable)
    broken: str = ""


class RayWorker:
    """The actor. Its methods run in two threads: methods that wait for events in one, all others in the other."""

    def __init__(self) -> None:
        self._made = time.time()
        self._turn = threading.Condition()
        self._training: threading.Thread | None = None
        self._wanted = threading.Event()

    def begin(self, job: bytes, paths: list[str], token: str, threads: int) -> Hello:
        """Serve a study: the first one, or the next one after a rest."""
        with self._turn:
            self._wanted.set()
        if self._training is not None:
            self._training.join()
            if _changed(self._made):
                os._exit(0)  # a new worker takes its place, with the code as it is now
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._described: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._held: HeldStates | None = None
        self._reader: Reader | None = None
        self._placed = 0
        self._hello = Hello(
            "", os.getpid(), platform.node(), platform.python_version(), __version__, "", "", 0, None, False
        )
        sys.path += [path for path in paths if path not in sys.path]
        try:
            self._begin(job, token, threads)
        except Exception as error:
            said = str(error) if isinstance(error, PenstockError) else traceback.format_exc()
            self._hello = replace(self._hello, broken=said)
        return self._hello

    def _begin(self, pickled: bytes, token: str, threads: int) -> None:
        import cloudpickle
        import ray

        from penstock.training.worker import Worker

        context, given = ray.get_runtime_context(), ray.get_gpu_ids()
        found = _device(bool(given))
        self._hello = replace(
            self._hello,
            node=context.get_node_id(),
            labels={name: str(value) for name, value in context.get_node_labels().items()},
            device=found.name,
            type=found.type,
            memory=found.memory,
            number=int(given[0]) if given and str(given[0]).isdigit() else None,
        )
        job: Job = cloudpickle.loads(pickled)
        if isinstance(job.task, Task):  # functions bring their own imports
            import torch
            import torch._dynamo  # the first trial on several devices would import it later, while it is timed

            if found.type == "cpu":
                torch.set_num_threads(threads)
        states = States.of(job.states)
        shared = sees(states, token)
        if not isinstance(states, Folder):
            states.probe()
        elif not shared:
            self._held = HeldStates()
            job = replace(job, states=self._held)
        self._reader = Reader(found, lambda reading: self._events.put((reading, None)))
        self._hello = replace(self._hello, shared=shared, meter=self._reader.found)
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        worker = Worker(job, found.name, host, threads if found.type == "cpu" else 1)
        self._training = threading.Thread(target=self._train, args=(worker,), daemon=True, name="training")
        self._training.start()

    def _train(self, worker: Any) -> None:
        try:
            serve(worker, self._orders, self._tell)
            worker.close()
            del worker
            _free()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # this should never happen; a worker that cannot train must not seem alive

    def _tell(self, kind: str, value: Any) -> None:
        if kind == "described":
            self._described.put(value)
            return
        state = getattr(value, "state", None)
        kept = None
        if self._held is not None and state is not None:
            kept = self._held.written.pop(state.file, None)  # from here on the driver has the state
        self._events.put((value, kept))

    def rest(self, seconds: float) -> None:
        """The study is over: forget it, and wait ``seconds`` for another study of the same program."""
        if self._reader is not None:
            self._reader.close()
        self._orders.put(("end", None))
        self._wanted.clear()
        threading.Thread(target=self._leave, args=(seconds,), daemon=True, name="resting").start()

    def _leave(self, seconds: float) -> None:
        """Give the device back, unless it is wanted."""
        from ray.util.placement_group import get_current_placement_group, remove_placement_group

        end = time.monotonic() + seconds
        while True:
            if self._wanted.wait(GLANCE):  # asked first: `others` may still see the study that ended, or see the next
                return
            if time.monotonic() > end or others():
                break
        with self._turn:
            if not self._wanted.is_set():
                remove_placement_group(get_current_placement_group())
                os._exit(0)

    def place(self, number: int, bundle: Bundle, states: Mapping[str, bytes]) -> None:
        """Take a bundle, with the states that its trials begin with where this worker cannot read them.

        Placements are numbered, because they may arrive in either thread.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._placed == number - 1)
            if self._held is not None:
                needed = {p.state.file for p in bundle.placements if p.state is not None}
                sent = {**self._held.sent, **states}
                self._held.sent = {name: one for name, one in sent.items() if name in needed}
            self._orders.put(("place", bundle))
            self._placed = number
            self._turn.notify()

    def place_and_listen(self, number: int, bundle: Bundle, states: Mapping[str, bytes], timeout: float) -> list[Told]:
        """Place and listen in one call: its answer already has the events of a trial that takes no time."""
        self.place(number, bundle, states)
        return self.events(timeout)

    def describe(self, configs: list[Any], train: bool, trials: list[int], variants: list[str]) -> Any:
        self._orders.put(("describe", (configs, train, trials, variants)))
        return self._described.get()

    def read(self) -> Reading:
        """The joules of its device by now."""
        assert self._reader is not None
        return self._reader.look()

    def events(self, timeout: float) -> list[Told]:
        """The events since the last call, as soon as there is one; none after the timeout, as a sign of life."""
        try:
            told = [self._events.get(timeout=timeout)]
        except queue.Empty:
            return []
        while not self._events.empty():
            told.append(self._events.get())
        return told


def _device(accelerated: bool) -> Device:
    """The device of this worker; Ray may count a GPU that is not there, and torch takes seconds to find that out."""
    if accelerated and any(map(_loads, ("libcuda.so.1", "libamdhip64.so"))):
        from penstock.executors.local import find_devices

        return find_devices()[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("cpu", "cpu", memory // (os.cpu_count() or 1))


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _free() -> None:
    """Give the accelerator's memory back, where there is an accelerator."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _changed(since: float) -> bool:
    """Whether a file that this process has imported was changed since."""
    for module in list(sys.modules.values()):
        try:
            if os.path.getmtime(getattr(module, "__file__", None) or "") > since:
                return True
        except OSError:
            continue
    return False
