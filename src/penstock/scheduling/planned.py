"""Trials as a plan has them: each with as many devices as its stage gives it, on the nodes that its bracket has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from dataclasses import dataclass

from penstock.bundle import Device
from penstock.scheduling.base import FULL, Assignment, Demand, Room, Scheduler, View
from penstock.scheduling.nodes import arrange
from penstock.speed.model import Speed


@dataclass(frozen=True)
class Berth:
    """What the plan gives a trial: its number of ``devices``, or the part of one, on one of these ``nodes``.

    Trials that share devices are dealt among ``most`` of them.
    """

    devices: float
    nodes: Set[str]
    most: int = 1


def planned(berth: Callable[[int], Berth]) -> Scheduler:
    """The scheduler that gives each trial its ``berth``, in the order of asking, once so much of its nodes is idle.

    >>> from penstock.scheduling.base import room
    >>> from penstock.speed.model import UNKNOWN
    >>> devices = {name: Device(name, "h200", 8, node=name[0]) for name in ("a0", "a1", "b0", "b1")}
    >>> schedule = planned(lambda trial: Berth(2, {"b"}))
    >>> view, demands = View(devices, {}, room(devices, ())), [Demand(0, "g", 9), Demand(1, "g", 9)]
    >>> [one.devices for one in schedule(view, demands, UNKNOWN)]
    [('b0', 'b1')]
    """

    def as_planned(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
        left, kinds = dict(view.room), dict(view.kinds)
        made = []
        for demand in demands:
            one = berth(demand.trial)
            there = {name: device for name, device in view.devices.items() if device.node in one.nodes}
            on = {name: there[name] for name in left if name in there}
            names = (
                _whole(on, left, round(one.devices)) if one.devices >= 1 else _part(left, kinds, on, there, demand, one)
            )
            if names is None:
                continue
            made.append(Assignment(demand.trial, names, one.devices))
            for name in names:
                share, bytes = left.pop(name)
                kinds[name] = demand.signature
                if share - one.devices > FULL:
                    left[name] = Room(share - one.devices, bytes - demand.bytes)
        return made

    return as_planned


def _whole(on: dict[str, Device], left: dict[str, Room], width: int) -> tuple[str, ...] | None:
    """So many idle devices on as few nodes as possible; None where there are too few."""
    free = {name: device for name, device in on.items() if left[name].share > 1 - FULL}
    if len(free) < width:
        return None
    return arrange(free, {}, {0: width}, mixed=True)[0]


def _part(
    left: dict[str, Room],
    kinds: dict[str, str],
    on: Collection[str],
    there: Collection[str],
    demand: Demand,
    one: Berth,
) -> tuple[str, ...] | None:
    """The emptiest device with room for the trial beside others of its signature; an idle one while few are taken."""
    idle = 1 - FULL
    fits = [name for name in on if left[name].share >= one.devices - FULL and left[name].bytes >= demand.bytes]
    beside = [
        name for name in fits if left[name].share < idle and demand.signature and kinds.get(name) == demand.signature
    ]
    whole = [name for name in fits if left[name].share >= idle]
    few = len(there) - len(whole) < one.most
    if beside and not (whole and few):
        return (max(beside, key=lambda name: left[name].share),)
    return (whole[0],) if whole else None
