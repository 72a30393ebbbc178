"""Grouping: how devices are dealt among signatures, and which trials come together."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bundle import Device
from penstock.errors import StudyError
from penstock.scheduling.base import FULL, Assignment, Demand, Holding, View, kinds, room
from penstock.scheduling.capacity import Capacity
from penstock.scheduling.fifo import fifo
from penstock.scheduling.grouping import by_position, by_signature
from penstock.speed.curve import Curve
from penstock.speed.model import Speed

untimed = settings(deadline=None)  # tests never measure time
MEMORY = 80


def trials(signature, *numbers, at=(0, 0), load=32, bytes=0):
    return [
        Demand(number, "g", 1, number, bytes=bytes, signature=signature, position=at, load=load) for number in numbers
    ]


def running(*bundles, limit=8, load=32):
    """Trials from 1000 on that run in bundles of (device, signature, trials)."""
    made = {}
    for device, signature, count in bundles:
        for _ in range(count):
            number = 1000 + len(made)
            share = 1 / limits(limit)(signature)
            demand = Demand(number, "g", 1, signature=signature, load=load)
            made[number] = Holding(demand, Assignment(number, (device,), share))
    return made


def limits(limit):
    """The most trials of a bundle: a number, or a dict by signature. A trial without a signature has no company."""
    return lambda signature: (limit[signature] if isinstance(limit, dict) else limit) if signature else 1


def seen(devices, held=None, memory=MEMORY, unlike=False):
    """What is shown of devices, which are names or a dict with their memory."""
    sizes = devices if isinstance(devices, dict) else dict.fromkeys(devices, memory)
    there = {name: Device(name, "h200", size) for name, size in sizes.items()}
    held = held or {}
    return View(there, held, room(there, held.values()), kinds(held.values()), unlike)


def speed(view, waiting, limit=8, known=True):
    """Sharing is free, up to the limit; ``known`` says whether that was measured."""
    demands = {one.trial: one for one in (*waiting, *(one.demand for one in view.running.values()))}
    most = limits(limit)
    return Speed(
        lambda trial: 1.0,
        lambda trial: Curve((1.0,) * most(demands[trial].signature)),
        shared=lambda trial: known,
    )


def emptiest(view, demands, speed):
    """A part of the emptiest device for each: as much as the most of its like have that share one."""
    space, made = Capacity(view.devices, view.room, view.kinds, view.unlike), []
    for demand in demands:
        share = 1 / speed.curve(demand.trial).most
        if (devices := space.fit(share, demand.bytes, signature=demand.signature)) is not None:
            space.take(devices, share, demand.bytes, demand.signature)
            made.append(Assignment(demand.trial, devices, share))
    return made


dealt = by_signature(emptiest)


def placed(devices, waiting, held=None, limit=8, known=True):
    """Device -> trials."""
    view = seen(devices, held)
    made = by_position(dealt(view, waiting, speed(view, waiting, limit, known)), waiting)
    found = defaultdict(list)
    for one in made:
        found[one.devices[0]].append(one.trial)
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def signatures(devices, waiting, held=None, limit=8, known=True):
    """Signature -> how many of the devices that were free it has now."""
    free = {name for name, left in seen(devices, held).room.items() if left.share > 1 - FULL}
    of = {one.trial: one.signature for one in waiting}
    found = placed(devices, waiting, held, limit, known)
    return Counter(of[ones[0]] for name, ones in found.items() if name in free)


def test_the_scheduler_keeps_its_name_and_is_asked_as_it_is_where_there_is_nothing_to_deal():
    assert dealt.__name__ == "emptiest"
    asked = []

    def watched(view, demands, speed):
        asked.append((view, demands))
        return emptiest(view, demands, speed)

    alike, two = trials("a", 0, 1), [*trials("a", 0), *trials("b", 1)]
    for view, demands in ((seen("x"), alike), (seen("x"), []), (seen("x", unlike=True), two)):
        by_signature(watched)(view, demands, speed(view, demands))
        assert asked.pop() == (view, demands)
    full = seen("x", running(("x", "a", 8)))
    by_signature(watched)(full, two, speed(full, two))
    assert asked.pop() == (full, two), "no device has room"
    view = seen("xy")
    by_signature(watched)(view, two, speed(view, two))
    assert [(list(one.devices), list(one.room), [d.trial for d in ours]) for one, ours in asked] == [
        (["x"], ["x"], [0]),
        (["y"], ["y"], [1]),
    ]


# Spreading


def test_trials_spread_evenly_before_they_fuse_deeper():
    assert placed("xyz", trials("a", *range(7)), known=False) == {"x": (0, 1, 2), "y": (3, 4), "z": (5, 6)}


def test_trials_of_which_it_is_not_known_what_sharing_costs_measure_it_whatever_the_scheduler():
    def alone(view, demands, speed):
        return [Assignment(demand.trial, (name,)) for demand, name in zip(demands, view.room, strict=False)]

    view, waiting = seen("xy"), [*trials("a", 0, 1, 2, 3)]
    made = by_signature(alone)(view, waiting, speed(view, waiting, known=False))
    assert [(one.devices[0], one.share) for one in made] == [("x", 1 / 8)] * 2 + [("y", 1 / 8)] * 2
    made = by_signature(alone)(view, waiting, speed(view, waiting, known=True))
    assert [(one.devices[0], one.share) for one in made] == [("x", 1.0), ("y", 1.0)]


def test_no_bundle_holds_more_than_its_limit_and_the_rest_waits():
    assert placed("xy", trials("a", *range(7)), limit=3, known=False) == {"x": (0, 1, 2), "y": (3, 4, 5)}


@pytest.mark.parametrize("known", [True, False])
def test_a_device_with_less_memory_takes_less(known):
    waiting = trials("a", *range(9), bytes=10)
    found = placed({"x": 20, "y": MEMORY}, waiting, known=known)
    assert {name: len(ones) for name, ones in found.items()} == {"x": 2, "y": 7}


@pytest.mark.parametrize("known", [True, False])
def test_where_fusing_does_not_pay_each_trial_has_a_device(known):
    for waiting in (trials("a", *range(4)), [*trials("a", 0, 1), *trials("b", 2), *trials("", 3)]):
        assert placed("xyz", waiting, limit=1, known=known) == {"x": (0,), "y": (1,), "z": (2,)}


@pytest.mark.parametrize("known", [True, False])
def test_trials_without_a_signature_run_solo(known):
    view, waiting = seen("xyz", running(("z", "", 1))), [*trials("", 0, 1, 2), *trials("a", 3)]
    made = dealt(view, waiting, speed(view, waiting, known=known))
    assert sorted(made, key=lambda one: one.trial) == [Assignment(0, ("y",)), Assignment(3, ("x",), 1 / 8)]


@pytest.mark.parametrize(("signature", "limit"), [("", 8), ("a", 1)])
def test_an_only_device_goes_to_the_first_solo_trial_of_the_highest_priority(signature, limit):
    waiting = [replace(one, priority=one.trial % 3) for one in trials(signature, *range(6))]
    view = seen("x")
    made = dealt(view, waiting, speed(view, waiting, limit, known=False))
    assert made == [Assignment(2, ("x",))]
    busy = seen("x", running(("x", "", 1)))
    assert not dealt(busy, waiting, speed(busy, waiting, limit, known=False))


def test_an_only_device_is_dealt_by_weight_where_some_trials_can_share_it():
    assert placed("x", [*trials("", 0), *trials("a", 1, 2)], known=False) == {"x": (1, 2)}


def test_a_trial_that_no_device_can_hold_is_refused():
    for known in (True, False):
        view, waiting = seen("xy"), [*trials("a", 0, bytes=MEMORY + 1), *trials("b", 1)]
        with pytest.raises(StudyError, match="trial 0 takes 81 bytes and the largest device has 80"):
            by_signature(fifo)(view, waiting, speed(view, waiting, known=known))


# Bundles that run


@pytest.mark.parametrize("known", [True, False])
def test_a_running_bundle_takes_in_what_it_has_room_for(known):
    assert placed("x", trials("a", *range(9)), running(("x", "a", 5)), known=known) == {"x": (0, 1, 2)}


@pytest.mark.parametrize("known", [True, False])
def test_a_bundle_that_is_full_solo_or_unlike_takes_nobody(known):
    b = trials("b", 9)
    assert placed("x", [*trials("a", 0), *b], running(("x", "a", 8)), known=known) == {}
    assert placed("x", [*trials("a", 0), *b], running(("x", "a", 1), limit=1), 1, known=known) == {}
    assert placed("x", [*trials("", 0), *b], running(("x", "", 1)), known=known) == {}
    assert placed("x", [*trials("b", 0), *trials("c", 1)], running(("x", "a", 1)), known=known) == {}


@pytest.mark.parametrize("known", [True, False])
def test_the_emptier_of_two_bundles_is_filled_first_and_then_both_evenly(known):
    held = running(("x", "a", 5), ("y", "a", 2))
    assert placed("xy", trials("a", 0, 1, 2), held, known=known) == {"y": (0, 1, 2)}
    assert {d: len(t) for d, t in placed("xy", trials("a", *range(6)), held, known=known).items()} == {"x": 2, "y": 4}
    assert {d: len(t) for d, t in placed("xy", trials("a", *range(20)), held, known=known).items()} == {"x": 3, "y": 6}


@pytest.mark.parametrize("known", [True, False])
def test_a_free_device_is_used_before_a_running_bundle_is_filled(known):
    held = running(("x", "a", 1))
    assert placed("xyz", trials("a", 0, 1), held, known=known) == {"y": (0,), "z": (1,)}
    found = placed("xyz", trials("a", *range(5)), held, known=known)
    assert {d: len(t) for d, t in found.items()} == {"x": 1, "y": 2, "z": 2}


# Suspects


@pytest.mark.parametrize("known", [True, False])
def test_suspects_fuse_with_those_of_their_half_alone(known):
    waiting = [*trials("a half 1", 0, 1), *trials("a half 2", 2), *trials("a", 3, 4)]
    assert set(placed("xyz", waiting, known=known).values()) == {(0, 1), (2,), (3, 4)}


@pytest.mark.parametrize("known", [True, False])
def test_suspects_enter_no_bundle_of_others_and_are_not_joined_by_others(known):
    held = running(("x", "a", 1), ("y", "a half 1", 1))
    assert placed("xy", trials("a half 2", 0), held, known=known) == {}
    assert placed("xy", trials("a half 1", 0), held, known=known) == {"y": (0,)}
    assert placed("xy", trials("a", 0), held, known=known) == {"x": (0,)}


# Dealing devices


@pytest.mark.parametrize("known", [True, False])
def test_devices_go_by_batch_size_times_trials(known):
    waiting = [*trials("a", *range(6), load=64), *trials("b", *range(6, 12), load=32)]
    assert signatures("123456", waiting, known=known) == {"a": 4, "b": 2}
    waiting = [*trials("a", *range(8)), *trials("b", *range(8, 12))]
    assert signatures("123456", waiting, known=known) == {"a": 4, "b": 2}


@pytest.mark.parametrize("known", [True, False])
def test_every_signature_has_a_device_while_there_are_enough(known):
    waiting = [*trials("a", *range(50), load=512), *trials("b", 50, load=1), *trials("", 51, load=1)]
    assert signatures("1234", waiting, known=known) == {"a": 2, "b": 1, "": 1}


def test_otherwise_the_heaviest_come_first():
    waiting = [*trials("a", 0, 1), *trials("b", 2, 3, 4), *trials("c", 5, load=128)]
    assert placed("xy", waiting) == {"x": (5,), "y": (2, 3, 4)}


def test_ties_go_to_the_signature_that_has_waited_longest():
    waiting = [*trials("b", 0), *trials("a", 1, 2), *trials("b", 3), *trials("c", 4, 5)]
    assert placed("x", waiting) == {"x": (0, 3)}


def test_a_signature_that_has_a_device_comes_after_one_that_has_none():
    waiting = [*trials("a", *range(20)), *trials("b", 20, load=1)]
    assert placed("xy", waiting, running(("x", "a", 8))) == {"y": (20,)}


def test_trials_that_run_count_in_their_signatures_weight():
    held = running(("w", "a", 8), ("x", "b", 2), limit=16)
    waiting = [*trials("b", 0, 1, 2), *trials("a", 3, 4)]
    assert signatures("wxy", waiting, held, 16) == {"a": 1}, "(8 + 2) / 1 against (2 + 3) / 1"


def test_devices_that_a_signature_has_already_count():
    held = running(("v", "a", 4), ("w", "a", 4), ("x", "b", 4), limit=16)
    waiting = [*trials("a", 0, 1, 2, 3), *trials("b", 4, 5, 6)]
    assert signatures("vwxy", waiting, held, 16) == {"b": 1}, "(8 + 4) / 2 against (4 + 3) / 1"


def test_no_signature_gets_more_devices_than_it_has_trials():
    waiting = [*trials("a", 0, load=4096), *trials("b", *range(1, 6), load=1)]
    assert sorted(map(len, placed("1234", waiting).values())) == [1, 1, 2, 2]


# Positions


def test_equal_positions_stay_together_when_they_spread():
    waiting = [*trials("a", 0, 1, at=(1, 0)), *trials("a", 2, 3, 4, at=(2, 0)), *trials("a", 5, 6, at=(3, 0))]
    assert set(placed("xyz", waiting).values()) == {(0, 1), (2, 3, 4), (5, 6)}
    mixed = [replace(waiting[i], asked=n) for n, i in enumerate((0, 5, 2, 3, 1, 6, 4))]
    assert set(placed("xyz", mixed).values()) == {(0, 1), (2, 3, 4), (5, 6)}


def test_a_common_position_is_cut_before_bundles_are_mixed():
    waiting = [*trials("a", 0, 2, 4, 6, at=(1, 0)), *trials("a", 1, 3, 5, at=(2, 0))]
    assert set(placed("xyz", waiting).values()) == {(1, 3, 5), (0, 2), (4, 6)}


def test_positions_never_unbalance_the_counts():
    waiting = [*trials("a", 0, 1, 2, 3, 4, at=(1, 0)), *trials("a", 5, at=(2, 0))]
    assert sorted(map(len, placed("xy", waiting).values())) == [3, 3]


def test_a_new_bundle_is_of_one_position_and_a_running_one_takes_the_others():
    waiting = [*trials("a", 0, at=(1, 0)), *trials("a", 1, 2, at=(2, 0))]
    assert placed("xy", waiting, running(("x", "a", 1))) == {"x": (0,), "y": (1, 2)}


def test_only_equal_parts_of_devices_are_exchanged_among_trials_that_are_alike():
    waiting = [
        *trials("a", 0, at=(1, 0)),
        *trials("a", 1, at=(2, 0)),
        *trials("b", 2, at=(1, 0)),
        *trials("a", 3, at=(1, 0), bytes=5),
        *trials("a", 4, at=(2, 0)),
        *trials("a", 5, at=(1, 0)),
    ]
    shares = [0.25] * 4 + [0.5, 1.0]
    made = [Assignment(t, (name,), share) for t, (name, share) in enumerate(zip("xxxyyz", shares, strict=True))]
    assert by_position(made, waiting) == made
    alike = [*made[:2], Assignment(6, ("y",), 0.25), Assignment(7, ("y",), 0.25)]
    more = [*waiting, *trials("a", 6, at=(1, 0)), *trials("a", 7, at=(2, 0))]
    assert [one.devices[0] for one in by_position(alike, more)] == ["x", "y", "x", "y"]


def test_trials_that_move_stay_where_they_are_sent():
    made = [Assignment(1000, ("x",), 0.5), Assignment(0, ("x",), 0.5), Assignment(1, ("y",), 0.5)]
    assert by_position(made, [*trials("a", 0, at=(1, 0)), *trials("a", 1, at=(2, 0))])[0] == made[0]


# Starving


def asked(*at, signature, load=32):
    """Trials that are numbered by when they were asked for."""
    return trials(signature, *at, load=load)


def test_a_signature_whose_devices_are_long_full_gets_another_after_a_round():
    held, waiting = running(("x", "a", 2), limit=2), asked(5, signature="a")
    heavy = [*waiting, *asked(8, signature="b", load=1000)]
    assert placed("xy", heavy, held, 2) == {"y": (8,)}, "four wait and run: 8 < 5 + 4"
    heavy = [*waiting, *asked(9, signature="b", load=1000)]
    assert placed("xy", heavy, held, 2) == {"y": (5,)}


def test_a_trial_that_was_asked_for_a_round_later_counts_for_no_device():
    waiting = [*asked(0, signature="a", load=1), *asked(50, signature="b", load=1)]
    waiting += asked(90, signature="a", load=1000)
    assert placed("x", waiting) == {"x": (0,)}
    assert placed("xy", waiting) == {"x": (0, 90), "y": (50,)}


@pytest.mark.parametrize("known", [True, False])
def test_a_bundle_is_open_to_trials_asked_for_less_than_a_round_after_one_that_waits(known):
    held, b = running(("x", "a", 3)), asked(10, signature="b")
    assert placed("x", [*b, *asked(14, signature="a")], held, known=known) == {"x": (14,)}, "14 < 10 + 5 that are there"
    waiting = [*b, *asked(15, signature="a")]
    assert placed("x", waiting, held, known=known) == {}
    assert placed("xy", waiting, held, known=known) == {"x": (15,), "y": (10,)}, "nobody is kept from a device"
    assert placed("x", waiting, running(("x", "a", 4)), known=known) == {"x": (15,)}


def test_a_trial_that_was_asked_for_earlier_may_always_enter():
    waiting = [*asked(3, signature="a"), *asked(70, signature="b")]
    assert placed("x", waiting, running(("x", "a", 1))) == {"x": (3,)}


def test_a_heavy_signature_goes_behind_a_trial_that_has_waited_a_round():
    light = asked(10, signature="b", load=1)
    heavy = asked(11, 12, 13, signature="a")
    assert placed("x", [*light, *heavy]) == {"x": (11, 12, 13)}
    heavy = asked(14, 15, 16, signature="a")
    assert placed("x", [*light, *heavy]) == {"x": (10,)}
    assert sorted(placed("xy", [*light, *heavy]).values()) == [(10,), (14, 15, 16)]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=2, max_size=12),
    st.integers(1, 3),
    st.integers(1, 6),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_no_trial_starves_however_often_the_others_come_back(signatures, devices, limit, known, random):
    """Trials come back as soon as they are done, for ever; one that waits is overtaken less than a round's times."""
    loads = [random.choice([1, 1000]) for _ in signatures]
    names = [str(i) for i in range(devices)]
    waiting = [Demand(i, "g", 1, i, signature=s, load=loads[i]) for i, s in enumerate(signatures)]
    count, held, overtaken, begun = len(waiting), {}, Counter(), set()
    for _ in range(150):
        view = seen(names, held)
        made = dealt(view, waiting, speed(view, waiting, limit, known))
        by = {one.trial: one for one in waiting}
        now = {one.trial for one in made}
        waiting = [one for one in waiting if one.trial not in now]
        begun |= now
        served = {kind(signatures[trial], limit) for trial in now}
        for one in waiting:
            if kind(one.signature, limit) not in served:  # its signature's eldest, or it, got no place
                overtaken[one] += sum(by[trial].asked > one.asked for trial in now)
        held = held | {one.trial: Holding(by[one.trial], one) for one in made}
        done = set(random.sample(sorted(held), random.randint(1, len(held))))
        held = {trial: one for trial, one in held.items() if trial not in done}
        for trial in sorted(done):
            waiting.append(Demand(trial, "g", 1, count, signature=signatures[trial], load=loads[trial]))
            count += 1
    assert max(overtaken.values(), default=0) < len(signatures)
    assert len(begun) == len(signatures)


