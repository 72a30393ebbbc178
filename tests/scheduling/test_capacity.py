"""Who fits where, and how groups divide devices."""

from penstock.bundle import Device
from penstock.scheduling.base import Assignment, Demand, Holding, Room, View, room
from penstock.scheduling.capacity import Capacity, divide, largest_remainder


def space(**free: int) -> Capacity:
    """So many free devices on each node."""
    devices = {f"{node}{i}": Device(f"{node}{i}", "h200", 80, node) for node, n in free.items() for i in range(n)}
    return Capacity(devices, {name: Room(1.0, 80) for name in devices})


def test_a_wide_trial_goes_to_the_node_that_just_has_enough() -> None:
    assert space(a=3, b=2, c=1).fit(2.0, 0) == ("b0", "b1")


def test_a_trial_wider_than_any_node_begins_with_the_one_that_has_most() -> None:
    assert space(a=2, b=3, c=1).fit(4.0, 0) == ("b0", "b1", "b2", "c0")


def test_a_trial_keeps_its_own_devices_where_it_can() -> None:
    assert space(a=3, b=2).fit(2.0, 0, own=("a2",))[0] == "a2"  # type: ignore[index]
    assert space(a=3).fit(0.5, 0, own=("a2",)) == ("a2",)


def test_numbers_add_up_and_the_largest_remainders_are_rounded_up() -> None:
    assert largest_remainder(10, {"a": 1.0, "b": 1.0, "c": 1.3}) == {"a": 3, "b": 3, "c": 4}
    assert largest_remainder(3, {"a": 0.0, "b": 0.0}) == {"a": 2, "b": 1}


def test_a_device_that_is_too_small_for_one_is_there_for_the_next() -> None:
    devices = {name: Device(name, "h200", memory) for name, memory in (("small", 10), ("large", 80))}
    made = Capacity(devices, {"small": Room(1.0, 10), "large": Room(0.5, 80)}, {"large": "a"})
    assert made.fit(0.5, 40, signature="a") == ("large",)
    assert made.fit(0.5, 5, signature="a") == ("small",), "which is the emptier one"


def test_groups_of_which_no_weight_is_said_are_one_part_beside_those_that_have_one() -> None:
    devices = {f"gpu {i}": Device(f"gpu {i}", "h200", 80) for i in range(12)}
    view = View(devices, {}, room(devices, []))
    weights = {"a": 2.0, "b": 1.0, "c": 1.0}
    demands = [Demand(i, group, 1, i, weight=weight) for i, (group, weight) in enumerate(weights.items())]
    parts = divide(view, demands)
    assert [(sorted(part.groups or ()), len(part.room)) for part in parts] == [(["a"], 6), (["b", "c"], 6)]
    (all_as_one,) = divide(view, demands[1:])
    assert (all_as_one.groups, len(all_as_one.room)) == (None, 12)


def test_what_running_groups_have_counts_towards_their_weights_due() -> None:
    devices = {f"gpu {i}": Device(f"gpu {i}", "h200", 80) for i in range(12)}
    held = [Holding(Demand(9 + i, "a", 1, weight=2.0), Assignment(9 + i, (f"gpu {i}",))) for i in range(4)]
    view = View(devices, {one.demand.trial: one for one in held}, room(devices, held))
    demands = [Demand(0, "a", 1, 0, weight=2.0), Demand(1, "b", 1, 1, weight=0.5), Demand(2, "c", 1, 2, weight=0.5)]
    parts = divide(view, demands)
    assert [(sorted(part.groups or ()), len(part.room)) for part in parts] == [(["a"], 4), (["b"], 2), (["c"], 2)]


# Who joins whom


def test_a_part_of_a_device_goes_beside_trials_of_its_signature_or_onto_an_empty_device() -> None:
    made = space(a=3)
    for name, signature in (("a0", "x"), ("a1", "y")):
        made.take((name,), 0.5, 0, signature)
    assert made.kinds == {"a0": "x", "a1": "y"}
    assert made.fit(0.5, 0, signature="x") == ("a2",), "which is the emptiest"
    made.take(("a2",), 1.0, 0, "z")
    assert made.fit(0.5, 0, signature="x") == ("a0",)
    assert made.fit(0.5, 0, signature="y") == ("a1",)
    assert made.fit(0.5, 0, signature="z") is None
    assert made.fit(0.5, 0) is None, "a trial of no signature is like no other"
    assert made.fit(0.5, 0, own=("a1",), signature="x") == ("a0",), "not even on its own device"
    assert [made.joins("a0", signature) for signature in ("x", "y", "")] == [True, False, False]


def test_trials_of_no_signature_are_not_of_one_kind() -> None:
    made = space(a=2)
    made.take(("a0",), 0.5, 0)
    made.take(("a1",), 0.5, 0)
    assert made.fit(0.5, 0) is None
    assert made.fit(0.5, 0, own=("a0",)) is None
    assert not made.joins("a0", "")


def test_unlike_trials_share_a_device_where_a_view_says_that_they_can() -> None:
    devices = space(a=1).devices
    made = Capacity(devices, {"a0": Room(0.5, 80)}, {"a0": "x"}, unlike=True)
    assert made.fit(0.5, 0, signature="y") == made.fit(0.5, 0) == ("a0",)
    assert made.joins("a0", "y")
    made.take(("a0",), 0.25, 0, "y")
    assert made.kinds == {"a0": ""}, "there is no signature that all of them have"


def test_a_device_that_became_empty_is_of_no_kind() -> None:
    made = space(a=1)
    made.take(("a0",), 0.5, 10, "x")
    made.give(("a0",), 0.5, 10)
    assert made.fit(0.5, 80, signature="y") == ("a0",)
    made.take(("a0",), 0.5, 10, "y")
    assert made.fit(0.5, 70, signature="y") == ("a0",)
    assert made.fit(0.5, 71, signature="y") is None, "there is no memory for it"
    assert made.fit(0.5, 70, signature="x") is None


def test_whole_devices_are_of_no_kind_as_long_as_they_are_free() -> None:
    made = space(a=3)
    made.take(("a1",), 0.25, 0, "x")
    assert made.fit(2.0, 0, signature="x") == ("a0", "a2")
    assert made.whole() == 2
    assert set(made.free()) == {"a0", "a1", "a2"}
