"""Studies that follow a plan, on simulated clouds that do as planned and on clouds that do not."""

import json
from collections import Counter
from dataclasses import replace

import pytest

import penstock as ps
from penstock.engine.drift import Drift
from penstock.log.events import Devices, Ended, Opened, Placed, Planned
from penstock.log.history import History
from penstock.planning.cloud import Cloud, Instance, Offer
from penstock.planning.draws import Draws
from penstock.planning.plan import Plan
from penstock.planning.planner import plan
from penstock.planning.spec import Job, Times, works
from penstock.plans import purpose
from tests.studies import log, studies

SECONDS = 60.0  # of a unit alone, as planned
CURVE = ps.Curve(scaling=(1, 0.55, 0.4, 0.3))


def tabulated(seconds=SECONDS):
    """A task whose units take so many seconds; the smaller x, the better the trial."""
    return ps.TabulatedTask(lambda c: ps.Tabulated({"loss": [c["x"] / u for u in range(1, 10)]}, seconds, curve=CURVE))


study = studies(tabulated(), {"x": ps.uniform(1, 2)}, algorithm=ps.SuccessiveHalving(max_budget=9), trials=9)


def cloud(prices=(36.0,), losses=0.0, **settings):
    """Nodes of four devices of types "a", "b", …, that come after 10 seconds and start in 20."""
    market = "spot" if losses else "on-demand"
    offers = [
        Offer(Instance(name, name, 4, 2**34, {market: price}, losses=losses), market)
        for name, price in zip("ab", prices, strict=False)
    ]
    return Cloud(tuple(offers), arrival=Draws(10.0), preparing=Draws(20.0), **{"head": 3.6, "most": 4, **settings})


def job(study, faster=1.0):
    """What the study is planned as; units on nodes of type "b" take ``faster`` times as long."""
    times = {name: (Times(Draws(SECONDS * part), CURVE),) for name, part in (("a", 1.0), ("b", faster))}
    return Job(works(study.algorithm.stages(study.trials)), times, Draws(2.0), purpose(study))


def planned(study, on=None, **limits):
    """A plan for a study."""
    return plan(job(study), on or cloud(), **limits)


def history():
    """What the log folds to."""
    return History.of(log())


def nodes_billed(lines=None):
    """The cost of the nodes, and of the head, summed up from the log's lines by a way of its own."""
    lines, prices, total, since = lines or log(), {}, 0.0, {}
    last = 0.0

    def leave(name, clock):
        began, price = since.pop(name)
        return price * max(prices["minimum"], clock - began) / 3600

    head = 0.0
    for event in lines:
        clock = getattr(event, "clock", last)
        head += prices.get("head", 0.0) * max(0.0, clock - last) / 3600
        last = max(last, clock)
        match event:
            case Planned():
                prices = event.prices
            case Devices():
                there = {node["name"]: node for node in event.nodes}
                total += sum(leave(name, clock) for name in list(since) if name not in there)
                for name, node in there.items():
                    since.setdefault(name, (node["since"], node["price"]))
            case Opened() if since:
                total += sum(leave(name, last) for name in list(since))
            case Ended():
                total += sum(leave(name, clock) for name in list(since))
    return total + head


def test_time_and_cost_are_those_of_the_plan_where_nothing_varies():
    made = planned(study(), deadline=330)
    result = study().run(ps.Simulated.of(made), plan=made, progress=False)
    assert history().clock == pytest.approx(made.seconds, abs=1e-6)
    assert history().cost == pytest.approx(made.cost, abs=1e-6) == pytest.approx(nodes_billed(), abs=1e-9)
    assert [event.reason for event in log() if isinstance(event, Planned)] == ["It was given."]
    assert result.best.curve[-1]["budget"] == 9


