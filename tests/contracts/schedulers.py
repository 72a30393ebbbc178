"""The suite that every scheduler passes: inherit ``SchedulerContract`` and say which."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.bundle import Device
from penstock.errors import StudyError
from penstock.scheduling.base import FULL, Assignment, Demand, Holding, Scheduler, View, kinds, room
from penstock.scheduling.capacity import Capacity
from penstock.speed.curve import Curve
from penstock.speed.model import UNKNOWN, Speed
from penstock.trial import Later
from tests.scheduling.simulated_groups import SimulatedTrial, check, demands, simulate

thorough = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,  # a failure on one machine is a failure on every other
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)
LARGEST = 80


@dataclass(frozen=True)
class World:
    """A cluster under way: what a scheduler is called with."""

    view: View
    waiting: list[Demand]
    speed: Speed


def curves() -> st.SearchStrategy[Curve]:
    overheads = st.tuples(st.floats(1, 1.4), st.integers(1, 4), st.floats(1, 1.2), st.integers(1, 5))
    return st.one_of(st.just(Curve()), overheads.map(lambda one: Curve.of(*one)))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    rng = random.Random(draw(st.integers(0, 10**6)))
    curve, moving = draw(curves()), draw(st.sampled_from([math.inf, 0.0, 3.0]))
    count, groups = draw(st.integers(1, 8)), draw(st.sampled_from(["a", "ab", "abc"]))
    devices = {f"gpu {i}": Device(f"gpu {i}", "h200", rng.choice([40, LARGEST]), f"node {i % 2}") for i in range(count)}
    devices["gpu 0"] = replace(devices["gpu 0"], memory=LARGEST)
    seconds = [rng.uniform(0.5, 2) for _ in range(40)]

    signatures, unlike = draw(st.sampled_from([["one"], ["one", "two"], ["one", "two", ""]])), draw(st.booleans())
    weights, rungs = draw(st.sampled_from([{}, {"a": 1.0, "b": 2.5}])), draw(st.sampled_from([(), (Later(2, 3),)]))

    def demand(trial: int) -> Demand:
        group, signature = rng.choice(groups), rng.choice(signatures)
        return Demand(
            trial,
            group,
            rng.randint(1, 50),
            trial,
            rng.choice([0, 0, 0, 1]),
            weights.get(group, 1.0),
            rng.choice([0, 0, 10, 30, 60]),
            signature=signature,
            position=(rng.randint(0, 1), 0),
            later=rungs,
        )

    space = Capacity(devices, room(devices, []), unlike=unlike)
    running = {}
    for trial in range(rng.randint(0, 2 * count)):
        one = demand(trial)
        share = rng.choice([1 / rng.randint(1, curve.most), float(rng.randint(1, curve.widest))])
        places = space.fit(share, one.bytes, signature=one.signature)
        if places:
            space.take(places, share, one.bytes, one.signature)
            running[trial] = Holding(one, Assignment(trial, places, share))
    waiting = [demand(20 + i) for i in range(draw(st.integers(0, 10)))]
    left = room(devices, running.values())
    there = {name: kind for name, kind in kinds(running.values()).items() if name in left}
    view = View(devices, running, left, there, unlike)
    return World(view, waiting, Speed(seconds.__getitem__, lambda trial: curve, moving))


def groups_of_trials() -> st.SearchStrategy[list[SimulatedTrial]]:
    trial = st.builds(
        SimulatedTrial,
        units=st.integers(1, 30),
        seconds=st.floats(0.5, 2),
        group=st.sampled_from("ab"),
        signature=st.sampled_from(["one", "one", "two", ""]),
    )
    return st.lists(trial, min_size=1, max_size=8)


class SchedulerContract:
    scheduler: ClassVar[Scheduler]
    conserves_work: ClassVar[bool] = True

    def schedule(self, world: World) -> list[Assignment]:
        return type(self).scheduler(world.view, {d.trial: d for d in world.waiting}.values(), world.speed)

    @thorough
    @given(worlds())
    def test_nothing_is_given_away_twice(self, world: World) -> None:
        check(world.view, world.waiting, world.speed, self.schedule(world))

    @thorough
    @given(worlds())
    def test_no_device_is_free_while_a_trial_waits_that_fits(self, world: World) -> None:
        if not self.conserves_work:
            return
        given = {one.trial: one for one in self.schedule(world)}
        wanted = {demand.trial: demand for demand in world.waiting}
        held = [replace(one, assignment=given.get(trial, one.assignment)) for trial, one in world.view.running.items()]
        held += [Holding(wanted[trial], one) for trial, one in given.items() if trial in wanted]
        for name, left in room(world.view.devices, held).items():
            fitting = [d.trial for d in world.waiting if d.trial not in given and d.bytes <= left.bytes]
            assert left.share < 1 - FULL or not fitting, f"{name} is free and {fitting} wait"

    @thorough
    @given(worlds(), st.randoms(use_true_random=False))
    def test_equal_input_gives_equal_output(self, world: World, rng: random.Random) -> None:
        running = list(world.view.running.items())
        rng.shuffle(running)
        again = replace(world, view=replace(world.view, running=dict(running)))
        assert self.schedule(world) == self.schedule(world) == self.schedule(again)

    @thorough
    @given(groups_of_trials(), st.integers(1, 6), curves(), st.sampled_from([math.inf, 0.0, 3.0]))
    def test_every_trial_ends_with_all_its_units(
        self, trials: list[SimulatedTrial], devices: int, curve: Curve, moving: float
    ) -> None:
        units: defaultdict[int, float] = defaultdict(float)
        for one in simulate(type(self).scheduler, trials, devices, curve, moving).stretches:
            cost = moving if one.trial in units else 0.0
            units[one.trial] += (one.end - one.start - cost) / (trials[one.trial].seconds * curve.at(one.share))
        assert units == {i: pytest.approx(trial.units, rel=1e-6) for i, trial in enumerate(trials)}

    def test_nothing_is_done_where_nothing_waits_and_nothing_runs(self) -> None:
        device = {"gpu 0": Device("gpu 0", "h200", LARGEST)}
        assert type(self).scheduler(View(device, {}, room(device, [])), [], UNKNOWN) == []

    def test_a_trial_that_no_device_can_hold_is_refused(self) -> None:
        device = {"gpu 0": Device("gpu 0", "h200", LARGEST)}
        waiting = demands([SimulatedTrial(1), SimulatedTrial(1, bytes=LARGEST + 1)])
        with pytest.raises(StudyError, match=r"trial 1 takes 81 bytes and the largest device has 80: make"):
            type(self).scheduler(View(device, {}, room(device, [])), waiting, UNKNOWN)

    def test_a_cluster_of_no_devices_is_refused(self) -> None:
        with pytest.raises(StudyError, match="trial 0 waits on a cluster of no devices"):
            type(self).scheduler(View({}, {}, {}), demands([SimulatedTrial(1)]), UNKNOWN)
