"""What a unit of a trial takes at a share of the devices, relative to one device of its own: h(w) of Fluid §4.2.2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import StudyError
from penstock.speed.sizes import best_size


@dataclass(frozen=True)
class Curve:
    """What a unit takes at a share, relative to a device of its own.

    ``sharing`` is that of each of p = 1, 2, … c trials that share a device, ``scaling`` that of one trial on
    w = 1, 2, … d devices; both begin with 1. Their lengths are Fluid's limits c and d. ``tried`` are the numbers of
    devices whose times are known, where not all are: the others are interpolated, which is good enough to predict by
    and not to choose by.

    >>> curve = Curve(sharing=(1, 1.1, 1.5), scaling=(1, 0.55))
    >>> curve.at(1 / 3), curve.at(1), curve.at(2)
    (1.5, 1, 0.55)
    """

    sharing: tuple[float, ...] = (1.0,)
    scaling: tuple[float, ...] = (1.0,)
    tried: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(not 1 <= count <= len(self.scaling) for count in self.tried):
            raise StudyError(
                f"A curve's tried numbers of devices must be from 1 to {len(self.scaling)}, which is as far as its "
                f"scaling goes; got {self.tried}."
            )
        for name, times in (("sharing", self.sharing), ("scaling", self.scaling)):
            if not times or times[0] != 1 or not all(0 < t < math.inf for t in times):
                raise StudyError(
                    f"A curve's {name} must be finite times above 0, relative to the first, which is 1; got {times}."
                )

    @property
    def most(self) -> int:
        """The most trials that may share a device: c."""
        return len(self.sharing)

    @property
    def widest(self) -> int:
        """The most devices that a trial may have: d."""
        return len(self.scaling)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of devices that a trial may be given: those whose times are known, rising from 1.

        >>> Curve(scaling=(1, 0.6, 0.5, 0.4), tried=(2, 4)).counts, Curve(scaling=(1, 0.6, 0.5)).counts
        ((1, 2, 4), (1, 2, 3))
        """
        return tuple(sorted({1, *self.tried})) if self.tried else tuple(range(1, len(self.scaling) + 1))

    def at(self, share: float) -> float:
        """The relative time of a unit at 1/p of a device, or on as many whole devices.

        Beyond its end a curve goes on by its last ratio. One that says nothing of sharing has p trials take p times as
        long; one that says nothing of spreading gains nothing by it.

        >>> Curve(sharing=(1, 2)).at(1 / 3), Curve().at(1 / 3), Curve().at(3)
        (4.0, 3, 1)
        """
        times, count = (self.sharing, round(1 / share)) if share < 1 else (self.scaling, round(share))
        if count <= len(times):
            return times[count - 1]
        if len(times) == 1:
            return count if share < 1 else 1
        return times[-1] * (times[-1] / times[-2]) ** (count - len(times))

    @property
    def alpha(self) -> float:
        """Fluid's α: h(1/p) is about αᵖ⁻¹, fitted to all p; 1 where nothing shares."""
        return _rate([(p, math.log(t)) for p, t in enumerate(self.sharing)])

    @property
    def beta(self) -> float:
        """Fluid's β: h(w) is about βʷ⁻¹ / w, fitted to all w; 1 where nothing spreads."""
        return _rate([(w, math.log(t * (w + 1))) for w, t in enumerate(self.scaling)])

    @classmethod
    def of(cls, alpha: float = 1.0, most: int = 1, beta: float = 1.0, widest: int = 1) -> Curve:
        """The curve of Fluid §4.2.2: h(1/p) = αᵖ⁻¹ for p up to ``most``, h(w) = βʷ⁻¹ / w for w up to ``widest``.

        >>> Curve.of(alpha=1.5, most=2, beta=1.0, widest=2)
        Curve(sharing=(1.0, 1.5), scaling=(1.0, 0.5), tried=())
        """
        if most < 1 or widest < 1:
            raise StudyError(f"A curve goes to at least one trial and one device, got most={most}, widest={widest}.")
        sharing = tuple(alpha**p for p in range(most))
        return cls(sharing, tuple(beta**w / (w + 1) for w in range(widest)))


