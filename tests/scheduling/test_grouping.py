"""Grouping: whom a trial fuses with, and where."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduling.grouping import Candidate, Gathering, Running, group

untimed = settings(deadline=None)  # tests never measure time


def trials(signature, *numbers, at=(0, 0), weight=32):
    return [Candidate(number, signature, at, weight, number) for number in numbers]


def placed(devices, running, waiting, limit=8):
    """Device -> trials; a limit is a number, a dict by signature, or one by signature and device."""
    return {g.device: g.trials for g in group(devices, running, waiting, limits(limit))}


def limits(limit):
    if not isinstance(limit, dict):
        return lambda signature, device: limit
    return lambda signature, device: limit[signature, device] if (signature, device) in limit else limit[signature]


# Spreading


def test_trials_spread_evenly_before_they_fuse_deeper():
    assert placed("xyz", [], trials("a", *range(7))) == {"x": (0, 1, 2), "y": (3, 4), "z": (5, 6)}


def test_no_bundle_holds_more_than_its_limit_and_the_rest_waits():
    assert placed("xy", [], trials("a", *range(7)), limit=3) == {"x": (0, 1, 2), "y": (3, 4, 5)}


def test_a_device_with_a_lower_limit_takes_less():
    limit = {("a", "x"): 2, "a": 8}
    assert [len(t) for t in placed("xy", [], trials("a", *range(9)), limit).values()] == [2, 7]


@pytest.mark.parametrize("limit", [1, 0, -3])
def test_where_fusing_does_not_pay_each_trial_has_a_device(limit):
    assert placed("xyz", [], trials("a", *range(4)), limit) == {"x": (0,), "y": (1,), "z": (2,)}


def test_trials_without_a_signature_run_solo():
    waiting = trials(None, 0, 1, 2)
    assert group("xy", [Running("b", "z", None, 1)], waiting, limits(8)) == [
        Gathering("x", None, (0,), None),
        Gathering("y", None, (1,), None),
    ]


def test_what_a_gathering_says():
    running = [Running("b", "y", "a", 1)]
    assert group("xy", running, trials("a", 4, 5, 6), limits(8)) == [
        Gathering("x", None, (4, 5), "a"),
        Gathering("y", "b", (6,), "a"),
    ]


# Running bundles


def test_a_running_bundle_takes_in_what_it_has_room_for():
    assert placed("x", [Running("b", "x", "a", 5)], trials("a", *range(9))) == {"x": (0, 1, 2)}


@pytest.mark.parametrize("size", [0, 1])
def test_a_bundle_that_is_full_solo_or_unlike_takes_nobody(size):
    assert placed("x", [Running("b", "x", "a", 8)], trials("a", 0)) == {}
    assert placed("x", [Running("b", "x", "a", size)], trials("a", 0), limit=1) == {}
    assert placed("x", [Running("b", "x", None, size)], trials(None, 0)) == {}
    assert placed("x", [Running("b", "x", "a", size)], trials("b", 0)) == {}


def test_the_emptier_of_two_bundles_is_filled_first_and_then_both_evenly():
    running = [Running("b", "x", "a", 5), Running("c", "y", "a", 2)]
    assert placed("xy", running, trials("a", 0, 1, 2)) == {"y": (0, 1, 2)}
    assert {d: len(t) for d, t in placed("xy", running, trials("a", *range(6))).items()} == {"x": 2, "y": 4}
    assert {d: len(t) for d, t in placed("xy", running, trials("a", *range(20))).items()} == {"x": 3, "y": 6}


def test_a_free_device_is_used_before_a_running_bundle_is_filled():
    running = [Running("b", "x", "a", 1)]
    assert placed("xyz", running, trials("a", 0, 1)) == {"y": (0,), "z": (1,)}
    assert {d: len(t) for d, t in placed("xyz", running, trials("a", *range(5))).items()} == {"x": 1, "y": 2, "z": 2}


def test_an_empty_bundle_leaves_no_free_device_idle():
    assert placed("xy", [Running("b", "x", "a", 0)], trials("a", 0)) == {"y": (0,)}


def test_a_bundle_on_a_lost_device_neither_takes_nor_counts():
    running = [Running("b", "lost", "a", 1)]
    assert placed("x", running, [*trials("a", 0, 1), *trials("b", 2)]) == {"x": (0, 1)}


# Suspects


def suspects(half, *numbers):
    return [replace(one, half=half) for one in trials("a", *numbers)]


def test_suspects_fuse_with_those_of_their_half_alone():
    waiting = [*suspects(1, 0, 1), *suspects(2, 2), *trials("a", 3, 4)]
    assert set(placed("xyz", [], waiting).values()) == {(0, 1), (2,), (3, 4)}
    assert {g.signature for g in group("xyz", [], waiting, limits(8))} == {"a"}


def test_suspects_enter_no_bundle_of_others_and_are_not_joined_by_others():
    others, ours = Running("b", "x", "a", 1), Running("c", "y", "a", 1, half=1)
    assert placed("xy", [others, ours], suspects(2, 0)) == {}
    assert placed("xy", [others, ours], suspects(1, 0)) == {"y": (0,)}
    assert placed("xy", [others, ours], trials("a", 0)) == {"x": (0,)}


# Sharing devices


def test_devices_go_by_batch_size_times_trials():
    waiting = [*trials("a", *range(6), weight=64), *trials("b", *range(6, 12), weight=32)]
    by = Counter(g.signature for g in group("123456", [], waiting, limits(8)))
    assert by == {"a": 4, "b": 2}
    waiting = [*trials("a", *range(8)), *trials("b", *range(8, 12))]
    assert Counter(g.signature for g in group("123456", [], waiting, limits(8))) == {"a": 4, "b": 2}


def test_every_group_has_a_device_while_there_are_enough():
    waiting = [*trials("a", *range(50), weight=512), *trials("b", 50, weight=1), *trials(None, 51, weight=1)]
    by = Counter(g.signature for g in group("1234", [], waiting, limits(8)))
    assert by == {"a": 2, "b": 1, None: 1}


def test_otherwise_the_heaviest_come_first():
    waiting = [*trials("a", 0, 1), *trials("b", 2, 3, 4), *trials("c", 5, weight=128)]
    assert placed("xy", [], waiting) == {"x": (5,), "y": (2, 3, 4)}


def test_ties_go_to_the_group_that_has_waited_longest():
    waiting = [*trials("b", 0), *trials("a", 1, 2), *trials("b", 3), *trials("c", 4, 5)]
    assert placed("x", [], waiting) == {"x": (0, 3)}


def test_a_group_that_has_a_device_comes_after_one_that_has_none():
    waiting = [*trials("a", *range(20)), *trials("b", 20, weight=1)]
    assert placed("xy", [Running("b", "x", "a", 8)], waiting) == {"y": (20,)}


def test_trials_that_run_count_in_their_groups_weight():
    running = [Running("b", "w", "a", 8), Running("c", "x", "b", 2)]
    waiting = [*trials("b", 0, 1, 2), *trials("a", 3, 4)]
    given = {g.device: g.signature for g in group("wxy", running, waiting, limits(16)) if g.bundle is None}
    assert given == {"y": "a"}  # (8 + 2) / 1 against (2 + 3) / 1


def test_devices_that_a_group_has_already_count():
    running = [Running("b", "v", "a", 4), Running("c", "w", "a", 4), Running("d", "x", "b", 4)]
    waiting = [*trials("a", 0, 1, 2, 3), *trials("b", 4, 5, 6)]
    given = {g.device: g.signature for g in group("vwxy", running, waiting, limits(16)) if g.bundle is None}
    assert given == {"y": "b"}  # (8 + 4) / 2 against (4 + 3) / 1


def test_no_group_gets_more_devices_than_it_has_trials():
    waiting = [*trials("a", 0, weight=4096), *trials("b", *range(1, 6), weight=1)]
    assert sorted(map(len, placed("1234", [], waiting).values())) == [1, 1, 2, 2]


# Positions


def test_equal_positions_stay_together_when_they_spread():
    waiting = [*trials("a", 0, 1, at=(1, 0)), *trials("a", 2, 3, 4, at=(2, 0)), *trials("a", 5, 6, at=(3, 0))]
    assert set(placed("xyz", [], waiting).values()) == {(0, 1), (2, 3, 4), (5, 6)}
    mixed = [waiting[i] for i in (0, 5, 2, 3, 1, 6, 4)]
    assert set(placed("xyz", [], mixed).values()) == {(0, 1), (2, 3, 4), (5, 6)}


def test_a_common_position_is_cut_before_bundles_are_mixed():
    waiting = [*trials("a", 0, 2, 4, 6, at=(1, 0)), *trials("a", 1, 3, 5, at=(2, 0))]
    assert set(placed("xyz", [], waiting).values()) == {(1, 3, 5), (0, 2), (4, 6)}


def test_positions_never_unbalance_the_counts():
    waiting = [*trials("a", 0, 1, 2, 3, 4, at=(1, 0)), *trials("a", 5, at=(2, 0))]
    assert sorted(map(len, placed("xy", [], waiting).values())) == [3, 3]


def test_where_not_all_fit_the_position_that_has_waited_longest_comes_first_and_then_the_most_common():
    waiting = [
        *trials("a", 0, at=(1, 0)),
        *trials("a", 1, 2, at=(2, 0)),
        *trials("a", 3, 4, 5, at=(3, 0)),
        *trials("a", 6, at=(1, 0)),
    ]
    assert placed("x", [], waiting, limit=2) == {"x": (0, 6)}
    assert placed("x", [], waiting, limit=5) == {"x": (0, 3, 4, 5, 6)}
    assert placed("x", [Running("b", "x", "a", 3)], waiting, limit=5) == {"x": (0, 6)}


def test_a_new_bundle_is_of_one_position_and_a_running_one_takes_the_others():
    running = [Running("b", "x", "a", 1)]
    waiting = [*trials("a", 0, at=(1, 0)), *trials("a", 1, 2, at=(2, 0))]
    assert placed("xy", running, waiting) == {"x": (0,), "y": (1, 2)}


# Starving


def test_a_solo_group_whose_device_is_long_taken_gets_another_after_a_round():
    running, waiting = [Running("s", "x", "a", 1)], trials("a", 5)
    again = Candidate(9, "b", (0, 0), 1000, asked=7)
    assert placed("xy", running, [*waiting, again], limit=1) == {"y": (9,)}  # three wait and run: 7 < 5 + 3
    assert placed("xy", running, [*waiting, replace(again, asked=8)], limit=1) == {"y": (5,)}


def test_who_was_asked_for_a_round_later_counts_for_no_device():
    waiting = [Candidate(0, "a", (0, 0), 1, 0), Candidate(1, "b", (0, 0), 1, 50), Candidate(2, "a", (0, 0), 1000, 90)]
    assert placed("x", [], waiting) == {"x": (0,)}
    assert placed("xy", [], waiting) == {"x": (0, 2), "y": (1,)}


def test_a_bundle_is_open_to_what_was_asked_for_less_than_a_round_after_who_waits():
    running = [Running("b", "x", "a", 3)]
    waiting = [Candidate(9, "b", (0, 0), 32, asked=10), Candidate(1, "a", (0, 0), 32, asked=14)]
    assert placed("x", running, waiting) == {"x": (1,)}  # five trials wait and run: 14 < 10 + 5
    waiting = [waiting[0], Candidate(1, "a", (0, 0), 32, asked=15)]
    assert placed("x", running, waiting) == {}
    assert placed("xy", running, waiting) == {"x": (1,), "y": (9,)}  # nobody is kept from a device
    assert placed("x", [Running("b", "x", "a", 4)], waiting) == {"x": (1,)}


def test_a_trial_that_was_asked_for_earlier_may_always_enter():
    waiting = [Candidate(1, "a", (0, 0), 32, asked=3), Candidate(9, "b", (0, 0), 32, asked=70)]
    assert placed("x", [Running("b", "x", "a", 1)], waiting) == {"x": (1,)}


def test_a_heavy_group_goes_behind_who_has_waited_a_round():
    light = Candidate(9, "b", (0, 0), 1, asked=10)
    heavy = [Candidate(i, "a", (0, 0), 32, asked=11 + i) for i in range(3)]
    assert placed("x", [], [light, *heavy]) == {"x": (0, 1, 2)}
    heavy = [Candidate(i, "a", (0, 0), 32, asked=14 + i) for i in range(3)]
    assert placed("x", [], [light, *heavy]) == {"x": (9,)}
    assert placed("xy", [], [light, *heavy]) in ({"x": (9,), "y": (0, 1, 2)}, {"x": (0, 1, 2), "y": (9,)})


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "c", None]), min_size=2, max_size=12),
    st.integers(1, 3),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_no_trial_starves_however_often_the_others_come_back(signatures, devices, limit, random):
    """Trials come back as soon as they are done, for ever; who waits is overtaken less than a round's times."""
    weights = [random.choice([1, 1000]) for _ in signatures]
    names = [str(i) for i in range(devices)]
    waiting = [Candidate(i, s, (0, 0), weights[i], i) for i, s in enumerate(signatures)]
    asked, bundles, overtaken, seen = len(waiting), {}, Counter(), set()
    for turn in range(150):
        running = [Running(name, device, s, len(inside)) for name, (device, s, inside) in bundles.items()]
        gatherings = group(names, running, waiting, limits(limit))
        by = {c.trial: c for c in waiting}
        now = {t for g in gatherings for t in g.trials}
        waiting = [c for c in waiting if c.trial not in now]
        seen |= now
        served = {g.signature for g in gatherings} - {None}
        for c in waiting:
            if c.signature not in served:  # its group's eldest, or it, got no place
                overtaken[c] += sum(by[trial].asked > c.asked for trial in now)
        for g in gatherings:
            _, _, ones = bundles.setdefault(g.bundle or f"{turn} {g.device}", (g.device, g.signature, set()))
            ones.update(g.trials)
        inside = sorted(t for _, _, ones in bundles.values() for t in ones)
        done = set(random.sample(inside, random.randint(1, len(inside))))
        bundles = {name: (d, s, ones - done) for name, (d, s, ones) in bundles.items() if ones - done}
        for trial in sorted(done):
            waiting.append(Candidate(trial, signatures[trial], (0, 0), weights[trial], asked))
            asked += 1
    assert max(overtaken.values(), default=0) < len(signatures)
    assert len(seen) == len(signatures)


