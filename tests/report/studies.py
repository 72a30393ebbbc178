"""Logs of small studies, as the engine would write them."""

from __future__ import annotations

from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

from penstock.domains import choice, loguniform
from penstock.log.events import (
    VERSION,
    Asked,
    Dropped,
    Ended,
    Event,
    Failed,
    Measured,
    Opened,
    Placed,
    Reported,
)
from penstock.log.history import History
from penstock.log.writer import Log
from penstock.space import Space
from penstock.trial import StateRef, Usage, plain

SPACE = {"lr": loguniform(1e-3, 1), "widths": choice([[64, 32], [8]]), "[red]act": ":smile:"}
SETTINGS: dict[str, Any] = {
    "log": VERSION,
    "penstock": "0.1.0",
    "name": "digits-1",
    "file": None,
    "task": "Digits",
    "source": "0",
    "space": plain(Space.of(SPACE).describe()),
    "metric": "accuracy",
    "mode": "max",
    "algorithm": "ASHA(max_budget=3, reduction=3)",
    "max_budget": 3,
    "sampler": None,
    "seed": 0,
    "trials": 5,
    "deadline": None,
    "target": None,
    "changed": [],
}


def reported(trial: int, unit: int, clock: float, *, state: StateRef | None = None, **metrics: float) -> Reported:
    return Reported(trial, 1, unit, metrics, state, Usage(device_seconds=0.5, steps=10), clock)


def story(**settings: Any) -> Iterator[Event]:
    """Trial 0 is best and finished, 1 was better and diverged, 2 failed, 3 runs, 4 waits."""
    yield Opened({**SETTINGS, **settings})
    for trial, lr in enumerate((0.1, 0.5, 0.9, 0.01, 0.02)):
        config = {"lr": lr, "widths": [64, 32], "[red]act": ":smile:"}
        yield Asked(trial, config, 3 if trial in (0, 2) else 1, "rung 0")
    for trial in range(4):
        yield Placed(trial, 1, ("cpu",), "solo", None, 0.5)
    yield reported(0, 1, 1.0, accuracy=0.5, loss=1.0)
    yield reported(0, 2, 2.0, accuracy=0.875, loss=0.5)
    yield reported(1, 1, 2.5, accuracy=0.99, loss=0.1)
    yield reported(0, 3, 3.0, accuracy=0.75, loss=0.6)
    yield Dropped((0,))
    yield Asked(1, {"lr": 0.5, "widths": [64, 32], "[red]act": ":smile:"}, 3, "rung 1")
    yield Placed(1, 2, ("cpu",), "solo", None, 3.25)
    yield reported(1, 2, 3.5, accuracy=nan, loss=nan)
    yield Failed(2, 1, 'Traceback:\n  File "x.py"\nValueError: too, "large" [bold]', True, 4.0)


def fused(size: int = 4) -> Iterator[Event]:
    """Trials 0 to 3 run: two of a signature that pays to be fused, one of another that does not, one without."""
    yield Opened(SETTINGS)
    for trial in range(4):
        yield Asked(trial, {"lr": 0.1}, 3, "rung 0")
    for trial in range(4):
        yield Placed(trial, 1, ("cpu",), "fused" if trial < 2 else "solo", None, 0.5)
    yield Measured("a" * 24, "cpu", "sharing", {1: 0.5, 2: 0.6}, size, "2 trials together pay", "native", 1.0)
    yield Measured("b" * 24, "cpu", "sharing", {}, 1, "native: item at [x].py:3: it depends on one trial", "solo", 1.5)


def ended(reason: str = "done", clock: float = 5.0, **settings: Any) -> Iterator[Event]:
    yield from story(**settings)
    yield reported(3, 1, 4.5, accuracy=0.25, loss=2.0)
    yield reported(4, 1, 4.75, accuracy=0.125, loss=2.5)
    yield Ended(reason, clock)


def history(**settings: Any) -> History:
    return History.of(story(**settings))


def write(dir: Path, name: str, events: Iterator[Event]) -> Path:
    """The folder of a study with these events in its log."""
    log = Log.open(dir / name)
    for event in events:
        log.append(event)
    log.close()
    return dir / name
