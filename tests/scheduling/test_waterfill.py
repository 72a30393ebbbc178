"""Waterfill: plans for few, a level for many, a glance at a flood."""

import math
import random
from collections.abc import Collection, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bundle import Device
from penstock.scheduling.base import Assignment, Demand, Holding, Room, View, room
from penstock.scheduling.fifo import fifo
from penstock.scheduling.fluid import dynamic_fluid, static_fluid
from penstock.scheduling.lookahead.choose import look_ahead, rebalance
from penstock.scheduling.lookahead.layout import Policy, Scene
from penstock.scheduling.lookahead.rollout import follow
from penstock.scheduling.lookahead.search import Search
from penstock.scheduling.waterfill import waterfill
from penstock.speed.curve import Curve
from penstock.speed.model import UNKNOWN, Speed
from penstock.trial import Later
from tests.contracts.schedulers import SchedulerContract, World, curves, groups_of_trials, thorough, worlds
from tests.scheduling.simulated_groups import SimulatedTrial, alike, check, cluster, demands, empty, simulate, under_way

EVEN = Curve((1, 2), (1, 1 / 2, 1 / 3, 1 / 4, 1 / 5))  # however wide a trial is, it takes the same device seconds
TOY = [SimulatedTrial(units) for units in (4, 4, 12, 30)]


def speed(curve: Curve, moving: float = math.inf) -> Speed:
    return Speed(lambda trial: 1.0, lambda trial: curve, moving)


def trials(*units: int) -> list[SimulatedTrial]:
    return [SimulatedTrial(one) for one in units]


class TestContract(SchedulerContract):
    scheduler = staticmethod(waterfill)


@pytest.mark.parametrize("moving", [math.inf, 0.0])
def test_the_papers_example_ends_as_early_as_it_can(moving: float) -> None:
    assert simulate(waterfill, TOY, 5, EVEN, moving).makespan == pytest.approx(10)


def random_group(seed: int) -> tuple[list[SimulatedTrial], int, Curve]:
    rng = random.Random(seed)
    some = [SimulatedTrial(rng.randint(5, 90), rng.uniform(0.9, 1.1)) for _ in range(rng.randint(2, 10))]
    most, widest = rng.randint(1, 4), rng.randint(1, 6)
    curve = Curve.of(rng.uniform(1, 1.3), most, rng.uniform(1, 1 + 1 / widest), widest)
    return some, rng.randint(1, 10), curve


@pytest.mark.parametrize("seed", range(20))
def test_a_group_ends_no_later_than_by_fluid(seed: int) -> None:
    some, devices, curve = random_group(seed)
    ours = simulate(waterfill, some, devices, curve).makespan
    assert ours <= simulate(static_fluid, some, devices, curve).makespan * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_a_group_that_moves_ends_no_later_than_by_fluid(seed: int) -> None:
    some, devices, curve = random_group(seed)
    ours = simulate(waterfill, some, devices, curve, moving=1.0).makespan
    assert ours <= simulate(dynamic_fluid, some, devices, curve, moving=1.0).makespan * (1 + 1e-9)


@thorough
@given(groups_of_trials(), st.integers(1, 6), curves())
def test_one_more_device_costs_no_more_than_a_unit(some: list[SimulatedTrial], devices: int, curve: Curve) -> None:
    some = [replace(trial, group="a") for trial in some]
    fewer, more = (simulate(waterfill, some, n, curve).makespan for n in (devices, devices + 1))
    slowest = curve.sharing[-1] * max(trial.seconds for trial in some)
    assert more <= fewer + slowest * (1 + 1e-9)


def test_where_nothing_is_measured_the_longest_go_first_and_of_equals_who_asked_first() -> None:
    made = waterfill(empty(cluster(2)), demands(trials(1, 5, 5, 9)), UNKNOWN)
    assert [(one.trial, one.share) for one in made] == [(3, 1), (1, 1)]
    made = waterfill(empty(cluster(3)), demands(trials(1, 5, 9, 5, 5)), UNKNOWN)
    assert [(one.trial, one.share) for one in made] == [(2, 1), (1, 1), (3, 1)]