def test_nodes_come_ahead_of_a_barrier_and_go_with_their_last_trial():
    slow = studies(tabulated(), {"x": ps.uniform(1, 2)}, algorithm=ps.SuccessiveHalving(max_budget=9), trials=9)()
    first, *later = planned(slow, deadline=330).stages
    stages = (
        replace(first, nodes=1, used=1),
        replace(later[0], nodes=3, used=3, lead=30.0),
        replace(later[1], nodes=1),
    )
    made = replace(planned(slow, deadline=330), stages=stages, deadline=None)
    slow.run(ps.Simulated.of(made), plan=made, progress=False)
    counts = [
        (round(event.clock), len(event.nodes), len(event.devices)) for event in log() if isinstance(event, Devices)
    ]
    # The one node is ready at 30; nine trials in three rounds of 62 seconds end at 216; nodes for the next stage are
    # asked for at 186, come at 196, and are ready at 216. Three trials of two units on four devices end at 254.
    assert counts == [(10, 1, 0), (30, 1, 4), (196, 3, 4), (216, 3, 12), (254, 1, 4)]
    assert history().cost == pytest.approx(nodes_billed(), abs=1e-9)  # a node that was there for 58 seconds costs 60


def test_nodes_are_asked_for_by_when_the_last_trial_will_have_ended_and_not_a_mean_one():
    one = study(algorithm=ps.SuccessiveHalving(max_budget=3))
    times = {"a": (Times(Draws(SECONDS, 0.2 * SECONDS), CURVE, Draws(1.0, 0.1)),)}
    whole = Job(works(one.algorithm.stages(9)), times, purpose=purpose(one))
    made = plan(whole, cloud(most=6, head=0.0), deadline=10**4)
    first, second = made.stages
    stages = (replace(first, nodes=3, used=3), replace(second, nodes=6, used=3, devices=4, lead=30.0))
    one.run(ps.Simulated.of(made, varying=(0.0, 0.0)), plan=replace(made, stages=stages, deadline=None), progress=False)
    asked = next(event.clock for event in log() if isinstance(event, Devices) and len(event.nodes) > 3) - 10.0
    # Nine trials begin at 30: their units' deviation is 0.22 of 60 s, and the last of nine is 1.49 deviations late.
    late = 1.49 * SECONDS * (0.2**2 + 0.1**2) ** 0.5
    assert asked == pytest.approx(30 + SECONDS + late - 30.0, abs=1.0)


def test_trials_that_share_devices_are_dealt_among_them_as_planned():
    curve = ps.Curve(sharing=(1, 1.3, 1.7), scaling=(1, 0.55))
    task = ps.TabulatedTask(lambda c: ps.Tabulated({"loss": [c["x"] / u for u in range(1, 4)]}, SECONDS, curve=curve))
    one = study(task, algorithm=ps.SuccessiveHalving(max_budget=3), trials=27)
    times = {"a": (Times(Draws(SECONDS), curve),)}
    made = plan(Job(works(one.algorithm.stages(27)), times, purpose=purpose(one)), cloud(most=1))
    assert [(stage.devices, stage.at_once) for stage in made.stages] == [
        (pytest.approx(1 / 3), 12),
        (pytest.approx(1 / 3), 9),
    ]
    one.run(ps.Simulated.of(made), plan=made, progress=False)
    # Twelve trials, twelve, and then three alone; nine for two units, three on each of three devices.
    assert history().clock == pytest.approx(30 + 102 + 102 + 60 + 2 * 102) == pytest.approx(made.seconds)
    assert history().cost == pytest.approx(made.cost)


def test_where_functions_are_billed_trials_are_paid_for_and_not_nodes():
    made = planned(study(), cloud(billing="function"), deadline=330)
    result = study().run(ps.Simulated.of(made), plan=made, progress=False)
    used = sum(trial.device_seconds for trial in result.trials)
    assert result.cost == pytest.approx(9.0 * used / 3600 + 3.6 * result.seconds / 3600)
    assert result.cost == pytest.approx(made.cost, rel=0.05)


def test_units_that_take_longer_are_planned_for_anew_and_the_deadline_is_kept():
    made = planned(study(), cloud(head=0.0), deadline=400)
    slower = study(tabulated(1.5 * SECONDS))
    given = replace(made, purpose=purpose(slower))
    assert made.seconds > 380  # as planned, half as long again would be far too late
    slower.run(ps.Simulated.of(given), plan=given, progress=False)
    first, anew, *_ = [event for event in log() if isinstance(event, Planned)]
    assert "Units take 1.25 times as long as planned" in anew.reason
    assert (first.given, anew.given) == (True, False)
    assert history().clock <= 400
    assert history().cost == pytest.approx(nodes_billed(), abs=1e-9)


