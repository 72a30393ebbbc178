"""Plans for a few trials on a few devices: what a choice of shares and an order come to.

A plan is laid out in time as list scheduling does: whenever something becomes free, the trials that wait are gone
through in order and each starts that fits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from penstock.scheduling.base import FULL, Demand
from penstock.speed.curve import Curve

BETTER = 1e-9
"""A plan is better that is shorter by this part at least: sums in another order differ by rounding."""


class Option(NamedTuple):
    """A share, the seconds that a trial takes at it, and the device seconds."""

    share: float
    seconds: float
    area: float


@dataclass(frozen=True)
class Job:
    """A trial to plan: its demand, its runtime on a device of its own, what it can be given, narrowest first."""

    demand: Demand
    runtime: float
    options: tuple[Option, ...]


@lru_cache
def options(curve: Curve, devices: int) -> tuple[Option, ...]:
    """What is worth giving a trial whose runtime is 1, narrowest first.

    Sharing that does not save device seconds over sharing with fewer is left out, and so is a width that is no faster.
    Of more than four to a device some counts stand for all.

    >>> [option.share for option in options(Curve(sharing=(1, 1.2, 3.5), scaling=(1, 0.6, 0.6)), devices=8)]
    [0.5, 1.0, 2.0]
    """
    found = [Option(1.0, 1.0, 1.0)]
    for p, seconds in enumerate(curve.sharing[1:], 2):
        some = p <= 4 or p * found[0].share >= 1.5 or p == curve.most
        if some and seconds / p < found[0].area * (1 - BETTER):
            found.insert(0, Option(1 / p, seconds, seconds / p))
    for w, seconds in enumerate(curve.scaling[1:devices], 2):
        if seconds < found[-1].seconds * (1 - BETTER):
            found.append(Option(float(w), seconds, w * seconds))
    return tuple(found)


@dataclass(frozen=True)
class Held:
    """What is on devices, by their places in the list, until it ends."""

    end: float
    devices: tuple[int, ...]
    share: float
    bytes: int


@dataclass(frozen=True)
class Site:
    """The devices of a plan: what is free on each, its free bytes, and what will be freed when."""

    free: tuple[float, ...]
    bytes: tuple[int, ...]
    held: tuple[Held, ...]


class Start(NamedTuple):
    job: int
    option: Option
    devices: tuple[int, ...]
    time: float


@dataclass(frozen=True)
class Plan:
    """What was laid out: the last end, the sum of the ends, who starts when with what."""

    makespan: float
    ends: float
    starts: tuple[Start, ...]

    def beats(self, other: Plan) -> bool:
        """It ends sooner, or at the same time with results that come sooner."""
        if self.makespan < other.makespan * (1 - BETTER):
            return True
        return self.makespan <= other.makespan * (1 + BETTER) and self.ends < other.ends * (1 - BETTER)


class Wish(NamedTuple):
    """What a job would start with, by preference, and when it should end: what ends later is not for it."""

    options: tuple[Option, ...]
    deadline: float = math.inf


def lay(site: Site, jobs: Sequence[Job], order: Sequence[int], wishes: Sequence[Wish], strict: bool = False) -> Plan:
    """Lay jobs out in time, each as soon as it fits, or where ``strict`` not before those that come before it.

    No device stays free while a job waits that fits there: it then starts with fewer.
    """
    bytes = list(site.bytes)
    empty = [d for d, share in enumerate(site.free) if share > 1 - FULL]
    begun = {d: share for d, share in enumerate(site.free) if FULL < share <= 1 - FULL}
    ends = [(held.end, i, held.devices, held.share, held.bytes) for i, held in enumerate(site.held)]
    heapq.heapify(ends)
    makespan = max((held.end for held in site.held), default=0.0)
    total, now, count = sum(held.end for held in site.held), 0.0, len(ends)
    starts: list[Start] = []

    def start(job: int, wanted: Iterable[Option], deadline: float = math.inf) -> bool:
        nonlocal makespan, total, count
        need = jobs[job].demand.bytes
        for option in wanted:
            share, end = option.share, now + option.seconds
            if end > deadline:
                continue
            if share >= 1:
                if share > len(empty):
                    continue
                devices = tuple([d for d in empty if bytes[d] >= need][: round(share)])
                if len(devices) < share:
                    continue
                for d in devices:
                    empty.remove(d)
                    bytes[d] -= need
            else:  # the fullest that has room: whole devices are kept for those that need them
                fitting = [(left, d) for d, left in begun.items() if left >= share - FULL and bytes[d] >= need]
                if not fitting:
                    fitting = [(1.0, d) for d in empty if bytes[d] >= need][:1]
                    if not fitting:
                        continue
                    empty.remove(fitting[0][1])
                left, d = min(fitting)
                devices = (d,)
                begun[d] = left - share
                bytes[d] -= need
            heapq.heappush(ends, (end, count, devices, share, need))
            count += 1
            starts.append(Start(job, option, devices, now))
            makespan, total = max(makespan, end), total + end
            return True
        return False

    waiting = list(order)
    while waiting:
        if strict:
            while waiting and start(waiting[0], wishes[waiting[0]].options, wishes[waiting[0]].deadline):
                waiting.pop(0)
        else:
            waiting = [job for job in waiting if not start(job, wishes[job].options, wishes[job].deadline)]
        if waiting and empty:
            waiting = [job for job in waiting if not (empty and start(job, reversed(jobs[job].options)))]
        if waiting:
            if not ends:
                return Plan(math.inf, math.inf, ())
            now = ends[0][0]
            while ends and ends[0][0] <= now + BETTER * abs(now):
                _, _, devices, share, need = heapq.heappop(ends)
                for d in devices:
                    bytes[d] += need
                    left = begun.pop(d, 0.0) + min(1.0, share)
                    if left > 1 - FULL:
                        empty.append(d)
                    else:
                        begun[d] = left
    return Plan(makespan, total, tuple(starts))