def test_where_first_come_first_served_ends_sooner_it_is_begun() -> None:
    some = trials(2, 3, 2, 3, 2)
    assert [one.trial for one in waterfill(empty(cluster(2)), demands(some), UNKNOWN)] == [0, 1]
    assert simulate(waterfill, some, 2, Curve()).makespan == 6, "and 7 where the longest go first"


def test_sharing_that_saves_nothing_is_not_done() -> None:
    made = waterfill(empty(cluster(2)), demands(trials(*[5] * 9)), speed(Curve(sharing=(1, 2, 3.3))))
    assert [one.share for one in made] == [1, 1]


def test_sharing_that_saves_is_done_where_more_wait_than_there_are_devices() -> None:
    made = waterfill(empty(cluster(2)), demands(trials(*[5] * 40)), speed(Curve(sharing=(1, 1.2, 1.4))))
    assert [one.share for one in made] == [1 / 3] * 6


def test_a_trial_alone_takes_what_it_can_use() -> None:
    made = waterfill(empty(cluster(8)), demands(trials(5)), speed(Curve.of(1, 1, 1.1, 4)))
    assert [one.share for one in made] == [4]


def test_those_of_a_higher_priority_go_first() -> None:
    some = [SimulatedTrial(9), SimulatedTrial(9), SimulatedTrial(1, priority=1.0)]
    assert [one.trial for one in waterfill(empty(cluster(1)), demands(some), UNKNOWN)] == [2]
    many = [SimulatedTrial(9, priority=i % 7 == 5) for i in range(500)]
    made = waterfill(empty(cluster(70)), demands(many), UNKNOWN)
    assert [one.trial for one in made][:20] == [i for i in range(144) if i % 7 == 5]


@pytest.mark.parametrize("trials_each", [3, 200])
def test_groups_divide_the_devices_by_weight(trials_each: int) -> None:
    some = [SimulatedTrial(9, group=group) for _ in range(trials_each) for group in "ab"]
    made = waterfill(empty(cluster(4)), demands(some, {"a": 1.0, "b": 3.0}), UNKNOWN)
    assert sorted(some[one.trial].group for one in made) == ["a", "b", "b", "b"]


def test_a_group_that_has_its_due_leaves_what_is_free_to_others() -> None:
    devices = cluster(4)
    held = {99 + i: Holding(alike(99 + i, "a", 9), Assignment(99 + i, (f"gpu {i}",))) for i in range(2)}
    some = [SimulatedTrial(9, group="a"), *(SimulatedTrial(1, group="b") for _ in range(2))]
    waiting = demands(some, {"a": 1.5, "b": 1.5})
    assert sorted(one.trial for one in waterfill(under_way(devices, held), waiting, UNKNOWN)) == [1, 2]


def test_groups_of_which_no_weight_is_said_are_as_one() -> None:
    some = [SimulatedTrial(n, group=str(n)) for n in (4, 4, 12, 30)]
    free = Curve((1.0, 2.0), (1, 1 / 2, 1 / 3, 1 / 4, 1 / 5))
    assert simulate(waterfill, some, 5, free).makespan == pytest.approx(10)
    weighted = simulate(waterfill, some, 5, free, weights={"4": 3.0, "12": 1.0, "30": 1.0})
    assert weighted.makespan > 10


def test_groups_of_one_share_devices_when_there_are_many() -> None:
    some = [SimulatedTrial(9, group=str(i)) for i in range(40)]
    made = waterfill(empty(cluster(2)), demands(some), speed(Curve(sharing=(1, 1.2, 1.4))))
    assert [one.share for one in made] == [1 / 3] * 6


def test_a_trial_that_needs_a_large_device_finds_it_free() -> None:
    devices = {name: Device(name, "h200", memory) for name, memory in (("gpu 0", 80), ("gpu 1", 40))}
    some = [SimulatedTrial(9), SimulatedTrial(5, bytes=60)]
    view = View(devices, {}, room(devices, []))
    assert {one.trial: one.devices for one in waterfill(view, demands(some), UNKNOWN)} == {
        0: ("gpu 1",),
        1: ("gpu 0",),
    }


