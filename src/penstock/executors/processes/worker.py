"""The program of a worker process: trains what the driver sends, tells what happens, and ends with the driver."""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from penstock.executors.serving import Order, serve


def main(fd: int) -> None:
    connection: Connection[Any, Any] = Connection(fd)
    device, threads = connection.recv()
    try:
        job = cloudpickle.loads(connection.recv_bytes())
        import torch

        from penstock.training.worker import Worker

        if threads is not None:
            torch.set_num_threads(threads)
        if device.startswith("cuda"):
            torch.cuda.set_device(device)  # what a task means by "cuda", and where NCCL sends from
        worker = Worker(job, device)
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
    main(int(sys.argv[1]))
