"""Who shares a device with whom."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.bundle import Device
from penstock.scheduling.base import Assignment, Room
from penstock.scheduling.company import alike_together

CARDS = {name: Device(name, type, 100) for name, type in (("a", "new"), ("b", "new"), ("c", "new"), ("old", "old"))}
ROOM = {name: Room(1.0, 100) for name in CARDS}


def together(
    places: str, signatures: str, share: float = 0.5, bytes: int = 1, there: dict[str, str] | None = None
) -> str:
    """Trial i of signature ``signatures[i]`` was given a part of the device ``places[i]``; where each is then."""
    made = [Assignment(trial, (name,), share) for trial, name in enumerate(places)]
    known, sizes = dict(enumerate(signatures)), dict.fromkeys(range(len(places)), bytes)
    found = alike_together(made, known, sizes, CARDS, ROOM, there or {})
    assert [one.trial for one in found] == [one.trial for one in made]
    return "".join(one.devices[0] for one in found)


def test_trials_of_one_signature_share_a_device() -> None:
    assert together("abab", "xxyy") == "aabb"
    assert together("abcabc", "xyzzyx") == "abccba"


def test_where_all_are_alike_everybody_stays() -> None:
    assert together("abba", "xxxx") == "abba"
    assert together("abba", "xxxx", there={"a": "x"}) == "abba"


def test_who_starts_joins_its_like() -> None:
    assert together("ab", "xy", there={"a": "y", "b": "x"}) == "ba"
    assert together("ab", "xx", there={"a": "y"}) in ("ab", "ba")


def test_the_most_common_have_the_device_with_most_places() -> None:
    assert together("abbb", "xyxx", share=0.25) == "babb"


def test_nobody_is_exchanged_into_a_device_without_the_memory() -> None:
    made = [Assignment(trial, (name,), 0.5) for trial, name in enumerate("abab")]
    sizes = {0: 60, 1: 60, 2: 40, 3: 40}
    assert alike_together(made, dict(enumerate("xxyy")), sizes, CARDS, ROOM, {}) == made


def test_other_shares_other_types_and_whole_devices_are_not_exchanged() -> None:
    made = [
        Assignment(0, ("a",), 0.5),
        Assignment(1, ("b",), 0.25),
        Assignment(2, ("old",), 0.5),
        Assignment(3, ("c",)),
    ]
    made += [Assignment(4, ("a",), 0.5), Assignment(5, ("b",), 0.25), Assignment(6, ("old",), 0.5)]
    known = dict(enumerate("xxxxyyy"))
    assert alike_together(made, known, dict.fromkeys(range(7), 1), CARDS, ROOM, {}) == made


@given(st.integers(0, 10**6))
def test_the_devices_and_each_trials_share_are_as_they_were(seed: int) -> None:
    rng = random.Random(seed)
    made = [Assignment(i, (rng.choice("abc"),), rng.choice([0.5, 0.25, 1.0])) for i in range(rng.randint(0, 12))]
    known = {one.trial: rng.choice("xyz") for one in made}
    found = alike_together(made, known, dict.fromkeys(known, 1), CARDS, ROOM, {})
    assert {one.trial: one.share for one in found} == {one.trial: one.share for one in made}
    assert Counter((one.devices, one.share) for one in found) == Counter((one.devices, one.share) for one in made)
