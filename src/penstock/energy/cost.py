"""The cost of training in time and energy (Zeus §2, §3 and §4.1), and joules as people write them.

All costs are in joules: time is counted at the device's greatest power, so that both halves have one unit (eq. 2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import StudyError
from penstock.numeric import finite, shown

JOULES = {"": 1, "J": 1, "kJ": 1e3, "MJ": 1e6, "GJ": 1e9, "Wh": 3600, "kWh": 3.6e6, "MWh": 3.6e9, "GWh": 3.6e12}
_UNIT = {name.lower(): factor for name, factor in JOULES.items()}


class Draw(NamedTuple):
    """A unit of training at one batch size and power limit: its seconds, and the average power meanwhile."""

    seconds: float
    watts: float

    @property
    def joules(self) -> float:
        """Eq. 1: energy is time times average power.

        >>> Draw(seconds=10.0, watts=250.0).joules
        2500.0
        """
        return self.seconds * self.watts


@dataclass(frozen=True)
class Objective:
    """What is to be small: energy alone (``eta`` 1), time alone (0), or both, weighed by ``eta`` (Zeus §3.1).

    ``max_power`` is the device's greatest power limit in watts, MAXPOWER; it makes time and energy comparable.

    >>> Objective(eta=0.5, max_power=250.0).cost(seconds=10.0, joules=1500.0)
    2000.0
    """

    eta: float = 0.5
    max_power: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "eta", fraction("eta", self.eta))
        power = finite(self.max_power)
        if power is None or power <= 0:
            raise StudyError(f"max_power must be a number of watts above 0, got {shown(self.max_power)}.")

    def cost(self, seconds: float, joules: float) -> float:
        """Eq. 2: C = η·ETA + (1 − η)·MAXPOWER·TTA."""
        return self.eta * joules + (1 - self.eta) * self.max_power * seconds

    def rate(self, watts: float) -> float:
        """The cost of a second at an average power (eq. 3).

        >>> Objective(eta=0.5, max_power=250.0).rate(watts=150.0)
        200.0
        """
        return self.eta * watts + (1 - self.eta) * self.max_power

    def unit_cost(self, draw: Draw) -> float:
        """The cost of one unit at one limit: the rate over the throughput (eq. 5)."""
        return self.rate(draw.watts) * draw.seconds

    def best_limit(self, draws: Mapping[float, Draw]) -> float:
        """The power limit of least cost a unit (eq. 7); of equal limits the highest, which is nearest to no limit.

        >>> draws = {250.0: Draw(8.0, 210.0), 150.0: Draw(8.5, 130.0)}
        >>> [Objective(eta, 250.0).best_limit(draws) for eta in (0.0, 1.0)]
        [250.0, 150.0]
        """
        return min(draws, key=lambda limit: (self.unit_cost(draws[limit]), -limit))

    def epoch_cost(self, draws: Mapping[float, Draw]) -> float:
        """EpochCost(b; η): the cost of a unit at the best limit (eq. 7)."""
        return self.unit_cost(draws[self.best_limit(draws)])


def front(points: Iterable[Draw]) -> list[Draw]:
    """The points that no other point beats in both time and energy, the quickest first (Zeus §2.3).

    >>> front([Draw(8.0, 210.0), Draw(8.5, 130.0), Draw(9.0, 200.0)])
    [Draw(seconds=8.0, watts=210.0), Draw(seconds=8.5, watts=130.0)]
    """
    found: list[Draw] = []
    for point in sorted(points, key=lambda one: (one.seconds, one.joules)):
        if not found or point.joules < found[-1].joules:
            found.append(point)
    return found


def fraction(name: str, value: object) -> float:
    """A number from 0 to 1, such as eta.

    >>> fraction("eta", 1)
    1.0
    """
    made = finite(value)
    if made is None or not 0 <= made <= 1:
        raise StudyError(f"{name} must be a number from 0 to 1, got {shown(value)}.")
    return float(made)


def joules(energy: object, name: str = "max_energy") -> float | None:
    """Joules from a number or from text such as "500kJ" or "2kWh"; None stays None.

    >>> joules("2kWh"), joules(500), joules("1.5 MJ"), joules(None)
    (7200000.0, 500.0, 1500000.0, None)
    """
    if energy is None:
        return None
    made = finite(energy)
    if isinstance(energy, str) and (
        match := re.fullmatch(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", energy)
    ):
        # "mJ" would be a thousandth of a joule: an M is read as it is written, all other letters in either case.
        factor = JOULES.get(match[2], None if match[2][:1] == "m" else _UNIT.get(match[2].lower()))
        made = None if factor is None else finite(float(match[1]) * factor)
    if made is None or made <= 0:
        raise StudyError(
            f'{name} must be a finite number of joules above 0, or text such as "500kJ", "300Wh", "2kWh", got '
            f"{shown(energy)}."
        )
    return float(made)


def legible(amount: float) -> str:
    """Joules as people read them: in kWh from a tenth of one on, and below that in J or kJ.

    >>> legible(7.2e6), legible(1500.0), legible(3.0), legible(0.0)
    ('2 kWh', '1.5 kJ', '3 J', '0 J')
    """
    if abs(amount) >= 0.1 * JOULES["kWh"]:
        return f"{amount / JOULES['kWh']:.4g} kWh"
    return f"{amount / 1e3:.4g} kJ" if abs(amount) >= 999.5 else f"{amount:.3g} J"
