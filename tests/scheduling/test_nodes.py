"""Which devices a trial's workers are on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.bundle import Device
from penstock.errors import StudyError
from penstock.scheduling.nodes import Places, arrange, consolidate

LETTERS = "abcdefgh"
untimed = settings(deadline=None)  # tests never measure time


def cluster(*sizes: int, types: Iterable[str] = ()) -> dict[str, Device]:
    """Nodes a, b, ... with so many devices each: a0, a1, ..."""
    kinds = [*types] or ["h200"] * len(sizes)
    return {
        f"{node}{i}": Device(f"{node}{i}", type, 80, node)
        for node, size, type in zip(LETTERS, sizes, kinds, strict=False)
        for i in range(size)
    }


def at(*places: str) -> Places:
    """Trial i has the devices that are named in the i-th text."""
    return {trial: tuple(names.split()) for trial, names in enumerate(places)}


def nodes(devices: Mapping[str, Device], names: Iterable[str]) -> int:
    return len({devices[name].node for name in names})


def fewest(rooms: Iterable[int], count: int) -> int:
    """On how many nodes a trial is at least."""
    found = 0
    for room in sorted(rooms, reverse=True):
        if count > 0:
            count, found = count - room, found + 1
    return found


def sound(devices: Mapping[str, Device], wanted: Mapping[int, int], made: Places, mixed: bool = False) -> None:
    assert made.keys() == wanted.keys()
    assert {trial: len(names) for trial, names in made.items()} == wanted
    assert max(Counter(name for names in made.values() for name in names).values(), default=1) == 1
    assert all(name in devices for names in made.values() for name in names)
    assert mixed or all(len({devices[name].type for name in names}) == 1 for names in made.values())


# Who goes where


def test_a_trial_goes_to_the_node_where_the_fewest_are_free_that_are_enough() -> None:
    assert arrange(cluster(4, 2, 3), {}, {0: 2}) == at("b0 b1")
    assert arrange(cluster(4, 4), {7: ("b3",)}, {0: 3, 7: 1}) == {0: ("b0", "b1", "b2"), 7: ("b3",)}


def test_the_largest_is_placed_first() -> None:
    assert arrange(cluster(4, 4), {}, {0: 1, 1: 3, 2: 4}) == at("b3", "b0 b1 b2", "a0 a1 a2 a3")
    assert arrange(cluster(1, 1), {}, {5: 1, 3: 1}) == {5: ("b0",), 3: ("a0",)}, "of equal ones, the first"


def test_a_trial_wider_than_any_node_fills_the_emptiest_and_leaves_as_little_as_can_be() -> None:
    assert arrange(cluster(2, 4, 1, 3), {}, {0: 5}) == at("b0 b1 b2 b3 c0")
    assert arrange(cluster(2, 3, 3, 3), {}, {0: 7}) == at("b0 b1 b2 c0 c1 c2 a0")


def test_devices_are_named_by_node_most_first_and_in_natural_order() -> None:
    assert arrange(cluster(1, 12), {}, {0: 13}) == at(" ".join(f"b{i}" for i in range(12)) + " a0")
    held = at("a0", "c0", "b1 b0")
    assert arrange(cluster(2, 2, 2), held, {2: 4}) == {2: ("a0", "a1", "b0", "b1")}
    assert arrange(cluster(2, 2, 2), held, {2: 2}) == {2: ("b1", "b0")}, "who stays is as it was"


def test_smaller_trials_are_displaced_where_no_node_has_room() -> None:
    """As §4.4.1 says it; they are placed in turn, and who is not in the way stays."""
    held = at("a0", "a1", "b0", "b1 b2")
    made = arrange(cluster(4, 4, 1), held, {0: 1, 1: 1, 2: 1, 3: 2, 4: 3})
    assert made == at("b3", "a1", "b0", "b1 b2", "a0 a2 a3")
    made = arrange(cluster(4, 4, 4), at("a0", "b0", "c0"), {0: 1, 1: 1, 2: 1, 3: 7})
    assert made == at("c1", "b0", "c0", "a0 a1 a2 a3 b1 b2 b3"), "two nodes and not three, and one device moves"


def test_who_is_displaced_may_displace_in_its_turn() -> None:
    made = arrange(cluster(4, 3, 2), at("a0 a1", "b0", "c0"), {0: 2, 1: 1, 2: 1, 3: 4})
    assert made == at("b1 b2", "b0", "c0", "a0 a1 a2 a3"), "where there is room it does not"
    made = arrange(cluster(4, 2, 2), at("a0 a1", "b0", "c0"), {0: 2, 1: 1, 2: 1, 3: 4})
    assert made == at("b0 b1", "c1", "c0", "a0 a1 a2 a3")


def test_nobody_is_displaced_by_its_equal_nor_where_that_saves_no_node() -> None:
    assert arrange(cluster(3, 3), at("a0 a1", "b0 b1"), {0: 2, 1: 2, 2: 2}) == at("a0 a1", "b0 b1", "a2 b2")
    assert arrange(cluster(2, 2, 1), at("a0"), {0: 1, 1: 3}) == at("a0", "b0 b1 a1")


def test_as_few_devices_as_can_be_are_displaced_and_of_as_few_trials() -> None:
    held = at("a0 a1", "a2", "b0 b1", "b2 b3")
    made = arrange(cluster(4, 4, 1, 2), held, {0: 2, 1: 1, 2: 2, 3: 2, 4: 3})
    assert made == held | {0: ("d0", "d1"), 4: ("a0", "a1", "a3")}, "one of two is enough on a, and b has two of two"
    held = at("a0", "a1", "a2 a3", "b0 b1 b2 b3")
    made = arrange(cluster(5, 4, 2), held, {0: 1, 1: 1, 2: 2, 3: 4, 4: 3})
    assert made == held | {2: ("c0", "c1"), 4: ("a2", "a3", "a4")}, "one of two and not two of one"
    held = at("a0 b0", "c0")
    made = arrange(cluster(3, 3, 3), held, {0: 2, 1: 1, 2: 3})
    assert made == held | {1: ("a1",), 2: ("c0", "c1", "c2")}, "from a or b a trial of two would have to go"
    held = at("a0 b0", "a1")
    assert arrange(cluster(4, 2, 1), held, {0: 2, 1: 1, 2: 3}) == held | {1: ("b1",), 2: ("a1", "a2", "a3")}


# Who stays


def test_a_trial_that_grows_or_shrinks_keeps_what_it_has_where_that_costs_no_node() -> None:
    assert arrange(cluster(2, 4), at("b3"), {0: 2}) == at("b0 b3"), "though a would be the better fit"
    assert arrange(cluster(4, 2), at("a1 a2 a3"), {0: 1}) == at("a1")
    assert arrange(cluster(4, 4), at("a3 b0 b1"), {0: 2}) == at("b0 b1"), "which is one node less"
    held = at("a0 a1", "a2 a3")
    assert arrange(cluster(4, 4), held, {0: 3, 1: 2}) == at("b0 b1 b2", "a2 a3"), "two nodes would be one more"
    assert arrange(cluster(2, 4, 4), at("a0 a1"), {0: 5}) == at("b0 b1 b2 a0 a1"), "both of them, and not one"


def test_trials_that_grow_leave_one_another_what_they_have() -> None:
    assert arrange(cluster(8), at("a0 a1", "a2 a3"), {0: 3, 1: 3}) == at("a0 a1 a4", "a2 a3 a5")
    assert arrange(cluster(4, 4), at("a0"), {0: 2, 1: 3}) == at("a0 a1", "b0 b1 b2")


def test_fixed_trials_stay_and_their_devices_are_nobody_elses() -> None:
    held = at("a0", "b0")
    assert arrange(cluster(2, 2), held, {0: 1, 1: 1, 2: 2}) == at("b1", "b0", "a0 a1")
    assert arrange(cluster(2, 2), held, {0: 1, 1: 1, 2: 2}, fixed={0}) == at("a0", "a1", "b0 b1")
    assert arrange(cluster(2, 2), held, {0: 1, 1: 1, 2: 2}, fixed={0, 1}) == at("a0", "b0", "a1 b1")
    assert arrange(cluster(2, 2), held, {2: 2}, fixed={0, 1}) == {2: ("a1", "b1")}, "of whom nothing else is said"
    assert arrange(cluster(2, 2), held, {2: 2}) == {2: ("a0", "a1")}, "who is not fixed is gone"


def test_a_trial_that_has_lost_a_device_is_placed_anew() -> None:
    assert arrange(cluster(2, 2), at("a0 gone"), {0: 2}) == at("a0 a1")
    assert arrange(cluster(1, 1), at("a0 gone", "b0"), {0: 1, 1: 1}, fixed={1}) == at("a0", "b0")


def test_of_two_trials_on_one_device_one_gets_another() -> None:
    assert arrange(cluster(2), at("a0", "a0"), {0: 1, 1: 1}) == at("a0", "a1")


# Several types


def test_a_trial_is_on_one_type_unless_types_may_be_mixed() -> None:
    devices = cluster(2, 3, types=["old", "new"])
    assert arrange(devices, {}, {0: 3, 1: 2}) == at("b0 b1 b2", "a0 a1")
    assert arrange(devices, {}, {0: 4, 1: 1}, mixed=True) == at("b0 b1 b2 a0", "a1")
    assert arrange(devices, at("a0 b0"), {0: 2}) == at("a0 a1"), "who is on two types is placed anew"
    assert arrange(devices, at("a0 b0"), {0: 2}, mixed=True) == at("a0 b0")


def test_the_type_is_that_where_a_trial_is_best_placed() -> None:
    assert arrange(cluster(1, 1, 3, types=["old", "old", "new"]), {}, {0: 2}) == at("c0 c1"), "on one node"
    assert arrange(cluster(2, 3, types=["old", "new"]), at("a0"), {0: 1, 1: 2}) == at("a0", "b0 b1"), "nobody moves"
    assert arrange(cluster(2, 4, types=["old", "new"]), at("b0"), {0: 2}) == at("b0 b1"), "it keeps what it has"
    assert arrange(cluster(4, 2, types=["old", "new"]), {}, {0: 2}) == at("b0 b1"), "nothing is left over"


def test_types_are_divided_so_that_all_have_a_place() -> None:
    """Best fit alone would put the first trial of three on b, and the last trial of two nowhere."""
    made = arrange(cluster(6, 4, types=["old", "new"]), {}, {0: 3, 1: 3, 2: 2, 3: 2})
    assert made == at("a0 a1 a2", "a3 a4 a5", "b0 b1", "b2 b3")


def test_a_larger_trial_moves_to_another_type_where_smaller_ones_have_no_place_otherwise() -> None:
    devices = cluster(6, 5, types=["old", "new"])
    made = arrange(devices, at("a0 a1 a2 a3 a4"), {0: 5, 1: 3, 2: 3})
    sound(devices, {0: 5, 1: 3, 2: 3}, made)
    assert made[0] == ("b0", "b1", "b2", "b3", "b4")
    three = cluster(6, 5, 2, types=["old", "new", "newest"])
    assert arrange(three, at("a0 a1 a2 a3 a4", "c1 c0"), {0: 5, 1: 2, 2: 3, 3: 3})[1] == ("c1", "c0"), "as it was"
    with pytest.raises(StudyError, match="cannot be divided"):
        arrange(devices, at("a0 a1 a2 a3 a4"), {0: 5, 1: 3, 2: 3}, fixed={0})


# What is refused


def test_more_devices_than_there_are_of_one_type_are_refused() -> None:
    devices = cluster(4, 2, 3, types=["new", "new", "old"])
    with pytest.raises(StudyError) as refused:
        arrange(devices, {}, {3: 8})
    assert str(refused.value) == (
        "Trial 3 is to have 8 devices, and the nodes have 6 of one type (4 on a, 2 on b): ask for 6 or fewer, or allow "
        "devices of several types."
    )
    with pytest.raises(StudyError) as refused:
        arrange(cluster(1, 1, 1, 1, 2), {}, {3: 8})
    assert str(refused.value) == (
        "Trial 3 is to have 8 devices, and the nodes have 6 (2 on e, 1 on a, 1 on b, 1 on c, ...): ask for 6 or fewer, "
        "or add devices."
    )


@pytest.mark.parametrize(
    ("devices", "held", "wanted", "fixed", "total"),
    [
        (cluster(2, 2), {}, {0: 2, 1: 3}, (), "5 devices in all, and there are 4"),
        (cluster(2), at("a0"), {1: 2}, {0}, "3 devices in all, and there are 2"),
        ({}, {}, {0: 1}, (), "1 devices in all, and there are 0"),
    ],
)
def test_more_devices_than_there_are_in_all_are_a_schedulers_mistake(devices, held, wanted, fixed, total) -> None:
    with pytest.raises(StudyError, match=f"{total}: a scheduler must give out no more"):
        arrange(devices, held, wanted, fixed)


def test_a_fixed_trial_cannot_have_another_number() -> None:
    with pytest.raises(StudyError, match=r"Trial 0 is to stay where it is with 2 devices, and it has 1: leave"):
        arrange(cluster(4), at("a0"), {0: 2}, fixed={0})


def test_trials_of_types_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(StudyError) as refused:
        arrange(cluster(3, 3, types=["old", "new"]), {}, {0: 2, 1: 2, 2: 2})
    assert str(refused.value) == (
        "Trials are to have 6 devices in all, each trial those of one type, and 3 of type old and 3 of type new cannot "
        "be divided like that: ask for fewer, or allow devices of several types."
    )


# Properties

Scene = tuple[dict[str, Device], Places, dict[int, int], set[int]]


@st.composite
def scenes(draw: st.DrawFn, types: str = "x") -> Scene:
    """Trials scattered over nodes, of which some stay as they are, some change or end and some are new."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    devices = cluster(*sizes, types=[draw(st.sampled_from(types)) for _ in sizes])
    names = draw(st.permutations(sorted(devices)))
    names.sort(key=lambda name: devices[name].type)
    held: Places = {}
    for trial, size in enumerate(draw(st.lists(st.integers(1, 4), max_size=6))):
        mine, names = tuple(names[:size]), names[size:]
        if mine and len({devices[name].type for name in mine}) == 1:
            held[trial] = mine
    fixed = {trial for trial in held if draw(st.integers(0, 3)) == 3}
    wanted = {trial: len(held[trial]) for trial in fixed if draw(st.booleans())}
    left = len(devices) - sum(len(held[trial]) for trial in fixed)
    for trial in draw(st.permutations([*(held.keys() - fixed), 10, 11, 12])):
        same = len(held.get(trial, ()))
        number = min(left, draw(st.sampled_from([same, same, same, 0, 1, 2, 3, 5])))
        if number:
            wanted[trial], left = number, left - number
    return devices, held, wanted, fixed


