"""The program of a worker process: trains what the driver sends, tells what happens, and ends with the driver.

Run as a program, it is the fork server of its driver: it imports what workers need, and each worker is a fork of it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from penstock.bundle import TrialFailed
from penstock.executors.processes.mps import under_mps
from penstock.executors.processes.server import fork_on_request
from penstock.executors.serving import Order, serve

NEEDED = (  # by any worker, as soon as it trains
    "torch._dynamo",  # which torch imports for a trial on several devices
    "penstock.training.check",
    "penstock.training.checkpoint",
    "penstock.training.data",
    "penstock.training.fused.bundle",
    "penstock.training.loop",
    "penstock.training.runs.gang",
    "penstock.training.worker",
)


def main(connection: Connection[Any, Any]) -> None:
    device, threads = connection.recv()
    try:
        job = cloudpickle.loads(connection.recv_bytes())
        import numpy
        import torch

        from penstock.training.worker import Worker

        numpy.random.seed()  # as in a new process: no two workers draw the same by accident
        if threads is not None:
            torch.set_num_threads(threads)
        if device.startswith("cuda"):
            torch.cuda.set_device(device)  # what a task means by "cuda", and where NCCL sends from
            torch.cuda.synchronize()  # MPS refuses a process here, before it has any trial
        worker = Worker(job, device, threads=threads or 1)
    except Exception:
        connection.send(("broken", traceback.format_exc()))
        return
    linked = under_mps(os.environ)
    if linked:
        connection.send(("ready", None))
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, orders), daemon=True).start()
    broken = partial(_broken, device)
    serve(worker, orders, teller(connection.send, broken, os._exit, linked=linked))


def teller(
    send: Callable[[tuple[str, Any]], None],
    broken: Callable[[], bool],
    leave: Callable[[int], None],
    *,
    linked: bool,
) -> Callable[[str, Any], None]:
    """What tells the driver of events, and leaves where an error has ``broken`` the device for this process.

    Under MPS such an error is told to all of the device's processes, whichever of them made it. So this trial is not
    said to have failed, but to have died, as the other processes' trials do.
    """

    def tell(kind: str, value: Any) -> None:
        if not isinstance(value, TrialFailed) or value.died or not broken():
            send((kind, value))
            return
        send(("lost", value.error) if linked else (kind, value))
        leave(1)

    return tell


def _broken(device: str) -> bool:
    if not device.startswith("cuda"):
        return False
    import torch

    try:
        torch.cuda.synchronize(device)
    except Exception:
        return True
    return False


def _listen(connection: Connection[Any, Any], orders: queue.SimpleQueue[Order]) -> None:
    try:
        while True:
            orders.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)  # the driver is gone, and so is every reason to train


if __name__ == "__main__":
    for name in NEEDED:
        import_module(name)
    main(fork_on_request(int(sys.argv[1])))
