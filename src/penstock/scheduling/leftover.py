"""A stage: trials of weight 0 get what the others leave idle."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import wraps

from penstock.scheduling.base import Assignment, Demand, Holding, Scheduler, View
from penstock.scheduling.capacity import Capacity
from penstock.speed.model import Speed


def leftover(schedule: Scheduler) -> Scheduler:
    """A scheduler that is asked for the trials of weight 0 last, and about the room that is left then."""

    @wraps(schedule)
    def scheduled(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
        first = [demand for demand in demands if demand.weight > 0]
        if len(first) == len(demands):
            return schedule(view, demands, speed)
        made = schedule(view, first, speed) if first else []
        if any(one.trial in view.running for one in made):
            return made  # running trials move: the room is known once they have left
        left = after(view, made, first)
        return made + (schedule(left, [demand for demand in demands if demand.weight <= 0], speed) if left.room else [])

    return scheduled


def after(view: View, made: Collection[Assignment], demands: Collection[Demand]) -> View:
    """The view once new trials have their devices."""
    asked = {demand.trial: demand for demand in demands}
    space = Capacity(view.devices, view.room, view.kinds, view.unlike)
    for one in made:
        space.take(one.devices, one.share, asked[one.trial].bytes, asked[one.trial].signature)
    running = {**view.running, **{one.trial: Holding(asked[one.trial], one) for one in made}}
    return replace(view, running=running, room=space.free(), kinds=space.kinds)
