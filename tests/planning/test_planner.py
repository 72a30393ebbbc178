from dataclasses import replace

import pytest

import penstock as ps
from penstock.planning.choosing import Choosing
from penstock.planning.draws import Draws
from penstock.planning.execution import Choice, Execution
from penstock.planning.plan import Plan, Purpose
from penstock.planning.planner import Held, Used, plan, replan
from penstock.planning.spec import Times
from penstock.speed.curve import Curve
from tests.planning.jobs import cloud, instance, job

CURVE = Curve(scaling=(1, 0.55, 0.45, 0.4))
VARIED = job((9, 1), (3, 4), (1, 13), curve=CURVE, std=1.5, own=0.08)
CLOUD = cloud(instance(devices=2, spot=2400.0, losses=2.0), arrival=Draws(6.0, 2.0), preparing=Draws(4.0), minimum=20.0)


@pytest.mark.parametrize("deadline", [105, 130, 400])
def test_a_plan_keeps_its_deadline_with_its_confidence_in_other_samples_too(deadline):
    made = plan(VARIED, CLOUD, deadline=deadline)
    assert made.chance >= 0.95
    assert made.late <= deadline
    choosing = Choosing(VARIED, CLOUD, {}, ahead=True, seed=1)
    fresh = choosing.judge(Choosing(VARIED, CLOUD, {}, ahead=True, seed=0).cheapest(deadline, 0.95).candidate)
    assert fresh.chance(deadline) > 0.92
    assert fresh.cost.mean() == pytest.approx(made.cost, rel=0.03)


def test_a_plan_by_mean_times_would_hold_less_surely_and_a_surer_one_costs_more():
    sure, likely = (plan(VARIED, CLOUD, deadline=110, confidence=part) for part in (0.95, 0.5))
    assert likely.cost <= sure.cost
    assert likely.chance < sure.chance


@pytest.mark.parametrize("deadline", [105, 130, 400, 1000])
def test_no_plan_costs_more_than_a_static_a_naive_or_a_greedy_one(deadline):
    made = plan(VARIED, CLOUD, deadline=deadline)
    assert {one.kind for one in made.baselines} >= {"static", "greedy"}
    for one in made.baselines:
        assert one.chance >= 0.95
        assert made.cost <= one.cost * (1 + 1e-9) or one.kind == "naive"


def test_the_stages_of_a_plan_say_what_is_asked_for_when():
    made = plan(job((8, 1), (2, 5), curve=CURVE), cloud(arrival=Draws(6.0), preparing=Draws(4.0)), deadline=51)
    first, second = made.stages
    assert (first.nodes, first.devices, first.at_once, first.start, first.lead) == (4, 1, 8, 0.0, 0.0)
    assert (second.nodes, second.devices, second.start, second.seconds) == (2, 2, 20.0, pytest.approx(22.0))
    assert made.seconds == pytest.approx(42.0)
    assert sum(stage.cost for stage in made.stages) == pytest.approx(made.cost)
    growing = plan(job((1, 1), (4, 2), curve=CURVE), cloud(arrival=Draws(3.0), preparing=Draws(2.0)), deadline=25)
    assert [stage.nodes for stage in growing.stages] == [1, 2]
    assert growing.stages[1].lead == pytest.approx(5.0)


def test_brackets_at_once_have_nodes_of_their_own_and_one_deadline():
    made = job((4, 1, 1), (2, 3, 1), (3, 3, 0), curve=CURVE)
    whole = plan(made, cloud(), deadline=40)
    assert [stage.bracket for stage in whole.stages] == [0, 0, 1]
    assert whole.seconds <= 40
    parts = [plan(replace(made, stages=works), cloud(), deadline=40) for works in made.brackets]
    assert whole.cost == pytest.approx(sum(part.cost for part in parts))


def test_a_plan_for_a_cost_is_the_quickest_that_keeps_it():
    on, made = cloud(), job((8, 1), (2, 5), curve=CURVE)
    cheapest = plan(made, on)
    quick = plan(made, on, max_cost=cheapest.cost * 1.2)
    assert quick.cost <= cheapest.cost * 1.2
    assert quick.seconds < cheapest.seconds
    assert plan(made, on, deadline=quick.seconds).cost <= quick.cost
    assert all(
        point.cost > cheapest.cost * 1.2 for point in quick.frontier if point.seconds < quick.seconds * (1 - 1e-9)
    )


def test_a_deadline_below_the_shortest_time_is_refused_with_that_time_and_its_cost():
    with pytest.raises(
        ps.StudyError, match=r"No plan keeps a deadline of 10 s: the quickest takes 26 s .* costs 208\.00"
    ):
        plan(job((8, 1), (2, 5), curve=CURVE), cloud(most=4), deadline=10)


def test_a_cost_below_the_least_is_refused_with_that_cost():
    with pytest.raises(
        ps.StudyError, match=r"No plan costs at most 1\.00 USD: the cheapest costs 160\.00 .* takes 50 s"
    ):
        plan(job((8, 1), (2, 5), curve=Curve()), cloud(), max_cost=1)
    with pytest.raises(ps.StudyError, match=r"No plan that keeps a deadline of 60 s costs at most 1\.00"):
        plan(job((8, 1), (2, 5), curve=CURVE), cloud(), deadline=60, max_cost=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"deadline": 0}, "deadline must be a number of seconds above 0, got 0"),
        ({"max_cost": -1}, "max_cost must be a number of USD above 0"),
        ({"confidence": 2}, "confidence must be above 0 and at most 1"),
    ],
)
def test_limits_that_make_no_sense_are_refused(given, said):
    with pytest.raises(ps.StudyError, match=said):
        plan(job((2, 1)), cloud(), **given)


