"""A log with a line of every kind."""

from pathlib import Path

from penstock.log.events import (
    Asked,
    Devices,
    Dropped,
    Ended,
    Event,
    Failed,
    Measured,
    Opened,
    Placed,
    Reported,
    Saved,
    Stopped,
    Wrote,
)
from penstock.log.writer import Log
from penstock.trial import StateRef, Usage
from tests.report.studies import SETTINGS

STATE = StateRef("000001-1-9.pt", 1, 9, 100)
FIRST = Opened(SETTINGS)
ALL: list[Event] = [
    FIRST,
    Wrote(None, "key", {"a": [1, 2.5]}),
    Asked(0, {"lr": 0.1 + 0.2, "widths": [3, 4]}, 3, "rung 0", None),
    Asked(1, {"lr": 1e-300}, 9, "rung 1", (0, 3)),
    Devices(({"name": "cpu", "type": "cpu", "memory": 8, "node": "local", "price": None, "market": "spot"},), 1.25),
    Placed(1, 1, ("cpu",), "solo", STATE, 1.5),
    Measured("5f", "cpu", "scaling", {1: 0.5, 2: 0.25}, 2, "2 devices pay", "", 1.75),
    Saved(1, 1, STATE, 2.0),
    Reported(1, 1, 4, {"accuracy": float("inf"), "b": 0.1}, STATE, Usage(1.25, 9, None), 2.5),
    Reported(0, 1, 1, {"accuracy": 0.75, "b": 0.1}, None, Usage(1.25, 9, None), 2.5),
    Stopped(1, 1, 2.75),
    Failed(1, 1, "it broke\nbadly", True, 3.0),
    Dropped((0, 1)),
    Ended("done", 4.0),
]


def write(dir: Path, *events: Event) -> Path:
    """The path of a log with these events."""
    log = Log.open(dir)
    for event in events:
        log.append(event)
    log.close()
    return dir / "log.jsonl"
