"""What a policy comes to: rungs that follow, signatures that keep apart, trials that spread at the end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from penstock.scheduling.base import Assignment, Demand, Holding, View
from penstock.scheduling.lookahead.layout import Plan, Policy, Scene
from penstock.scheduling.lookahead.rollout import follow
from penstock.speed.curve import Curve
from penstock.speed.model import Speed
from penstock.trial import Later
from tests.scheduling.simulated_groups import alike, cluster, empty, under_way


def plan(view: View, waiting: list[Demand], curve: Curve, policy: Policy, moving: float = math.inf) -> Plan:
    speed = Speed(lambda trial: 1.0, lambda trial: curve, moving)
    scene = Scene(view, view.running.values(), waiting, speed)
    return follow(scene.site, scene.jobs, policy)


def test_the_next_rung_arrives_when_the_last_trial_of_its_group_ends() -> None:
    later = (Later(2, 3), Later(1, 6))
    waiting = [alike(i, "a", units, i, later=later) for i, units in enumerate((1, 2, 4))]
    made = plan(empty(cluster(2)), waiting, Curve(), Policy(solo=True))
    assert [(start.job, start.time) for start in made.starts] == [(0, 0), (1, 0), (2, 1), (-1, 5), (-1, 5), (-1, 8)]
    assert made.makespan == 14


def test_rungs_to_come_count_for_a_trial_that_runs() -> None:
    one = Holding(alike(0, "a", 2, later=(Later(1, 3),)), Assignment(0, ("gpu 0",)), done=0.0)
    assert plan(under_way(cluster(1), {0: one}), [], Curve(), Policy()).makespan == 5


def test_a_trial_that_runs_takes_as_long_as_the_share_that_it_trains_at_says() -> None:
    half = Holding(alike(0, "a", 4), Assignment(0, ("gpu 0",), 0.5), done=0.0)
    curve = Curve(sharing=(1.0, 1.5))
    assert plan(under_way(cluster(1), {0: half}), [], curve, Policy()).makespan == 6
    assert plan(under_way(cluster(1), {0: replace(half, pace=1.0)}), [], curve, Policy()).makespan == 4


@pytest.mark.parametrize(("signatures", "unlike", "makespan"), [("aa", False, 4), ("ab", False, 8), ("ab", True, 4)])
def test_unlike_trials_share_no_device_unless_they_can(signatures: str, unlike: bool, makespan: float) -> None:
    waiting = [replace(alike(i, "a", 4, i), signature=one) for i, one in enumerate(signatures)]
    view = replace(empty(cluster(1)), unlike=unlike)
    assert plan(view, waiting, Curve(sharing=(1.0, 1.0)), Policy(order=(0, 1))).makespan == makespan


def test_while_nobody_waits_the_last_to_end_spreads_if_that_pays() -> None:
    waiting = [alike(0, "a", 2, 0), alike(1, "a", 12, 1)]
    curve = Curve(scaling=(1.0, 0.5))
    assert plan(empty(cluster(2)), waiting, curve, Policy(solo=True)).makespan == 12
    moved = plan(empty(cluster(2)), waiting, curve, Policy(solo=True), moving=1.0)
    assert moved.makespan == 2 + 0.5 + 9.5 / 2 + 1.0, "half a unit until it can leave, and what moving costs"
    assert plan(empty(cluster(2)), waiting, curve, Policy(solo=True), moving=9.0).makespan == 12


def test_a_plan_that_is_certain_to_end_too_late_is_not_gone_on_with() -> None:
    view, waiting = empty(cluster(1)), [alike(0, "a", 4, 0), alike(1, "a", 4, 1)]
    scene = Scene(view, (), waiting, Speed(lambda trial: 1.0, lambda trial: Curve()))
    assert follow(scene.site, scene.jobs, Policy(), limit=8.0).makespan == 8
    assert follow(scene.site, scene.jobs, Policy(), limit=7.9).makespan == math.inf


def test_those_of_a_lower_priority_overtake_nobody_that_fits() -> None:
    waiting = [alike(0, "a", 4, 0, priority=1.0), alike(1, "a", 4, 1)]
    curve = Curve(scaling=(1.0, 0.5, 0.4))
    busy = Holding(alike(9, "a", 1), Assignment(9, ("gpu 0",)), done=0.0)
    made = plan(under_way(cluster(3), {9: busy}), waiting, curve, Policy(deadline=1.7, order=(0, 1)))
    assert (made.starts[0].job, made.starts[0].option.share) == (0, 2.0), "it wants three, and two are free"