@pytest.mark.parametrize("count", [8, 400])
def test_wide_trials_stay_on_one_node(count: int) -> None:
    devices = {f"gpu {i}": Device(f"gpu {i}", "h200", 80, f"node {i // 4}") for i in range(count)}
    made = waterfill(empty(devices), demands(trials(9, 9)), speed(Curve.of(1, 1, 1, 4)))
    assert [one.share for one in made] == [4, 4]
    assert [len({devices[name].node for name in one.devices}) for one in made] == [1, 1]


def test_a_trial_that_should_have_ended_already_stops_nobody() -> None:
    devices = cluster(2)
    held = {9: Holding(alike(9, "a", 0), Assignment(9, ("gpu 0",)))}
    view = under_way(devices, held)
    assert [one.trial for one in waterfill(view, demands(trials(3, 3)), UNKNOWN)] == [0]


def test_a_trial_that_others_follow_has_the_share_that_wastes_least() -> None:
    curve = Curve((1, 1.2), (1, 0.55))
    followed = [replace(demand, open=True) for demand in demands(trials(9, 9))]
    assert [one.share for one in waterfill(empty(cluster(8)), followed, speed(curve))] == [1 / 2, 1 / 2]
    assert [one.share for one in waterfill(empty(cluster(8)), demands(trials(9, 9)), speed(curve))] == [2, 2]


def test_of_many_devices_the_one_that_a_trial_fits_on_is_found() -> None:
    devices = {f"gpu {i}": Device(f"gpu {i}", "h200", 80 if i == 299 else 8) for i in range(300)}
    made = waterfill(empty(devices), demands([SimulatedTrial(9, bytes=4), SimulatedTrial(9, bytes=60)]), UNKNOWN)
    assert [one.trial for one in made] == [0, 1]
    assert made[1].devices == ("gpu 299",)


class Flood(Collection[Demand]):
    """So many that nobody goes through them all."""

    def __init__(self, waiting: int) -> None:
        self.waiting, self.seen = waiting, 0

    def __len__(self) -> int:
        return self.waiting

    def __contains__(self, one: object) -> bool:
        raise AssertionError("nobody looks for one of them")

    def __iter__(self) -> Iterator[Demand]:
        for i in range(self.waiting):
            self.seen = max(self.seen, i + 1)
            yield alike(i, "a", 1 + i % 7, i)


