"""Penstock's own scheduler: all trials end as early as possible, which is the aim of Fluid's water-filling.

Few trials on few devices are planned ahead. For more, a plan would take too long: they get shares by one common level.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from penstock.scheduling.base import FULL, Assignment, Demand, Goal, Holding, Room, View
from penstock.scheduling.by_type import by_type
from penstock.scheduling.capacity import Capacity, Due, divide, everywhere, refuse_impossible
from penstock.scheduling.grouping import until_measured
from penstock.scheduling.lookahead.choose import FEW, SMALL, look_ahead, rebalance
from penstock.scheduling.lookahead.layout import Option, options
from penstock.speed.model import Speed

SAMPLE = 256  # the level is found from about so many trials, where there are more
WORTH = 0.25  # the part of more than SMALL devices that must be free before running trials are resized
ENOUGH = 8  # devices that are looked at for each waiting trial, besides SMALL
PATIENCE = 256  # a trial asked for fewer than so many askings after another may always overtake it


@by_type
@until_measured
def waterfill(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
    """Give each trial the least share by which all trials end as early as possible, and start the trials that go first.

    - Few trials on few devices are planned to their ends, with the rungs that follow them. The search tries many shares
      and orders; fifo's next move and Fluid's are tried too. The plan that ends first is begun.
    - Otherwise a trial gets the share with the least area, in device seconds, that lets it end by a common time. This
      time is the level of the water: the earliest time by which all areas fit.
    - A trial of an open group gets the share that wastes least, because there the throughput counts.
    - Where far more trials wait than devices can hold, only the first of them are looked at.
    - No device stays free while a trial that fits there waits. Trials of a higher priority go first. Then come trials
      of the group with most time left, its later rungs included; then the longest trials; then the trials that were
      asked for first. Where a study is to reach a target, the time that groups have left does not count.
    - Groups divide the devices by weight.
    - No trial starves. Trials that are asked for long after the first waiting trial do not overtake it, except on a
      device that is too small for it. "Long after" means at least 256 askings, and at least four times as many askings
      as trials wait and run now.
    - Where trials can move and none waits, running trials are resized to use free devices, if trials end sooner so.
    """
    moves = math.isfinite(speed.moving)
    if not demands:
        return _rebalance(view, speed) if moves and view.room and view.running else []
    if not view.devices:
        refuse_impossible(view, demands)
    if not view.room:
        return []
    first = next(iter(demands))
    slots = min(len(view.room), 2 * len(demands)) / options(speed.curve(first.trial), 1)[0].share
    window = list(islice(demands, max(round(2 * slots) + 4, FEW if len(view.devices) <= SMALL else 0)))
    late = first.asked + max(PATIENCE, 4 * (len(demands) + len(view.running)))
    early = [demand for demand in window if demand.asked < late]
    if many := len(view.devices) > SMALL:
        view = replace(view, room=_enough(view.room, window))
    beyond = len(demands) - len(window)
    made = _start(view, early, beyond, speed)
    if len(early) < len(window):
        made += _start_late(_view_after(view, made, early), len(made) < len(early), window[len(early) :], beyond, speed)
    if len(made) < len(window):
        given = {one.trial for one in made}
        refuse_impossible(view, (demand for demand in window if demand.bytes and demand.trial not in given))
    elif moves and not beyond and not many:
        made += _rebalance(_view_after(view, made, window), speed, frozenset(one.trial for one in made))
    return made


def _enough(room: Mapping[str, Room], demands: Sequence[Demand]) -> Mapping[str, Room]:
    """Some of very many devices, because it would take long to look at all of them.

    Each has memory for any of these trials, and there are more than the trials could use. Where so many devices cannot
    be found, it gives all.
    """
    bytes, count = max(demand.bytes for demand in demands), SMALL + ENOUGH * len(demands)
    some = dict(islice(((name, left) for name, left in room.items() if left.bytes >= bytes), count))
    return some if len(some) == count else room


def _start_late(view: View, waits: bool, demands: Sequence[Demand], beyond: int, speed: Speed) -> list[Assignment]:
    """Start trials that were asked for late.

    While an earlier trial ``waits``, they get only devices that are wholly free: these are too small for that trial.
    """
    room = {name: left for name, left in view.room.items() if left.share > 1 - FULL or not waits}
    return _start(replace(view, room=room), demands, beyond, speed) if room else []


def _start(view: View, demands: Sequence[Demand], beyond: int, speed: Speed) -> list[Assignment]:
    """Choose the trials that start now, part by part; ``beyond`` is how many more trials wait behind ``demands``."""
    parts = divide(view, demands)
    plans = [_start_part(view, part, beyond, speed) for part in parts]
    spare: dict[str, Room] = {}  # the room that is left in parts whose trials all start
    for part, (made, space) in zip(parts, plans, strict=True):
        if len(made) == len(part.demands):
            spare |= space.free()
    if spare:
        for i, (part, (made, _)) in enumerate(zip(parts, plans, strict=True)):
            if len(made) < len(part.demands):
                plans[i] = _start_part(view, replace(part, room={**part.room, **spare}), beyond, speed)
                spare = {}
    started = [one for made, _ in plans for one in made]
    space = plans[0][1] if len(parts) == 1 else Capacity(view.devices, view.room, view.kinds, view.unlike)
    if len(parts) > 1:
        _carry_out(space, started, demands)
    if space.whole() and len(started) < len(demands):
        given = {one.trial for one in started}
        waiting = [demand for demand in demands if demand.trial not in given]
        free = {name: left for name, left in space.room.items() if left.share > 1 - FULL}
        started += _fill_up(
            Capacity(view.devices, free, {}, view.unlike), waiting, beyond, len(view.devices), speed, view.goal
        )
    return started


def _start_part(view: View, part: Due, beyond: int, speed: Speed) -> tuple[list[Assignment], Capacity]:
    """The assignments of the part's trials that start now, and the capacity that is left of its room."""
    space = Capacity(view.devices, part.room, view.kinds, view.unlike)
    opened = any(demand.open for demand in part.demands)
    if beyond or opened or len(part.demands) > FEW or len(view.devices) > SMALL:
        return _fill_up(space, part.demands, beyond, len(view.devices), speed, view.goal), space
    made = look_ahead(_part_view(view, part), part.demands, speed)
    _carry_out(space, made, part.demands)
    return made, space


