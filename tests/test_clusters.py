"""Whole studies on simulated clusters: every algorithm under every scheduler, with devices that come and go."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.algorithms.base import Granting
from penstock.curve import Curve
from penstock.events import Asked, Devices, Measured, Placed, Reported, Saved, read
from penstock.events import Failed as FailedEvent
from penstock.executors.base import Device
from penstock.scheduling.fifo import fifo
from penstock.study import SCHEDULERS as SCHEDULERS_BY_NAME
from penstock.trial import Member, TrialGroup
from tests.tasks import Blobs

SPACE = {"x": ps.uniform(0, 1), "slow": ps.choice([1, 2, 5])}
CURVE = Curve.of(alpha=1.2, most=3, beta=1.1, widest=4)
SCHEDULERS = ["fifo", "static_fluid", "dynamic_fluid", "waterfill"]
SYNCHRONOUS = [
    (ps.SuccessiveHalving(max_budget=9), 12),
    (ps.Hyperband(max_budget=9), None),
    (ps.PBT(population=6, max_budget=8, interval=2), None),
    (ps.Random(budget=4), 9),
]
OTHERS = [
    (ps.ASHA(max_budget=9), 20),
    (ps.ASHA(max_budget=9, brackets=2, concurrency=7), 20),
    (ps.BOHB(max_budget=9), 12),
    (ps.SyncBOHB(max_budget=9), None),
]


def look_up(config):
    losses = [config["x"] + 1 / unit for unit in range(1, 31)]
    return ps.Tabulated({"loss": losses}, seconds=float(config["slow"]), bytes=2**30)


def study(algorithm, trials=None, name="s", task=None, **changes):
    task = ps.TabulatedTask(look_up) if task is None else task
    arguments = {"metric": "loss", "mode": "min", "algorithm": algorithm, "trials": trials, "name": name, **changes}
    return ps.Study(task, arguments.pop("space", SPACE), **arguments)


def cluster(devices=5, **changes):
    return ps.Simulated(devices=devices, **{"curve": CURVE, "start": 0.5, "stop": 0.25, **changes})


def log(name="s"):
    return list(read(Path(".penstock") / name / "log.jsonl"))


def assert_sound(result, devices):
    """Every curve is that of the table, each unit was reported once, and no device was given away twice."""
    for trial in result.trials:
        table = look_up(trial.config)
        assert [row["budget"] for row in trial.curve] == list(range(1, len(trial.curve) + 1))
        assert [row["loss"] for row in trial.curve] == list(table.metrics["loss"][: len(trial.curve)])
    assert_not_oversubscribed(result.timeline(), devices)


def assert_not_oversubscribed(rows, devices):
    assert {row.device for row in rows} <= set(devices)
    for name in devices:
        own = [row for row in rows if row.device == name and row.end > row.start]
        changes = sorted(
            [(row.end, -min(1, row.share)) for row in own] + [(row.start, min(1, row.share)) for row in own]
        )
        used = 0.0
        for _, change in changes:
            used += change
            assert used < 1 + 1e-6, name
    for trial in {row.trial for row in rows}:
        stays = sorted({(row.start, row.end) for row in rows if row.trial == trial})
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(stays)), "no trial runs twice at once"


def names(simulated):
    return [device.name for device in simulated.cluster()]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("algorithm", "trials"), SYNCHRONOUS + OTHERS, ids=repr)
def test_every_algorithm_runs_under_every_scheduler(algorithm, trials, scheduler):
    result = study(algorithm, trials).run(on=cluster(), scheduler=scheduler, progress=False)
    assert result.ended == "done"
    assert {trial.state for trial in result.trials} <= {"finished", "stopped", "paused"}
    assert "finished" in {trial.state for trial in result.trials}
    if not isinstance(algorithm, ps.PBT):
        assert_sound(result, names(cluster()))
    else:
        assert_not_oversubscribed(result.timeline(), names(cluster()))


@pytest.mark.parametrize(("algorithm", "trials"), SYNCHRONOUS, ids=repr)
def test_where_decisions_wait_at_barriers_every_scheduler_ends_with_the_same_trials(algorithm, trials):
    curves = set()
    for scheduler in SCHEDULERS:
        result = study(algorithm, trials, name=scheduler).run(on=cluster(), scheduler=scheduler, progress=False)
        curves.add(repr([(trial.config, list(trial.curve)) for trial in result.trials]))
    assert len(curves) == 1


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_equal_seeds_give_equal_logs(scheduler):
    lossy = cluster(loss_rate=60.0, returns=True, provision=4.0, saving_every=2)
    for name in "ab":
        study(ps.ASHA(max_budget=9), 16, name=name, dir=name).run(on=lossy, scheduler=scheduler, progress=False)
    first, second = (list(read(Path(name) / name / "log.jsonl")) for name in "ab")
    assert any(isinstance(event, FailedEvent) for event in first), "devices were lost"
    assert first[1:] == second[1:]


def test_a_known_curve_makes_the_next_study_share_from_its_start():
    first = study(ps.Random(budget=2), 1, name="profile").run(on=cluster(), progress=False)
    assert [row.mode for row in first.timeline()] == ["solo"], "where nothing is measured, nothing is assumed"
    second = study(ps.Random(budget=4), 15).run(on=cluster(), progress=False)
    start = [row for row in second.timeline() if row.start == 0]
    assert {row.mode for row in start} == {"fused"}
    assert len(start) > 5


def test_what_was_cut_of_a_measured_curve_is_said():
    wasteful = cluster(curve=Curve((1.0, 9.0), (1.0, 0.6)))
    study(ps.Random(budget=2), 2).run(on=wasteful, progress=False)
    (found,) = (event for event in log() if isinstance(event, Measured))
    assert found.reason == "simulated; sharing stops to pay at 1 trial a device, of 2 tried"


def test_sharing_can_be_refused():
    study(ps.Random(budget=2), 1, name="profile").run(on=cluster(), progress=False)
    result = study(ps.Random(budget=4), 15).run(on=cluster(), sharing="solo", progress=False)
    assert {row.share for row in result.timeline()} <= {1, 2, 3, 4}


def test_trials_of_other_signatures_share_a_device_as_processes():
    def unlike(config):
        return ps.Tabulated({"loss": [config["x"]] * 9}, 1.0, signature=str(config["slow"]), curve=Curve((1.0, 1.0)))

    task = ps.TabulatedTask(unlike)
    study(ps.Random(budget=2), 6, name="profile", task=task).run(on=cluster(6), progress=False)
    result = study(ps.Random(budget=4), 9, task=task).run(on=cluster(3), progress=False)
    assert "processes" in {row.mode for row in result.timeline()}
    assert_not_oversubscribed(result.timeline(), names(cluster(3)))


class Budgets(Granting):
    """One group of trials, each with a budget of its own."""

    samples = False

    def __init__(self, *budgets, twice=False):
        self.budgets, self.max_budget, self.twice = budgets, max(budgets), twice

    def trials(self, search):
        return len(self.budgets)

    def ask(self):
        members = [Member(n, {"x": 0.5, "slow": 1}, budget) for n, budget in enumerate(self.budgets)]
        self.budgets = ()
        groups = [self._grant("one", members)] if members else []
        return [*groups, TrialGroup("two", members[:1])] if self.twice and members else groups


@pytest.mark.parametrize(
    ("scheduler", "seconds"), [("fifo", 30), ("static_fluid", 12), ("dynamic_fluid", 10), ("waterfill", 10)]
)
def test_the_toy_example_of_fluids_figure_5(scheduler, seconds):
    free = ps.Simulated(devices=5, curve=Curve((1.0, 2.0), (1, 1 / 2, 1 / 3, 1 / 4, 1 / 5)))
    known = Curve((1.0, 2.0), (1, 1 / 2, 1 / 3, 1 / 4, 1 / 5))

    def table(config):
        return ps.Tabulated({"loss": [1.0] * 30}, 1.0, curve=known)

    task = ps.TabulatedTask(table)
    study(Budgets(2), name="profile", task=task).run(on=free, progress=False)
    study(Budgets(4, 4, 12, 30), task=task).run(on=free, scheduler=scheduler, progress=False)
    assert log()[-1].clock == pytest.approx(seconds)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    losses=st.lists(st.tuples(st.floats(0.1, 40), st.integers(0, 4)), max_size=8, unique_by=lambda loss: loss[1]),
    scheduler=st.sampled_from(SCHEDULERS),
    saving_every=st.integers(0, 3),
)
def test_losing_any_device_at_any_time_loses_no_report(tmp_path_factory, losses, scheduler, saving_every):
    dir = tmp_path_factory.mktemp("studies")
    gone = [(when, f"node 0/device {i}") for when, i in losses if i > 0]  # one stays
    lossy = cluster(losses=gone, saving_every=saving_every, arrivals=[(20.0, Device("spare", "simulated", 2**34))])
    result = study(ps.SuccessiveHalving(max_budget=9), 9, dir=dir).run(on=lossy, scheduler=scheduler, progress=False)
    whole = study(ps.SuccessiveHalving(max_budget=9), 9, name="w", dir=dir).run(on=cluster(), progress=False)
    assert [list(t.curve) for t in result.trials] == [list(t.curve) for t in whole.trials]
    assert [t.state for t in result.trials] == [t.state for t in whole.trials]
    events = list(read(dir / "s" / "log.jsonl"))
    reports = [(e.trial, e.unit) for e in events if isinstance(e, Reported)]
    assert len(reports) == len(set(reports)), "none twice"
    saved = {}
    for event in events:
        if isinstance(event, Reported | Saved) and event.state is not None:
            saved[event.trial] = event.state
        elif isinstance(event, Placed):
            assert event.state == saved.get(event.trial), "it goes on from its last state"
    there = [e.types for e in events if isinstance(e, Devices)]
    assert len(there[0]) == 5


def test_a_scheduler_that_moves_everybody_all_the_time_comes_to_an_end(monkeypatch):
    def restless(view, demands, speed):
        moves = [holding.assignment for holding in view.running.values()]
        return [*fifo(view, demands, speed), *moves]

    monkeypatch.setitem(SCHEDULERS_BY_NAME, "fifo", restless)
    result = study(ps.Random(budget=6), 7).run(on=cluster(2), scheduler="fifo", progress=False)
    assert_sound(result, names(cluster(2)))
    assert {len(trial.curve) for trial in result.trials} == {6}
    assert len(result.timeline()) > 7, "they were moved"


def test_asha_says_that_others_follow_until_all_are_drawn():
    study(ps.ASHA(max_budget=4, reduction=2, concurrency=3), 8).run(on=cluster(), progress=False)
    asked = [event for event in log() if isinstance(event, Asked)]
    last = max(i for i, event in enumerate(asked) if event.trial == 7 and event.start_from is None)
    assert all(event.open for event in asked[: last - 3])
    assert not any(event.open for event in asked[last:])


def test_a_study_goes_on_from_where_its_deadline_ended_it():
    result = study(ps.Hyperband(max_budget=9), deadline=12).run(on=cluster(), progress=False)
    assert result.ended == "deadline"
    again = study(ps.Hyperband(max_budget=9)).run(on=cluster(devices=9), scheduler="fifo", progress=False)
    whole = study(ps.Hyperband(max_budget=9), name="w").run(on=cluster(), progress=False)
    assert again.ended == "done"
    assert [list(t.curve) for t in again.trials] == [list(t.curve) for t in whole.trials]


def test_a_real_task_trains_on_a_simulated_cluster_as_it_does_here():
    settings = {"space": {"lr": ps.loguniform(1e-2, 1)}, "task": Blobs()}
    here = study(ps.SuccessiveHalving(max_budget=4, reduction=2), 6, name="h", **settings)
    there = study(ps.SuccessiveHalving(max_budget=4, reduction=2), 6, name="t", **settings)
    expected = here.run(sharing="solo", progress=False)
    result = there.run(on=cluster(3, unit_seconds=2.0), progress=False)
    assert [list(t.curve) for t in result.trials] == [list(t.curve) for t in expected.trials]
    assert repr(result.best.model()) == repr(expected.best.model())


def test_the_timeline_is_that_of_the_study():
    one = study(ps.Random(budget=3), 4)
    with pytest.raises(ps.StudyError, match="no timeline before the study has run"):
        one.timeline()
    result = one.run(on=cluster(2), scheduler="fifo", progress=False)
    rows = one.timeline()
    assert rows == result.timeline()
    assert {row.trial for row in rows} == set(range(4))
    assert {(row.share, row.mode) for row in rows} == {(1.0, "solo")}
    unnamed = study(ps.Random(budget=1), 1, name=None)
    unnamed.run(on=cluster(2), scheduler="fifo", progress=False)
    assert len(unnamed.timeline()) == 1


def test_a_table_is_not_trained():
    with pytest.raises(ps.StudyError, match="looked up and not trained: run it on a simulated cluster"):
        study(ps.Random(budget=1), 1).run(progress=False)
    result = study(ps.Random(budget=1), 1).run(on=cluster(), progress=False)
    with pytest.raises(ps.StudyError, match="looked up in a table and not trained: it has no model"):
        result.best.model()


def test_a_trial_that_fits_no_device_is_refused_at_once():
    small = ps.Simulated(devices=2, memory=2**20)
    with pytest.raises(ps.StudyError, match="memory"):
        study(ps.Random(budget=1), 1).run(on=small, progress=False)


def test_two_groups_that_claim_one_trial():
    with pytest.raises(ps.StudyError, match="claim"):
        study(Budgets(2, 2, twice=True)).run(on=cluster(), progress=False)


def test_a_group_whose_trials_are_all_finished():
    class Again(Budgets):
        def ask(self):
            groups = super().ask()
            if not groups and not self._granted and not getattr(self, "_once", False):
                self._once = True
                return [TrialGroup("again", (Member(0, {"x": 0.5, "slow": 1}, 2),))]
            return groups

    with pytest.raises(ps.StudyError, match="has reported 2 units already"):
        study(Again(2, 2)).run(on=cluster(), progress=False)


def test_all_devices_lost_for_good_is_an_error_and_not_a_hang():
    gone = [(1.5, name) for name in names(cluster(2))]
    with pytest.raises(ps.StudyError, match="device"):
        study(ps.Random(budget=9), 4).run(on=cluster(2, losses=gone), progress=False)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (dict(scheduler="fifo", sharing="fused"), 'scheduler="fifo" gives each trial a device of its own'),
        (dict(workers=2), "workers= is for this machine"),
    ],
)
def test_ways_to_run_that_contradict_themselves(how, said):
    with pytest.raises(ps.StudyError, match=said):
        study(ps.Random(budget=1), 1).run(on=cluster(), progress=False, **how)