def rooms(devices: Mapping[str, Device], without: Iterable[str]) -> Counter[str]:
    """The devices on each node, without some."""
    gone = set(without)
    return Counter(device.node for name, device in devices.items() if name not in gone)


@untimed
@given(scenes())
def test_every_trial_has_its_number_of_devices_and_no_device_is_given_twice(scene: Scene) -> None:
    devices, held, wanted, fixed = scene
    made = arrange(devices, held, wanted, fixed)
    sound(devices, wanted, made)
    for trial in fixed:
        assert made.get(trial, held[trial]) == held[trial]
        assert all(set(held[trial]).isdisjoint(made[other]) for other in made if other != trial)
    for trial, names in made.items():
        if names != held.get(trial):
            there = Counter(devices[name].node for name in names)
            assert list(names) == sorted(names, key=lambda name: (-there[devices[name].node], name))


@untimed
@given(scenes(types="xy"), st.booleans())
def test_of_several_types_all_have_a_place_if_that_can_be(scene: Scene, mixed: bool) -> None:
    devices, held, wanted, fixed = scene
    kept = {name for trial in fixed for name in held[trial]}
    room = Counter("x" if mixed else device.type for name, device in devices.items() if name not in kept)
    movable = [number for trial, number in wanted.items() if trial not in fixed]
    can = False
    for types in product("xy", repeat=len(movable)):
        taken = Counter[str]()
        for type, number in zip(types, movable, strict=True):
            taken[type] += number
        can = can or taken <= room
    if can:
        made = arrange(devices, held, wanted, fixed, mixed=mixed)
        sound(devices, wanted, made, mixed)
        assert all(made.get(trial, held[trial]) == held[trial] for trial in fixed)
        assert arrange(devices, made, wanted, mixed=mixed) == made
    else:
        with pytest.raises(StudyError):
            arrange(devices, held, wanted, fixed, mixed=mixed)


