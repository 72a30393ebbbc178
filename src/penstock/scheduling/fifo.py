"""First in, first out: one trial, one device; what Ray Tune and Optuna do."""

from __future__ import annotations

from collections.abc import Collection

from penstock.scheduling.base import FULL, Assignment, Demand, View
from penstock.scheduling.speed import Speed


def fifo(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
    """Give each free device, in order, to the trial that has waited longest."""
    free = (name for name, room in view.room.items() if room.share > 1 - FULL)
    return [Assignment(demand.trial, (name,)) for name, demand in zip(free, demands, strict=False)]
