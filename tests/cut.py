"""Studies as SIGKILL would leave them after each line of their logs, and what they decide once they are resumed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import penstock as ps
from penstock.algorithms.base import Algorithm
from penstock.log.events import Asked, Dropped, Event, Failed, Reported
from penstock.log.reader import read
from penstock.log.writer import Log

ALGORITHMS: dict[str, tuple[Callable[[], Algorithm], int | None]] = {  # each with its number of trials
    "Random": (lambda: ps.Random(budget=2), 5),
    "Grid": (lambda: ps.Grid(budget=2), None),
    "SuccessiveHalving": (lambda: ps.SuccessiveHalving(max_budget=4, reduction=2), 6),
    "Hyperband": (lambda: ps.Hyperband(max_budget=4, reduction=2), None),
    "ASHA": (lambda: ps.ASHA(max_budget=4, reduction=2, concurrency=4), 9),
    "BOHB": (lambda: ps.BOHB(max_budget=4, reduction=2, concurrency=4), 10),
    "SyncBOHB": (lambda: ps.SyncBOHB(max_budget=4, reduction=2), None),
    "PBT": (lambda: ps.PBT(population=4, max_budget=4, interval=2), None),
}


def study(algorithm: str, task: object, dir: Path, seed: int = 0) -> ps.Study:
    """A small study of a task whose one parameter is ``lr``."""
    make, trials = ALGORITHMS[algorithm]
    space = {"lr": ps.grid([0.01, 0.03, 0.1, 0.3]) if algorithm == "Grid" else ps.loguniform(1e-3, 1)}
    return ps.Study(
        task, space, metric="loss", mode="min", algorithm=make(), trials=trials, seed=seed, name="s", dir=dir
    )


@contextmanager
def copied(dir: Path, to: Path, after: Collection[int]) -> Iterator[None]:
    """Copy the study in ``dir`` to a folder of ``to`` after each of some lines: so SIGKILL would leave it there."""
    append, lines = Log.append, 0

    def appended(log: Log, event: Event) -> None:
        nonlocal lines
        append(log, event)
        lines += 1
        if lines in after:
            shutil.copytree(dir, to / str(lines))

    with mock.patch.object(Log, "append", appended):
        yield


def decisions(dir: Path) -> list[tuple[Any, ...]]:
    """What the study in a folder asked for, reported and dropped, in its order and without times."""
    told: list[tuple[Any, ...]] = []
    for event in read(dir / "s" / "log.jsonl"):
        if isinstance(event, Asked):
            told.append(("asked", event.trial, event.config, event.budget, event.group, event.start_from))
        elif isinstance(event, Reported):
            told.append(("reported", event.trial, event.unit))
        elif isinstance(event, Failed) and event.final:
            told.append(("failed", event.trial))
        elif isinstance(event, Dropped):
            told.append(("dropped", *event.trials))
    return told


def curves(dir: Path) -> dict[tuple[int, int], dict[str, float]]:
    """Every report of the study in a folder, by trial and unit; a report that came twice is an error."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for event in read(dir / "s" / "log.jsonl"):
        if isinstance(event, Reported):
            assert (event.trial, event.unit) not in found, f"trial {event.trial} reported unit {event.unit} twice"
            found[event.trial, event.unit] = event.metrics
    return found
