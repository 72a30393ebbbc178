"""Devices that are idle while no trial waits: running trials get them where that pays.

Fluid §4.3 and Hydro §5.3 give a promising trial the devices that its rivals gave up. A scheduler that resizes decides
first which trials grow. After any scheduler, this module deals the devices that are still idle. A bundle is split
rather than spread, because its parts exchange nothing. A trial measures the gain of several devices for its signature.
Then trials grow by what was measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from penstock.bundle import Device
from penstock.scheduling.base import FULL, Assignment, Demand, Room, View
from penstock.scheduling.nodes import arrange
from penstock.speed.model import Speed

First = Literal["best", "evenly"]
FIRST: tuple[str, ...] = get_args(First)
WORTH = 2  # a trial with fewer units left does not move onto idle devices
GAIN = 0.1  # the fraction of a step's time that splitting a bundle must save


@dataclass(frozen=True)
class Growing:
    """Which trial grows onto idle devices first, and whether a trial's devices may be of several types."""

    first: First = "best"
    mixed: bool = False


def idle(view: View) -> list[str]:
    """The devices on which no trial runs."""
    return [name for name, left in view.room.items() if left.share > 1 - FULL]


def alone(view: View, ranked: Sequence[int]) -> list[int]:
    """The trials, in the order of ``ranked``, that have their devices to themselves and measure nothing."""
    company = Counter(name for one in view.running.values() for name in one.assignment.devices)
    return [
        trial
        for trial in ranked
        if trial in view.running
        and not view.running[trial].assignment.measure
        and all(company[name] == 1 for name in view.running[trial].assignment.devices)
    ]


