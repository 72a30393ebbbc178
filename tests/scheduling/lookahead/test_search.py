"""Plans: groups whose best plan only one part of the search finds, and what else a plan is chosen by."""

from __future__ import annotations

import pytest

from penstock.scheduling.base import Demand
from penstock.scheduling.fluid import dynamic_fluid
from penstock.scheduling.lookahead.layout import Plan, options
from penstock.scheduling.waterfill import waterfill
from penstock.speed.curve import Curve
from penstock.speed.model import Speed
from tests.scheduling.simulated_groups import SimulatedTrial, cluster, demands, empty, simulate


@pytest.mark.parametrize(
    ("units", "curve", "makespan"),
    [
        ([18, 20], Curve.of(widest=3), 38 / 3),
        ([15, 8, 2], Curve.of(beta=1.1, widest=4), 9.056666666666667),
        ([19, 7, 20], Curve.of(1.5, 3, widest=4), 46 / 3),
    ],
    ids=["by another share for one", "by another order", "by keeping to the order"],
)
def test_the_plan_that_ends_first_is_found(units: list[int], curve: Curve, makespan: float) -> None:
    trials = [SimulatedTrial(one) for one in units]
    assert simulate(waterfill, trials, 3, curve).makespan <= makespan * (1 + 1e-9)


def test_where_fluid_ends_sooner_than_any_plan_it_is_followed() -> None:
    sizes = zip([22, 20, 34, 38, 4, 21, 25, 40], [60, 30, 30, 0, 60, 0, 60, 30], strict=True)
    trials = [SimulatedTrial(units, bytes=bytes) for units, bytes in sizes]
    curve = Curve.of(1.1173081474705677, 2, 1.2394053629249064, 2)
    speed = Speed(lambda trial: 1.0, lambda trial: curve)
    ours, theirs = (one(empty(cluster(2)), demands(trials), speed) for one in (waterfill, dynamic_fluid))
    assert ours == theirs


def test_no_order_puts_a_trial_before_one_of_a_higher_priority() -> None:
    waiting = [Demand(0, "g", 1, 0, 1.0), Demand(1, "g", 1, 1, 1.0), Demand(2, "g", 10, 2)]
    speed = Speed(lambda trial: 1.0, lambda trial: Curve(scaling=(1.0, 0.99)))
    assert {one.trial for one in waterfill(empty(cluster(2)), waiting, speed)} == {0, 1}


def test_of_plans_that_end_at_once_the_one_whose_trials_end_sooner_is_better() -> None:
    assert Plan(10.0, 20.0, ()).beats(Plan(10.0, 30.0, ()))
    assert not Plan(10.0, 30.0, ()).beats(Plan(10.0, 20.0, ()))
    assert not Plan(11.0, 20.0, ()).beats(Plan(10.0, 30.0, ()))


def test_of_many_to_a_device_some_counts_stand_for_all() -> None:
    found = [round(1 / option.share) for option in options(Curve.of(1.01, 20), 1)]
    assert found == [20, 14, 9, 6, 4, 3, 2, 1]