@untimed
@given(scenes())
def test_who_moves_has_made_way_for_a_larger_trial(scene: Scene) -> None:
    devices, held, wanted, fixed = scene
    made = arrange(devices, held, wanted, fixed)
    now = {name: trial for trial, names in made.items() for name in names}
    for trial in made.keys() & held.keys():
        if wanted[trial] == len(held[trial]) and made[trial] != held[trial]:
            assert any(wanted[now[name]] > wanted[trial] for name in held[trial] if name in now)


@untimed
@given(scenes())
def test_nobody_moves_where_the_others_are_on_the_fewest_nodes_all_the_same(scene: Scene) -> None:
    """Placed on what is free alone, each of the others is on as few nodes as if only fixed trials were there."""
    devices, held, wanted, fixed = scene
    stay = {trial for trial in wanted.keys() & held.keys() if wanted[trial] == len(held[trial])} | fixed
    kept = {name for trial in stay for name in held[trial]}
    free = {name: device for name, device in devices.items() if name not in kept}
    others = {trial: number for trial, number in wanted.items() if trial not in stay}
    alone = arrange(free, held, others)
    best = rooms(devices, (name for trial in fixed for name in held[trial])).values()
    assume(all(nodes(devices, alone[trial]) == fewest(best, number) for trial, number in others.items()))
    made = arrange(devices, held, wanted, fixed)
    assert made == alone | {trial: held[trial] for trial in stay if trial in wanted}


