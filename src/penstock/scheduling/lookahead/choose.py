"""Decisions by what they lead to: each candidate is followed out over the stages to come, and the best is begun.

The candidates are the plans of a search, fifo's next move and Fluid's. Each policy decides the same again at every
later point of its own course; so a decision made anew there finds at least what was found here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from penstock.scheduling.base import FULL, Assignment, Demand, Holding, View, kinds
from penstock.scheduling.capacity import Capacity, everywhere
from penstock.scheduling.fifo import fifo
from penstock.scheduling.fluid import dynamic_fluid
from penstock.scheduling.lookahead.layout import BETTER, Option, Plan, Policy, Scene, Work
from penstock.scheduling.lookahead.rollout import follow
from penstock.scheduling.lookahead.search import Search, in_order
from penstock.speed.model import Speed

FEW = 256
"""Trials that foresight is for,"""
SMALL = 64
"""and devices."""

MOVERS = (1, 2, 4, 16)  # how many of the last to end are planned anew together
MANY = 32  # trials that run, of which fewer are planned anew: each plan takes as long as there are
NEAR = 40  # trials of rungs to come that are looked at before trials are moved
PART = 0.2  # of a search, for each of these
SOONER = 0.01  # by which trials must end sooner on the average for a move that does not make the last one do so
WORTH = 0.003  # by which fifo's plan must end sooner to be begun: a difference so small is in the guesses


def look_ahead(view: View, demands: Sequence[Demand], speed: Speed) -> list[Assignment]:
    """Who starts now, and with what, in the best plan that is found."""
    if not view.devices:
        return []
    scene = Scene(view, view.running.values(), demands, speed)
    if not scene.jobs:
        return []
    able = {job.trial for job in scene.jobs}
    demands = [demand for demand in demands if demand.trial in able]
    best = Search(scene.site, scene.jobs).best()
    made, least = scene.now(best.plan), best.plan.makespan
    if any(len(job.options) > 1 for job in scene.jobs):  # where nothing can be shared or spread, Fluid has no say
        fluids = dynamic_fluid(view, demands, speed)
        for deadline in dict.fromkeys((math.inf, best.policy.deadline)):
            plan = _begin(scene, fluids, deadline, speed)
            if plan.makespan < least * (1 - BETTER):
                made, least = fluids, plan.makespan
    if view.goal == "end":
        plan = follow(scene.site, scene.jobs, Policy(solo=True))
        if plan.makespan <= least * (1 - WORTH):
            made = fifo(view, sorted(demands, key=lambda demand: -demand.priority), speed)
    return _together(view, made, demands)


def _begin(scene: Scene, made: Sequence[Assignment], deadline: float, speed: Speed) -> Plan:
    """What comes of assignments that are carried out now."""
    given, begun, rest = {one.trial: one for one in made}, [], []
    for job in scene.jobs:
        if (one := given.get(job.trial)) is None:
            rest.append(job)
            continue
        known = next((option.seconds for option in job.options if option.share == one.share), None)
        begun.append(scene.held(job, one, known or job.runtime * speed.curve(job.trial).at(one.share)))
    return follow(scene.begun(begun), rest, Policy(deadline, in_order(rest)))


def rebalance(view: View, speed: Speed, fixed: frozenset[int]) -> list[Assignment]:
    """Which trials that run to give more or less, so that all end sooner, moving costs and all; those fixed stay."""
    curves = {id(curve): curve for curve in map(speed.curve, view.running)}.values()
    if all(left.share <= FULL for left in view.room.values()) or all(c.most == c.widest == 1 for c in curves):
        return []
    fluids = dynamic_fluid(view, [], speed)
    if fixed:
        fluids = _changes(view, {one.trial: one.share for one in fluids if one.trial not in fixed})
    if len(view.running) > FEW or len(view.devices) > SMALL:
        return fluids
    opened = any(one.demand.open for one in view.running.values())
    stay = follow(Scene(view, view.running.values(), (), speed, NEAR).site, (), Policy())
    best, least = list[Assignment](), stay
    for moves, plan in _moves(view, speed, fixed, fluids):
        sooner = (opened or plan.makespan <= least.makespan) and plan.ends < least.ends * (1 - SOONER)
        if sooner or (not opened and plan.makespan < least.makespan * (1 - BETTER)):
            best, least = moves, plan
    return best


def _together(view: View, made: list[Assignment], demands: Sequence[Demand]) -> list[Assignment]:
    """The same on few nodes: a plan knows only how many devices a trial has. As it is, where not all fit so."""
    asked = {demand.trial: demand for demand in demands}
    space = Capacity(view.devices, view.room, view.kinds, view.unlike)
    for one in made:
        if one.share < 1:
            space.take(one.devices, one.share, asked[one.trial].bytes, asked[one.trial].signature)
    placed = {one.trial: one for one in made}
    for one in sorted((one for one in made if one.share >= 1), key=lambda one: -one.share):
        devices = space.fit(one.share, asked[one.trial].bytes)
        if devices is None:
            return made
        space.take(devices, one.share, asked[one.trial].bytes, asked[one.trial].signature)
        placed[one.trial] = replace(one, devices=devices)
    return list(placed.values())


def _moves(
    view: View, speed: Speed, fixed: frozenset[int], fluids: list[Assignment]
) -> Iterator[tuple[list[Assignment], Plan]]:
    """Ways to rebalance, and what comes of them: Fluid's, and those by which the last to end are planned anew."""
    if fluids:
        yield fluids, _begin(_without(view, [one.trial for one in fluids], speed), fluids, math.inf, speed)
    able = [trial for trial, one in view.running.items() if trial not in fixed and one.demand.units > 1]
    ends = {trial: view.running[trial].demand.units * speed.seconds(trial, view.running[trial].at) for trial in able}
    able.sort(key=lambda trial: -ends[trial])
    tried = MOVERS if len(view.running) <= MANY else MOVERS[:2]
    for count in sorted({min(count, len(able)) for count in tried} - {0}):
        scene = _without(view, able[:count], speed)
        plan = Search(scene.site, scene.jobs, PART).best().plan
        shares = {scene.jobs[start.job].trial: start.option.share for start in plan.starts if start.job >= 0}
        if all(start.time == 0 for start in plan.starts if start.job >= 0) and (moves := _changes(view, shares)):
            yield moves, plan