def measured(sharing: Mapping[int, float], scaling: Mapping[int, float]) -> tuple[Curve, list[str]]:
    """The curve through measured seconds, by the number of trials on a device and of devices of a trial.

    Between measured counts the logarithm of the time is linear in that of the count. A unit takes no less where more
    share a device and no more on more devices: what says otherwise is averaged with its neighbours. c is where the
    marginal benefit of sharing falls below its threshold (``best_size``), d where more devices save nothing any more.
    What was smoothed or cut is said.

    >>> measured({1: 2.0, 2: 2.2, 4: 8.8}, {1: 2.0, 2: 1.2, 4: 1.5})
    (Curve(sharing=(1.0, 1.1), scaling=(1.0, 0.6), tried=()), \
['sharing stops to pay at 2 trials a device, of 4 tried', \
'scaling stops to pay at 2 devices, of 4 tried'])
    """
    said: list[str] = []
    below, above = _usable(sharing), _usable(scaling)
    smooth = _monotone(below, 1)
    if any(abs(smooth[p] / below[p] - 1) > 0.02 for p in below):
        said.append("sharing was measured to get faster with more trials in places, and was smoothed")
    most = best_size(smooth, max(smooth, default=1)) if smooth else 1
    if below and most < max(below):
        said.append(f"sharing stops to pay at {_count(most, 'trial')} a device, of {max(below)} tried")
    best = min(above, key=lambda w: (above[w], w), default=1)
    if above and best < max(above):
        said.append(f"scaling stops to pay at {_count(best, 'device')}, of {max(above)} tried")
    falling = _monotone({w: t for w, t in above.items() if w <= best}, -1)
    if any(abs(falling[w] / above[w] - 1) > 0.02 for w in falling):
        said.append("scaling was measured to get slower with more devices in places, and was smoothed")
    tried = () if len(falling) in (0, best) else tuple(falling)  # where all were, it needs no saying
    return Curve(_through(smooth, most), _through(falling, best), tried), said


def doublings(most: int) -> list[int]:
    """1, 2, 4, … and the most itself.

    >>> doublings(6)
    [1, 2, 4, 6]
    """
    return [*(2**i for i in range((most - 1).bit_length())), most]


def _usable(seconds: Mapping[int, float]) -> dict[int, float]:
    """The times that are times; none where there is no time of one trial on one device to compare with."""
    usable = {count: t for count, t in sorted(seconds.items()) if count >= 1 and 0 < t < math.inf}
    return usable if 1 in usable else {}


def _monotone(seconds: Mapping[int, float], sign: int) -> dict[int, float]:
    """Neighbours out of order are replaced by their mean until none are (isotonic regression of the logarithms)."""
    blocks: list[tuple[float, int]] = []  # mean, how many
    for t in seconds.values():
        blocks.append((sign * math.log(t), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (b, n), (a, m) = blocks.pop(), blocks.pop()
            blocks.append(((a * m + b * n) / (m + n), m + n))
    means = [mean for mean, count in blocks for _ in range(count)]
    return {count: math.exp(sign * mean) for count, mean in zip(seconds, means, strict=True)}


def _through(seconds: Mapping[int, float], last: int) -> tuple[float, ...]:
    """Relative times at 1, 2, … ``last``, interpolated between those measured."""
    if not seconds:
        return (1.0,)
    counts = sorted(seconds)
    times = []
    for count in range(1, last + 1):
        left = max(n for n in counts if n <= count)
        right = min((n for n in counts if n >= count), default=left)
        same = seconds[left] == seconds[right]  # as after smoothing: rounding must not make them differ in between
        part = 0.0 if same else math.log(count / left) / math.log(right / left)
        times.append(seconds[left] ** (1 - part) * seconds[right] ** part / seconds[1])
    return tuple(round(t, 12) for t in times)


def _rate(points: Sequence[tuple[int, float]]) -> float:
    over = sum(x * x for x, _ in points)
    return math.exp(sum(x * y for x, y in points) / over) if over else 1.0


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
