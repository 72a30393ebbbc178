"""Sharded trials: each has as many devices as its task says, all of one type, to its end.

The only decision is which trial is next: the one that has waited longest starts once enough devices are idle, on as few
nodes as possible. Surrogates of a sharded model train on one device each, and go first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import wraps

from penstock.bundle import Device
from penstock.scheduling.base import Assignment, Demand, Scheduler, View
from penstock.scheduling.growing import are_apart, idle
from penstock.scheduling.leftover import after
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


def beside(schedule: Scheduler) -> Scheduler:
    """A stage: sharded trials get what trials of one device leave idle, which a scheduler deals as if alone there."""

    @wraps(schedule)
    def scheduled(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
        wide = [demand for demand in demands if demand.width]
        narrow = [demand for demand in demands if not demand.width]
        rest = _without_wide(view)
        largest = max(device.memory for device in rest.devices.values())
        waits = len(rest.devices) < len(view.devices)  # a trial that is too large for the rest may be for a held device
        able = [demand for demand in narrow if demand.bytes <= largest] if waits else narrow
        made = schedule(rest, able, speed)
        if not wide or any(one.trial in view.running for one in made):
            return made  # running trials move: the room is known once they have left
        left = after(view, made, narrow)
        return made + (sharded(left, wide, speed) if left.room else [])

    return scheduled


def _without_wide(view: View) -> View:
    """The view without sharded trials and the devices that they hold."""
    wide = {trial: one for trial, one in view.running.items() if one.demand.width}
    held = {name for one in wide.values() for name in one.assignment.devices}
    if not wide:
        return view
    return replace(
        view,
        devices={name: device for name, device in view.devices.items() if name not in held},
        running={trial: one for trial, one in view.running.items() if trial not in wide},
    )


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
