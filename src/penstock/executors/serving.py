"""What a worker's own program does, wherever it runs: take orders between two boundaries, and tell what happens."""

from __future__ import annotations

import queue
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.training.worker import Worker

Order = tuple[str, Any]  # ("place", bundle), ("describe", (configs, train)) or ("end", None)


def serve(worker: Worker, orders: queue.SimpleQueue[Order], tell: Callable[[str, Any], None]) -> None:
    """Train what is placed, until the end is ordered; an idle worker waits for orders."""
    while True:
        while worker.idle or not orders.empty():
            kind, value = orders.get()
            if kind == "end":
                return
            if kind == "place":
                worker.place(value)
            else:
                tell("described", _described(worker, *value))
        event = worker.advance()
        if event is not None:
            tell("event", event)


def _described(worker: Worker, configs: list[Any], train: bool) -> object:
    try:
        return [worker.describe(config, train=train) for config in configs]
    except Exception as error:
        error.add_note(traceback.format_exc())  # a traceback does not travel, its text does
        return error
