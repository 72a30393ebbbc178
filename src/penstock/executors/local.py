"""One worker in the driver's own process, on one device."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

from penstock.bundle import Bundle, Description, Device, Gathering, Job
from penstock.executors.base import Executor, ExecutorEvent
from penstock.executors.metering import Metering, uuids
from penstock.training.random.generators import own_randomness
from penstock.training.worker import Worker
from penstock.trial import Config


class LocalExecutor(Executor):
    """Trains inside ``wait``, a step at a time; ``close`` gives the caller's random generators and threads back."""

    def __init__(self, job: Job) -> None:
        import torch

        device = find_devices()[0]
        self._devices = [device]
        self._worker = Worker(job, device.name, threads=device.threads or 1)
        self._meters: Metering = Metering.of(uuids(self._devices))
        self._began = time.monotonic()
        self._woken = False
        self._restore = ExitStack()
        self._restore.enter_context(own_randomness())
        self._restore.callback(_compute_with, torch.get_num_threads())

    def devices(self) -> Sequence[Device]:
        return self._devices

    def place(self, bundle: Bundle) -> None:
        self._meters.placed(bundle)
        self._worker.place(bundle)

    def wait(self, timeout: float | None = None) -> list[ExecutorEvent]:
        end = None if timeout is None else time.monotonic() + timeout
        while not self._worker.idle and not self._woken:
            event = self._worker.advance()
            if event is not None and not isinstance(event, Gathering):
                return [self._meters.took(event), *self._meters.due()]
            if due := self._meters.due():
                return list(due)
            if end is not None and time.monotonic() >= end:
                break
        self._woken = False
        return []

    def wake(self) -> None:
        self._woken = True

    def describe(
        self,
        configs: Sequence[Config],
        *,
        train: bool,
        trials: Sequence[int] = (),
        study: str = "",
        variants: Sequence[str] = (),
    ) -> list[Description]:
        return self._worker.describe_all(configs, train=train, trials=trials, variants=variants)

    def now(self) -> float:
        return time.monotonic() - self._began

    def close(self) -> None:
        self._meters.close()
        self._worker.close()
        self._restore.close()


def _compute_with(threads: int) -> None:
    import torch

    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def find_devices() -> list[Device]:
    """The CUDA devices of this machine, or else its CPU."""
    import torch

    from penstock.training.threads import most

    if torch.cuda.is_available():
        return [
            Device(f"cuda:{i}", torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory)
            for i in range(torch.cuda.device_count())
        ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [Device("cpu", "cpu", memory, threads=most())]