def _fill_up(
    space: Capacity, demands: Sequence[Demand], beyond: int, devices: int, speed: Speed, goal: Goal
) -> list[Assignment]:
    """Place trials in order, each at the share that the level asks for, or else at the next narrower one that fits."""
    trials, known = {}, dict[tuple[int, bool], tuple[Option, ...]]()  # by the curve's id: hashing a curve is slow
    for demand in demands:
        curve, alone = speed.curve(demand.trial), not demand.signature and not space.unlike
        if (id(curve), alone) not in known:
            known[id(curve), alone] = options(curve, devices, alone)
        trials[demand.trial] = _Trial(demand.units * speed.unit(demand.trial), known[id(curve), alone])
    level = _level(list(trials.values()), space, beyond, devices)
    made = []

    def order(demand: Demand) -> tuple[float, ...]:
        runtime = trials[demand.trial].runtime
        after = 0.0
        if demand.later and goal == "end":
            after = sum(rung.units for rung in demand.later) * speed.unit(demand.trial)
        return -demand.priority, -runtime - after, -runtime, demand.asked, demand.trial

    for demand in sorted(demands, key=order):
        ours = trials[demand.trial].options
        widest = 0 if demand.open else ours.index(_least(trials[demand.trial], level))
        for option in reversed(ours[: widest + 1]):
            places = space.fit(option.share, demand.bytes, signature=demand.signature)
            if places:
                space.take(places, option.share, demand.bytes, demand.signature)
                made.append(Assignment(demand.trial, places, option.share))
                break
    return made


class _Trial(NamedTuple):
    runtime: float
    options: tuple[Option, ...]


def _level(trials: Sequence[_Trial], space: Capacity, beyond: int, devices: int) -> float:
    """The earliest time by which all trials can end.

    Where there is room for all trials at once, their shares must fit into the room. Otherwise trials follow one
    another, and their areas must fit into devices × time. That is an estimate: it assumes that areas can be cut at
    will, and that the trials ``beyond`` are like these.
    """
    sample = sorted(trials, key=lambda trial: -trial.runtime)[:: max(1, len(trials) // SAMPLE)]
    part = len(sample) / (len(trials) + beyond)
    room = part * sum(left.share for left in space.room.values())
    at_once = sum(trial.options[0].share for trial in sample) <= room
    low = max(trial.runtime * trial.options[-1].seconds for trial in sample)
    high = max(trial.runtime * trial.options[0].seconds for trial in sample)
    if not at_once:
        area = sum(trial.runtime * trial.options[0].area for trial in sample) / (part * devices)
        if area >= high:
            return area
        high = max(high, area)
    for _ in range(12):
        middle = (low + high) / 2
        given = [(trial.runtime, _least(trial, middle)) for trial in sample]
        if at_once:
            fits = sum(option.share for _, option in given) <= room
        else:
            fits = sum(runtime * option.area for runtime, option in given) <= part * devices * middle
        low, high = (low, middle) if fits else (middle, high)
    return high


def _least(trial: _Trial, level: float) -> Option:
    """The narrowest option that ends by the level: it has the least area. Where none does, the fastest option."""
    for option in trial.options:
        if trial.runtime * option.seconds <= level:
            return option
    return trial.options[-1]


def _rebalance(view: View, speed: Speed, fixed: frozenset[int] = frozenset()) -> list[Assignment]:
    least = WORTH * len(view.devices) if len(view.devices) > SMALL else 0.0
    if sum(left.share for left in view.room.values()) <= least:
        return []
    made = []
    for part in divide(view, [holding.demand for _, holding in sorted(view.running.items())]):
        made += rebalance(_part_view(view, part), speed, fixed)
    return made


def _part_view(view: View, part: Due) -> View:
    """The view of a part: its own running trials, the devices that they have, and its room.

    A device outside its room may be in use by other parts. There the part has only the room that its own trials give
    up.
    """
    groups = part.groups
    running = {t: one for t, one in sorted(view.running.items()) if groups is None or one.demand.group in groups}
    names = set(part.room).union(*(one.assignment.devices for one in running.values()))
    others = set(view.room).union(
        *(one.assignment.devices for trial, one in view.running.items() if trial not in running)
    )
    left = everywhere(view)
    devices = {name: device for name, device in view.devices.items() if name in names}
    room = {name: Room(0.0, 0) if name in others else left[name] for name in devices} | part.room
    return replace(view, devices=devices, running=running, room=room)


def _view_after(view: View, made: Sequence[Assignment], demands: Collection[Demand]) -> View:
    """The view once assignments are carried out."""
    asked = {demand.trial: demand for demand in demands}
    space = Capacity(view.devices, view.room, view.kinds, view.unlike)
    _carry_out(space, made, demands)
    running = {**view.running, **{one.trial: Holding(asked[one.trial], one) for one in made}}
    return replace(view, running=running, room=space.free(), kinds=space.kinds)


def _carry_out(space: Capacity, made: Sequence[Assignment], demands: Collection[Demand]) -> None:
    asked = {demand.trial: demand for demand in demands}
    for one in made:
        space.take(one.devices, one.share, asked[one.trial].bytes, asked[one.trial].signature)
