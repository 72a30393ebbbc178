"""Devices of several types: trials are dealt among the types, and each type is scheduled by its own measurements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import islice

from penstock.scheduling.base import Assignment, Demand, Scheduler, View
from penstock.scheduling.capacity import refuse_impossible
from penstock.scheduling.lookahead.layout import Option, options
from penstock.speed.model import Speed

AHEAD = 64  # waiting trials that are dealt, besides twice as many as could start now


def by_type(scheduler: Scheduler) -> Scheduler:
    """Make a scheduler for devices of one type a scheduler for any devices: it is called for each type.

    The longest trial is dealt first. Each goes to the type on which it would end first, after the trials that run there
    and the trials dealt before it. So a trial may wait for a fast device while a slow one is free on which it would end
    later. No trial gets devices of several types, and none moves from one type to another, because the time at a share
    is known for a single type only. A trial that already spans types is not touched.
    """

    @wraps(scheduler)
    def schedule(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
        if not speed.types:
            return scheduler(view, demands, speed)
        if not view.devices:
            refuse_impossible(view, demands)
        parts = [_part(view, type, speed.types[type]) for type in sorted({d.type for d in view.devices.values()})]
        if demands and view.room:
            _deal(parts, view, demands)
        return [one for part in parts for one in scheduler(part.view, part.demands, part.speed)]

    return schedule


@dataclass
class _Part:
    """The devices of one type, the speed on them, and the trials dealt to them."""

    type: str
    view: View
    speed: Speed
    largest: int  # the largest memory of a device
    load: float  # device seconds of the trials that run there or were dealt
    demands: list[Demand] = field(default_factory=list)
    _known: dict[int, tuple[Option, ...]] = field(default_factory=dict)  # by the curve's id: hashing it is slow

    def options(self, trial: int) -> tuple[Option, ...]:
        curve = self.speed.curve(trial)
        if id(curve) not in self._known:
            self._known[id(curve)] = options(curve, len(self.view.devices))
        return self._known[id(curve)]

    def end(self, demand: Demand) -> tuple[float, float]:
        """When the trial would end here, and the load with it, at the share that takes the fewest device seconds."""
        runtime, ours = demand.units * self.speed.unit(demand.trial), self.options(demand.trial)
        load = self.load + runtime * ours[0].area
        return max(load / len(self.view.devices), runtime * ours[-1].seconds), load


def _part(view: View, type: str, speed: Speed) -> _Part:
    devices = {name: device for name, device in view.devices.items() if device.type == type}
    running = {trial: one for trial, one in view.running.items() if devices.keys() >= {*one.assignment.devices}}
    room = {name: left for name, left in view.room.items() if name in devices}
    load = sum(
        (one.demand.units - one.done) * speed.seconds(trial, one.assignment.share) * one.assignment.share
        for trial, one in running.items()
    )
    largest = max(device.memory for device in devices.values())
    return _Part(type, replace(view, devices=devices, running=running, room=room), speed, largest, load)


def _deal(parts: Sequence[_Part], view: View, demands: Collection[Demand]) -> None:
    first = next(iter(demands)).trial
    slots = sum(len(part.view.room) / part.options(first)[0].share for part in parts)

    def order(demand: Demand) -> tuple[float, float, int]:
        return -demand.priority, -demand.units * min(part.speed.unit(demand.trial) for part in parts), demand.asked

    for demand in sorted(islice(demands, AHEAD + round(2 * slots)), key=order):
        able = [i for i, part in enumerate(parts) if part.largest >= demand.bytes]
        if not able:
            refuse_impossible(view, [demand])
        stays = [i for i in able if parts[i].type == demand.type]
        _, load, i = min((*parts[i].end(demand), i) for i in stays or able)
        parts[i].load = load
        parts[i].demands.append(demand)
    for part in parts:
        part.demands.sort(key=lambda demand: demand.asked)