def test_a_replan_counts_the_time_and_money_that_were_used():
    made = plan(VARIED, CLOUD, deadline=220)
    rest = VARIED.rest({0: (1, [3, 3, 1.5])})
    held = {0: Held("big", "spot", 3)}
    again = replan(rest, CLOUD, held=held, used=Used(60.0, 0.5), deadline=220)
    assert again.missed == ""
    assert again.chance >= 0.95
    assert 60 < again.stages[0].start + again.stages[0].seconds < again.late <= 220
    assert (again.used_seconds, again.used_cost, again.deadline) == (60.0, 0.5, 220)
    assert again.cost == pytest.approx(0.5 + sum(stage.cost for stage in again.stages), rel=1e-6)
    assert [stage.number for stage in again.stages] == [1, 2]
    assert made.purpose == again.purpose


def test_a_replan_with_nodes_in_hand_does_not_wait_for_them():
    on, rest = cloud(arrival=Draws(50.0)), job((2, 1), curve=CURVE).rest({0: (0, [1.0, 1.0])})
    have = replan(rest, on, held={0: Held("big", "on-demand", 1)}, used=Used(0.0, 0.0), deadline=20)
    assert (have.missed, have.seconds) == ("", pytest.approx(10.0))


def test_a_deadline_that_is_lost_is_said_and_the_rest_is_finished_or_paid_for():
    on, rest = cloud(), job((8, 1), (2, 5), curve=CURVE).rest({0: (1, [])})
    late = replan(rest, on, held={}, used=Used(100.0, 30.0), deadline=105)
    assert late.missed.startswith("No plan keeps a deadline of 105 s: the quickest takes 116 s")
    cheapest = replan(rest, on, held={}, used=Used(100.0, 30.0))
    assert late.cost == cheapest.cost
    paid = replan(rest, on, held={}, used=Used(100.0, 30.0), deadline=105, max_cost=130, late="pay")
    assert paid.missed
    assert paid.cost <= 130
    assert paid.seconds < late.seconds


def test_a_plan_is_read_back_from_its_json_and_belongs_to_its_study():
    purpose = Purpose("Digits", "abc", "Random(budget=1)", 8)
    made = plan(replace(VARIED, purpose=purpose), CLOUD, deadline=220)
    again = Plan.from_json(made.to_json())
    assert again == made
    again.require(purpose)
    for other, word in (
        (replace(purpose, task="Faces"), "task: 'Digits', and the study has 'Faces'"),
        (replace(purpose, source="abd"), "source"),
        (replace(purpose, algorithm="Grid(budget=1)"), "algorithm"),
        (replace(purpose, trials=9), "number of trials: 8, and the study has 9"),
    ):
        with pytest.raises(ps.StudyError, match=word):
            again.require(other)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"penstock_plan": 1, "stages": 3}'])
def test_a_text_that_is_no_plan_is_refused(text):
    with pytest.raises(ps.StudyError, match="That is no plan of this version"):
        Plan.from_json(text)


def test_what_a_plan_assumes_is_said():
    made = plan(replace(VARIED, assumed=("nothing was measured",)), CLOUD)
    assert made.assumed == (
        "nothing was measured",
        "a node of big spot is taken to be lost 2 times an hour",
        "a node is taken to come 6 s after it was asked for, and to be of use 4 s later",
    )


def test_trials_of_several_signatures_have_their_own_times():
    slow = (Times(Draws(10.0), weight=3), Times(Draws(40.0)))
    made = job((400, 1), times={"gpu": slow})
    execution = Execution(made, made.stages, cloud(instance(devices=1), most=1), samples=50)
    outcome = execution.run((Choice(0, 1),))
    assert outcome.seconds.mean() == pytest.approx(400 * (0.75 * 10 + 0.25 * 40), rel=0.02)


def test_more_nodes_may_be_held_than_a_plan_may_have():
    rest = job((4, 1), (1, 5)).rest({0: (0, [1.0] * 4)})
    made = replan(rest, cloud(most=2), held={0: Held("big", "on-demand", 5)}, used=Used(0.0, 0.0), deadline=60)
    assert made.stages[0].nodes <= 2


def test_what_is_paid_for_a_short_stage_counts_when_a_plan_is_chosen():
    # 16 trials of 4 s take 32 node seconds on any nodes, and each node is paid for 60 s. One node alone is too late.
    made, on = job((16, 1), (1, 11), unit=4.0), cloud(most=8, minimum=60.0)
    choosing = Choosing(made, on, {}, ahead=True, seed=0)
    assert [choice.nodes for choice in choosing.cheapest(50, 0.95).candidate.paths[0]] == [2, 1]
    whole = plan(made, on, deadline=50)
    assert whole.cost == pytest.approx(2 * 2 * 60)
    costs = [point.cost for point in whole.frontier]
    assert costs == sorted(costs, reverse=True)