# Properties

SIGNATURES = st.sampled_from(["a", "b", "c", None])


@st.composite
def rooms(draw):
    devices = [f"gpu {i}" for i in range(draw(st.integers(0, 7)))]
    busy = [device for device in devices if draw(st.booleans())]
    running = [Running(f"on {device}", device, draw(SIGNATURES), draw(st.integers(1, 6))) for device in busy]
    count = draw(st.integers(0, 25))
    asked = sorted(draw(st.lists(st.integers(0, 60), min_size=count, max_size=count, unique=True)))
    weights = {s: draw(st.sampled_from([1, 32, 256])) for s in ("a", "b", "c", None)}
    waiting = []
    for trial, number in zip(draw(st.permutations(range(count))), asked, strict=True):
        signature = draw(SIGNATURES)
        waiting.append(Candidate(trial, signature, (draw(st.integers(0, 2)), 0), weights[signature], number))
    limit = {s: draw(st.integers(1, 6)) for s in ("a", "b", "c")}
    return devices, running, waiting, limits(limit)


@untimed
@given(rooms())
def test_every_trial_is_placed_once_at_most_and_with_its_like(room):
    gatherings = group(*room)
    by = {candidate.trial: candidate for candidate in room[2]}
    everyone = [trial for g in gatherings for trial in g.trials]
    assert len(everyone) == len(set(everyone))
    for g in gatherings:
        assert g.trials
        assert {by[trial].signature for trial in g.trials} == {g.signature}
        assert [by[trial].asked for trial in g.trials] == sorted(by[trial].asked for trial in g.trials)


