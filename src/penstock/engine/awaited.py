"""Nodes that a plan has asked for: when each is expected, which are late, and how late they come."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from penstock.engine.drift import TOLERANCE
from penstock.planning.plan import Plan
from penstock.planning.standing import Kind


class Awaited:
    """The nodes that are ``wanted``, by kind, and those of them that have not come.

    ``lag`` are the seconds by which nodes came later than the ``given`` plan has it, the last time.
    """

    def __init__(self, given: Plan) -> None:
        self.wanted: Counter[Kind] = Counter()
        self.lag = 0.0
        cloud = given.cloud
        self._coming = cloud.arrival.expected + cloud.preparing.expected
        chance = 3 * math.hypot(cloud.arrival.deviation, cloud.preparing.deviation)
        self._tolerance = max(chance, TOLERANCE * given.seconds)
        self._asked: dict[Kind, list[float]] = {}  # for each node that is to come: when it was asked for, rising
        self._late: set[tuple[Kind, float]] = set()  # such that were said to be late
        self._there: dict[str, Kind] = {}

    def want(self, wanted: Counter[Kind], clock: float) -> None:
        """So many nodes are asked for now."""
        there = Counter(self._there.values())
        for here in wanted.keys() | self._asked.keys():
            asked = self._asked.setdefault(here, [])
            more = max(0, wanted[here] - there[here]) - len(asked)  # a study may begin with nodes, and some stay longer
            asked += [clock] * more
            del asked[len(asked) + min(0, more) :]
        self.wanted = wanted

    def lost(self, here: Kind, clock: float) -> None:
        """A node is gone: the executor asks for another at once."""
        self._asked.setdefault(here, []).append(clock)

    def came(self, there: Mapping[str, Kind], clock: float) -> str:
        """Learn how late nodes come from those that are new; say so where they had been late."""
        said = False
        for node, here in there.items():
            if node not in self._there and (asked := self._asked.get(here)):
                self.lag = max(0.0, clock - asked[0] - self._coming)
                said = said or (here, asked[0]) in self._late
                del asked[0]
        self._there = dict(there)
        return f"Nodes came {self.lag:.0f} seconds later than planned." if said else ""

    def overdue(self, clock: float) -> str:
        """Which nodes are late, if any are; each request for nodes is said to be late once."""
        late = {(here, asked) for here, asked in self._silent() if self._patience(asked) <= clock}
        self._late |= late
        self.lag = max([self.lag, *(clock - asked - self._coming for _, asked in late)])
        return f"Nodes are late: {', '.join(sorted({' '.join(here) for here, _ in late}))}." if late else ""

    def moments(self) -> list[float]:
        """The clocks at which nodes will be late that have not come by then."""
        return [self._patience(asked) for _, asked in self._silent()]

    def expected(self, here: Kind, clock: float) -> float:
        """The clock at which all nodes of a kind are expected."""
        asked = self._asked.get(here)
        return max(clock, (asked[-1] if asked else clock) + self._coming + self.lag)

    def _silent(self) -> list[tuple[Kind, float]]:
        """The requests for nodes that were not said to be late."""
        return [(here, at) for here, asked in self._asked.items() for at in asked if (here, at) not in self._late]

    def _patience(self, asked: float) -> float:
        """The clock from which on nodes are late by more than chance and the tolerance."""
        return asked + self._coming + self.lag + self._tolerance
