"""First in, first out: one trial, one device; what Ray Tune and Optuna do."""

from __future__ import annotations

from collections.abc import Collection

from penstock.scheduling.base import Assignment, Demand, Speed, View


def fifo(view: View, demands: Collection[Demand], speed: Speed | None = None) -> list[Assignment]:
    """Give each free device, in order, to the trial that has waited longest."""
    taken = {name for assignment in view.running for name in assignment.devices}
    free = [device.name for device in view.devices if device.name not in taken]
    return [Assignment(demand.trial, (name,)) for name, demand in zip(free, demands, strict=False)]