def _without(view: View, movers: Sequence[int], speed: Speed) -> Scene:
    """The devices without some trials that run, and these as jobs: to go on costs nothing; to move, what it costs."""
    space = Capacity(view.devices, everywhere(view), kinds(view.running.values()), view.unlike)
    for one in (view.running[trial] for trial in movers):
        space.give(one.assignment.devices, one.assignment.share, one.demand.bytes)
    stay = {trial: one for trial, one in view.running.items() if trial not in movers}
    here = replace(view, running=stay, room=space.room)
    scene = Scene(here, stay.values(), [view.running[trial].demand for trial in movers], speed, NEAR)
    scene.jobs = [_moved(job, view.running[job.trial], speed) for job in scene.jobs]
    return scene


def _moved(job: Work, one: Holding, speed: Speed) -> Work:
    """To go on as it does costs nothing; for another share it ends its unit first, and moves."""
    share, left = one.assignment.share, one.demand.units
    rest = speed.seconds(job.trial, one.at) * (1 - one.done)
    ours = []
    for option in job.options:
        stays = option.share == share
        unit = speed.seconds(job.trial, one.at) if stays else option.seconds / left
        seconds = rest + (left - 1) * unit + (0.0 if stays else speed.moving)
        ours.append(Option(option.share, seconds, option.share * seconds))
    return replace(job, runtime=(left - one.done) * job.unit, options=tuple(ours))


def _changes(view: View, shares: Mapping[int, float]) -> list[Assignment]:
    """Devices for those whose share changes, wide ones first; nothing where they do not all fit."""
    changed = [trial for trial, share in shares.items() if share != view.running[trial].assignment.share]
    space = Capacity(view.devices, everywhere(view), kinds(view.running.values()), view.unlike)
    for one in (view.running[trial] for trial in changed):
        space.give(one.assignment.devices, one.assignment.share, one.demand.bytes)
    made = []
    for trial in sorted(changed, key=lambda trial: -shares[trial]):
        one = view.running[trial]
        devices = space.fit(shares[trial], one.demand.bytes, one.assignment.devices, one.demand.signature)
        if devices is None:
            return []
        space.take(devices, shares[trial], one.demand.bytes, one.demand.signature)
        made.append(Assignment(trial, devices, shares[trial]))
    return made
