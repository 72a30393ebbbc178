"""The number of devices that are of use: a pure function beside the scheduler, for clusters that grow and shrink."""

from __future__ import annotations

import math
from collections.abc import Collection

from penstock.bundle import Request
from penstock.scheduling.base import Demand, View
from penstock.speed.model import Speed


def size(view: View, demands: Collection[Demand], speed: Speed, provisioning: float = 0.0, before: int = 0) -> Request:
    """The number of devices that waiting and running trials could use: one for each trial, or as many as pay.

    A new device takes ``provisioning`` seconds to come. A trial counts for several devices only if it will still train
    when new devices come, or if these devices are already there. Trials that an algorithm has not asked for yet do not
    count, so a study with an open group keeps the devices that it had ``before``.

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
