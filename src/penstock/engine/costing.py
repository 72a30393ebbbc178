"""Time weighed against energy (Zeus eq. 2): what trials draw, and which sizes, widths and devices cost least by it.

A cost is given as seconds: those that would cost as much at the device's greatest power. With ``eta`` 0 they are the
seconds themselves, and nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.speed.sizes import best_size
from penstock.trial import Usage

Kind = tuple[str, str]  # signature and device type


@dataclass
class _Drawn:
    """What trials of a signature drew on a device type, in bundles of one size."""

    joules: float = 0.0
    seconds: float = 0.0
    units: int = 0

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


@dataclass
class Costs:
    """Learns what trials draw from their reports, and weighs seconds by it.

    >>> costs = Costs(eta=1.0)
    >>> costs.recall("mlp", "H200", {0: 700.0, 1: 400.0, 8: 600.0})
    >>> costs.size("mlp", "H200", {1: 1.0, 2: 1.2, 4: 1.6, 8: 2.8}, 8)
    4
    """

    eta: float = 0.0
    _drawn: dict[Kind, dict[int, _Drawn]] = field(default_factory=dict)
    _known: dict[Kind, dict[int, float]] = field(default_factory=dict)  # watts by size, of an earlier study
    _most: dict[str, float] = field(default_factory=dict)  # MAXPOWER by type

    def metered(self, type: str, most: float) -> None:
        """A device of a type can draw so many watts."""
        self._most[type] = max(self._most.get(type, 0.0), most)

    def observed(self, signature: str, type: str, size: int, usage: Usage) -> None:
        """A trial trained a unit in a bundle of a size."""
        if usage.joules and usage.device_seconds > 0:
            drawn = self._drawn.setdefault((signature, type), {}).setdefault(size, _Drawn())
            drawn.joules, drawn.seconds = drawn.joules + usage.joules, drawn.seconds + usage.device_seconds
            drawn.units += 1

    def recall(self, signature: str, type: str, watts: Mapping[int, float]) -> None:
        """Take an earlier study's watts by bundle size; at 0 is the greatest power of the device."""
        self._known[signature, type] = {size: one for size, one in watts.items() if size > 0}
        self.metered(type, watts.get(0, 0.0))

    def watts(self, signature: str, type: str) -> dict[int, float]:
        """What a device draws by bundle size, and at 0 its greatest power: a profile's table; empty where unknown."""
        kind = signature, type
        drawn = {size: one.watts for size, one in self._drawn.get(kind, {}).items()}
        found = {**self._known.get(kind, {}), **drawn}
        return {0: self._max_power(type), **found} if found else {}

    def joules(self, signature: str, type: str) -> dict[int, float]:
        """The joules of a trial's unit by bundle size: a profile's table."""
        drawn = self._drawn.get((signature, type), {})
        return {size: one.joules / one.units for size, one in sorted(drawn.items())}

    def size(self, signature: str, type: str, seconds: Mapping[int, float], size: int) -> int:
        """The bundle size of least cost, of those that were timed; the ``size`` of least time without known power."""
        watts = self.watts(signature, type)
        if not self.eta or not watts or 1 not in seconds:
            return size
        weighed = {one: time * self._factor(_between(watts, one), type) for one, time in seconds.items()}
        return best_size(weighed, max(size, max(seconds)))

    def spread(self, signature: str, type: str, seconds: Mapping[int, float]) -> dict[int, float]:
        """The seconds of a step by the number of its devices, each with the joules of all these devices."""
        watts = self.watts(signature, type)
        if not self.eta or not watts:
            return dict(seconds)
        alone = _between(watts, 1)
        return {count: time * self._factor(count * alone, type) for count, time in seconds.items()}

    def on(self, type: str) -> float:
        """The seconds that cost as much as a second on a type, at the greatest power of all types."""
        drawn = [one for (_, where), sizes in self._drawn.items() if where == type for one in sizes.values()]
        seconds, most = sum(one.seconds for one in drawn), max(self._most.values(), default=0.0)
        if not self.eta or not seconds or most <= 0:
            return 1.0
        return self.eta * sum(one.joules for one in drawn) / seconds / most + 1 - self.eta

    def _factor(self, watts: float, type: str) -> float:
        return self.eta * watts / self._max_power(type) + 1 - self.eta

    def _max_power(self, type: str) -> float:
        sizes = [one for (_, where), known in self._drawn.items() if where == type for one in known.values()]
        seen = max((one.watts for one in sizes), default=0.0)
        return max(self._most.get(type, 0.0), seen) or 1.0


def _between(watts: Mapping[int, float], size: int) -> float:
    """The power at a size, between the known ones by the sizes' logarithms; beyond them that of the nearest.

    >>> _between({0: 700.0, 1: 200.0, 4: 400.0}, 2), _between({1: 200.0}, 64)
    (300.0, 200.0)
    """
    known = sorted(one for one in watts if one > 0)
    below = max((one for one in known if one <= size), default=known[0])
    above = min((one for one in known if one >= size), default=known[-1])
    if below >= above:
        return watts[below]
    part = math.log(size / below) / math.log(above / below)
    return watts[below] + (watts[above] - watts[below]) * part