# Properties


def kind(signature, limit):
    """The signature of trials that share devices, "" of those that do not."""
    return signature if limits(limit)(signature) > 1 else ""


@st.composite
def rooms(draw):
    devices = [f"gpu {i}" for i in range(draw(st.integers(1, 7)))]
    limit = {s: draw(st.integers(1, 6)) for s in "abc"}
    loads = {s: draw(st.sampled_from([1, 32, 256])) for s in ("a", "b", "c", "")}
    some = st.sampled_from(["a", "b", "c", ""])
    held = {}
    for device in devices:
        if draw(st.booleans()):
            signature = draw(some)
            for _ in range(draw(st.integers(1, limits(limit)(signature)))):
                number = 1000 + len(held)
                demand = Demand(number, "g", 1, signature=signature, load=loads[signature])
                held[number] = Holding(demand, Assignment(number, (device,), 1 / limits(limit)(signature)))
    count = draw(st.integers(0, 25))
    times = sorted(draw(st.lists(st.integers(0, 60), min_size=count, max_size=count, unique=True)))
    waiting = []
    for trial, number in zip(draw(st.permutations(range(count))), times, strict=True):
        signature, at = draw(some), (draw(st.integers(0, 2)), 0)
        waiting.append(Demand(trial, "g", 1, number, signature=signature, position=at, load=loads[signature]))
    view = seen(devices, held)
    return view, waiting, limit, speed(view, waiting, limit, draw(st.booleans()))


