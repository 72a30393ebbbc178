"""Who grows onto idle devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bundle import Device
from penstock.scheduling.base import Assignment, Demand, Holding, Room, View, kinds, room
from penstock.scheduling.growing import (
    Growing,
    alone,
    are_apart,
    give_back,
    grow,
    grow_apart,
    idle,
    keeps,
    on_first,
    on_the_way,
    own,
    probe,
    split,
    widen,
)
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


# Devices that nobody has a part of, and trials that have theirs to themselves


def holding(trial: int, devices: str, share: float = 0.0, units: int = 9, **assigned: bool | int) -> Holding:
    """A trial of signature "s" with a batch of 64 that has the devices named in a text, or a share of one."""
    names = tuple(devices.split())
    demand = Demand(trial, "g", units, signature="s", load=64)
    made = Assignment(trial, names, share or float(len(names)), measure=bool(assigned.get("measure")))
    return Holding(demand, replace(made, lent=int(assigned.get("lent", 0))))


def having(devices: dict[str, Device], *held: Holding, apart: tuple[str, ...] = ()) -> View:
    sets = [frozenset(text.split()) for text in apart]
    return View(devices, {one.demand.trial: one for one in held}, room(devices, held), kinds(held), apart=sets)


def test_a_device_is_idle_where_no_trial_has_any_part_of_it() -> None:
    there = having(cluster(4), holding(0, "a0"), holding(1, "a1", 0.25), holding(2, "a2", 0.5), holding(3, "a2", 0.5))
    assert idle(there) == ["a3"]


def test_trials_that_are_alone_share_no_device_and_measure_nothing_best_first() -> None:
    held = [holding(0, "a0"), holding(1, "a1", 0.25), holding(2, "a2", 0.5), holding(3, "a2", 0.5)]
    there = having(cluster(6), *held, holding(4, "a3 a4", measure=True))
    assert alone(there, [4, 3, 2, 1, 0]) == [1, 0]
    assert alone(there, [0, 1, 9]) == [0, 1], "one that does not run has nothing"


def test_devices_are_a_trials_own_as_far_as_they_were_not_lent_to_it() -> None:
    held = holding(0, "a0 a1 a2 a3", lent=3).assignment
    assert own(held) == 1
    assert on_first(held, 1) == Assignment(0, ("a0",), 1.0)
    assert on_first(held, 3) == Assignment(0, ("a0", "a1", "a2"), 3.0, lent=2)
    kept = holding(0, "a0 a1 a2 a3", lent=1).assignment
    assert on_first(kept, 2) == Assignment(0, ("a0", "a1"), 2.0), "none of these is lent"


def test_devices_are_apart_where_all_of_a_set_are_among_them_whose_workers_did_not_meet() -> None:
    there = having(cluster(3), apart=("a0 a1",))
    assert are_apart(("a0", "a2", "a1"), there)
    assert not are_apart(("a0", "a2"), there)


# Bundles that are split


def bundle(size: int, devices: int = 2, units: int = 9) -> View:
    return having(cluster(devices), *(holding(t, "a0", 1 / size, units) for t in range(size)))


def sharing(*times: float, moving: float = 0.1) -> Speed:
    return Speed(lambda t: 1.0, lambda t: Curve(sharing=times), moving)


def parts(made: list[Assignment]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in made:
        found.setdefault(one.devices[0], []).append(one.trial)
    return found


def test_a_bundle_is_split_among_idle_devices_where_fewer_take_less_time() -> None:
    slow = sharing(1.0, 1.5, 2.0, 2.5)
    made = split(bundle(4), slow)
    assert made == [Assignment(2, ("a1",), 0.5), Assignment(3, ("a1",), 0.5)]
    made = split(bundle(4, devices=9), slow)
    assert made == [Assignment(t, (f"a{t}",), 1.0) for t in (1, 2, 3)], "no more than a device each"
    assert parts(split(bundle(4, devices=3), slow)) == {"a1": [2, 3]}, "two and two are no slower than two, one and one"


def test_a_bundle_stays_whole_where_splitting_gains_little_or_less_than_moving_costs() -> None:
    assert split(bundle(4), sharing(1.0, 1.82, 1.9, 2.0)) == [], "less than a tenth of a step"
    assert split(bundle(4), sharing(1.0, 1.78, 1.9, 2.0)) != []
    assert split(bundle(4, units=2), sharing(1.0, 1.0, 2.0, 2.0, moving=2.0)) == [], "two units save two seconds"
    assert split(bundle(4, units=2), sharing(1.0, 1.0, 2.0, 2.0, moving=1.9)) != []
    assert split(bundle(4), sharing(1.0, 1.0, 2.0, 2.0, moving=float("inf"))) == []
    assert split(bundle(4, devices=1), sharing(1.0, 1.0, 2.0, 2.0)) == [], "no device is idle"
    assert split(bundle(1), sharing(1.0)) == split(having(cluster(2)), sharing(1.0)) == []


def test_the_largest_bundle_is_split_and_only_onto_devices_of_its_type() -> None:
    held = [holding(t, "a0", 0.5) for t in (0, 1)] + [holding(t, "b0", 0.25) for t in (2, 3, 4)]
    there = having(cluster(2, 2, types="xy"), *held)
    slow = sharing(1.0, 1.5, 2.0, 2.5)
    assert parts(split(there, Speed(slow.unit, slow.curve, 0.1, {"x": slow, "y": slow}))) == {"b1": [4]}


# What several devices give


def trying(tried: dict[int, float], moving: float = 0.1) -> Speed:
    return Speed(lambda t: 1.0, lambda t: straight(8), moving, tried=lambda t: tried)


def test_the_best_trial_that_is_alone_tries_all_the_devices_that_are_idle() -> None:
    there = having(cluster(4), holding(0, "a0"), holding(1, "a1"))
    made = probe(there, [1, 0], trying({}), BEST)
    assert made == Assignment(1, ("a1", "a2", "a3"), 3.0, measure=True, lent=2)


def test_a_trial_tries_no_more_devices_than_its_batch_has_parts() -> None:
    small = replace(holding(0, "a0"), demand=Demand(0, "g", 9, signature="s", load=2))
    made = probe(having(cluster(4), small), [0], trying({}), BEST)
    assert made is not None
    assert made.devices == ("a0", "a1")
    single = replace(small, demand=replace(small.demand, load=1))
    assert probe(having(cluster(4), single), [0], trying({}), BEST) is None


def test_what_was_tried_is_tried_again_only_on_twice_as_many_where_the_most_paid_best() -> None:
    there = having(cluster(4), holding(0, "a0"))
    assert probe(there, [0], trying({1: 1.0, 2: 0.6}), BEST) == Assignment(
        0, ("a0", "a1", "a2", "a3"), 4.0, measure=True, lent=3
    )
    assert probe(there, [0], trying({1: 1.0, 2: 1.1}), BEST) is None, "two did not pay"
    assert probe(having(cluster(3), holding(0, "a0")), [0], trying({1: 1.0, 2: 0.6}), BEST) is None, (
        "four are not there"
    )
    assert probe(there, [0], trying({1: 1.0, 2: 0.6, 4: 0.7}), BEST) is None


def test_a_trial_that_is_nearly_done_shares_its_device_or_has_no_signature_tries_nothing() -> None:
    assert probe(having(cluster(4), holding(0, "a0", units=1)), [0], trying({}), BEST) is None
    pair = [holding(t, "a0", 0.5) for t in (0, 1)]
    assert probe(having(cluster(4), *pair), [0, 1], trying({}), BEST) is None
    other = replace(holding(0, "a0"), demand=Demand(0, "g", 9, load=64))
    assert probe(having(cluster(4), other), [0], trying({}), BEST) is None
    made = probe(having(cluster(4), other, holding(1, "a1")), [0, 1], trying({}), BEST)
    assert made is not None
    assert made.trial == 1, "the next one tries"
    assert probe(having(cluster(1), holding(0, "a0")), [0], trying({}), BEST) is None, "no device is idle"


def test_devices_that_are_apart_or_of_another_type_are_not_tried_together() -> None:
    made = probe(having(cluster(3), holding(0, "a0"), apart=("a0 a1 a2",)), [0], trying({}), BEST)
    assert made is not None
    assert made.devices == ("a0", "a1"), "fewer of them met"
    there = having(cluster(1, 2, types="xy"), holding(0, "a0"))
    assert probe(there, [0], trying({}), BEST) is None
    made = probe(there, [0], trying({}), Growing("best", mixed=True))
    assert made is not None
    assert made.devices == ("a0", "b0", "b1")


# Growing and giving back


def moved(trial: int, signature: str = "a", type: str = "x", load: int = 8) -> Demand:
    """A trial that has left its devices to move."""
    return Demand(trial, "g", 1, signature=signature, type=type, load=load)


def test_a_trial_that_moves_to_a_device_of_its_own_measures_more_on_its_way() -> None:
    seen, made = having(cluster(4)), [Assignment(0, ("a1",)), Assignment(1, ("a2",))]
    assert on_the_way(seen, [moved(0), moved(1)], made, trying({})) == [
        Assignment(0, ("a0", "a1", "a3"), 3.0, measure=True, lent=2),
        Assignment(1, ("a2",)),
    ]
    assert on_the_way(seen, [moved(0, load=2), moved(1)], made, trying({}))[0].share == 2


@pytest.mark.parametrize(
    ("waiting", "tried", "apart"),
    [
        ([moved(0), moved(1)], {}, ""),  # another trial waits on, and the idle devices are its own
        ([moved(0, type="")], {}, ""),  # the trial comes new: after its first unit it may have two left
        ([moved(0, signature="")], {}, ""),
        ([moved(0, load=1)], {}, ""),
        ([moved(0)], {1: 1.0, 2: 0.6, 4: 0.7}, ""),
        ([moved(0)], {}, "a0 a1"),
    ],
)
def test_otherwise_no_trial_measures_on_its_way(waiting: list[Demand], tried: dict[int, float], apart: str) -> None:
    seen = having(cluster(4), apart=(apart,) if apart else ())
    made = [Assignment(0, ("a1",))]
    assert on_the_way(seen, waiting, made, trying(tried)) == made


def test_one_trial_of_a_signature_measures_at_a_time() -> None:
    seen = having(cluster(4), holding(5, "a2 a3", measure=True))
    running = {5: replace(seen.running[5], demand=moved(5))}
    made = [Assignment(0, ("a1",))]
    assert on_the_way(replace(seen, running=running), [moved(0)], made, trying({})) == made
    assert on_the_way(replace(seen, running=running), [moved(0, "b")], made, trying({}))[0].measure


def test_trials_that_are_alone_grow_onto_devices_that_are_lent_to_them() -> None:
    there = having(cluster(4), holding(0, "a0"), holding(1, "a1"), holding(2, "a2", 0.5))
    assert grow_apart(there, [2, 1, 0], speed(2), BEST) == [Assignment(2, ("a2", "a3"), 2.0, lent=1)]
    again = having(cluster(5), holding(0, "a0 a1", lent=1))
    assert grow_apart(again, [0], speed(4), BEST) == [Assignment(0, ("a0", "a1", "a2", "a3"), 4.0, lent=3)], (
        "what was lent before still is"
    )


def test_a_trial_with_one_unit_left_and_one_that_shares_its_device_do_not_grow() -> None:
    there = having(cluster(4), holding(0, "a0", units=1), *(holding(t, "a1", 0.5) for t in (1, 2)))
    assert grow_apart(there, [0, 1, 2], speed(4, moving=0.0), BEST) == []


def test_a_trial_whose_devices_would_be_apart_leaves_them_to_the_next() -> None:
    there = having(cluster(3), holding(0, "a0"), holding(1, "a1"), apart=("a0 a2",))
    assert grow_apart(there, [0, 1], speed(2), BEST) == [Assignment(1, ("a1", "a2"), 2.0, lent=1)]
    assert grow_apart(having(cluster(2), holding(0, "a0"), apart=("a0 a1",)), [0], speed(2), BEST) == []


def test_devices_that_were_lent_are_given_back_by_the_worst_trials_first_and_no_more_than_are_missing() -> None:
    held = [holding(0, "a0 a1", lent=1), holding(1, "a2 a3 a4", lent=2), holding(2, "a5 a6")]
    there = having(cluster(8), *held)
    assert give_back(there, [0, 1, 2], 1) == [Assignment(1, ("a2",), 1.0)]
    assert give_back(there, [0, 1, 2], 2) == [Assignment(1, ("a2",), 1.0)]
    assert give_back(there, [0, 1, 2], 3) == [Assignment(1, ("a2",), 1.0), Assignment(0, ("a0",), 1.0)]
    assert [one.trial for one in give_back(there, [1, 0, 2], 9)] == [0, 1], "the third one has its own alone"
    assert give_back(there, [0, 1, 2], 0) == []


def test_a_trial_that_measures_gives_nothing_back_before_it_knows() -> None:
    assert give_back(having(cluster(2), holding(0, "a0 a1", measure=True, lent=1)), [0], 1) == []


def test_a_trial_keeps_the_devices_that_pay_of_those_that_it_has_measured_on() -> None:
    there = having(cluster(4), holding(0, "a0 a1 a2 a3", lent=3))
    assert keeps(there, 0, [0], speed(4), BEST) is None
    assert keeps(there, 0, [0], speed(2), BEST) == Assignment(0, ("a0", "a1"), 2.0, lent=1)
    assert keeps(there, 0, [0], speed(1), BEST) == Assignment(0, ("a0",), 1.0)


def test_where_devices_are_dealt_evenly_it_keeps_what_it_would_be_dealt() -> None:
    there = having(cluster(4), holding(0, "a0 a1 a2", lent=2), holding(1, "a3"))
    assert keeps(there, 0, [0, 1], speed(8), BEST) is None
    assert keeps(there, 0, [0, 1], speed(8), EVENLY) == Assignment(0, ("a0", "a1"), 2.0, lent=1)
    lonely = having(cluster(4), holding(0, "a0 a1 a2 a3", lent=3))
    assert keeps(lonely, 0, [0], speed(8), EVENLY) is None, "there is nobody else"


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
