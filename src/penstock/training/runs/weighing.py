"""The gain of a pack, timed on steps that count as training: each part alone, and one more together after another.

Parts rest while others are timed. A newcomer takes its first steps alone, so its memory and its speed are its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.speed.packing import JOINS, how_many, throughput
from penstock.training.runs.base import Run

STEPS, SECONDS = 20, 0.2  # of a window: it ends when each of its parts has taken so many steps, or so long
SETTLING = 3.0  # seconds after which a part is timed although its step may yet become faster


class Weighing:
    """Windows in which some of a pack's runs train and the others rest; ``sigmas`` has what was found, by count."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self.sigmas: dict[int, float] = {}
        self._alone: dict[int, float] = {}  # seconds of a step, by the run's place
        self._began: float | None = None  # of the window; None while its runs settle
        self._first = time.perf_counter()  # when its runs began to settle
        self._steps = [run.steps for run in self.active]

    @property
    def done(self) -> bool:
        """Whether nothing is left to find out: all are together, or the last that joined gained too little."""
        if len(self._alone) < len(self.runs):
            return False
        counts = sorted(self.sigmas)
        before = self.sigmas.get(counts[-1] - 1, 1.0) if counts else 1.0
        lost = bool(counts) and self.sigmas[counts[-1]] < JOINS * before
        return lost or len(self.runs) < 2 or (bool(counts) and counts[-1] == len(self.runs))

    @property
    def size(self) -> int:
        """How many of the runs are to stay together."""
        return how_many(self.sigmas)

    @property
    def active(self) -> list[Run]:
        """The runs that train now: each alone first, and then the first two, three, …"""
        if len(self._alone) < len(self.runs):
            return [self.runs[len(self._alone)]]
        return self.runs[: 2 + len(self.sigmas)]

    def look(self) -> None:
        """Begin or end a window where it is time; to be called between two turns."""
        now = time.perf_counter()
        if self._began is None:
            begun = all(run.settled for run in self.active) and min(self._taken()) > 0  # a first step is slow
            if begun or now - self._first > SETTLING:
                self._begin()
            return
        taken = self._taken()
        if min(taken) < 1 or (min(taken) < STEPS and now - self._began < SECONDS):
            return
        for run in self.active:
            run.wait()
        self._end(time.perf_counter() - self._began, taken)

    def _taken(self) -> list[int]:
        return [run.steps - before for run, before in zip(self.active, self._steps, strict=True)]

    def _begin(self) -> None:
        for run in self.active:
            run.wait()
        self._began, self._steps = time.perf_counter(), [run.steps for run in self.active]

    def _end(self, seconds: float, taken: Sequence[int]) -> None:
        active, each = self.active, [seconds / steps for steps in taken]
        if len(active) == 1 and len(self._alone) < len(self.runs):
            self._alone[len(self._alone)] = each[0]
        else:
            self.sigmas[len(active)] = throughput([self._alone[i] for i in range(len(active))], each)
        self._began, self._first = None, time.perf_counter()
        if not self.done:
            self._steps = [run.steps for run in self.active]
