"""What becomes of devices that are idle while nobody waits: running trials grow onto them, as far as that pays.

Fluid §4.3 and Hydro §5.3 give a promising trial what its rivals gave up. A scheduler that resizes says first who grows;
this deals what it leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from penstock.bundle import Device
from penstock.scheduling.base import FULL, Assignment, View
from penstock.scheduling.nodes import arrange
from penstock.speed.model import Speed

First = Literal["best", "evenly"]
FIRST: tuple[str, ...] = get_args(First)


@dataclass(frozen=True)
class Growing:
    """Who grows onto idle devices first, and whether a trial's devices may be of several types."""

    first: First = "best"
    mixed: bool = False


def grow(view: View, trials: Sequence[int], speed: Speed, growing: Growing) -> list[Assignment]:
    """More devices for ``trials``, the best of them first, each of which is alone on its devices.

    Devices that are free are dealt by doublings, while they pay: to the best trial as many as there are, then to the
    next one; or, evenly, always to the one that has fewest, until it cannot have twice as many. Who would gain less
    time by it than moving costs gets none. Nobody else moves, and nobody has fewer than before.

    >>> from penstock.speed.curve import Curve
    >>> from penstock.scheduling.base import Demand, Holding, room
    >>> devices = {name: Device(name, "h200", 8) for name in "abcd"}
    >>> running = {t: Holding(Demand(t, "g", 9), Assignment(t, (name,))) for t, name in enumerate("ab")}
    >>> view = View(devices, running, room(devices, running.values()))
    >>> speed = Speed(lambda trial: 1.0, lambda trial: Curve(scaling=(1.0, 0.5, 0.4)), moving=0.1)
    >>> grow(view, [1, 0], speed, Growing("best"))
    [Assignment(trial=1, devices=('b', 'c', 'd'), share=3.0)]
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
    """How many devices each trial has at last, from how many it has and the most that pay."""
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
    """``count`` of the devices that a trial holds and of those that are free, on as few nodes as can be.

    They are of the type of its first one. Where these are too few, and types may be ``mixed``, all of these come first,
    and others follow.

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