def schedule(world):
    view, waiting, _, known = world
    return by_position(dealt(view, waiting, known), waiting)


def after(world):
    """Who runs when all is carried out, by device."""
    view, waiting, _, _ = world
    demands = {one.trial: one for one in waiting}
    held = [*view.running.values(), *(Holding(demands[one.trial], one) for one in schedule(world))]
    found = {name: [] for name in view.devices}
    for one in held:
        for name in one.assignment.devices:
            found[name].append(one)
    return found


@untimed
@given(rooms())
def test_every_trial_is_placed_once_at_most_and_with_its_like(world):
    made = schedule(world)
    assert len({one.trial for one in made}) == len(made)
    assert {one.trial for one in made} <= {one.trial for one in world[1]}, "nobody that runs is moved"
    for there in after(world).values():
        assert len({one.demand.signature for one in there}) <= 1
        assert len(there) <= 1 or there[0].demand.signature


@untimed
@given(rooms())
def test_shares_add_up_to_a_device_at_most(world):
    _, _, limit, _ = world
    for there in after(world).values():
        assert sum(one.assignment.share for one in there) <= 1 + FULL
        assert {one.assignment.share for one in there} <= {1 / limits(limit)(one.demand.signature) for one in there}


def round_of(world):
    return len(world[1]) + len(world[0].running)


