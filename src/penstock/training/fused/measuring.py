"""How many trials to train at once: measured on the bundle's own first steps, which count as training.

The first trial takes a few steps alone; the others are then trained in parts of 2, 4, 8, … rows, so that every trial
advances by the same steps whatever was measured. Each size is timed several times, and the median counts. The first
time is left out: it pays for the check of the way, for allocations and for choosing kernels. Sizes grow as long as the
cost of each further trial lets a larger one pay: a bundle's step has a fixed cost, so that a small size may lose alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from penstock.speed.sizes import UNKNOWN_SIZE, best_size, foreseen, most

ALONE = 5  # steps of the first trial alone
REPEATS = 4  # times that a size is timed, the first one included; nothing follows from fewer
UNLIKELY = 3.0  # trials that are so many times slower together than alone: another program had the machine meanwhile
LOST, LOSS = 10, 0.02  # steps alone, or the part of the certain steps, that may be lost on sizes that do not pay
LARGEST = 512  # trials in a bundle: larger ones were never seen to gain


def stopwatch(device: str) -> Callable[[], float]:
    """The clock that steps are timed by: where one thread of a CPU computes them, the time that this thread computes.

    Other programs on the machine do not lengthen it, and they are what makes the times of a CPU differ.
    """
    return time.thread_time if device.startswith("cpu") and torch.get_num_threads() == 1 else time.perf_counter


@dataclass
class Measuring:
    """The times of a training step at growing sizes, as far as they are known; ``steps`` are certain to follow."""

    trials: int
    free: int  # bytes of memory that a bundle may take
    steps: float = float("inf")
    clock: Callable[[], float] = time.perf_counter
    guess: int = 0  # the size that paid for trials of another batch size: it is timed first, and then larger ones
    bytes: dict[int, int] = field(default_factory=dict)
    _times: dict[int, list[float]] = field(default_factory=dict)

    def expect(self, trials: int) -> None:
        """Measure no more trials at once than are still here."""
        self.trials = min(self.trials, trials)

    def next(self, left: int) -> int:
        """How many of ``left`` rows to train next."""
        wanted = self._wanted()
        if wanted is None:  # the best size is known in the middle of a step
            return min(left, self.size if self.size > 1 else self._fastest)
        return wanted if wanted <= left else min(left, max((size for size in self._times if size > 1), default=left))

    def took(self, size: int, seconds: float, bytes: int | None) -> None:
        """A step of ``size`` trials took so long, and so much memory at its peak; a size of 1 is a trial alone.

        A single row of a bundle is no trial alone. It may be left over from larger parts, and comes after these.
        """
        if size == 1 and max(self._times, default=1) > 1:
            return
        self._times.setdefault(size, []).append(seconds)
        if bytes is not None:
            self.bytes[size] = max(bytes, self.bytes.get(size, 0))

    @property
    def seconds(self) -> dict[int, float]:
        """The seconds of a step by size: the median of its repeats."""
        return self._by(median)

    def _by(self, choose: Callable[[Sequence[float]], float]) -> dict[int, float]:
        known = {size: times for size, times in self._times.items() if size == 1 or len(times) >= REPEATS}
        return {size: choose(times[1:] or times) for size, times in known.items()}

    @property
    def checking(self) -> float:
        """The seconds by which the first step together was longer than its repeats: it has found and checked a way."""
        size, times = next(((size, times) for size, times in self._times.items() if size > 1), (1, [0.0]))
        if len(times) > 1:
            return max(0.0, times[0] - median(times[1:]))
        each = min((t / many for many, t in self.seconds.items() if many > 1), default=times[0] / size)
        return max(0.0, times[0] - size * each)

    @property
    def lost(self) -> float:
        """The seconds by which the timed steps were longer than the same steps of trials alone, at the least."""
        alone, known = self.seconds.get(1, 0.0), {s: t[1:] for s, t in self._times.items() if len(t) >= REPEATS}
        known.pop(self.guess, None)  # smaller sizes may pay all the same
        return sum(len(times) * max(0.0, min(times) - size * alone) for size, times in known.items())

    @property
    def cut_short(self) -> bool:
        """Whether more was lost on timing than is repaid."""
        return self.lost > max(LOST, LOSS * self.steps) * self.seconds.get(1, 0.0)

    @property
    def steady(self) -> bool:
        """Whether the least and the greatest times tell about the same as the medians: what noise tells is not kept."""
        chosen = [best_size(self._by(choose), self.ceiling) for choose in (min, median, max)]
        alike = (min(chosen) > 1 or max(chosen) == 1) and max(chosen) <= 2 * min(chosen)
        seconds = self.seconds
        likely = all(t <= UNLIKELY * size * seconds[1] for size, t in seconds.items() if 1 in seconds)
        return alike and likely and len(seconds) > 1

    @property
    def done(self) -> bool:
        return self._wanted() is None

    def _wanted(self) -> int | None:
        size = self._first
        while size < 2 * self.trials:
            size = min(size, self.trials)
            if size > self.ceiling or self.cut_short or self._hopeless():
                return None
            if not self._enough(size):
                return size
            if size == self.trials:
                return None
            size *= 2
        return None

    @property
    def _first(self) -> int:
        """The size to begin with: the guessed one, unless it was timed and does not pay."""
        guess = min(self.guess, self.trials, self.ceiling)
        alone = {size: seconds for size, seconds in self.seconds.items() if size in (1, guess)}
        return 2 if guess < 2 or (self._enough(guess) and best_size(alone, LARGEST) == 1) else guess

    def _enough(self, size: int) -> bool:
        return len(self._times.get(size, [])) >= REPEATS

    def _hopeless(self) -> bool:
        """Whether no size can pay, by what each further trial costs in the two largest sizes that were timed."""
        least = {**self._by(min), 1: self.seconds.get(1, 0.0)}  # other programs do not shorten a step
        return len(self.seconds) > 2 and best_size(foreseen(least, UNKNOWN_SIZE), self.ceiling) == 1

    @property
    def _fastest(self) -> int:
        """The size from 2 on at which each trial's step is shortest, as far as they were timed."""
        each = {size: seconds / size for size, seconds in self.seconds.items() if size > 1}
        return min(each, key=lambda size: each[size], default=2)

    @property
    def slope(self) -> tuple[int, int] | None:
        """Memory as a line over the size, from the two smallest sizes that were measured."""
        if len(self.bytes) < 2:
            return None
        (a, at_a), (b, at_b) = sorted(self.bytes.items())[:2]
        each = max(0, (at_b - at_a) // (b - a))
        return max(0, at_a - each * a), each

    @property
    def ceiling(self) -> int:
        """The most trials that fit."""
        return LARGEST if self.slope is None else max(1, min(LARGEST, most(self.slope, self.free)))

    @property
    def size(self) -> int:
        """The size to train with from now on."""
        return best_size(self.seconds, self.ceiling)

    def reason(self, way: str) -> str:
        """Why that size, for a person."""
        unkept = "" if self.steady else "; the next study measures again, as times varied"
        return reason(self.seconds, self.size, way) + unkept


def reason(seconds: Mapping[int, float], size: int, way: str) -> str:
    """Why a size, for a person.

    >>> reason({1: 0.01, 8: 0.02}, 8, "native")
    '8 trials together train at 400 steps/s, 4.0 times those of one alone (native)'
    """
    rates = {n: n / t for n, t in seconds.items()}
    best = max(rates, key=lambda n: rates[n])
    if size == 1:
        return f"alone a trial trains at {rates[1]:.0f} steps/s, {best} together at {rates[best]:.0f}: not worth it"
    gain = "" if 1 not in seconds else f", {rates[best] / rates[1]:.1f} times those of one alone"
    return f"{best} trials together train at {rates[best]:.0f} steps/s{gain} ({way})"


def parts(alike: list[tuple[int, int]], size: int | None, measuring: Measuring | None) -> Iterator[tuple[int, int]]:
    """Rows that take a step at once, at most ``size`` at a time; while measuring, of the sizes that are to be timed.

    >>> list(parts([(0, 3), (3, 4)], 2, None))
    [(0, 2), (2, 3), (3, 4)]
    """
    for start, last in alike:
        first = start
        while first < last:
            left = last - first
            count = min(left, size or left) if measuring is None else measuring.next(left)
            yield first, first + count
            first += count