@untimed
@given(scenes())
def test_the_largest_of_those_placed_is_on_the_fewest_nodes(scene: Scene) -> None:
    """Those that are as large, or larger, and stay are all that can be in its way."""
    devices, held, wanted, fixed = scene
    same = {trial for trial in wanted.keys() & held.keys() if wanted[trial] == len(held[trial])}
    others = wanted.keys() - same - fixed
    assume(others)
    largest = min(others, key=lambda trial: (-wanted[trial], trial))
    ahead = {trial for trial in same if wanted[trial] >= wanted[largest]} | fixed
    best = rooms(devices, (name for trial in ahead for name in held[trial])).values()
    made = arrange(devices, held, wanted, fixed)
    assert nodes(devices, made[largest]) == fewest(best, wanted[largest])


@untimed
@given(scenes())
def test_arranging_again_moves_nobody_and_the_order_of_what_is_given_does_not_matter(scene: Scene) -> None:
    devices, held, wanted, fixed = scene
    made = arrange(devices, held, wanted, fixed)
    again = {trial: names for trial, names in held.items() if trial in fixed} | made
    assert arrange(devices, again, wanted, fixed) == made
    assert arrange(devices, again, wanted) == made
    backwards = (dict(reversed(one.items())) for one in (devices, held, wanted))
    assert arrange(*backwards, sorted(fixed)) == made  # type: ignore[arg-type]


