"""How many devices are of use: a pure function beside the scheduler, for clusters that grow and shrink."""

from __future__ import annotations

import math
from collections.abc import Collection

from penstock.bundle import Request
from penstock.scheduling.base import Demand, View
from penstock.speed.model import Speed


def size(view: View, demands: Collection[Demand], speed: Speed, provisioning: float = 0.0, before: int = 0) -> Request:
    """The devices that trials which wait or run could use: one each, or as many as pay.

    A device that is yet to come takes ``provisioning`` seconds. It is of use to a trial that waits, and beside other
    devices only to a trial that still trains when it is there. Trials that follow count as soon as they are there: an
    algorithm whose group is open keeps the devices that it had ``before``.

    >>> from penstock.bundle import Device
    >>> from penstock.speed.model import UNKNOWN
    >>> size(View({}, {}, {}), [Demand(0, "g", 1), Demand(1, "g", 1)], UNKNOWN).count
    2
    """
    kinds = list(speed.types.values()) or [speed]
    now, later, opened = 0, 0, False
    running = [(one.demand, one.demand.units - one.done, one.at) for one in view.running.values()]
    for demand, units, share in [*((demand, float(demand.units), 1.0) for demand in demands), *running]:
        most = demand.width or max(kind.curve(demand.trial).widest for kind in kinds)
        left = units * min(kind.seconds(demand.trial, share) for kind in kinds)
        moving = speed.moving if math.isfinite(speed.moving) else 0.0
        lasts = bool(demand.width) or not speed.timed or left > provisioning + moving
        now += most
        later += most if lasts else 1
        opened = opened or demand.open
    wanted = max(later, min(now, len(view.devices)))
    return Request(max(wanted, before) if opened else wanted)
