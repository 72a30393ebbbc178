"""Penstock's own scheduler: what Fluid's water-filling means to do, by looking ahead at what it would come to."""

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

SAMPLE = 256  # trials that the level is found from
WORTH = 0.25  # the part of many devices that must be free before those that run are looked at
ENOUGH = 8  # devices for each trial that waits, of many
PATIENCE = 256  # askings by which a trial may be overtaken, if not more wait


@by_type
@until_measured
def waterfill(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
    """Give every trial the least that lets all end by the earliest time possible, and start the trials that start now.

    - Trials on few devices are planned to their end, and so are the rungs that follow them: shares and an order are
      laid out in time, fifo's next move and Fluid's are among those that are tried, and what ends first is begun.
    - Many are given what the level of the water says: the least area by the time at which all areas fit.
    - Of a group that others follow each trial has the share that wastes least: then most are done in a time.
    - Of far more than fit, only the first few times as many as fit are looked at.
    - No device is free while a trial waits that fits there. Of a group's trials those of a higher priority go first.
      Then come the trials of the group with most time left, its later rungs among it; then the longest; then the first
      to ask. Where a target is to be reached, the longest come before those of groups with much left. Groups divide the
      devices by weight.
    - Nobody starves: a trial is overtaken only by those asked for less than so many askings after it as four times
      those that wait and run now, or 256.
    - Where trials can be moved and nobody waits, those that run are given what is free if all end sooner so.
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
        made += _start_late(_with(view, made, early), len(made) < len(early), window[len(early) :], beyond, speed)
    if len(made) < len(window):
        given = {one.trial for one in made}
        refuse_impossible(view, (demand for demand in window if demand.bytes and demand.trial not in given))
    elif moves and not beyond and not many:
        made += _rebalance(_with(view, made, window), speed, frozenset(one.trial for one in made))
    return made


def _enough(room: Mapping[str, Room], demands: Sequence[Demand]) -> Mapping[str, Room]:
    """More devices than these trials could use, where there are so many that each of them fits on."""
    bytes, count = max(demand.bytes for demand in demands), SMALL + ENOUGH * len(demands)
    some = dict(islice(((name, left) for name, left in room.items() if left.bytes >= bytes), count))
    return some if len(some) == count else room


def _start_late(view: View, waits: bool, demands: Sequence[Demand], beyond: int, speed: Speed) -> list[Assignment]:
    """Start those that came late: while an earlier one waits, only on free devices, which are too small for it."""
    room = {name: left for name, left in view.room.items() if left.share > 1 - FULL or not waits}
    return _start(replace(view, room=room), demands, beyond, speed) if room else []


def _start(view: View, demands: Sequence[Demand], beyond: int, speed: Speed) -> list[Assignment]:
    """Start who starts now, part by part; ``beyond`` more wait behind these."""
    parts = divide(view, demands)
    plans = [_start_part(view, part, beyond, speed) for part in parts]
    spare: dict[str, Room] = {}  # what is left by parts of which all trials start
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
    """Who of a part starts now, and what is left of its room then."""
    space = Capacity(view.devices, part.room, view.kinds, view.unlike)
    opened = any(demand.open for demand in part.demands)
    if beyond or opened or len(part.demands) > FEW or len(view.devices) > SMALL:
        return _fill_up(space, part.demands, beyond, len(view.devices), speed, view.goal), space
    here = _of(view, part)
    made = look_ahead(here, part.demands, speed)
    _carry_out(space, made, part.demands)
    return made, space


def _fill_up(
    space: Capacity, demands: Sequence[Demand], beyond: int, devices: int, speed: Speed, goal: Goal
) -> list[Assignment]:
    """Place trials at the level of the water, in order; where that does not fit, what is narrower."""
    trials, known = {}, dict[tuple[int, bool], tuple[Option, ...]]()  # by the curve's id: hashing it is slow
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
    """The earliest time by which all end: at once, if there is room for all at once; or else one after another.

    At once, shares add up to the room. One after another, areas add up to devices × time: taken for granted is that
    areas can be cut at will, and that those beyond are like these.
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
    """The narrowest that ends by the level, which has the least area; the fastest where none does."""
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
        made += rebalance(_of(view, part), speed, fixed)
    return made


def _of(view: View, part: Due) -> View:
    """What a part sees: its own trials that run, where they run, and its room.

    Of a device that others are on, or have the room of, it has what its own trials give up and no more.
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


def _with(view: View, made: Sequence[Assignment], demands: Collection[Demand]) -> View:
    """The same with assignments carried out."""
    asked = {demand.trial: demand for demand in demands}
    space = Capacity(view.devices, view.room, view.kinds, view.unlike)
    _carry_out(space, made, demands)
    running = {**view.running, **{one.trial: Holding(asked[one.trial], one) for one in made}}
    return replace(view, running=running, room=space.free(), kinds=space.kinds)


def _carry_out(space: Capacity, made: Sequence[Assignment], demands: Collection[Demand]) -> None:
    asked = {demand.trial: demand for demand in demands}
    for one in made:
        space.take(one.devices, one.share, asked[one.trial].bytes, asked[one.trial].signature)