@untimed
@given(rooms())
def test_limits_hold_and_a_device_has_one_bundle(room):
    devices, running, _, limit = room
    inside = {one.bundle: one for one in running}
    gatherings = group(*room)
    assert [g.device for g in gatherings] == sorted({g.device for g in gatherings})
    for g in gatherings:
        assert g.device in devices
        most = 1 if g.signature is None else limit(g.signature, g.device)
        if g.bundle is None:
            assert g.device not in {one.device for one in running}
            assert len(g.trials) <= most
        else:
            assert (inside[g.bundle].device, inside[g.bundle].signature) == (g.device, g.signature)
            assert len(g.trials) + inside[g.bundle].trials <= most > 1


@untimed
@given(rooms())
def test_nothing_idles_while_a_trial_waits_that_could_use_it(room):
    devices, running, waiting, limit = room
    gatherings = group(*room)
    placed = {trial for g in gatherings for trial in g.trials}
    left = [c for c in waiting if c.trial not in placed]
    used = {one.device for one in running} | {g.device for g in gatherings}
    assert not left or used == set(devices)
    open_ = {one.signature for one in running if one.signature and 1 < limit(one.signature, "") > one.trials}
    stranded = [
        c.asked for c in left if c.signature is None or c.signature not in open_ | {g.signature for g in gatherings}
    ]
    round_ = len(waiting) + sum(one.trials for one in running)
    taken = defaultdict(int, {g.device: len(g.trials) for g in gatherings})
    for bundle in running:
        most = 1 if bundle.signature is None else limit(bundle.signature, bundle.device)
        if 1 < most > bundle.trials + taken[bundle.device]:  # still open
            for c in left:
                assert c.signature != bundle.signature or (stranded and c.asked >= min(stranded) + round_)
    for g in gatherings:
        if g.bundle is None and g.signature is not None and len(g.trials) < limit(g.signature, g.device):
            for c in left:
                assert c.signature != g.signature or (stranded and c.asked >= min(stranded) + round_)


