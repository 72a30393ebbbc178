"""Who grows onto idle devices."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bundle import Device
from penstock.scheduling.base import Assignment, Demand, Holding, Room, View, room
from penstock.scheduling.growing import Growing, grow, widen
from penstock.speed.curve import Curve
from penstock.speed.model import Speed

untimed = settings(deadline=None)  # tests never measure time
BEST, EVENLY = Growing("best"), Growing("evenly")


def straight(widest: int) -> Curve:
    """Twice as many devices take half as long, up to so many."""
    return Curve(scaling=tuple(1 / n for n in range(1, widest + 1)))


def cluster(*sizes: int, types: str = "") -> dict[str, Device]:
    kinds = types or "x" * len(sizes)
    return {
        f"{node}{i}": Device(f"{node}{i}", kind, 80, node)
        for node, size, kind in zip("abcdef", sizes, kinds, strict=False)
        for i in range(size)
    }


def view(devices: dict[str, Device], *held: str, units: int = 9) -> View:
    """Trial i has the devices that are named in the i-th text."""
    names = [tuple(text.split()) for text in held]
    running = {t: Holding(Demand(t, "g", units), Assignment(t, n, float(len(n))), 0.5) for t, n in enumerate(names)}
    return View(devices, running, room(devices, running.values()))


def speed(widest: int = 8, moving: float = 0.1, **types: int) -> Speed:
    known = {type: Speed(lambda t: 1.0, lambda t, w=w: straight(w), moving) for type, w in types.items()}  # type: ignore[misc]
    return Speed(lambda t: 1.0, lambda t: straight(widest), moving, known)


def shares(made: list[Assignment]) -> dict[int, int]:
    return {one.trial: len(one.devices) for one in made}


def test_the_best_has_as_many_as_pay_and_then_the_next() -> None:
    there = view(cluster(7), "a0", "a1", "a2")
    assert shares(grow(there, [1, 0, 2], speed(4), BEST)) == {1: 4, 0: 2}
    assert shares(grow(there, [1, 0, 2], speed(2), BEST)) == {1: 2, 0: 2, 2: 2}
    assert shares(grow(there, [1, 0, 2], speed(8), BEST)) == {1: 4, 0: 2}, "eight are not there"
    assert shares(grow(view(cluster(6), "a0"), [0], speed(6), BEST)) == {0: 6}, "the most that pay, if not a doubling"


def test_evenly_the_one_with_fewest_is_next() -> None:
    there = view(cluster(7), "a0", "a1", "a2")
    assert shares(grow(there, [1, 0, 2], speed(4), EVENLY)) == {1: 2, 0: 2, 2: 2}
    assert shares(grow(view(cluster(8), "a0 a1 a2 a3", "a4"), [0, 1], speed(8), EVENLY)) == {1: 4}
    assert grow(view(cluster(8), "a0 a1", "a2 a3 a4 a5 a6"), [0, 1], speed(6), EVENLY) == [], "nobody is overtaken"


def test_nobody_grows_where_that_costs_more_than_it_saves() -> None:
    there = view(cluster(4), "a0", "a1", units=2)
    assert grow(there, [0, 1], speed(4, moving=0.75), BEST) == [], "half of one and a half units"
    assert shares(grow(there, [0, 1], speed(4, moving=0.7), BEST)) == {0: 2, 1: 2}
    assert grow(there, [0, 1], speed(4, moving=float("inf")), BEST) == [], "before it was seen what starting costs"
    running = {**there.running, 0: Holding(Demand(0, "g", 1), Assignment(0, ("a0",)), 0.9)}
    near = View(there.devices, running, there.room)
    assert shares(grow(near, [0, 1], speed(4, moving=0.7), BEST)) == {1: 2}, "who is near its end leaves them"


def test_what_others_have_parts_of_and_what_is_too_small_is_not_dealt() -> None:
    there = view(cluster(4), "a0")
    shared = View(there.devices, there.running, {**there.room, "a1": Room(0.5, 80), "a2": Room(1.0, 1)})
    large = {0: Holding(Demand(0, "g", 9, bytes=8), Assignment(0, ("a0",)))}
    assert grow(shared, [0], speed(4), BEST) == [Assignment(0, ("a0", "a2"), 2.0)]
    assert grow(View(shared.devices, large, shared.room), [0], speed(4), BEST) == [Assignment(0, ("a0", "a3"), 2.0)]


def test_a_trial_that_grows_is_on_as_few_nodes_as_can_be() -> None:
    there = view(cluster(2, 4), "a0", "a1")
    assert grow(there, [0], speed(4), BEST) == [Assignment(0, ("b0", "b1", "b2", "b3"), 4.0)]
    both = grow(there, [0, 1], speed(2), BEST)
    assert both == [Assignment(0, ("b0", "b1"), 2.0), Assignment(1, ("a0", "a1"), 2.0)], "one keeps what it has"


def test_devices_of_several_types_only_where_that_is_asked_for() -> None:
    there = view(cluster(2, 4, types="xy"), "a0", "b0")
    known = speed(x=4, y=2)
    assert grow(there, [0, 1], known, BEST) == [Assignment(0, ("a0", "a1"), 2.0), Assignment(1, ("b0", "b1"), 2.0)]
    mixed = grow(there, [0, 1], known, Growing("best", mixed=True))
    assert mixed == [Assignment(0, ("a0", "a1", "b1", "b2"), 4.0), Assignment(1, ("b0", "b3"), 2.0)]
    assert widen(cluster(2, 4, types="xy"), ("b1", "a1"), ("a0", "b0"), 4, mixed=True) == ("a0", "a1", "b0", "b1")


@pytest.mark.parametrize("mixed", [False, True])
@untimed
@given(data=st.data())
def test_devices_are_dealt_once_as_far_as_they_pay_and_nobody_shrinks(mixed: bool, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    devices = cluster(*sizes, types=data.draw(st.text("xy", min_size=len(sizes), max_size=len(sizes))))
    left = {kind: [name for name, one in devices.items() if one.type == kind] for kind in "xy"}
    texts = []
    for kind in data.draw(st.lists(st.sampled_from("xy"), max_size=5)):
        many = data.draw(st.integers(1, 3))
        if len(left[kind]) >= many:
            texts.append(" ".join(left[kind].pop() for _ in range(many)))
    there, numbers = view(devices, *texts), range(len(texts))
    trials = data.draw(st.permutations(numbers))[: data.draw(st.integers(0, len(texts)))]
    widest = {kind: data.draw(st.integers(1, 9)) for kind in "xy"}
    first = data.draw(st.sampled_from(["best", "evenly"]))
    made = grow(there, trials, speed(**widest), Growing(first, mixed))  # type: ignore[arg-type]
    after = {t: one.assignment.devices for t, one in there.running.items()} | {one.trial: one.devices for one in made}
    names = [name for held in after.values() for name in held]
    assert len(names) == len(set(names)), "no device is dealt twice"
    assert made == grow(there, trials, speed(**widest), Growing(first, mixed))  # type: ignore[arg-type]
    for one in made:
        before = there.running[one.trial].assignment.devices
        kinds = {devices[name].type for name in one.devices}
        assert one.trial in trials
        assert len(before) < len(one.devices) <= widest[devices[before[0]].type]
        assert one.share == len(one.devices)
        assert kinds == {devices[before[0]].type} or (mixed and devices[before[0]].type in kinds)
    for one in made if first == "evenly" else []:
        kind = devices[one.devices[0]].type
        others = [t for t in trials if devices[after[t][0]].type == kind or (mixed and widest["x"] == widest["y"])]
        assert all(len(one.devices) <= 2 * len(after[t]) for t in others), "nobody is a doubling behind"


@untimed
@given(trials=st.integers(1, 6), more=st.integers(0, 20), widest=st.integers(1, 16))
def test_evenly_all_that_scale_alike_differ_by_one_doubling_at_most(trials: int, more: int, widest: int) -> None:
    names = count()
    devices = {f"a{i}": Device(f"a{i}", "x", 80, "a") for i in range(trials + more)}
    there = view(devices, *(f"a{next(names)}" for _ in range(trials)))
    made = shares(grow(there, list(range(trials)), speed(widest), EVENLY))
    sizes = [made.get(trial, 1) for trial in range(trials)]
    assert max(sizes) <= 2 * min(sizes)
    assert len(devices) - sum(sizes) < min(sizes) or min(sizes) == widest or min(sizes) * 2 > widest
