"""Clusters of devices of several types: each type goes by what was measured on it."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bundle import Device
from penstock.errors import StudyError
from penstock.scheduling.base import Assignment, Demand, Holding, Scheduler, View, room
from penstock.scheduling.by_type import by_type
from penstock.scheduling.capacity import Capacity
from penstock.scheduling.fluid import dynamic_fluid, static_fluid
from penstock.scheduling.waterfill import waterfill
from penstock.speed.curve import Curve
from penstock.speed.model import Speed
from tests.contracts.schedulers import thorough
from tests.scheduling.simulated_groups import alike, check, under_way

ALL = pytest.mark.parametrize("scheduler", [static_fluid, dynamic_fluid, waterfill])
UNKNOWN, SHARES, SPREADS = Curve(), Curve.of(alpha=1.05, most=4), Curve.of(beta=1.0, widest=8)


def cluster(memory: int = 80, **counts: int) -> dict[str, Device]:
    names = [(f"{type} {i}", type) for type, count in counts.items() for i in range(count)]
    return {name: Device(name, type, memory, type) for name, type in names}


def known(moving: float = math.inf, **types: tuple[float, Curve]) -> Speed:
    """The seconds of a unit and the curve on each type."""

    def one(unit: float, curve: Curve) -> Speed:
        return Speed(lambda trial: unit, lambda trial: curve, moving)

    return Speed(lambda trial: 1.0, lambda trial: Curve(), moving, {type: one(*given) for type, given in types.items()})


def view(devices: dict[str, Device], *running: Holding) -> View:
    return under_way(devices, {one.demand.trial: one for one in running})


def demands(count: int, units: int = 10, bytes: int = 0) -> list[Demand]:
    return [alike(i, "g", units, i, bytes=bytes) for i in range(count)]


def where(made: Collection[Assignment]) -> dict[int, tuple[str, float]]:
    return {one.trial: (one.devices[0].split()[0], one.share) for one in made}


@ALL
def test_a_share_is_one_that_was_measured_on_its_type(scheduler: Scheduler) -> None:
    speed = known(new=(1.0, SHARES), old=(1.0, UNKNOWN))
    made = where(scheduler(view(cluster(new=2, old=2)), demands(10), speed))
    assert {share for type, share in made.values() if type == "new"} == {0.25}
    assert {share for type, share in made.values() if type == "old"} == {1.0}, "nothing is assumed"


@ALL
def test_a_trial_spreads_on_the_type_that_was_measured_and_over_no_other(scheduler: Scheduler) -> None:
    speed = known(new=(1.0, UNKNOWN), old=(1.0, SPREADS))
    (made,) = scheduler(view(cluster(new=3, old=3)), demands(1), speed)
    assert made.devices == ("old 0", "old 1", "old 2")


@ALL
def test_a_trial_alone_goes_where_it_ends_first(scheduler: Scheduler) -> None:
    cards = view(cluster(slow=4, fast=1))
    speed = known(slow=(3.0, UNKNOWN), fast=(1.0, UNKNOWN))
    assert where(scheduler(cards, demands(1), speed)) == {0: ("fast", 1.0)}
    assert where(scheduler(cards, demands(3), speed)) == {0: ("fast", 1.0)}, "the slow ones would end later"
    assert len(scheduler(cards, demands(8), speed)) == 5


@ALL
def test_a_trial_that_is_moved_stays_on_its_type_while_that_is_there(scheduler: Scheduler) -> None:
    speed = known(slow=(3.0, UNKNOWN), fast=(1.0, UNKNOWN))
    moved = [replace(demand, type="slow") for demand in demands(1)]
    assert where(scheduler(view(cluster(slow=1, fast=1)), moved, speed)) == {0: ("slow", 1.0)}
    assert where(
        scheduler(view(cluster(other=1, fast=1)), moved, replace(speed, types={**speed.types, "other": speed}))
    ) == {0: ("fast", 1.0)}


@ALL
def test_what_runs_on_a_type_counts(scheduler: Scheduler) -> None:
    busy = Holding(alike(9, "g", 50), Assignment(9, ("fast 0",)))
    speed = known(slow=(3.0, UNKNOWN), fast=(1.0, UNKNOWN))
    assert where(scheduler(view(cluster(slow=4, fast=1), busy), demands(1), speed)) == {0: ("slow", 1.0)}
    short = replace(busy, demand=replace(busy.demand, units=5))
    assert scheduler(view(cluster(slow=4, fast=1), short), demands(1), speed) == [], "it waits for the fast one"


@ALL
def test_what_runs_counts_by_its_share(scheduler: Scheduler) -> None:
    def quarter(units: int) -> Holding:
        return Holding(alike(9, "g", units), Assignment(9, ("fast 0",), 0.25))

    speed = known(slow=(3.0, UNKNOWN), fast=(1.0, SHARES))  # four take 1.16 times as long
    for units, type in ((60, "fast"), (100, "slow")):
        assert where(scheduler(view(cluster(slow=1, fast=1), quarter(units)), demands(1), speed))[0][0] == type


@ALL
def test_those_of_a_higher_priority_are_dealt_first(scheduler: Scheduler) -> None:
    waiting = [alike(0, "g", 10, 0, priority=1.0), alike(1, "g", 20, 1)]
    made = where(scheduler(view(cluster(slow=1, fast=1)), waiting, known(slow=(1.4, UNKNOWN), fast=(1.0, UNKNOWN))))
    assert made == {0: ("fast", 1.0), 1: ("slow", 1.0)}


@ALL
def test_the_longest_go_where_they_are_fast(scheduler: Scheduler) -> None:
    waiting = [alike(0, "g", 5, 0), alike(1, "g", 20, 1)]
    made = where(scheduler(view(cluster(slow=1, fast=1)), waiting, known(slow=(3.0, UNKNOWN), fast=(1.0, UNKNOWN))))
    assert made == {0: ("slow", 1.0), 1: ("fast", 1.0)}


@ALL
def test_a_trial_goes_to_a_type_that_can_hold_it(scheduler: Scheduler) -> None:
    cards = {**cluster(memory=10, fast=2), **cluster(slow=2)}
    speed = known(slow=(3.0, UNKNOWN), fast=(1.0, UNKNOWN))
    assert where(scheduler(view(cards), demands(1, bytes=20), speed)) == {0: ("slow", 1.0)}
    with pytest.raises(StudyError, match="trial 0 takes 90 bytes and the largest device has 80"):
        scheduler(view(cards), demands(1, bytes=90), speed)
    with pytest.raises(StudyError, match="cluster of no devices"):
        scheduler(view({}), demands(1), speed)


def test_those_that_run_are_rebalanced_by_the_curve_of_their_own_type() -> None:
    def run(type: str) -> Holding:
        return Holding(alike(0, "g", 50), Assignment(0, (f"{type} 0",)))

    cards = cluster(old=4, new=4)
    speed = known(moving=1.0, new=(1.0, UNKNOWN), old=(1.0, SPREADS))
    for scheduler in (dynamic_fluid, waterfill):
        assert scheduler(view(cards, run("new")), [], speed) == []
        (moved,) = scheduler(view(cards, run("old")), [], speed)
        assert sorted(moved.devices) == ["old 0", "old 1", "old 2", "old 3"]


def test_a_trial_of_a_device_that_was_lost_is_passed_over() -> None:
    gone = Holding(alike(9, "g", 50), Assignment(9, ("gone 0",)))
    speed = known(new=(1.0, UNKNOWN), old=(1.0, UNKNOWN))
    assert len(waterfill(view(cluster(old=1, new=1), gone), demands(2), speed)) == 2


def test_of_a_flood_only_some_are_dealt_and_they_come_in_the_order_of_asking() -> None:
    asked: list[list[int]] = []

    @by_type
    def fake(view: View, waiting: Collection[Demand], speed: Speed) -> list[Assignment]:
        asked.append([demand.asked for demand in waiting])
        return []

    rng = random.Random(0)
    flood = [alike(i, "g", rng.randint(1, 9), i) for i in range(10_000)]
    fake(view(cluster(old=2, new=2)), flood, known(new=(1.0, UNKNOWN), old=(2.0, UNKNOWN)))
    assert [sorted(one) for one in asked] == asked
    assert 50 < sum(map(len, asked)) < 200
    assert len(asked[0]) > 1.5 * len(asked[1]), "the type that is twice as fast has more"


@st.composite
def worlds(draw: st.DrawFn) -> tuple[View, list[Demand], Speed]:
    rng = random.Random(draw(st.integers(0, 10**6)))
    cards = {**cluster(40, a=rng.randint(1, 4)), **cluster(80, b=rng.randint(1, 4))}
    curve = {type: Curve.of(rng.uniform(1, 1.3), rng.randint(1, 4), 1.1, rng.randint(1, 4)) for type in "ab"}
    space, running = Capacity(cards, room(cards, [])), []
    for trial in range(rng.randint(0, 6)):
        type = rng.choice("ab")
        share = rng.choice([1 / rng.randint(1, curve[type].most), 1.0])
        one = alike(trial, "g", rng.randint(1, 20), 0, bytes=rng.choice([0, 10]))
        device = next((d for d in cards if d[0] == type and space.room[d].share >= share - 1e-9), None)
        if device is not None and space.room[device].bytes >= one.bytes:
            space.take((device,), share, one.bytes)
            running.append(Holding(one, Assignment(trial, (device,), share)))
    waiting = [alike(20 + i, "g", rng.randint(1, 20), i, bytes=rng.choice([0, 30, 60])) for i in range(8)]
    moving = rng.choice([math.inf, 1.0])
    return view(cards, *running), waiting, known(moving, a=(1.0, curve["a"]), b=(2.0, curve["b"]))


@ALL
@thorough
@given(worlds())
def test_no_device_is_given_away_twice_and_no_trial_has_two_types(
    scheduler: Scheduler, world: tuple[View, list[Demand], Speed]
) -> None:
    now, waiting, speed = world
    made = scheduler(now, waiting, speed)
    for type, ours in speed.types.items():
        devices = {name: device for name, device in now.devices.items() if device.type == type}
        part = View(
            devices,
            {t: one for t, one in now.running.items() if one.assignment.devices[0] in devices},
            {name: left for name, left in now.room.items() if name in devices},
        )
        check(part, waiting, ours, [one for one in made if one.devices[0] in devices])


@ALL
def test_a_trial_that_spans_types_is_left_alone(scheduler: Scheduler) -> None:
    devices, speed = cluster(new=4, old=2), known(moving=0.0, new=(1.0, SPREADS), old=(1.0, SPREADS))
    wide = Holding(alike(0, "g", 10), Assignment(0, ("new 0", "old 0"), 2.0))
    assert scheduler(view(devices, wide), [], speed) == []
    made = scheduler(view(devices, wide), [alike(1, "g", 10)], speed)
    assert [one.trial for one in made] == [1]
    assert {"new 0", "old 0"}.isdisjoint(made[0].devices)