@untimed
@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 5), st.integers(0, 10**6))
def test_powers_of_two_on_equal_nodes_are_always_on_the_fewest(per_node: int, number: int, seed: int) -> None:
    """Through trials that come, go and change: what is larger is made room for each time."""
    rng = random.Random(seed)
    devices, held = cluster(*[per_node] * number), Places()
    for _ in range(4):
        wanted, left = dict[int, int](), len(devices)
        for trial in rng.sample(range(12), 12):
            sizes = [0, 1, 1, 2, 4, 8, 16, len(held.get(trial, ()))]
            size = rng.choice([size for size in sizes if size <= left])
            if size:
                wanted[trial], left = size, left - size
        held = arrange(devices, held, wanted)
        sound(devices, wanted, held)
        assert all(nodes(devices, names) == -(-len(names) // per_node) for names in held.values())


@untimed
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 4))
def test_no_more_devices_move_than_are_in_the_way(used: list[int], count: int) -> None:
    """With trials of one device, the node that lacks the fewest gives them up."""
    devices = cluster(*[4] * len(used))
    held = dict(enumerate((f"{node}{i}",) for node, number in zip(LETTERS, used, strict=False) for i in range(number)))
    assume(count > 1 and len(held) + count <= len(devices))
    made = arrange(devices, held, dict.fromkeys(held, 1) | {99: count})
    assert sum(made[trial] != held[trial] for trial in held) == max(0, count - (4 - min(used)))


# Whole nodes that come free


def test_the_nodes_with_the_fewest_devices_in_use_are_emptied() -> None:
    held = at("a0 a1 a2", "b0", "c0 c1")
    assert consolidate(cluster(4, 4, 4), held, 8) == ({1: ("a3",)}, ("b",))
    assert consolidate(cluster(4, 4, 4), held, 9) == ({}, ())
    assert consolidate(cluster(4, 4, 4), at("a0", "a1"), 2) == ({}, ("b", "c")), "nobody need move"
    assert consolidate(cluster(2, 2), {}, 0) == ({}, ("a", "b"))
    assert consolidate(cluster(3, 1, 1, 2), at("d0 d1"), 4) == ({}, ("b", "c")), "two small ones and not a large one"