def left_over(world):
    given = {one.trial for one in schedule(world)}
    return [one for one in world[1] if one.trial not in given]


@untimed
@given(rooms())
def test_nothing_idles_while_a_trial_waits_that_could_use_it(world):
    view, waiting, limit, _ = world
    left, found = left_over(world), after(world)
    assert not left or all(found.values()), "no device is free while a trial waits"
    there = {view.kinds[name] for name in view.room if name in view.kinds}  # signatures with an open bundle
    there |= {kind(one.signature, limit) for one in waiting if one not in left}
    for ones in found.values():
        signature = ones[0].demand.signature if ones else ""
        if 1 < limits(limit)(signature) > len(ones):  # still open
            stranded = [one.asked for one in left if kind(one.signature, limit) not in there]
            for one in left:
                assert one.signature != signature or (stranded and one.asked >= min(stranded) + round_of(world))


@untimed
@given(rooms())
def test_the_counts_on_a_signatures_devices_differ_by_one_at_most(world):
    view, _, limit, _ = world
    new, old = defaultdict(list), defaultdict(list)
    taken = {name for one in view.running.values() for name in one.assignment.devices}
    for name, ones in after(world).items():
        if ones and ones[0].demand.signature:
            signature = ones[0].demand.signature
            grew = any(one.demand.trial < 1000 for one in ones)
            (old if name in taken else new)[signature].append((len(ones), grew))
    for signature, sizes in new.items():
        assert max(sizes)[0] - min(sizes)[0] <= 1
        for size, grew in old[signature]:
            assert not grew or min(sizes)[0] >= size - 1, "a free device is used before a running bundle is filled"
    for signature, sizes in old.items():  # a bundle that took a trial in is no fuller than another that had room
        roomy = [size for size, _ in sizes if size < limits(limit)(signature)]
        assert all(size <= min(roomy, default=size) + 1 for size, grew in sizes if grew)


