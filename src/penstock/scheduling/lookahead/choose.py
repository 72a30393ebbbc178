"""Decisions by what they lead to: candidates are carried out to the end with the speed model, and the best is begun.

A decision is followed by a policy that needs no foresight: one that keeps to its plan, or Fluid's. Each policy decides
the same again at every later point of its own course; so whoever asks anew there finds at least what was found here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from penstock.scheduling.base import FULL, Assignment, Demand, Holding, Scheduler, View
from penstock.scheduling.capacity import Space, everywhere
from penstock.scheduling.fluid import dynamic_fluid
from penstock.scheduling.lookahead.layout import BETTER, Held, Job, Option, Plan, Site, options
from penstock.scheduling.lookahead.rollout import course
from penstock.scheduling.lookahead.search import fill, plan_of
from penstock.speed.model import Speed

FEW = 32
"""Trials that foresight is for,"""
SMALL = 64
"""and devices."""

MOVERS = 8  # trials that are planned anew together, if not all are
CANDIDATES = 3  # ways to rebalance that are carried out
SOONER = 0.01  # by which trials must end sooner on the average for a move that does not make the last one do so


def look_ahead(view: View, demands: Sequence[Demand], speed: Speed) -> list[Assignment]:
    """Who starts now, and with what, in the best plan that is found."""
    site, names = _site(view, view.running.values(), speed)
    jobs = [job for demand in demands if _fits(job := _job(demand, len(names), speed), site)]
    demands = [job.demand for job in jobs]
    if not jobs:
        return []
    plan = plan_of(site, jobs)
    ours = _together(view, _now(plan, jobs, names), demands)
    fluids = dynamic_fluid(view, demands, speed)
    if math.isinf(speed.moving):
        theirs = course(dynamic_fluid, view, demands, speed).makespan
        return fluids if theirs < plan.makespan * (1 - BETTER) else ours
    return _best([ours, keep(view, demands, speed), fluids], view, demands, speed)


def _together(view: View, made: list[Assignment], demands: Sequence[Demand]) -> list[Assignment]:
    """The same on few nodes: a plan knows only how many devices a trial has. As it is, where not all fit so."""
    bytes = {demand.trial: demand.bytes for demand in demands}
    space = Space(view.devices, view.room)
    for one in made:
        if one.share < 1:
            space.take(one.devices, one.share, bytes[one.trial])
    placed = {one.trial: one for one in made}
    for one in sorted((one for one in made if one.share >= 1), key=lambda one: -one.share):
        devices = space.fit(one.share, bytes[one.trial])
        if devices is None:
            return made
        space.take(devices, one.share, bytes[one.trial])
        placed[one.trial] = replace(one, devices=devices)
    return list(placed.values())


def rebalance(view: View, speed: Speed, fixed: frozenset[int]) -> list[Assignment]:
    """Which trials that run to give more or less, so that all end sooner, moving costs and all; those fixed stay."""
    if all(left.share <= FULL for left in view.room.values()):
        return []
    fluids = dynamic_fluid(view, [], speed)
    if fixed:
        fluids = _changes(view, {one.trial: one.share for one in fluids if one.trial not in fixed})
    if len(view.running) > FEW or len(view.devices) > SMALL:
        return fluids
    found = sorted(_moves(view, speed, fixed), key=lambda one: one[0])
    return _best([[], fluids, *(moves for _, moves in found[:CANDIDATES])], view, [], speed)


def keep(view: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
    """The policy that moves nobody: fill what is free."""
    if not demands or not view.room:
        return []
    site, names = _site(view, view.running.values(), speed)
    jobs = [_job(demand, len(names), speed) for demand in demands]
    return _now(fill(site, jobs), jobs, names)


def _best(
    candidates: Sequence[list[Assignment]], view: View, demands: Sequence[Demand], speed: Speed
) -> list[Assignment]:
    """The one whose last trial ends first; of those, one whose trials end sooner; of equal ones the first.

    Where others follow, what counts is that trials end soon.
    """
    opened = any(one.demand.open for one in view.running.values()) or any(demand.open for demand in demands)
    best, last, ends = candidates[0], math.inf, math.inf
    tried: list[list[Assignment]] = []
    for made in candidates:
        if made not in tried:
            tried.append(made)
            courses = [course(_first(made, after, view), view, demands, speed) for after in (keep, dynamic_fluid)]
            ours = min(courses, key=lambda one: one.ends if opened else one.makespan)
            sooner = (opened or ours.makespan <= last) and ours.ends < ends * (1 - SOONER)
            if sooner or (not opened and ours.makespan < last * (1 - BETTER)):
                best, last, ends = made, ours.makespan, ours.ends
    return best


def _first(made: list[Assignment], after: Scheduler, view: View) -> Scheduler:
    """Do this first, and then what the policy says; who is told to move does so, whatever happens until then."""
    moving = {one.trial: view.running[one.trial].assignment for one in made if one.trial in view.running}
    asked = False

    def schedule(now: View, demands: Collection[Demand], speed: Speed) -> list[Assignment]:
        nonlocal asked
        if not asked:
            asked = True
            return made
        still = [
            one
            for one in made
            if one.trial in now.running and now.running[one.trial].assignment is moving.get(one.trial)
        ]
        told = {one.trial for one in still}
        return [*(one for one in after(now, demands, speed) if one.trial not in told), *still]

    return schedule


def _moves(view: View, speed: Speed, fixed: frozenset[int]) -> Iterator[tuple[float, list[Assignment]]]:
    """Ways to rebalance, and when all would end: the last to end are planned anew, first one, then two, and so on."""
    ends = {trial: one.demand.units * speed.seconds(trial, one.assignment.share) for trial, one in view.running.items()}
    able = [trial for trial in view.running if trial not in fixed and view.running[trial].demand.units > 1]
    able.sort(key=lambda trial: -ends[trial])
    for count in sorted({*range(1, min(MOVERS, len(able)) + 1), len(able)} - {0}):
        movers = able[:count]
        stay = [one for trial, one in view.running.items() if trial not in movers]
        space = Space(view.devices, everywhere(view))
        for one in (view.running[trial] for trial in movers):
            space.give(one.assignment.devices, one.assignment.share, one.demand.bytes)
        site, names = _site(View(view.devices, {}, space.room), stay, speed)
        jobs = [_moved(view.running[trial], len(names), speed) for trial in movers]
        plan = fill(site, jobs)
        if all(start.time == 0 for start in plan.starts):
            moves = _changes(view, {movers[start.job]: start.option.share for start in plan.starts})
            if moves:
                yield plan.makespan, moves


def _changes(view: View, shares: dict[int, float]) -> list[Assignment]:
    """Devices for those whose share changes, wide ones first; nothing where they do not all fit."""
    changed = [trial for trial, share in shares.items() if share != view.running[trial].assignment.share]
    space = Space(view.devices, everywhere(view))
    for one in (view.running[trial] for trial in changed):
        space.give(one.assignment.devices, one.assignment.share, one.demand.bytes)
    made = []
    for trial in sorted(changed, key=lambda trial: -shares[trial]):
        one = view.running[trial]
        devices = space.fit(shares[trial], one.demand.bytes, own=one.assignment.devices)
        if devices is None:
            return []
        space.take(devices, shares[trial], one.demand.bytes)
        made.append(Assignment(trial, devices, shares[trial]))
    return made


def _site(view: View, running: Collection[Holding], speed: Speed) -> tuple[Site, list[str]]:
    room = everywhere(view)
    names = list(room)
    place = {name: i for i, name in enumerate(names)}
    held = tuple(
        Held(
            (one.demand.units - one.done) * speed.seconds(one.demand.trial, one.assignment.share),
            tuple(place[name] for name in one.assignment.devices if name in place),
            one.assignment.share,
            one.demand.bytes,
        )
        for one in running
    )
    free = tuple(room[name].share for name in names)
    return Site(free, tuple(room[name].bytes for name in names), held), names


def _fits(job: Job, site: Site) -> bool:
    """Whether it fits somewhere once all that ends has ended; what others have there is theirs."""
    free, bytes = list(site.free), list(site.bytes)
    for held in site.held:
        for d in held.devices:
            free[d] += min(1.0, held.share)
            bytes[d] += held.bytes
    least = min(1.0, job.options[0].share) - FULL
    return any(share >= least and left >= job.demand.bytes for share, left in zip(free, bytes, strict=True))


def _job(demand: Demand, devices: int, speed: Speed) -> Job:
    runtime = demand.units * speed.unit(demand.trial)
    ours = options(speed.curve(demand.trial), devices)
    return Job(demand, runtime, tuple(Option(o.share, runtime * o.seconds, runtime * o.area) for o in ours))


def _moved(one: Holding, devices: int, speed: Speed) -> Job:
    """To go on as it does costs nothing; for another share it ends its unit first, and moves."""
    share = one.assignment.share
    unit, left = speed.unit(one.demand.trial), one.demand.units
    rest = speed.seconds(one.demand.trial, share) * (1 - one.done)
    ours = []
    for option in options(speed.curve(one.demand.trial), devices):
        stays = option.share == share
        seconds = rest + (left - 1) * unit * option.seconds + (0.0 if stays else speed.moving)
        ours.append(Option(option.share, seconds, option.share * seconds))
    return Job(one.demand, (left - one.done) * unit, tuple(ours))


def _now(plan: Plan, jobs: Sequence[Job], names: Sequence[str]) -> list[Assignment]:
    return [
        Assignment(jobs[start.job].demand.trial, tuple(names[d] for d in start.devices), start.option.share)
        for start in plan.starts
        if start.time == 0
    ]