def test_a_trial_is_not_torn_apart_to_free_a_node() -> None:
    held = at("a0 a1 a2", "b0 b1 b2", "c0 c1")
    assert consolidate(cluster(4, 4, 4), held, 8) == ({}, ())
    assert consolidate(cluster(4, 4, 4), at("a0 a1 a2", "b0 b1 b2", "c0", "c1"), 8)[1] == ("c",)
    held = at("a0 a1 a2", "b0 b1 b2", "c0 b3")
    assert consolidate(cluster(4, 4, 4), held, 8) == ({2: ("a3", "b3")}, ("c",)), "it was on two nodes before"
    held = at("a0 a1 a2", "b0 b1", "c0 b2")
    assert consolidate(cluster(4, 4, 4), held, 8) == ({2: ("b2", "b3")}, ("c",)), "and is on one where it can be"
    held = at("a0 a1 a2", "b0 b1 b2", "c0 d3", "d0 d1 d2")
    assert consolidate(cluster(4, 4, 4, 4), held, 12) == ({2: ("a3", "d3")}, ("c",)), "and keeps what it can"


def test_a_node_that_cannot_be_emptied_is_passed_over_and_fixed_trials_are_left_alone() -> None:
    held = at("a0 a1 a2", "b0", "c0", "c1")
    assert consolidate(cluster(4, 4, 4), held, 8) == ({1: ("a3",)}, ("b",))
    assert consolidate(cluster(4, 4, 4), held, 8, fixed={1}) == ({2: ("a3",), 3: ("b1",)}, ("c",))
    assert consolidate(cluster(4, 4, 4), held, 8, fixed={0, 1, 3}) == ({}, ())
    held = at("a0 a1", "b0 b1 b2", "c0", "c1", "c2")
    assert consolidate(cluster(4, 4, 4), held, 8)[1] == ("c",), "a has the fewest, and no other has room for two"


def test_a_device_that_is_gone_is_made_up_for_where_its_trial_moves() -> None:
    assert consolidate(cluster(2, 4), at("a0 gone", "b0"), 4) == ({0: ("b1", "b2")}, ("a",))


def test_the_largest_moves_first() -> None:
    held = at("a0", "b0", "c0 c1", "c2 c3 c4", "c5 c6 c7 c8")
    moves, freed = consolidate(cluster(5, 6, 9), held, 11, fixed={0, 1})
    assert freed == ("c",)
    assert moves[4] == ("a1", "a2", "a3", "a4"), "were it the last, no node would have room for it"


def test_who_moves_stays_on_its_type() -> None:
    devices = cluster(2, 2, 2, types=["old", "new", "new"])
    assert consolidate(devices, at("a0", "b0", "c0"), 4) == ({1: ("c1",)}, ("b",))


@untimed
@given(st.integers(1, 4), st.lists(st.integers(0, 4), min_size=1, max_size=7), st.data())
def test_trials_of_one_device_free_as_many_nodes_as_are_too_many(
    size: int, used: list[int], data: st.DataObject
) -> None:
    used = [min(size, number) for number in used]
    devices = cluster(*[size] * len(used))
    held = dict(enumerate((f"{node}{i}",) for node, number in zip(LETTERS, used, strict=False) for i in range(number)))
    count = data.draw(st.integers(len(held), len(devices)))
    moves, freed = consolidate(devices, held, count)
    assert len(freed) == (len(devices) - count) // size
    assert len(moves) == sum(sorted(used)[: len(freed)]), "and no more move than were on the emptiest"


@untimed
@given(scenes(types="xxy"), st.data())
def test_what_is_left_holds_everybody_on_no_more_nodes(scene: Scene, data: st.DataObject) -> None:
    devices, held, _, fixed = scene
    count = data.draw(st.integers(sum(map(len, held.values())), len(devices)))
    moves, freed = consolidate(devices, held, count, fixed)
    after = held | moves
    sound(devices, {trial: len(names) for trial, names in held.items()}, after)
    left = rooms(devices, (name for name in devices if devices[name].node in freed))
    used = Counter(devices[name].node for names in after.values() for name in names)
    assert left.total() >= count
    assert used.keys() <= left.keys()
    assert moves.keys().isdisjoint(fixed)
    for trial, names in moves.items():
        assert names != held[trial]
        assert any(devices[name].node in freed for name in held[trial]), "who need not move does not"
        assert nodes(devices, names) <= nodes(devices, held[trial])
        assert devices[names[0]].type == devices[held[trial][0]].type
    assert all(node in used for node, number in left.items() if left.total() - number >= count), "none is forgotten"
