"""Fluid's two schedulers as the paper defines them: StaticFluid and DynamicFluid, algorithms 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from penstock.scheduling.base import FULL, Assignment, Demand, Holding, Room, View, kinds
from penstock.scheduling.by_type import by_type
from penstock.scheduling.capacity import Capacity, divide, everywhere, largest_remainder, refuse_impossible
from penstock.scheduling.grouping import by_signature
from penstock.speed.model import Speed


@by_type
@by_signature
def static_fluid(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
    """Give trials that arrive shares of the idle devices in proportion to their runtimes: algorithm 1.

    Trials of a higher priority are placed first, then trials with the largest shares, then the longest trials. Where
    too few devices have the memory for a trial, it gets fewer devices. A trial that does not fit waits, and gets a new
    share of the devices that are idle then. Groups that wait at once divide the idle devices by weight; devices that
    one group leaves over go to the trials that still wait.
    """
    return _arrive(view, demands, speed, {})


@by_type
@by_signature
def dynamic_fluid(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
    """As ``static_fluid``; and where no trial waits and a device has room, resize the running trials: algorithm 2.

    A trial that has left its devices to be resized waits like a new one. It takes no more than algorithm 2 would give
    it beside the running trials of its group, so that free devices go to the trials that the resizing chose.
    """
    if math.isinf(speed.moving):
        return _arrive(view, demands, speed, {})
    if not demands:
        return _resize(view, speed) if view.room else []
    running = _by_group(holding.demand for _, holding in sorted(view.running.items()))
    waiting = _by_group(demands)
    most: dict[int, float] = {}
    dues = _dues(view, {**running, **waiting})
    for name in waiting.keys() & running.keys():
        most |= _shares([*waiting[name], *running[name]], dues[name], speed, view.unlike)
    return _arrive(view, demands, speed, most)


def _shares(demands: Iterable[Demand], devices: int, speed: Speed, unlike: bool) -> dict[int, float]:
    """Each trial's share, min(max(floor(h / Σh · n), 1/c), d); d is the largest measured width up to the floor.

    A trial that can share a device with no other gets at least a whole one.
    """
    runtimes = [(demand, demand.units * speed.unit(demand.trial)) for demand in demands]
    total = sum(runtime for _, runtime in runtimes)
    shares = {}
    for demand, runtime in runtimes:
        curve = speed.curve(demand.trial)
        whole = math.floor(runtime / total * devices + FULL) if total > 0 else 0
        alone = not demand.signature and not unlike
        if whole or alone:
            shares[demand.trial] = float(max(count for count in curve.counts if count <= max(1, whole)))
        else:
            shares[demand.trial] = 1 / curve.most
    return shares


def _arrive(view: View, demands: Collection[Demand], speed: Speed, most: dict[int, float]) -> list[Assignment]:
    refuse_impossible(view, demands)
    if not demands or not view.room:
        return []
    made: list[Assignment] = []
    left: dict[str, Room] = {}
    there = dict(view.kinds)
    waiting: list[Demand] = []
    for part in divide(view, demands):
        space = Capacity(view.devices, part.room, view.kinds, view.unlike)
        started = _place(space, part.demands, speed, most)
        made += started
        names = {one.trial for one in started}
        waiting += [demand for demand in part.demands if demand.trial not in names]
        left |= space.free()
        there |= space.kinds
    return made + _place(Capacity(view.devices, left, there, view.unlike), waiting, speed, most)


def _place(space: Capacity, demands: Sequence[Demand], speed: Speed, most: dict[int, float]) -> list[Assignment]:
    shares = _shares(demands, space.whole(), speed, space.unlike)
    shares = {trial: min(share, most.get(trial, share)) for trial, share in shares.items()}
    made = []
    for demand in sorted(
        demands, key=lambda d: (-d.priority, -shares[d.trial], -d.units * speed.unit(d.trial), d.asked, d.trial)
    ):
        share, counts = shares[demand.trial], speed.curve(demand.trial).counts
        for width in [share, *(float(count) for count in reversed(counts) if count < share)]:
            devices = space.fit(width, demand.bytes, signature=demand.signature)
            if devices:  # too few devices may have the memory for the whole share
                space.take(devices, width, demand.bytes, demand.signature)
                made.append(Assignment(demand.trial, devices, width))
                break
    return made


def _resize(view: View, speed: Speed) -> list[Assignment]:
    """Algorithm 2. Trials that shrink come first, so that trials that grow can have the devices that come free."""
    groups = _by_group(holding.demand for _, holding in sorted(view.running.items()))
    dues = _dues(view, groups)
    shares: dict[int, float] = {}
    for name, members in groups.items():
        shares |= _shares(members, dues[name], speed, view.unlike)

    def order(holding: Holding) -> tuple[bool, float, float, int, int]:
        demand = holding.demand
        new = shares[demand.trial]
        runtime = demand.units * speed.unit(demand.trial)
        return new > holding.assignment.share, -new, -runtime, demand.asked, demand.trial

    space = Capacity(view.devices, everywhere(view), kinds(view.running.values()), view.unlike)
    made = []
    for holding in sorted(view.running.values(), key=order):
        demand, old, new = holding.demand, holding.assignment, shares[holding.demand.trial]
        if not _pays(demand, old.share, new, speed):
            continue
        space.give(old.devices, old.share, demand.bytes)
        devices = space.fit(new, demand.bytes, old.devices, demand.signature)
        if devices:
            made.append(Assignment(demand.trial, devices, new))
            space.take(devices, new, demand.bytes, demand.signature)
        else:
            space.take(old.devices, old.share, demand.bytes, demand.signature)
    return made


def _pays(demand: Demand, old: float, new: float, speed: Speed) -> bool:
    before = demand.units * speed.seconds(demand.trial, old)
    after = demand.units * speed.seconds(demand.trial, new) + speed.moving
    return (new > old and after < before) or (new < old and new * after < old * before)


def _by_group(demands: Iterable[Demand]) -> dict[str, list[Demand]]:
    groups: dict[str, list[Demand]] = {}
    for demand in demands:
        groups.setdefault(demand.group, []).append(demand)
    return groups


def _dues(view: View, groups: Mapping[str, Sequence[Demand]]) -> dict[str, int]:
    return largest_remainder(len(view.devices), {name: ours[0].weight for name, ours in groups.items()})
