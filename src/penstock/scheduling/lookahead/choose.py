"""Decisions by their outcome: each candidate is followed through the rungs to come, and the best candidate is begun.

The candidates are the plans of a search, fifo's next move and Fluid's. Each policy decides the same again at every
later point of its own plan. So a decision that is made there finds a plan at least as good.
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
"""The most trials that are planned ahead."""
SMALL = 64
"""The most devices that are planned ahead."""

MOVERS = (1, 2, 4, 16)  # how many of the last trials to end are planned anew together
MANY = 32  # with more running trials, only the first two of MOVERS are tried: each plan takes longer
NEAR = 40  # trials of later rungs that are in a plan before running trials move
PART = 0.2  # each of MOVERS has this part of a search's starts
GAIN = 0.03  # the part of the makespan that a move must save: a smaller gain is within the error of later rungs' times
SOONER = 0.01  # a move that does not shorten the makespan must shorten the sum of ends by this part
WORTH = 0.003  # the part by which fifo's plan must be shorter to be begun: a smaller gain is within the guesses' error


def look_ahead(view: View, demands: Sequence[Demand], speed: Speed) -> list[Assignment]:
    """The assignments that begin the best plan found."""
    if not view.devices:
        return []
    scene = Scene(view, view.running.values(), demands, speed)
    if not scene.jobs:
        return []
    able = {job.trial for job in scene.jobs}
    demands = [demand for demand in demands if demand.trial in able]
    best = Search(scene.site, scene.jobs).best()
    made, least = scene.now(best.plan), best.plan.makespan
    if any(len(job.options) > 1 for job in scene.jobs):  # otherwise Fluid has no share to choose
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
    """The plan that follows once assignments are carried out."""
    given, begun, rest = {one.trial: one for one in made}, [], []
    for job in scene.jobs:
        if (one := given.get(job.trial)) is None:
            rest.append(job)
            continue
        known = next((option.seconds for option in job.options if option.share == one.share), None)
        begun.append(scene.held(job, one, known or job.runtime * speed.curve(job.trial).at(one.share)))
    return follow(scene.begun(begun), rest, Policy(deadline, in_order(rest)))


def rebalance(view: View, speed: Speed, fixed: frozenset[int]) -> list[Assignment]:
    """New shares for running trials, where trials end sooner so although they have to move; ``fixed`` trials stay."""
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
        if sooner or (not opened and plan.makespan < least.makespan * (1 - GAIN)):
            best, least = moves, plan
    return best


def _together(view: View, made: list[Assignment], demands: Sequence[Demand]) -> list[Assignment]:
    """The same assignments on few nodes, because a plan does not look at nodes; unchanged where not all would fit."""
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
    """Candidate moves, each with its plan: Fluid's, and searches that plan the last trials to end anew."""
    if fluids:
        yield fluids, _begin(_scene_without(view, [one.trial for one in fluids], speed), fluids, math.inf, speed)
    able = [trial for trial, one in view.running.items() if trial not in fixed and one.demand.units > 1]
    ends = {trial: view.running[trial].demand.units * speed.seconds(trial, view.running[trial].at) for trial in able}
    able.sort(key=lambda trial: -ends[trial])
    tried = MOVERS if len(view.running) <= MANY else MOVERS[:2]
    for count in sorted({min(count, len(able)) for count in tried} - {0}):
        scene = _scene_without(view, able[:count], speed)
        plan = Search(scene.site, scene.jobs, PART).best().plan
        shares = {scene.jobs[start.job].trial: start.option.share for start in plan.starts if start.job >= 0}
        if all(start.time == 0 for start in plan.starts if start.job >= 0) and (moves := _changes(view, shares)):
            yield moves, plan


def _scene_without(view: View, movers: Sequence[int], speed: Speed) -> Scene:
    """A scene in which some running trials, the movers, have left their devices and wait as jobs."""
    space = Capacity(view.devices, everywhere(view), kinds(view.running.values()), view.unlike)
    for one in (view.running[trial] for trial in movers):
        space.give(one.assignment.devices, one.assignment.share, one.demand.bytes)
    stay = {trial: one for trial, one in view.running.items() if trial not in movers}
    vacated = replace(view, running=stay, room=space.room)
    scene = Scene(vacated, stay.values(), [view.running[trial].demand for trial in movers], speed, NEAR)
    scene.jobs = [_mover(job, view.running[job.trial], speed) for job in scene.jobs]
    return scene


def _mover(job: Work, one: Holding, speed: Speed) -> Work:
    """A mover's job. At its present share the trial goes on; for another share it ends its unit first, then moves."""
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
    """Assignments for the trials whose share changes, the widest first; none where not all of them fit."""
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