class Sealed(dict[int, Holding]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("nobody goes through those that run")

    values = items = __iter__  # type: ignore[assignment]


def test_of_a_flood_only_the_first_few_are_looked_at() -> None:
    devices, flood = cluster(1000), Flood(100_000)
    held = Sealed({-i: Holding(alike(-i, "a", 5), Assignment(-i, (f"gpu {i}",))) for i in range(1, 1000)})
    view = View(devices, held, {"gpu 0": Room(1.0, 80)})
    made = waterfill(view, flood, speed(Curve.of(1.1, 4, 1.02, 8)))
    assert [(one.trial, one.share) for one in made] == [(6, 1 / 4), (5, 1 / 4), (4, 1 / 4), (11, 1 / 4)]
    assert flood.seen == 258


def test_many_trials_on_many_devices_all_run_at_once_where_they_can() -> None:
    view, waiting, curve = empty(cluster(100)), demands(trials(*range(1, 151))), Curve.of(1.1, 4, 1.02, 8)
    made = waterfill(view, waiting, speed(curve))
    check(view, waiting, speed(curve), made)
    share = {one.trial: one.share for one in made}
    assert len(made) > 140
    assert share[149] >= 2
    assert share[40] < 1
    assert sum(share.values()) > 90


def test_nobody_is_overtaken_for_ever() -> None:
    device = cluster(1)
    waiting = {0: alike(0, "a", units=1, asked=0)}
    for asked in range(1, 1000):
        waiting[asked] = alike(asked, "a", units=9, asked=asked)
        (started,) = waterfill(View(device, {}, room(device, [])), waiting.values(), UNKNOWN)
        del waiting[started.trial]
        if started.trial == 0:
            return
    raise AssertionError("the short trial waits for ever")


def test_who_came_late_starts_where_nobody_else_can() -> None:
    devices = {name: Device(name, "h200", memory) for name, memory in (("gpu 0", 80), ("gpu 1", 40), ("gpu 2", 40))}
    held = {9: Holding(alike(9, "a", 5, bytes=60), Assignment(9, ("gpu 0",)))}
    eldest, late = alike(0, "a", 1, asked=0, bytes=60), alike(1, "a", 1, asked=5000)
    both = waterfill(View(devices, {}, room(devices, [])), [eldest, late], UNKNOWN)
    assert {one.trial: one.devices for one in both} == {0: ("gpu 0",), 1: ("gpu 1",)}
    made = waterfill(under_way(devices, held), [eldest, late], UNKNOWN)
    assert made == [Assignment(1, ("gpu 1",))]


def test_who_came_late_takes_no_part_of_a_device_that_another_waits_for() -> None:
    device, curve = cluster(1), Curve(sharing=(1, 1.2))
    held = {9: Holding(alike(9, "a", 5, bytes=10), Assignment(9, ("gpu 0",), 0.5))}
    eldest, late = alike(0, "a", 1, asked=0, bytes=75), alike(1, "a", 1, asked=5000)
    view = under_way(device, held)
    assert waterfill(view, [eldest, late], speed(curve)) == []
    assert waterfill(view, [late], speed(curve)) == [Assignment(1, ("gpu 0",), 0.5)]


def running(*held: tuple[int, float], devices: int = 4) -> View:
    """Trials that run, by units left and share, each on devices of its own."""
    cards, free = cluster(devices), iter(cluster(devices))
    holdings = {
        i: Holding(alike(i, "a", units), Assignment(i, tuple(next(free) for _ in range(math.ceil(share))), share))
        for i, (units, share) in enumerate(held)
    }
    return under_way(cards, holdings)


def test_what_is_free_goes_to_the_trial_that_all_wait_for() -> None:
    made = waterfill(running((40, 1), (10, 1)), [], speed(EVEN, moving=1.0))
    assert made == [Assignment(0, ("gpu 0", "gpu 2", "gpu 3"), 3.0)]


def test_nobody_moves_for_less_than_moving_costs() -> None:
    assert waterfill(running((40, 1), (10, 1)), [], speed(EVEN, moving=27.0)) == []


def test_nobody_moves_where_trials_cannot() -> None:
    assert waterfill(running((40, 1), (10, 1)), [], speed(EVEN)) == []


def test_a_trial_in_its_last_unit_stays() -> None:
    assert waterfill(running((1, 1)), [], speed(EVEN, moving=0.0)) == []


def test_no_more_move_than_need_to() -> None:
    made = waterfill(running((40, 1), (20, 1), (20, 1), devices=4), [], speed(EVEN, moving=1.0))
    assert [(one.trial, one.share) for one in made] == [(0, 2)]


def test_a_trial_is_given_more_that_ends_sooner_so_though_the_last_does_not() -> None:
    cards = cluster(5)
    long, short = (Holding(alike(i, "a", units, i), Assignment(i, (f"gpu {i}",))) for i, units in enumerate((90, 60)))
    known = Speed(lambda trial: 1.0, lambda trial: (Curve(), Curve.of(widest=2))[trial], 1.0)
    running = {0: long, 1: short}
    (moved,) = waterfill(under_way(cards, running), [], known)
    assert (moved.trial, moved.share) == (1, 2.0)


@thorough
@given(worlds())
def test_those_that_just_start_are_not_rebalanced(world: World) -> None:
    known = replace(world.speed, moving=1.0)
    for fixed in (frozenset(world.view.running), frozenset(list(world.view.running)[::2])):
        moved = {one.trial for one in rebalance(world.view, known, fixed)}
        assert not moved & fixed


def rung(first: int, group: str, count: int, units: int, *later: Later) -> list[Demand]:
    """Trials of one rung, of which nobody has trained yet."""
    return [Demand(first + i, group, units, first + i, signature="alike", later=later) for i in range(count)]


def test_the_bracket_with_most_left_goes_first_and_not_the_longest_grant() -> None:
    waiting = [*rung(0, "long", 4, 12), *rung(4, "short", 4, 1, Later(2, 8), Later(1, 40))]
    made = waterfill(empty(cluster(2)), waiting, UNKNOWN)
    assert {one.trial for one in made} == {4, 5}, "which 40 units wait for at the end"


def test_of_many_devices_too_the_trials_that_most_follows_go_first() -> None:
    waiting = [*rung(0, "long", 80, 12), *rung(80, "short", 80, 1, Later(20, 8), Later(5, 40))]
    made = waterfill(empty(cluster(80)), waiting, UNKNOWN)
    assert {one.trial for one in made} == {*range(80, 160)}
    made = waterfill(replace(empty(cluster(80)), goal="target"), waiting, UNKNOWN)
    assert {one.trial for one in made} == {*range(80)}


def test_where_a_target_is_to_be_reached_the_longest_grant_goes_first() -> None:
    waiting = [*rung(0, "short", 4, 1, Later(2, 8), Later(1, 40)), *rung(4, "long", 4, 12)]
    view = replace(empty(cluster(2)), goal="target")
    assert {one.trial for one in waterfill(view, waiting, UNKNOWN)} == {4, 5}


def test_trials_whose_seconds_were_not_seen_overtake_nobody_of_their_rung() -> None:
    kinds = Speed(lambda trial: 1.0 + trial % 2, lambda trial: Curve())
    waiting = [replace(one, signature=f"kind {one.trial % 2}") for one in rung(0, "a", 9, 5)]
    made = waterfill(empty(cluster(2)), waiting, kinds)
    assert [one.trial for one in made] == [0, 1], "though those of odd numbers are of a slower kind"
    trained = [replace(one, position=(1, 0)) for one in waiting]
    assert [one.trial for one in waterfill(empty(cluster(2)), trained, kinds)] == [1, 3]


def test_a_trial_whose_seconds_were_not_seen_has_a_device_of_its_own_where_there_are_enough() -> None:
    waiting = [*rung(0, "a", 4, 8), *rung(4, "b", 1, 40)]
    known = speed(Curve((1.0, 1.1, 1.2), (1.0, 0.6, 0.5, 0.4)))
    assert min(one.share for one in waterfill(empty(cluster(5)), waiting, known)) == 1
    seen = [replace(demand, position=(1, 0)) for demand in waiting]
    assert min(one.share for one in waterfill(empty(cluster(5)), seen, known)) < 1


def test_a_width_that_was_not_measured_is_not_given() -> None:
    curve = Curve(scaling=(1.0, 0.5, 0.34, 0.25), tried=(1, 2, 4))
    made = waterfill(empty(cluster(3)), demands(trials(9)), speed(curve))
    assert [one.share for one in made] == [2]
    assert [one.share for one in static_fluid(empty(cluster(3)), demands(trials(9)), speed(curve))] == [2]


def test_a_trial_of_no_signature_has_whole_devices() -> None:
    some = [replace(trial, signature="") for trial in trials(9, 9, 9, 9)]
    for scheduler in (waterfill, static_fluid):
        made = scheduler(empty(cluster(2)), demands(some), speed(Curve((1.0, 1.0, 1.0))))
        assert [one.share for one in made] == [1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_whole_brackets_end_no_later_than_by_fifo(seed: int) -> None:
    """By the rollout of rungs, as a scheduler that is asked anew at every end decides."""
    rng = random.Random(seed)
    waiting: list[Demand] = []
    for bracket in range(rng.randint(1, 3)):
        count, units = rng.randint(2, 9), rng.randint(1, 4)
        waiting += rung(len(waiting), str(bracket), count, units, Later(max(1, count // 3), 3 * units))
    curve = Curve.of(rng.uniform(1, 1.3), rng.randint(1, 3), 1.1, rng.randint(1, 3))
    devices, known = rng.randint(1, 6), speed(curve)
    ours = look_ahead(empty(cluster(devices)), waiting, known)
    theirs = fifo(empty(cluster(devices)), waiting, known)
    assert ends(devices, waiting, ours, known) <= ends(devices, waiting, theirs, known) * (1 + 1e-6)


def ends(devices: int, waiting: list[Demand], made: list[Assignment], known: Speed) -> float:
    """When all end that can be known of, if this is done first and the best that is found then."""
    asked = {demand.trial: demand for demand in waiting}
    held = {one.trial: Holding(asked.pop(one.trial), one, done=0.0) for one in made}
    view = under_way(cluster(devices), held)
    scene = Scene(view, held.values(), asked.values(), known)
    return min(
        Search(scene.site, scene.jobs).best().plan.makespan,
        follow(scene.site, scene.jobs, Policy(solo=True)).makespan,
    )
