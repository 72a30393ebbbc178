"""The loop of a worker's process, wherever it runs: it takes orders between two boundaries, and tells events."""

from __future__ import annotations

import pickle
import queue
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import trace

if TYPE_CHECKING:
    from penstock.training.worker import Worker

Order = tuple[str, Any]  # ("place", bundle), ("describe", (configs, train, trials, variants)) or ("end", None)


def serve(worker: Worker, orders: queue.SimpleQueue[Order], tell: Callable[[str, Any], None]) -> None:
    """Train the bundles that are placed, until the end is ordered; an idle worker waits for orders."""
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


def _described(
    worker: Worker, configs: list[Any], train: bool, trials: list[int], variants: Sequence[str] = ()
) -> object:
    try:
        return worker.describe_all(configs, train=train, trials=trials, variants=variants)
    except Exception as error:
        return _as_sent(error)


def _as_sent(error: Exception) -> Exception:
    """An error that can be pickled, with its traceback as text.

    An error of the user's own class may not be picklable: a RuntimeError that names the class takes its place.
    """
    text = trace(error)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__qualname__}: {error}")
    error.add_note(text)
    return error
