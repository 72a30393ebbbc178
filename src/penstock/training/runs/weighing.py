"""The gain of a pack, timed on steps that count as training: each part alone, and some of them together.

First all parts train together until their steps are as fast as they will soon be. Then parts rest while others are
timed: each alone, then all together, and where all gain too little, two and more of them. What was timed holds on when
a part leaves, and of a newcomer only its own times are missing. Windows cost what the device could train meanwhile, so
there are few: parts that are alike are timed alone once, and where there are many parts, several join at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence

from penstock.speed.packing import gains, how_many, next_count, throughput
from penstock.training.runs.base import Run

STEPS, SECONDS = 20, 0.2
"""A window ends when each of its runs has taken so many steps, or so long."""
LAUNCHES, LONGEST = 4, 2.0
"""The device times runs that launch many steps at once: over so many launches, or fewer after so many seconds."""
TRIES = 5  # times that a window is begun anew because something came between two steps
SETTLING = 3.0  # seconds after which parts are timed although their steps may yet become faster


class Weighing:
    """Windows in which some of a pack's runs train and the others rest; ``sigmas`` has what was found, by count."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = list(runs)
        self.sigmas: dict[int, float] = {}
        self._alone: dict[Run, tuple[float, bool]] = {}  # seconds of a step, and whether by the host's clock
        self._alike: dict[Hashable, tuple[float, bool]] = {}  # the same, by the kind of run
        self._began: float | None = None  # of the window; None while its runs settle
        self._first = time.perf_counter()  # when the runs began to settle
        self._window: list[tuple[Run, int]] = []  # its runs, with the steps that each had taken before
        self._interrupted: dict[Run, int] = {}  # how often its runs had been interrupted before
        self._tries = 0  # of the window

    def join(self, run: Run) -> None:
        """Weigh one more run, after the others."""
        self.runs.append(run)
        self._settle()

    def leave(self, run: Run) -> None:
        """Weigh without a run; what was timed without it holds on."""
        if run not in self.runs:
            return
        place = self.runs.index(run)
        self.runs.remove(run)
        self.sigmas = {count: sigma for count, sigma in self.sigmas.items() if count <= place}
        if any(run is one for one, _ in self._window):
            self.rest()

    def rest(self) -> None:
        """End the window, or give it up."""
        for run, _ in self._window:
            run.put_off(False)
        self._began, self._window = None, []

    @property
    def done(self) -> bool:
        """Whether nothing is left to find out: all gain together, or the last that joined gained too little."""
        if any(run not in self._alone for run in self.runs):
            return False
        most = len(self.runs)
        if most < 2 or (most in self.sigmas and how_many({most: self.sigmas[most]}) == most):
            return True
        counts = [count for count in sorted(self.sigmas) if count < most]
        before = (counts[-2], self.sigmas[counts[-2]]) if len(counts) > 1 else (1, 1.0)
        lost = bool(counts) and not gains(before, counts[-1], self.sigmas[counts[-1]])
        return lost or (most in self.sigmas and self._next_count() == most)

    def _next_count(self) -> int:
        """How many of the runs to time together next: all, and if these gain too little, two and more of them."""
        most = len(self.runs)
        if not self.sigmas:
            return most
        return next_count(max((count for count in self.sigmas if count < most), default=1), most)

    @property
    def size(self) -> int:
        """How many of the runs are to stay together."""
        return how_many(self.sigmas)

    @property
    def active(self) -> Sequence[Run]:
        """The runs that train now: all until they settle, then each alone, all, and the first two, three, …"""
        return self.runs if self._began is None else [run for run, _ in self._window]

    def look(self) -> None:
        """Begin or end a window where it is time; to be called between two turns."""
        now = time.perf_counter()
        if self._began is None:
            if all(run.settled and run.steps for run in self.runs) or now - self._first > SETTLING:
                self._begin()
            return
        seconds = now - self._began
        by_device = {run: self._by_device(run, seconds) for run in self.active}
        by_host = [run for run, found in by_device.items() if found is None]
        taken = {run: run.steps - before for run, before in self._window}
        if min(taken.values()) < 1 or any(found is not None and math.isnan(found) for found in by_device.values()):
            return
        if seconds < SECONDS and any(taken[run] < STEPS for run in by_host):
            return
        for run in self.active:
            run.drain()
        seconds = time.perf_counter() - self._began
        self._tries += 1
        again = any(run.interrupted > self._interrupted[run] for run in by_host)
        if len(by_device) > 1:  # a step may have become another kind of step since its run was timed alone
            unlike = [run for run, found in by_device.items() if (found is None) != self._alone[run][1]]
            for run in unlike if self._tries < TRIES else ():
                self._forget(run)
            again = again or bool(unlike)
        if again and self._tries < TRIES:
            self.rest()
        else:
            self._end({run: (seconds / taken[run], True) if found is None else (found, False)
                       for run, found in by_device.items()})  # fmt: skip
        if not self.done:
            self._begin()

    def _by_device(self, run: Run, seconds: float) -> float | None:
        """The seconds of a step by the device's clock, NaN if it is too early; None where only the host's tells."""
        found = run.step_seconds(LAUNCHES if seconds < LONGEST else 1)
        return None if found is not None and math.isnan(found) and seconds > LONGEST else found

    def _forget(self, run: Run) -> None:
        """Time a run alone once more."""
        self._alone.pop(run, None)
        self._alike.pop(run.kind, None)

    def _settle(self) -> None:
        self.rest()
        self._first = time.perf_counter()

    def _begin(self) -> None:
        for run in self.runs:
            run.drain()
            if run not in self._alone and (known := self._alike.get(run.kind)) is not None:
                self._alone[run] = known
        if self.done:
            return
        alone = next(([run] for run in self.runs if run not in self._alone), None)
        chosen = alone or self.runs[: self._next_count()]
        for run in chosen:
            run.put_off(True)
        self._interrupted = {run: run.interrupted for run in chosen}
        self._began, self._window = time.perf_counter(), [(run, run.steps) for run in chosen]

    def _end(self, each: Mapping[Run, tuple[float, bool]]) -> None:
        """Keep the seconds of a step of each run in the window."""
        if len(each) == 1:
            ((run, step),) = each.items()
            self._alone[run] = step
            if run.kind is not None:
                self._alike[run.kind] = step
        else:
            self.sigmas[len(each)] = throughput(
                [self._alone[run][0] for run in each], [step for step, _ in each.values()]
            )
        self.rest()
        self._tries = 0
