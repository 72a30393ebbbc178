"""Who fits where, and how groups divide devices."""

from penstock.bundle import Device
from penstock.scheduling.base import Demand, Room, View, room
from penstock.scheduling.capacity import Space, divide, largest_remainder


def space(**free: int) -> Space:
    """So many free devices on each node."""
    devices = {f"{node}{i}": Device(f"{node}{i}", "h200", 80, node) for node, n in free.items() for i in range(n)}
    return Space(devices, {name: Room(1.0, 80) for name in devices})


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
    made = Space(devices, {"small": Room(1.0, 10), "large": Room(0.5, 80)}, {"large": "a"})
    assert made.fit(0.5, 40, signature="a") == ("large",)
    assert made.fit(0.5, 5, signature="a") == ("small",), "which is the emptier one"


def test_a_part_of_a_device_goes_to_the_like_of_the_trials_there_or_to_any_where_unlike_ones_can_share() -> None:
    devices = {name: Device(name, "h200", 80) for name in ("a", "b", "free")}
    half = {"a": Room(0.5, 80), "b": Room(0.75, 80), "free": Room(1.0, 80)}
    made = Space(devices, half, {"a": "one", "b": "two"})
    assert made.fit(0.5, 1, signature="one") == made.fit(0.5, 1) == ("free",), "a free device is the emptiest"
    made.take(("free",), 0.5, 1, "three")
    assert made.fit(0.5, 1, signature="one") == ("a",)
    assert made.fit(0.5, 1, signature="three") == ("free",), "which is one of its signature from then on"
    assert made.fit(0.5, 1, own=("b",), signature="three") == ("free",), "its own too must be of its like"
    assert made.fit(0.5, 1) is None, "trials of no signature are like nobody"
    made.give(("free",), 0.5, 1)
    assert made.fit(0.5, 1) == ("free",)
    assert Space(devices, {"a": half["a"], "b": half["b"]}, {"a": "one", "b": "two"}, unlike=True).fit(0.5, 1) == ("b",)


def test_groups_of_which_no_weight_is_said_are_one_part_beside_those_that_have_one() -> None:
    devices = {f"gpu {i}": Device(f"gpu {i}", "h200", 80) for i in range(9)}
    view = View(devices, {}, room(devices, []))
    parts = divide(view, [Demand(i, group, 1, i, weight=2.5 if group == "a" else 1.0) for i, group in enumerate("abc")])
    assert [(sorted(part.groups or ()), len(part.room)) for part in parts] == [(["a"], 5), (["b", "c"], 4)]
