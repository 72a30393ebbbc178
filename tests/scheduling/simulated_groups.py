"""Simulated TrialGroups: trials of known runtimes on a cluster that does what the speed model says."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.bundle import Device
from penstock.scheduling.base import FULL, Assignment, Demand, Holding, Scheduler, View, kinds, room
from penstock.speed.curve import Curve
from penstock.speed.model import Speed
from tests.scheduling.course import Course, course


@dataclass(frozen=True)
class SimulatedTrial:
    """So many units of so many seconds each, on a device of its own."""

    units: int
    seconds: float = 1.0
    group: str = "a"
    priority: float = 0.0
    bytes: int = 0
    signature: str = "alike"


def cluster(devices: int, memory: int = 80, node: int = 8) -> dict[str, Device]:
    return {f"gpu {i}": Device(f"gpu {i}", "simulated", memory, f"node {i // node}") for i in range(devices)}


alike = partial(Demand, signature="alike", position=(1, 0))
"""The demand of a trial that can share a device with others of these, and has trained before."""


def under_way(devices: Mapping[str, Device], running: Mapping[int, Holding]) -> View:
    """What a scheduler sees of these trials."""
    return View(devices, running, room(devices, running.values()), kinds(running.values()))


def empty(devices: Mapping[str, Device]) -> View:
    return under_way(devices, {})


def demands(trials: Sequence[SimulatedTrial], weights: Mapping[str, float] | None = None) -> list[Demand]:
    """Of trials whose units were timed: each has trained before."""
    weights = weights or {}
    return [
        Demand(
            i,
            t.group,
            t.units,
            i,
            t.priority,
            weights.get(t.group, 1.0),
            t.bytes,
            signature=t.signature,
            position=(1, 0),
        )
        for i, t in enumerate(trials)
    ]


def simulate(
    scheduler: Scheduler,
    trials: Sequence[SimulatedTrial],
    devices: int | Mapping[str, Device],
    curve: Curve,
    moving: float = math.inf,
    weights: Mapping[str, float] | None = None,
) -> Course:
    """All groups arrive at once on an empty cluster; trials are numbered in their order. Every decision is checked."""
    cards = cluster(devices) if isinstance(devices, int) else devices
    speed = Speed(lambda trial: trials[trial].seconds, lambda trial: curve, moving)

    def checked(view: View, waiting: Collection[Demand], speed: Speed) -> list[Assignment]:
        made = scheduler(view, waiting, speed)
        check(view, waiting, speed, made)
        return made

    made = course(checked, empty(cards), demands(trials, weights), speed)
    assert not made.waiting, f"{made.waiting} wait for ever"
    return made


def check(view: View, waiting: Collection[Demand], speed: Speed, made: Collection[Assignment]) -> None:
    """With everything carried out, no device holds more than it has, nor trials that are unlike.

    Every share is one that the curve knows.
    """
    known = {demand.trial: demand for demand in waiting}
    known |= {trial: holding.demand for trial, holding in view.running.items()}
    given = {one.trial: one for one in made}
    assert len(given) == len(made), "a trial was assigned twice"
    assert given.keys() <= known.keys(), "a trial that nobody asked for"
    after = {trial: holding.assignment for trial, holding in view.running.items()} | given
    shares: defaultdict[str, float] = defaultdict(float)
    bytes: defaultdict[str, int] = defaultdict(int)
    together: defaultdict[str, list[str]] = defaultdict(list)
    for trial, one in after.items():
        for name in one.devices:
            shares[name] += min(1.0, one.share)
            bytes[name] += known[trial].bytes
            together[name].append(known[trial].signature)
    for one in made:
        curve = speed.curve(one.trial)
        assert set(one.devices) <= view.devices.keys(), "a device that there is not"
        assert len(set(one.devices)) == len(one.devices) == max(1, round(one.share)), "as many devices as the share"
        if one.share < 1:
            assert one.share == 1 / round(1 / one.share), "1/p of a device"
            assert round(1 / one.share) <= curve.most, "no more to a device than the curve knows"
        else:
            assert one.share in curve.counts, "whole devices, as many as were measured"
    assert all(share <= 1 + FULL for share in shares.values()), "a device was given away twice"
    for signatures in together.values():
        assert view.unlike or len(signatures) == 1 or {*signatures} == {signatures[0]} != {""}, "unlike trials share"
    assert all(taken <= view.devices[name].memory for name, taken in bytes.items()), "more bytes than the device has"
