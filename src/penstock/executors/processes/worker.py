"""The program of a worker process: trains what the driver sends, tells what happens, and ends with the driver.

Run as a program, it is the fork server of its driver: it imports what workers need, and each worker is a fork of it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

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
        worker = Worker(job, device, threads=threads or 1)
    except Exception:
        connection.send(("broken", traceback.format_exc()))
        return
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, orders), daemon=True).start()
    serve(worker, orders, lambda kind, value: connection.send((kind, value)))


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
