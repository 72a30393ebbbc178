"""The time of a trial's unit at a share of the devices, relative to one device of its own: h(w) of Fluid §4.2.2."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import StudyError
from penstock.numeric import finite, shown
from penstock.speed.sizes import best_size


@dataclass(frozen=True)
class Curve:
    """The time of a unit at a share, relative to a device of its own.

    ``sharing`` has the time of a unit where p = 1, 2, … c trials share a device; ``scaling`` has the time on
    w = 1, 2, … d devices. Both begin with 1. Their lengths are Fluid's limits c and d. ``tried`` are the numbers of
    devices that were measured, where not all were. The times between them are interpolated: they serve to predict, but
    no number of devices is chosen on one.

    >>> curve = Curve(sharing=(1, 1.1, 1.5), scaling=(1, 0.55))
    >>> curve.at(1 / 3), curve.at(1), curve.at(2)
    (1.5, 1, 0.55)
    """

    sharing: tuple[float, ...] = (1.0,)
    scaling: tuple[float, ...] = (1.0,)
    tried: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("sharing", "scaling"):
            times = _numbers(getattr(self, name))
            if not times or times[0] != 1 or not all(t is not None and t > 0 for t in times):
                raise StudyError(
                    f"A curve's {name} must be finite times above 0, relative to the first, which is 1; got "
                    f"{shown(getattr(self, name))}."
                )
            object.__setattr__(self, name, times)
        tried = _numbers(self.tried)
        if tried is None or any(not isinstance(n, int) or not 1 <= n <= len(self.scaling) for n in tried):
            raise StudyError(
                f"A curve's tried numbers of devices must be from 1 to {len(self.scaling)}, which is as far as its "
                f"scaling goes; got {shown(self.tried)}."
            )
        object.__setattr__(self, "tried", tried)

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
        """The numbers of devices that a trial may be given: those with a measured time, rising from 1.

        >>> Curve(scaling=(1, 0.6, 0.5, 0.4), tried=(2, 4)).counts, Curve(scaling=(1, 0.6, 0.5)).counts
        ((1, 2, 4), (1, 2, 3))
        """
        return tuple(sorted({1, *self.tried})) if self.tried else tuple(range(1, len(self.scaling) + 1))

    def at(self, share: float) -> float:
        """The relative time of a unit at 1/p of a device, or on as many whole devices.

        Beyond its end ``sharing`` goes on by its last ratio; where it has only the 1, p trials take p times as long.
        Beyond the end of ``scaling`` more devices gain nothing, because a curve is cut where they no longer pay.

        >>> Curve(sharing=(1, 2)).at(1 / 3), Curve().at(1 / 3), Curve(scaling=(1, 0.6)).at(8)
        (4.0, 3, 0.6)
        """
        if share >= 1:
            return self.scaling[min(round(share), self.widest) - 1]
        times, count = self.sharing, round(1 / share)
        if count <= len(times):
            return times[count - 1]
        if len(times) == 1:
            return count
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
    """The curve through measured seconds, by the number of trials on a device and by the number of a trial's devices.

    Between measured counts the logarithm of the time is linear in the logarithm of the count. A unit takes no less
    time where more trials share a device, and no more time on more devices: a measurement that contradicts this is
    averaged with its neighbours. The limit c is where the marginal benefit of sharing falls below its threshold
    (``best_size``), the limit d where more devices save no more time. The second value says what was smoothed or cut.

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
    tried = () if len(falling) in (0, best) else tuple(falling)  # empty where every count was measured
    return Curve(_through(smooth, most), _through(falling, best), tried), said


def doublings(most: int) -> list[int]:
    """1, 2, 4, … and the most itself.

    >>> doublings(6)
    [1, 2, 4, 6]
    """
    return [*(2**i for i in range((most - 1).bit_length())), most]


def _usable(seconds: Mapping[int, float]) -> dict[int, float]:
    """The finite times above 0; none at all where the time of one trial on one device is missing."""
    usable = {count: t for count, t in sorted(seconds.items()) if count >= 1 and 0 < t < math.inf}
    return usable if 1 in usable else {}


def _monotone(seconds: Mapping[int, float], sign: int) -> dict[int, float]:
    """The times with neighbours out of order replaced by their mean (isotonic regression of the logarithms)."""
    blocks: list[tuple[float, int]] = []  # the mean and the number of the times in each block
    for t in seconds.values():
        blocks.append((sign * math.log(t), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (b, n), (a, m) = blocks.pop(), blocks.pop()
            blocks.append(((a * m + b * n) / (m + n), m + n))
    means = [mean for mean, count in blocks for _ in range(count)]
    return {count: math.exp(sign * mean) for count, mean in zip(seconds, means, strict=True)}


def _through(seconds: Mapping[int, float], last: int) -> tuple[float, ...]:
    """Relative times at 1, 2, … ``last``, interpolated between the measured ones."""
    if not seconds:
        return (1.0,)
    counts = sorted(seconds)
    times = []
    for count in range(1, last + 1):
        left = max(n for n in counts if n <= count)
        right = min((n for n in counts if n >= count), default=left)
        same = seconds[left] == seconds[right]  # after smoothing; rounding must not make the times between differ
        part = 0.0 if same else math.log(count / left) / math.log(right / left)
        times.append(seconds[left] ** (1 - part) * seconds[right] ** part / seconds[1])
    return tuple(round(t, 12) for t in times)


def _rate(points: Sequence[tuple[int, float]]) -> float:
    over = sum(x * x for x, _ in points)
    return math.exp(sum(x * y for x, y in points) / over) if over else 1.0


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _numbers(values: object) -> tuple[float | None, ...] | None:
    """The plain numbers of a list, with None for each value that is no finite number; None where there is no list."""
    return tuple(map(finite, values)) if isinstance(values, Iterable) else None
