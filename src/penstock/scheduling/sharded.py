"""Sharded trials: each has as many devices as its task says, all of one type, to its end.

The only decision is which trial is next: the one that has waited longest starts once enough devices are idle, on as few
nodes as possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from penstock.bundle import Device
from penstock.scheduling.base import Assignment, Demand, View
from penstock.scheduling.growing import are_apart, idle
from penstock.scheduling.nodes import arrange
from penstock.speed.model import Speed


def sharded(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
    """Give each waiting trial as many devices as its width, once so many are idle."""
    free = {name: view.devices[name] for name in idle(view)}
    made = []
    for demand in demands:
        names = _next(free, demand.width, view)
        if names is None:
            break
        made.append(Assignment(demand.trial, names, float(demand.width)))
        free = {name: device for name, device in free.items() if name not in names}
    return made


def _next(free: Mapping[str, Device], width: int, view: View) -> tuple[str, ...] | None:
    """The devices for the next trial; devices whose workers did not meet are used only where there are no others."""
    left, chosen = dict(free), None
    while max(Counter(one.type for one in left.values()).values(), default=0) >= width:
        (names,) = arrange(left, {}, {0: width}).values()
        if not are_apart(names, view):
            return names
        chosen = chosen or names
        del left[names[-1]]
    return chosen
