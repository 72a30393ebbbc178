"""First in, first out: each trial has one device, as in Ray Tune and Optuna."""

from __future__ import annotations

from collections.abc import Collection

from penstock.scheduling.base import FULL, Assignment, Demand, View
from penstock.scheduling.capacity import refuse_impossible
from penstock.speed.model import Speed


def fifo(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
    """Give each free device, in order, to the trial that has waited longest and fits there."""
    free = [name for name, room in view.room.items() if room.share > 1 - FULL]
    made = []
    for demand in demands:
        name = next((name for name in free if view.room[name].bytes >= demand.bytes), None)
        if name is not None:
            free.remove(name)
            made.append(Assignment(demand.trial, (name,)))
            continue
        refuse_impossible(view, [demand])
        if not free:
            break
    return made
