"""How many trials to train at once: measured on the bundle's own first steps, which count as training.

The first trial takes a few steps alone; the others are then trained in parts of 2, 4, 8, … rows, so that every trial
advances by the same steps whatever was measured. Each size is timed twice and its better time counts, because the first
time pays for allocations and for choosing kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.speed.sizes import best_size, marginal_benefit, most

ALONE = 3  # steps of the first trial alone
LARGEST = 512  # trials in a bundle: larger ones were never seen to gain


@dataclass
class Measuring:
    """The times of a training step at growing sizes, as far as they are known."""

    trials: int
    free: int  # bytes of memory that a bundle may take
    seconds: dict[int, float] = field(default_factory=dict)
    bytes: dict[int, int] = field(default_factory=dict)
    _times: dict[int, int] = field(default_factory=dict)

    def expect(self, trials: int) -> None:
        """Measure no more trials at once than are still here."""
        self.trials = min(self.trials, trials)

    def next(self, left: int) -> int:
        """How many of ``left`` rows to train next."""
        wanted = self._wanted()
        if wanted is None:  # the best size is known in the middle of a step
            return min(left, max(2, self.size))
        return wanted if wanted <= left else min(left, max(self._times, default=left))

    def took(self, size: int, seconds: float, bytes: int | None) -> None:
        """A step of ``size`` trials took so long, and so much memory at its peak."""
        self.seconds[size] = min(seconds, self.seconds.get(size, seconds))
        self._times[size] = self._times.get(size, 0) + 1
        if bytes is not None:
            self.bytes[size] = max(bytes, self.bytes.get(size, 0))

    @property
    def done(self) -> bool:
        return self._wanted() is None

    def _wanted(self) -> int | None:
        size = 2
        while size < 2 * self.trials:
            size = min(size, self.trials)
            if size > self.ceiling or self._hopeless():
                return None
            if self._times.get(size, 0) < 2:
                return size
            if size == self.trials:
                return None
            size *= 2
        return None

    def _hopeless(self) -> bool:
        """Whether two doublings in a row have made each trial's step slower."""
        known = sorted(size for size, times in self._times.items() if times > 1)
        return len(known) > 2 and all(
            marginal_benefit(self.seconds, a, b) < 0 for a, b in zip(known[-3:-1], known[-2:], strict=True)
        )

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
        size, alone = self.size, self.seconds.get(1)
        rates = {n: n / t for n, t in self.seconds.items()}
        best = max(rates, key=lambda n: rates[n])
        if size == 1:
            return f"alone a trial trains at {rates[1]:.0f} steps/s, {best} together at {rates[best]:.0f}: not worth it"
        gain = "" if alone is None else f", {rates[best] / rates[1]:.1f} times those of one alone"
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