def split(view: View, speed: Speed) -> list[Assignment]:
    """Move parts of the largest bundle to idle devices, where a step of fewer trials was measured to take less time.

    >>> from penstock.scheduling.base import Demand, Holding, kinds, room
    >>> from penstock.speed.curve import Curve
    >>> devices = {name: Device(name, "h200", 8) for name in "ab"}
    >>> running = {t: Holding(Demand(t, "g", 9, signature="s"), Assignment(t, ("a",), 0.25)) for t in range(4)}
    >>> view = View(devices, running, room(devices, running.values()), kinds(running.values()))
    >>> speed = Speed(lambda trial: 1.0, lambda trial: Curve(sharing=(1.0, 1.2, 1.6, 2.0)), moving=0.1)
    >>> [(one.trial, one.devices, one.share) for one in split(view, speed)]
    [(2, ('b',), 0.5), (3, ('b',), 0.5)]
    """
    bundles: dict[str, list[int]] = {}
    for trial, one in view.running.items():
        if one.assignment.share < 1:
            bundles.setdefault(one.assignment.devices[0], []).append(trial)
    device = max(bundles, key=lambda name: len(bundles[name]), default=None)
    if device is None or len(bundles[device]) < 2:
        return []
    trials = bundles[device]
    known = speed.on(view.devices[device].type)
    free = [name for name in idle(view) if view.devices[name].type == view.devices[device].type]
    parts = min(len(trials), 1 + len(free))
    fewer = -(-len(trials) // parts)
    units = min(view.running[trial].demand.units for trial in trials)
    before, after = (known.seconds(trials[0], 1 / count) for count in (len(trials), fewer))
    if after >= (1 - GAIN) * before or units * (before - after) <= known.moving:
        return []
    leaving = trials[fewer:]
    hands = [leaving[i : i + fewer] for i in range(0, len(leaving), fewer)]
    return [Assignment(trial, (name,), 1 / fewer) for name, hand in zip(free, hands, strict=False) for trial in hand]


def probe(view: View, ranked: Sequence[int], speed: Speed, growing: Growing) -> Assignment | None:
    """More devices for the best trial that has to measure their gain for its signature; None where none has to.

    A trial has to measure where its signature was not tried on several devices yet, and where the largest number tried
    paid and twice as many devices are there.
    """
    free = idle(view)
    for trial in alone(view, ranked) if free else ():
        holding = view.running[trial]
        held, type = holding.assignment.devices, view.devices[holding.assignment.devices[0]].type
        if not holding.demand.signature or holding.demand.units < WORTH:
            continue
        able = [name for name in free if growing.mixed or view.devices[name].type == type]
        tried = speed.on(type).tried(trial)
        for count in range(min(len(held) + len(able), holding.demand.load), len(held), -1):
            if not _untried(tried, count):
                break
            names = widen(view.devices, able, held, count, mixed=growing.mixed)
            if not are_apart(names, view):
                lent = count - own(holding.assignment)
                return Assignment(trial, names, float(count), measure=True, lent=lent)
    return None


def on_the_way(view: View, demands: Collection[Demand], made: list[Assignment], speed: Speed) -> list[Assignment]:
    """The same assignments, but a trial that moves to a device of its own measures more devices, if these stay idle.

    A trial of few units would not move once more to measure. As it moves anyway, measuring costs no move.
    """
    asked = {demand.trial: demand for demand in demands}
    given = {one.trial for one in made}
    if not asked.keys() <= given:
        return made  # the devices that stay idle are for the other waiting trials
    used = {name for one in made for name in one.devices}
    free = [name for name in idle(view) if name not in used]
    measuring = {one.demand.signature for one in view.running.values() if one.assignment.measure}
    for i, one in enumerate(made):
        demand = asked.get(one.trial)
        if demand is None or not demand.type or not demand.signature or one.share != 1 or demand.signature in measuring:
            continue
        able = [name for name in free if view.devices[name].type == demand.type]
        count = min(1 + len(able), demand.load)
        names = widen(view.devices, able, one.devices, count)
        if count < 2 or not _untried(speed.on(demand.type).tried(one.trial), count) or are_apart(names, view):
            continue
        wide = replace(one, devices=names, share=float(count), measure=True, lent=count - 1)
        return [*made[:i], wide, *made[i + 1 :]]
    return made


def _untried(tried: Mapping[int, float], count: int) -> bool:
    most = max(tried, default=0)
    return most == 0 or (1 < most <= count / 2 and min(tried, key=lambda width: (tried[width], width)) == most)


def own(assignment: Assignment) -> int:
    """How many of a trial's devices were not lent to it."""
    return len(assignment.devices) - assignment.lent


def are_apart(devices: Collection[str], view: View) -> bool:
    """Whether these devices include a set whose workers did not meet."""
    return any(one <= set(devices) for one in view.apart)


def grow_apart(view: View, ranked: Sequence[int], speed: Speed, growing: Growing) -> list[Assignment]:
    """``grow`` for trials that are alone on their devices and have units left to gain; no trial gets devices apart."""
    trials = [trial for trial in alone(view, ranked) if view.running[trial].demand.units >= WORTH]
    while True:
        made = grow(view, trials, speed, growing)
        refused = {one.trial for one in made if are_apart(one.devices, view)}
        if not refused:
            break
        trials = [trial for trial in trials if trial not in refused]
    had = {one.trial: own(view.running[one.trial].assignment) for one in made}
    return [replace(one, lent=len(one.devices) - had[one.trial]) for one in made]


def give_back(view: View, ranked: Sequence[int], missing: int) -> list[Assignment]:
    """Make trials give back devices that were lent to them, the worst trials first, until none are ``missing``."""
    made = []
    for trial in reversed(alone(view, ranked)):
        held = view.running[trial].assignment
        if missing > 0 and held.lent:
            missing -= held.lent
            made.append(on_first(held, own(held)))
    return made


def keeps(view: View, trial: int, ranked: Sequence[int], speed: Speed, growing: Growing) -> Assignment | None:
    """The devices that a trial keeps after measuring on them; None where it keeps them all."""
    held = view.running[trial].assignment
    pays = speed.on(view.devices[held.devices[0]].type).curve(trial).widest
    if growing.first == "evenly":
        pays = min(pays, _due(view, trial, ranked, speed, growing))
    return on_first(held, pays) if pays < len(held.devices) else None


def _due(view: View, trial: int, ranked: Sequence[int], speed: Speed, growing: Growing) -> int:
    """How many devices a trial would be dealt if the devices that it measured on were idle."""
    holding = view.running[trial]
    held, first = holding.assignment, max(1, own(holding.assignment))
    before = replace(holding, assignment=Assignment(trial, held.devices[:first], float(first)))
    free = {name: Room(1.0, view.devices[name].memory) for name in held.devices[first:]}
    view = replace(view, running={**view.running, trial: before}, room={**view.room, **free})
    trials = [one for one in alone(view, ranked) if one == trial or view.running[one].demand.units >= WORTH]
    made = grow(view, trials, replace(speed, moving=0.0), growing)
    return next((len(one.devices) for one in made if one.trial == trial), first)


def on_first(held: Assignment, count: int) -> Assignment:
    """The first ``count`` of a trial's devices."""
    return Assignment(held.trial, held.devices[:count], float(count), lent=max(0, count - own(held)))


def grow(view: View, trials: Sequence[int], speed: Speed, growing: Growing) -> list[Assignment]:
    """More devices for ``trials``, which come best first; each is alone on its devices.

    Free devices are dealt by doublings, while these pay. "best" gives the best trial as many as it can use, then the
    next trial. "evenly" always doubles the trial with the fewest devices, until too few are free for that. A trial that
    would gain less time than moving costs gets none. No other trial moves, and no trial has fewer devices than before.

    >>> from penstock.speed.curve import Curve
    >>> from penstock.scheduling.base import Demand, Holding, room
    >>> devices = {name: Device(name, "h200", 8) for name in "abcd"}
    >>> running = {t: Holding(Demand(t, "g", 9), Assignment(t, (name,))) for t, name in enumerate("ab")}
    >>> view = View(devices, running, room(devices, running.values()))
    >>> speed = Speed(lambda trial: 1.0, lambda trial: Curve(scaling=(1.0, 0.5, 0.4)), moving=0.1)
    >>> [(one.trial, one.devices) for one in grow(view, [1, 0], speed, Growing("best"))]
    [(1, ('b', 'c', 'd'))]
    >>> [one.share for one in grow(view, [1, 0], speed, Growing("evenly"))]
    [2.0, 2.0]
    """
    most = max((view.running[trial].demand.bytes for trial in trials), default=0)
    free = [name for name, left in view.room.items() if left.share > 1 - FULL and left.bytes >= most]
    types: dict[str, list[int]] = {}
    for trial in trials:
        type = view.devices[view.running[trial].assignment.devices[0]].type
        types.setdefault("" if growing.mixed else type, []).append(trial)
    made = []
    for type, ours in types.items():
        there = [name for name in free if growing.mixed or view.devices[name].type == type]
        made += _grow(view, ours, there, speed, growing)
    return made


def _grow(view: View, trials: list[int], free: list[str], speed: Speed, growing: Growing) -> list[Assignment]:
    held = {trial: view.running[trial].assignment.devices for trial in trials}
    known = {trial: speed.types.get(view.devices[held[trial][0]].type, speed) for trial in trials}

    def vain(trial: int, count: int) -> bool:
        units = view.running[trial].demand.units - view.running[trial].done
        before, after = (known[trial].seconds(trial, n) for n in (len(held[trial]), count))
        return count > len(held[trial]) and units * (before - after) <= speed.moving

    while True:
        counts = _deal({t: (len(held[t]), known[t].curve(t).widest) for t in trials}, len(free), growing.first)
        if (one := next((trial for trial in trials if vain(trial, counts[trial])), None)) is None:
            break
        trials = [trial for trial in trials if trial != one]
    made = {}
    for trial in sorted(trials, key=lambda trial: -counts[trial]):  # the largest first, as in RubberBand §4.4
        if counts[trial] > len(held[trial]):
            names = widen(view.devices, free, held[trial], counts[trial], mixed=growing.mixed)
            free = [name for name in (*free, *held[trial]) if name not in names]
            made[trial] = Assignment(trial, names, float(len(names)))
    return [made[trial] for trial in trials if trial in made]


def _deal(trials: Mapping[int, tuple[int, int]], free: int, first: str) -> dict[int, int]:
    """The final number of each trial's devices, from its present number and the most that pay."""
    counts = {trial: count for trial, (count, _) in trials.items()}
    while True:
        able = [trial for trial, (_, most) in trials.items() if counts[trial] < most]
        if first == "evenly":
            able = sorted(able, key=lambda trial: counts[trial])[:1]
        more = {trial: min(counts[trial], trials[trial][1] - counts[trial]) for trial in able}
        trial = next((trial for trial in able if more[trial] <= free), None)
        if trial is None:
            return counts
        counts[trial] += more[trial]
        free -= more[trial]


def widen(
    devices: Mapping[str, Device], free: Collection[str], held: tuple[str, ...], count: int, *, mixed: bool = False
) -> tuple[str, ...]:
    """``count`` devices for a trial, out of its own devices and free devices, on as few nodes as possible.

    All are of the type of its first device. Where there are too few of that type, and types may be ``mixed``, all of
    that type come first, and devices of other types follow.

    >>> devices = {name: Device(name, "h200" if name < "c" else "b200", 80) for name in "abcd"}
    >>> widen(devices, "bcd", ("a",), 3, mixed=True)
    ('a', 'b', 'c')
    """
    there = {name: devices[name] for name in (*held, *free)}
    alike = {name: device for name, device in there.items() if device.type == devices[held[0]].type}
    own = tuple(name for name in held if name in alike)
    names = arrange(alike, {0: own}, {0: min(count, len(alike))})[0]
    if mixed and len(names) < count:
        unlike = {name: device for name, device in there.items() if name not in alike}
        others = tuple(name for name in held if name in unlike)
        names += arrange(unlike, {0: others}, {0: count - len(names)}, mixed=True)[0]
    return names
