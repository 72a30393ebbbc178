"""Whole studies for bench/packing.py: timed from `study.run` to its return, and read from their logs.

Every study begins with an empty profile store, so that all that it measures, captures and compiles is in its time.
Beside them is the loop that a user would write by hand.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch

import penstock as ps
from bench.steps import held, synchronize
from penstock.log import events, reader
from penstock.log.events import Failed, Measured, Placed, Reported
from penstock.trial import Config

Row = dict[str, Any]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Whole:
    """A study that ran, by the log that it left."""

    seconds: float  # from study.run to its return
    memory: int | None  # the most bytes of the device that it held
    log: tuple[events.Event, ...]

    @cached_property
    def reports(self) -> list[Reported]:
        return [event for event in self.log if isinstance(event, Reported)]

    @property
    def steps(self) -> int:
        """Steps of all models."""
        return sum(report.usage.steps for report in self.reports)

    @property
    def rate(self) -> float:
        """Model steps a second of the whole study."""
        return self.steps / self.seconds

    def later(self, unit: int) -> float | None:
        """Model steps a second after so many units, by the seconds of the device that trials are charged for."""
        those = [report.usage for report in self.reports if report.unit > unit]
        return sum(usage.steps for usage in those) / sum(usage.device_seconds for usage in those) if those else None

    @cached_property
    def taken(self) -> Counter[int]:
        """The steps of each trial."""
        found = Counter[int]()
        for report in self.reports:
            found[report.trial] += report.usage.steps
        return found

    def step_seconds(self, units: range) -> dict[int, float]:
        """The seconds of a step of each trial, by the seconds that it is charged for: the median of these units."""
        found = defaultdict[int, list[float]](list)
        for report in self.reports:
            if report.unit in units:
                found[report.trial].append(report.usage.device_seconds / report.usage.steps)
        if found.keys() != self.taken.keys():
            raise RuntimeError(f"{len(found)} of {len(self.taken)} trials reported units {[*units]}: {self.note}")
        return {trial: median(seconds) for trial, seconds in found.items()}

    def curves(self, metric: str = "loss") -> dict[tuple[int, int], float]:
        """The metric of each trial after each of its units."""
        return {(report.trial, report.unit): report.metrics[metric] for report in self.reports}

    @property
    def ended(self) -> str:
        """Why it ended: "done", or its deadline."""
        return next((event.reason for event in self.log if isinstance(event, events.Ended)), "cut off")

    @cached_property
    def failures(self) -> list[Failed]:
        return [event for event in self.log if isinstance(event, Failed)]

    @property
    def complete(self) -> bool:
        """Whether every trial trained to its end, or to where its algorithm dropped it."""
        return self.ended == "done" and not any(event.final for event in self.failures)

    @property
    def note(self) -> str:
        """How its trials were placed last, what went wrong, and what was measured about its packs."""
        last = {event.trial: event.mode for event in self.log if isinstance(event, Placed)}
        said = [", ".join(f"{count} {mode}" for mode, count in Counter(last.values()).most_common())]
        if self.failures:
            lost = len({event.trial for event in self.failures if event.final})
            said.append(f"{len(self.failures)} failures, {lost} trials lost: {self.failures[0].error.splitlines()[-1]}")
        said += [] if self.ended == "done" else [f"ended by {self.ended}"]
        packs = [event.reason for event in self.log if isinstance(event, Measured) and event.kind == "packing"]
        return "; ".join([*said, *packs[-1:]])


def whole(
    task: ps.Task, space: Any, algorithm: Any, *, trials: int | None = None, deadline: float, **how: Any
) -> Whole:
    """Run a study in a folder of its own; a study that takes too long ends at its deadline."""
    cuda = DEVICE.type == "cuda"
    before = held() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as dir:
        aim: Any = {"metric": "loss", "mode": "min", "algorithm": algorithm, "trials": trials}
        study = ps.Study(task, space, **aim, deadline=deadline, dir=dir, name="s")
        began = time.perf_counter()
        study.run(progress=False, **how)
        seconds = time.perf_counter() - began
        log = tuple(reader.read(Path(dir) / "s" / "log.jsonl"))
    memory = torch.cuda.max_memory_reserved() - before if cuda else None
    return Whole(seconds, memory, log)


def differs(one: Whole, other: Whole) -> float:
    """The greatest relative difference between the curves of two studies, of the reports that both have."""
    ours, theirs = one.curves(), other.curves()
    return max((_apart(ours[key], theirs[key]) for key in ours.keys() & theirs.keys()), default=math.nan)


def agreeing(one: Whole, other: Whole, within: float) -> float:
    """The part of the reports that both studies have in which they differ by no more than that, relative."""
    ours, theirs = one.curves(), other.curves()
    shared = ours.keys() & theirs.keys()
    return sum(_apart(ours[key], theirs[key]) <= within for key in shared) / max(1, len(shared))


def _apart(one: float, other: float) -> float:
    if math.isnan(one) or math.isnan(other):
        return 0.0 if math.isnan(one) and math.isnan(other) else math.inf
    return 0.0 if one == other else abs(one - other) / max(abs(one), abs(other))


def by_hand(task: ps.Task, config: Config, units: int) -> float:
    """The seconds of one trial in a plain loop, as its user would write it, with the data on the device."""
    synchronize(DEVICE)
    began = time.perf_counter()
    (x, y), (held_x, held_y) = ([part.to(DEVICE) for part in parts] for parts in task.data(config))
    model = task.model(config).to(DEVICE)
    optimizer = task.optimizer(model.parameters(), config)
    autocast = torch.autocast(DEVICE.type, torch.bfloat16, enabled=task.precision == "bf16")
    for _ in range(units):
        model.train()
        for rows in torch.split(torch.randperm(len(x), device=DEVICE), task.batch_size):
            optimizer.zero_grad()
            with autocast:
                loss = task.loss(model, (x[rows], y[rows]), config)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model.eval()
        found = defaultdict[str, float](float)
        with torch.no_grad(), autocast:
            for batch in zip(held_x.split(task.eval_batch_size), held_y.split(task.eval_batch_size), strict=True):
                for name, value in task.metrics(model, batch, config).items():
                    found[name] += value.item() * len(batch[0]) / len(held_x)
    synchronize(DEVICE)
    return time.perf_counter() - began


def attempted(row: Row, fill: Callable[[], Row]) -> Row:
    """The row with its figures, or a row that says why it has none."""
    try:
        return {**row, **fill()}
    except Exception as error:  # the row says why it failed, and the other rows go on
        said = str(error).strip().splitlines() or [""]
        return {**row, "note": f"fails: {type(error).__name__}: {said[0]}"}


class Clock:
    """The seconds that a part of the bench may take: rows that would begin later are left out, and counted."""

    def __init__(self, seconds: float) -> None:
        self._until = time.perf_counter() + seconds
        self.left_out = 0

    @property
    def left(self) -> float:
        return self._until - time.perf_counter()

    def over(self) -> bool:
        """Whether the time is over; the row that asks is left out then."""
        self.left_out += self.left <= 0
        return self.left <= 0


def reached(rows: Sequence[Row]) -> str:
    """How many of the rows with a goal have reached it."""
    aimed = [row for row in rows if row.get("reached") is not None]
    missed = [row for row in aimed if not row["reached"]]
    return f"{len(aimed) - len(missed)} of {len(aimed)} rows with a goal reach it"
