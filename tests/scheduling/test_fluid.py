"""StaticFluid and DynamicFluid."""

import math

import pytest

from penstock.bundle import Device
from penstock.scheduling.base import Assignment, Holding, Scheduler
from penstock.scheduling.fluid import dynamic_fluid, static_fluid
from penstock.speed.curve import Curve
from penstock.speed.model import Speed
from tests.contracts.schedulers import SchedulerContract
from tests.scheduling.simulated_groups import SimulatedTrial, alike, cluster, demands, empty, simulate, under_way

EVEN = Curve((1, 2), (1, 1 / 2, 1 / 3, 1 / 4, 1 / 5))  # however wide a trial is, it takes the same device seconds
TOY = [SimulatedTrial(units) for units in (4, 4, 12, 30)]


def speed(curve: Curve = EVEN, moving: float = math.inf) -> Speed:
    return Speed(lambda trial: 1.0, lambda trial: curve, moving)


def shares(made: list[Assignment]) -> dict[int, float]:
    return {one.trial: one.share for one in made}


class TestStaticContract(SchedulerContract):
    scheduler = staticmethod(static_fluid)
    conserves_work = False


class TestDynamicContract(SchedulerContract):
    scheduler = staticmethod(dynamic_fluid)
    conserves_work = False


def test_the_papers_example_is_scheduled_as_in_its_figure() -> None:
    made = static_fluid(empty(cluster(5)), demands(TOY), speed())
    assert shares(made) == {3: 3, 2: 1, 0: 1 / 2, 1: 1 / 2}
    assert made[2].devices == made[3].devices
    assert simulate(static_fluid, TOY, 5, EVEN).makespan == pytest.approx(12)


def test_resizing_closes_the_gap_that_the_papers_example_leaves() -> None:
    course = simulate(dynamic_fluid, TOY, 5, EVEN, moving=0.0)
    assert course.makespan == pytest.approx(10)
    assert [(one.share, one.start) for one in course.stretches if one.trial == 2] == [(1, 0), (2, pytest.approx(8))]


@pytest.mark.parametrize("scheduler", [static_fluid, dynamic_fluid])
def test_a_trial_that_few_devices_have_the_memory_for_is_given_those(scheduler: Scheduler) -> None:
    devices = cluster(1, memory=40) | {"gpu 1": Device("gpu 1", "simulated", 80)}
    made = scheduler(empty(devices), demands([SimulatedTrial(9, bytes=60)]), speed())
    assert made == [Assignment(0, ("gpu 1",))]


def test_without_moving_dynamic_is_static() -> None:
    assert simulate(dynamic_fluid, TOY, 5, EVEN) == simulate(static_fluid, TOY, 5, EVEN)


def test_a_share_is_at_most_what_the_curve_goes_to() -> None:
    curve = Curve.of(1.1, 3, 1.1, 2)
    made = static_fluid(empty(cluster(8)), demands([SimulatedTrial(100), SimulatedTrial(1)]), speed(curve))
    assert shares(made) == {0: 2, 1: 1 / 3}


def test_new_trials_divide_what_is_idle_and_not_all_devices() -> None:
    devices = cluster(4)
    held = {9: Holding(alike(9, "a", 50), Assignment(9, ("gpu 0", "gpu 1"), 2.0))}
    view = under_way(devices, held)
    assert shares(static_fluid(view, demands([SimulatedTrial(5)]), speed())) == {0: 2}


def test_fractions_go_to_the_emptiest_device() -> None:
    devices = cluster(2)
    held = {9: Holding(alike(9, "a", 50), Assignment(9, ("gpu 0",), 0.25))}
    view = under_way(devices, held)
    made = static_fluid(view, demands([SimulatedTrial(5), SimulatedTrial(5), SimulatedTrial(5)]), speed())
    assert [one.devices for one in made] == [("gpu 1",), ("gpu 0",), ("gpu 1",)]


def test_those_of_a_higher_priority_are_placed_first() -> None:
    trials = [SimulatedTrial(9), SimulatedTrial(9), SimulatedTrial(1, priority=1.0)]
    made = static_fluid(empty(cluster(1)), demands(trials), speed())
    assert [one.trial for one in made] == [2, 0]


def test_groups_divide_the_devices_by_weight() -> None:
    trials = [SimulatedTrial(9, group=group) for group in "aaab"]
    made = static_fluid(empty(cluster(4)), demands(trials, {"a": 1.0, "b": 3.0}), speed())
    assert shares(made) == {0: 1 / 2, 1: 1 / 2, 3: 3}


def test_what_one_group_leaves_over_goes_to_another() -> None:
    trials = [SimulatedTrial(9, group="a"), SimulatedTrial(9, group="b"), SimulatedTrial(9, group="b")]
    made = static_fluid(empty(cluster(4)), demands(trials, {"a": 3.0}), speed(Curve()))
    assert shares(made) == {0: 1, 1: 1, 2: 1}


def resized(old: list[tuple[int, float]], moving: float, curve: Curve = EVEN, devices: int = 4) -> dict[int, float]:
    """What becomes of trials that run, by units left and share, each on devices of its own."""
    cards, free = cluster(devices), iter(cluster(devices))
    held = {
        i: Holding(alike(i, "a", units), Assignment(i, tuple(next(free) for _ in range(math.ceil(share))), share))
        for i, (units, share) in enumerate(old)
    }
    return shares(dynamic_fluid(under_way(cards, held), [], speed(curve, moving)))


def test_a_trial_grows_if_it_ends_sooner_by_more_than_moving_costs() -> None:
    assert resized([(12, 1)], moving=8.9) == {0: 4}
    assert resized([(12, 1)], moving=9.0) == {}


def test_a_trial_shrinks_if_it_takes_less_area_so() -> None:
    curve = Curve((1, 1.5), (1, 0.9, 0.8))
    assert resized([(8, 2), (8, 1)], moving=0.0, curve=curve) == {1: 2}
    assert resized([(8, 3), (40, 1)], moving=0.0, curve=curve, devices=5)[0] == 1 / 2
    assert 0 not in resized([(8, 3), (40, 1)], moving=100.0, curve=curve, devices=5)


def test_a_trial_finds_the_memory_of_the_devices_that_another_gives_up() -> None:
    devices, curve = cluster(3), Curve((1, 1.5), (1, 0.9, 0.8))
    held = {
        0: Holding(alike(0, "a", 1, bytes=10), Assignment(0, ("gpu 0", "gpu 1"), 2.0)),
        1: Holding(alike(1, "a", 90, bytes=60), Assignment(1, ("gpu 2",), 0.5)),
    }
    made = dynamic_fluid(under_way(devices, held), [], speed(curve, moving=0.0))
    assert shares(made) == {0: 1 / 2, 1: 2}


def test_nobody_is_resized_while_nothing_is_free() -> None:
    assert resized([(40, 2), (1, 2)], moving=0.0) == {}