def test_quick_trials_that_report_first_are_no_reason_to_plan_anew():
    drift = Drift()
    for trial in range(3):
        drift.add(trial, seconds=8.0, planned=10.0)
    assert drift.all([]) == 0.8
    assert not drift.left([(8.0, 10.0)] * 13, spread=0.0, own=0.0)
    assert drift.left([(15.0, 10.0)] * 13, spread=0.0, own=0.0)


def test_nodes_that_are_late_are_said_to_be_and_planned_for():
    made = planned(study(), deadline=330)
    late = [replace(one, queueing=80.0) for one in made.simulation()["instances"]]
    study().run(ps.Simulated.of(made, instances=late), plan=made, progress=False)
    reasons = [event.reason for event in log() if isinstance(event, Planned)]
    assert reasons[1].startswith("Nodes are late: a on-demand.")
    assert history().clock <= 330
    assert history().ended == "done"


def test_a_spot_node_that_is_lost_is_replaced_and_no_trial_is_dropped():
    made = planned(study(), cloud(losses=0.01), deadline=500)
    result = study().run(ps.Simulated.of(made, losses=[(100.0, "a 0")]), plan=made, progress=False)
    anew = [event for event in log() if isinstance(event, Planned)][1]
    assert anew.reason.startswith("1 node of the plan went: a 0.")
    assert anew.clock == 100.0
    assert history().clock <= 500
    assert not result.failed
    assert Counter(trial.curve[-1]["budget"] for trial in result.trials) == {1: 6, 3: 2, 9: 1}
    assert history().cost == pytest.approx(nodes_billed(), abs=1e-9)


@pytest.mark.parametrize("late", ["finish", "stop", "pay"])
def test_a_deadline_that_cannot_be_kept_is_said_at_once(late, capsys):
    made = planned(study(), deadline=260)
    slower = study(tabulated(3 * SECONDS))
    given = replace(made, purpose=purpose(slower), max_cost=12.0 if late == "pay" else None)
    result = slower.run(ps.Simulated.of(given), plan=given, late=late, progress=False)
    said = capsys.readouterr().err
    assert said.count("No plan keeps") == 1
    assert f"By late={late!r}" in said
    missed = next(event for event in log() if isinstance(event, Planned) and "No plan keeps" in event.reason)
    assert missed.clock < 200  # long before the deadline
    ended = history()
    if late == "stop":
        assert (ended.ended, ended.clock < 260) == ("deadline", True)
    else:
        assert ended.ended == "done"
        assert max(trial.curve[-1]["budget"] for trial in result.trials) == 9


def test_paying_is_quicker_and_dearer_than_finishing():
    made = planned(study(), cloud(head=0.0), deadline=400)
    ends = {}
    for late in ("finish", "pay"):
        slower = study(tabulated(3 * SECONDS), name=late)
        given = replace(made, purpose=purpose(slower), max_cost=20.0 if late == "pay" else None)
        slower.run(ps.Simulated.of(given), plan=given, late=late, progress=False)
        ended = History.of(log(late))
        ends[late] = ended.clock, ended.cost
    assert ends["pay"][0] < ends["finish"][0]
    assert ends["finish"][1] < ends["pay"][1] <= 20.0


def test_a_study_that_is_taken_up_again_goes_on_with_its_plan_and_its_cost():
    made = planned(study(), deadline=330)
    study(deadline=100).run(ps.Simulated.of(made), plan=made, progress=False)
    spent = history().cost
    assert spent == pytest.approx(nodes_billed(), abs=1e-9)
    study().run(ps.Simulated.of(made), progress=False)
    assert history().ended == "done"
    assert sum(isinstance(event, Planned) and event.given for event in log()) == 1
    assert history().cost == pytest.approx(nodes_billed(), abs=1e-9)
    assert history().cost > spent
    study().run(ps.Simulated.of(made), plan=made, progress=False)  # the same plan, given again
    assert sum(isinstance(event, Planned) and event.given for event in log()) == 1


