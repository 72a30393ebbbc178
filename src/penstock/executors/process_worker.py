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


def main(fd: int) -> None:
    connection: Connection[Any, Any] = Connection(fd)
    device, threads = connection.recv()
    try:
        job = cloudpickle.loads(connection.recv_bytes())
        import torch

        from penstock.training.worker import Worker

        if threads is not None:
            torch.set_num_threads(threads)
        worker = Worker(job, device)
    except Exception:
        connection.send(("broken", traceback.format_exc()))
        return
    inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    while True:
        while worker.idle or not inbox.empty():
            kind, value = inbox.get()
            if kind == "place":
                worker.place(value)
            else:
                connection.send(("described", _describe(worker, *value)))
        event = worker.advance()
        if event is not None:
            connection.send(("event", event))


def _describe(worker: Any, configs: list[Any], train: bool) -> object:
    try:
        return [worker.describe(config, train=train) for config in configs]
    except Exception as error:
        error.add_note(traceback.format_exc())  # a traceback does not travel, its text does
        return error


def _listen(connection: Connection[Any, Any], inbox: queue.SimpleQueue[tuple[str, Any]]) -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)  # the driver is gone, and so is every reason to train


if __name__ == "__main__":
    main(int(sys.argv[1]))