@untimed
@given(rooms())
def test_a_signature_with_no_device_has_one_before_any_other_has_one_more(world):
    view, waiting, limit, _ = world
    held = {kind(one.demand.signature, limit) for one in view.running.values()}
    taken = {name for one in view.running.values() for name in one.assignment.devices}
    new = Counter(
        kind(ones[0].demand.signature, limit) for name, ones in after(world).items() if ones and name not in taken
    )
    if any(count > 1 or signature in held for signature, count in new.items()):
        without = [one for one in left_over(world) if kind(one.signature, limit) not in held | set(new)]
        assert all(one.asked >= waiting[0].asked + round_of(world) for one in without)


@untimed
@given(rooms(), st.randoms(use_true_random=False))
def test_it_is_deterministic_and_only_the_order_of_asking_counts(world, random):
    view, waiting, limit, known = world
    assert schedule(world) == schedule(world)
    names = {one.trial: 900 - i for i, one in enumerate(sorted(waiting, key=lambda one: random.random()))}
    renamed = [replace(one, trial=names[one.trial]) for one in waiting]
    again = (view, renamed, limit, speed(view, renamed, limit, known.shared(0)))
    assert schedule(again) == [replace(one, trial=names[one.trial]) for one in schedule(world)]


@untimed
@given(st.integers(1, 5), st.integers(1, 6), st.integers(2, 4), st.integers(1, 3))
def test_equal_signatures_come_in_the_order_of_asking(groups, size, limit, devices):
    waiting = [replace(trials(f"s{i % groups}", i)[0], load=32) for i in range(groups * size)]
    names = [str(i) for i in range(min(devices, groups))]
    found = placed(names, waiting, limit=limit)
    assert list(found) == names
    for i, ones in enumerate(found.values()):
        assert ones == tuple(range(i, groups * size, groups))[:limit]


@untimed
@given(st.integers(1, 30), st.integers(1, 8))
def test_solo_trials_come_first_in_first_out(count, devices):
    names = [str(i) for i in range(devices)]
    for signature in ("", "a"):
        for known in (True, False):
            expected = {str(i): (i,) for i in range(min(count, devices))}
            assert placed(names, trials(signature, *range(count)), limit=1, known=known) == expected