@untimed
@given(rooms())
def test_the_counts_on_a_groups_devices_differ_by_one_at_most(room):
    _, running, _, limit = room
    counts = defaultdict(list)
    for g in group(*room):
        if g.bundle is None:
            counts[g.signature].append(len(g.trials))
    for sizes in counts.values():
        assert max(sizes) - min(sizes) <= 1
    after = defaultdict(int, {g.bundle: len(g.trials) for g in group(*room) if g.bundle})
    for one in running:  # who took somebody in is no fuller than any other bundle that had room for one more
        for other in running:
            if after[one.bundle] and one.signature == other.signature:
                room_left = other.trials + after[other.bundle] < limit(other.signature, other.device)
                assert not room_left or one.trials + after[one.bundle] <= other.trials + after[other.bundle] + 1
        for size in counts[one.signature] if after[one.bundle] else ():
            assert size >= min(limit(one.signature, one.device), one.trials + after[one.bundle])


@untimed
@given(rooms())
def test_a_group_with_none_has_a_device_before_any_other_has_one_more(room):
    _, running, waiting, _ = room
    gatherings = group(*room)
    placed = {trial for g in gatherings for trial in g.trials}
    held = {one.signature for one in running} - {None}
    new = Counter(g.signature for g in gatherings if g.bundle is None)
    without = [c for c in waiting if c.trial not in placed and (not c.signature or c.signature not in held | set(new))]
    if any(signature and (count > 1 or signature in held) for signature, count in new.items()):
        round_ = len(waiting) + sum(one.trials for one in running)
        assert all(c.asked >= waiting[0].asked + round_ for c in without)