def test_each_stage_has_nodes_of_its_own_type():
    one = study()
    stages = planned(one, deadline=330).stages
    on = cloud((36.0, 30.0))
    mixed = plan(job(one, faster=0.5), on)
    stages = (replace(stages[0], instance="a"), replace(stages[1], instance="b"), replace(stages[2], instance="a"))
    made = replace(mixed, stages=stages)
    one.run(ps.Simulated.of(made), plan=made, progress=False)
    types = {}
    for event in log():
        if isinstance(event, Placed):
            types.setdefault(event.devices[0].split()[0], []).append(event.trial)
    assert (len(types["a"]), len(types["b"])) == (10, 3)
    assert history().ended == "done"


def test_brackets_have_nodes_of_their_own():
    one = study(algorithm=ps.Hyperband(max_budget=9), trials=None)
    made = plan(job(one), cloud(), deadline=900)
    one.run(ps.Simulated.of(made), plan=made, progress=False)
    assert history().ended == "done"
    assert history().clock <= 900
    assert made.cost * 0.9 < history().cost <= made.cost  # a node that one bracket gives up can serve another


def test_a_plan_is_for_one_task_algorithm_and_total():
    made = planned(study(), deadline=330)
    for other, what in (
        (study(tabulated(1.0)), "task's source"),
        (study(algorithm=ps.SuccessiveHalving(max_budget=9, reduction=2)), "algorithm"),
        (study(trials=12), "number of trials"),
    ):
        if what == "task's source":
            made_for = replace(made, purpose=replace(made.purpose, source="another"))
            with pytest.raises(ps.StudyError, match=f"The plan was made for another {what}: .* Make a plan for this"):
                other.run(ps.Simulated.of(made), plan=made_for)
            continue
        with pytest.raises(ps.StudyError, match=f"The plan was made for another {what}: .* Make a plan for this study"):
            other.run(ps.Simulated.of(made), plan=made)


def test_a_cluster_without_the_plans_nodes_is_refused():
    made = planned(study(), deadline=330)
    with pytest.raises(ps.StudyError, match=r"The plan needs nodes of a, got on=.*no nodes that can be asked for"):
        study().run(ps.Simulated(8), plan=made)
    with pytest.raises(ps.StudyError, match=r"A plan decides how many devices each trial has: leave scheduler= out"):
        study().run(ps.Simulated.of(made), plan=made, scheduler="fifo")
    with pytest.raises(ps.StudyError, match=r"late must be \"finish\", \"stop\" or \"pay\", got 'never'"):
        study().run(ps.Simulated.of(made), plan=made, late="never")


def test_a_log_that_is_none_or_of_other_devices_is_refused():
    def train(trial):
        trial.report(1, loss=trial.config["x"])
        trial.report(2, loss=trial.config["x"])

    own = study(train, algorithm=ps.Random(budget=2), trials=2)
    with pytest.raises(ps.StudyError, match="log must be the name of a study that has run, got 3"):
        own.plan(instances=["p3.8xlarge"], log=3)
    own.run(progress=False)
    with pytest.raises(ps.StudyError, match=r"Nothing says how long a unit takes on v100: there are times of cpu"):
        own.plan(instances=["p3.8xlarge"], log="s")


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    with pytest.raises(ps.StudyError, match="plan must be a plan of study"):
        study().run(plan=3)
    with pytest.raises(ps.StudyError, match=r"Cannot read the plan .*: make one with `penstock plan FILE --save"):
        study().run(plan=tmp_path / "none.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ps.StudyError, match="That is no plan of this version"):
        study().run(plan=tmp_path / "other.json")


def test_a_plan_reads_back_from_its_file_as_it_was(tmp_path):
    made = planned(study(), deadline=330)
    (tmp_path / "plan.json").write_text(made.to_json())
    assert Plan.from_json((tmp_path / "plan.json").read_text()) == made
    assert json.loads(made.to_json())["cloud"]["head"] == 3.6