@untimed
@given(rooms(), st.randoms(use_true_random=False))
def test_it_is_deterministic_and_only_the_order_of_asking_counts(room, random):
    devices, running, waiting, limit = room
    assert group(*room) == group(*room)
    names = {c.trial: 1000 - i for i, c in enumerate(sorted(waiting, key=lambda c: random.random()))}
    renamed = [Candidate(names[c.trial], c.signature, c.position, c.weight, c.asked) for c in waiting]
    expected = [Gathering(g.device, g.bundle, tuple(names[t] for t in g.trials), g.signature) for g in group(*room)]
    assert group(devices, running, renamed, limit) == expected


@untimed
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3))
def test_equal_groups_come_in_the_order_of_asking(groups, size, limit, devices):
    waiting = [Candidate(i, f"s{i % groups}", (0, 0), 32, i) for i in range(groups * size)]
    names = [str(i) for i in range(min(devices, groups))]
    gatherings = group(names, [], waiting, limits(limit))
    assert [g.signature for g in gatherings] == [f"s{i}" for i in range(len(names))]
    for i, g in enumerate(gatherings):
        assert g.trials == tuple(range(i, groups * size, groups))[:limit]


@untimed
@given(st.integers(1, 30), st.integers(1, 8))
def test_solo_trials_come_first_in_first_out(count, devices):
    names = [str(i) for i in range(devices)]
    for signature in (None, "a"):
        waiting = trials(signature, *range(count))
        expected = {str(i): (i,) for i in range(min(count, devices))}
        assert placed(names, [], waiting, limit=1) == expected
