"""Whole studies on simulated clusters: every algorithm under every scheduler, with devices that come and go."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.algorithms.base import Granting
from penstock.bundle import Device
from penstock.log.events import Asked, Devices, Failed, Measured, Placed, Reported, Saved
from penstock.log.reader import read
from penstock.scheduling.base import Assignment
from penstock.scheduling.fifo import fifo
from penstock.settings import SCHEDULERS as SCHEDULERS_BY_NAME
from penstock.speed.curve import Curve
from penstock.trial import Member, StartFrom, TrialGroup
from tests.engine.known import know
from tests.studies import log, studies
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


usual = studies(ps.TabulatedTask(look_up), SPACE)


def study(algorithm, trials=None, **changes):
    return usual(algorithm=algorithm, trials=trials, **changes)


def cluster(devices=5, **changes):
    return ps.Simulated(devices=devices, **{"curve": CURVE, "start": 0.5, "stop": 0.25, **changes})


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
    assert any(isinstance(event, Failed) for event in first), "devices were lost"
    assert first[1:] == second[1:]


def test_a_known_curve_makes_a_study_share_from_its_start():
    first = study(ps.Random(budget=2), 1, name="first").run(on=cluster(), progress=False)
    assert first.timeline()[0].mode == "solo", "a lone trial shows nothing of sharing"
    know(ps.TabulatedTask(look_up), CURVE, *cluster().cluster())
    second = study(ps.Random(budget=4), 15).run(on=cluster(), progress=False)
    start = [row for row in second.timeline() if row.start == 0]
    assert {row.mode for row in start} == {"fused"}
    assert len(start) == 15
    assert not [event for event in log() if isinstance(event, Measured) and event.kind == "sharing"]


def test_trials_of_which_nothing_is_known_are_spread_over_the_devices_and_measure():
    study(ps.Random(budget=2), 8).run(on=cluster(2), progress=False)
    events = log()
    found = next(i for i, event in enumerate(events) if isinstance(event, Measured))
    placed = [event for event in events[:found] if isinstance(event, Placed)]
    assert [event.devices[0][-1] for event in placed] == list("00001111")
    assert {event.share for event in placed} == {1 / 64}
    rows = [row for row in study(ps.Random(budget=2), 8).timeline() if row.end > row.start]
    for name in names(cluster(2)):
        most = max(sum(row.device == name and row.start <= now < row.end for row in rows) for now in range(60))
        assert most == 3, "bundles shrank to what pays before a unit was trained"


@pytest.mark.parametrize("kept", [True, False])
def test_what_a_simulation_measures_is_known_to_the_next_one_if_it_is_kept(kept):
    for name in "ab":
        study(ps.Random(budget=2), 8, name=name).run(on=cluster(2, kept=kept), progress=False)
    assert any(isinstance(event, Measured) for event in log("a"))
    assert any(isinstance(event, Measured) for event in log("b")) is not kept
    assert Path(".penstock/profiles.jsonl").exists() is kept


def test_what_was_cut_of_a_measured_curve_is_said():
    wasteful = cluster(1, curve=Curve((1.0, 9.0), (1.0, 0.6)))
    study(ps.Random(budget=2), 2).run(on=wasteful, progress=False)
    (found,) = (event for event in log() if isinstance(event, Measured))
    assert found.reason == "simulated; sharing stops to pay at 1 trial a device, of 2 tried"


def test_sharing_can_be_refused():
    know(ps.TabulatedTask(look_up), CURVE, *cluster().cluster())
    result = study(ps.Random(budget=4), 15).run(on=cluster(), sharing="solo", progress=False)
    assert {row.share for row in result.timeline()} == {1}
    result = study(ps.Random(budget=4), 2, name="d").run(on=cluster(), sharing="distributed", progress=False)
    assert max(row.share for row in result.timeline()) > 1


def test_trials_of_other_signatures_share_a_device_as_processes():
    def unlike(config):
        return ps.Tabulated({"loss": [config["x"]] * 9}, 1.0, signature=str(config["slow"]), curve=Curve((1.0, 1.0)))

    task = ps.TabulatedTask(unlike)
    for kind in ("1", "2", "5"):
        know(task, Curve((1.0, 1.0)), *cluster().cluster(), signature=kind)
    together = study(ps.Random(budget=4), 9, name="p", task=task).run(on=cluster(1, processes=True), progress=False)
    assert "processes" in {row.mode for row in together.timeline()}
    assert_not_oversubscribed(together.timeline(), names(cluster(1)))
    apart = study(ps.Random(budget=4), 9, task=task).run(on=cluster(1), progress=False)
    assert {row.mode for row in apart.timeline()} <= {"solo", "fused"}, "as on real devices"


def test_trials_that_start_at_once_share_with_their_like():
    def two_kinds(config):
        return ps.Tabulated({"loss": [config["x"]] * 9}, 1.0, signature=str(config["slow"]), curve=Curve.of(1.05, 4))

    settings = {
        "task": ps.TabulatedTask(two_kinds),
        "space": {"x": ps.grid([0.1, 0.2, 0.3, 0.4]), "slow": ps.grid([1, 2])},
    }
    result = study(ps.Grid(budget=4), **settings).run(on=cluster(2), progress=False)
    together = {}
    for event in (event for event in log() if isinstance(event, Placed)):
        together.setdefault(event.devices, set()).add(result.trials[event.trial].config["slow"])
    assert sorted(map(list, together.values())) == [[1], [2]]
    assert {row.mode for row in result.timeline()} == {"fused"}


def mixed(**changes):
    """Two fast devices on which three trials share, and three slow ones on which a trial gains by spreading."""
    devices = [
        Device(f"{type} {i}", type, 2**34, type) for type, count in (("new", 2), ("old", 3)) for i in range(count)
    ]
    curves = {("tabulated", "new"): Curve.of(1.1, 3), ("tabulated", "old"): Curve.of(beta=1.05, widest=3)}
    return cluster(devices, curves=curves, speeds={"new": 4.0}, **changes)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("algorithm", "trials"), [(ps.Hyperband(max_budget=9), None), (ps.ASHA(max_budget=9), 20)])
def test_a_curve_that_was_measured_on_one_type_is_used_on_no_other(algorithm, trials, scheduler):
    for device in mixed().cluster():
        know(ps.TabulatedTask(look_up), mixed().curves["tabulated", device.type], device)
    result = study(algorithm, trials).run(on=mixed(), scheduler=scheduler, progress=False)
    assert_sound(result, names(mixed()))
    placed = [event for event in log() if isinstance(event, Placed)]
    assert all(len({name.split()[0] for name in event.devices}) == 1 for event in placed), "none spans types"
    shares = {type: {e.share for e in placed if e.devices[0].startswith(type)} for type in ("new", "old")}
    assert max(shares["new"]) <= 1
    assert min(shares["old"]) >= 1
    if scheduler != "fifo":
        assert min(shares["new"]) < 1
    if scheduler in ("dynamic_fluid", "waterfill") and isinstance(algorithm, ps.Hyperband):
        assert max(shares["old"]) > 1


def test_a_type_of_which_nothing_is_known_measures_for_itself():
    devices = [Device(f"{type} {i}", type, 2**34) for type in ("new", "old") for i in range(2)]
    know(ps.TabulatedTask(look_up), CURVE, devices[0])
    study(ps.Random(budget=4), 16).run(on=cluster(devices), progress=False)
    found = [event for event in log() if isinstance(event, Measured) and event.kind == "sharing"]
    assert {event.device.split()[0] for event in found} == {"old"}


def test_fast_devices_are_given_more_and_a_slow_one_is_no_straggler():
    task = ps.TabulatedTask(lambda config: ps.Tabulated({"loss": [config["x"]] * 9}, seconds=10.0))
    devices = [Device("fast", "fast", 2**34), Device("slow", "slow", 2**34)]
    there = ps.Simulated(devices=devices, speeds={"fast": 8.0})
    ends = {}
    for scheduler in ("fifo", "waterfill"):
        result = study(ps.Random(budget=4), 12, name=scheduler, task=task).run(
            on=there, scheduler=scheduler, progress=False
        )
        ends[scheduler] = max(row.end for row in result.timeline())
    assert ends == {"fifo": 80, "waterfill": 55}


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
    ("scheduler", "seconds"), [("fifo", 10.8), ("static_fluid", 10), ("dynamic_fluid", 10), ("waterfill", 10)]
)
def test_the_toy_example_of_fluids_figure_5(scheduler, seconds):
    free = ps.Simulated(devices=5, curve=Curve((1.0, 2.0), (1, 1 / 2, 1 / 3, 1 / 4, 1 / 5)))
    known = Curve((1.0, 2.0), (1, 1 / 2, 1 / 3, 1 / 4, 1 / 5))

    def table(config):
        return ps.Tabulated({"loss": [1.0] * 30}, 1.0, curve=known)

    task = ps.TabulatedTask(table)
    know(task, known, *free.cluster())
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
    there = [e.devices for e in events if isinstance(e, Devices)]
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


def swapping(share):
    """Trials go where it is free; one that waits beside trial 0 takes its place, which moves to the other device."""

    def schedule(view, demands, speed):
        first, second = view.devices
        free = [
            name
            for name in (first, second)
            if name not in {d for h in view.running.values() for d in h.assignment.devices}
        ]
        if len(view.running) == 1 and demands and view.running.keys() == {0}:
            waiting = next(iter(demands))
            return [Assignment(0, (second,), share), Assignment(waiting.trial, (first,), share)]
        return [Assignment(one.trial, (name,), share) for one, name in zip(demands, free, strict=False)]

    return schedule


@pytest.mark.parametrize(("share", "gib"), [(1.0, 0), (0.5, 10)], ids=["share", "memory"])
def test_a_trial_that_is_given_what_another_leaves_waits_until_it_has_left(monkeypatch, share, gib):
    budgets = {0: 9, 1: 1, 2: 5}
    large = ps.TabulatedTask(lambda config: ps.Tabulated({"loss": [0.0] * 9}, seconds=3.0, bytes=gib * 2**30))
    devices = [Device(f"node 0/device {i}", type, 2**34) for i, type in enumerate(("slow", "fast"))]
    monkeypatch.setitem(SCHEDULERS_BY_NAME, "fifo", swapping(share))
    there = cluster(devices, curve=Curve(), speeds={"fast": 2.0})  # the swap is in the middle of a unit
    result = study(Budgets(*budgets.values()), task=large).run(on=there, scheduler="fifo", progress=False)
    rows = result.timeline()
    assert [len(trial.curve) for trial in result.trials] == list(budgets.values())
    first = [row for row in rows if row.device == "node 0/device 0"]
    assert {row.trial for row in first} == {0, 2}
    assert [row.trial for row in rows if row.device == "node 0/device 1"] == [1, 0]
    assert all(earlier.end <= later.start for earlier, later in pairwise(first)), "one after the other"


def test_a_scheduler_that_gives_a_device_away_twice_has_one_wait(monkeypatch):
    def generous(view, demands, speed):
        return [Assignment(one.trial, (next(iter(view.devices)),)) for one in demands]

    monkeypatch.setitem(SCHEDULERS_BY_NAME, "fifo", generous)
    result = study(ps.Random(budget=2), 3).run(on=cluster(2), scheduler="fifo", progress=False)
    assert_sound(result, names(cluster(2)))
    assert {row.device for row in result.timeline()} == {"node 0/device 0"}


def test_a_scheduler_that_gives_nothing_that_there_is_is_an_error_and_not_a_hang(monkeypatch):
    def nowhere(view, demands, speed):
        return [Assignment(one.trial, ("nowhere",)) for one in demands]

    monkeypatch.setitem(SCHEDULERS_BY_NAME, "fifo", nowhere)
    with pytest.raises(ps.StudyError, match="nowhere gives nothing that fits to any of the 3 trials that wait"):
        study(ps.Random(budget=2), 3).run(on=cluster(2), scheduler="fifo", progress=False)


def test_a_trial_that_moves_has_what_suits_those_that_are_there_whoever_may_follow(monkeypatch):
    """Of a group that others follow, only those that were just asked for are said to be so."""
    opened, moved = {}, []

    def restless(view, demands, speed):
        moved.extend(demand for demand in demands if demand.trial in opened)
        opened.update({demand.trial: demand.open for demand in demands if demand.trial not in opened})
        return [*fifo(view, demands, speed), *(holding.assignment for holding in view.running.values())]

    monkeypatch.setitem(SCHEDULERS_BY_NAME, "fifo", restless)
    asha = ps.ASHA(max_budget=9, min_budget=9, concurrency=4)
    study(asha, 12).run(on=cluster(4), scheduler="fifo", progress=False)
    assert {opened[demand.trial] for demand in moved} == {True, False}
    assert not any(demand.open for demand in moved)


def test_a_trial_is_not_given_up_for_the_devices_that_it_lost():
    lost = [(10.0 * i, "node 0/device 0") for i in range(1, 8)]
    slow = ps.TabulatedTask(lambda config: ps.Tabulated({"loss": [0.0]}, seconds=30.0))
    result = study(ps.Random(budget=1), 1, task=slow).run(
        on=cluster(1, losses=lost, returns=True), scheduler="fifo", progress=False
    )
    assert [trial.state for trial in result.trials] == ["finished"]
    assert len([event for event in log() if isinstance(event, Failed)]) == 7


@pytest.mark.parametrize(("own", "donors", "done"), [(6, 2, True), (2, 6, False)])
def test_a_trial_that_takes_over_a_state_goes_on_from_there(own, donors, done):
    class Donates(Budgets):
        def ask(self):
            groups = super().ask()
            if not groups and not self._granted and not getattr(self, "_once", False):
                self._once = True
                return [self._grant("on", [Member(1, {"x": 0.5, "slow": 1}, 4, StartFrom(0, donors))])]
            return groups

        def _take(self, report):
            """Nobody is dropped."""

    two = study(Donates(donors, own))
    if not done:
        with pytest.raises(ps.StudyError, match="to 4 units, and it has reported 6 units already"):
            two.run(on=cluster(), progress=False)
        return
    result = two.run(on=cluster(), progress=False)
    assert [row["budget"] for row in result.trials[1].curve] == [1, 2, 3, 4, 5, 6, 3, 4]


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
        (dict(workers=2), "workers= is for real devices"),
    ],
)
def test_ways_to_run_that_contradict_themselves(how, said):
    with pytest.raises(ps.StudyError, match=said):
        study(ps.Random(budget=1), 1).run(on=cluster(), progress=False, **how)


def test_a_trial_that_moves_stays_on_its_type_of_device():
    devices = [Device(f"gpu {i}", type, 2**40) for i, type in enumerate(["fast", "fast", "slow", "slow"])]
    mixed = cluster(devices, speeds={"fast": 2, "slow": 0.5})
    know(ps.TabulatedTask(look_up), CURVE, *devices)
    result = study(ps.Random(budget=6), 4).run(on=mixed, progress=False)
    types = {device.name: device.type for device in devices}
    seen = {}
    for row in result.timeline():
        seen.setdefault(row.trial, []).append((row.start, types[row.device]))
    assert any(len({start for start, _ in rows}) > 1 for rows in seen.values()), "somebody moved"
    assert all(len({type for _, type in rows}) == 1 for rows in seen.values())


def test_what_is_printed_to_go_on_with_says_where_and_how(capsys):
    def interrupts(config):
        if Path(".penstock/s/log.jsonl").read_text():  # it has begun
            raise KeyboardInterrupt
        return look_up(config)

    interrupted = study(ps.Random(budget=2), 2, task=ps.TabulatedTask(interrupts))
    interrupted.file = "tune.py"
    with pytest.raises(KeyboardInterrupt):
        interrupted.run(on=cluster(3), scheduler="fifo")
    said = "Interrupted; go on with: penstock resume s --on simulated --devices 3 --scheduler fifo\n"
    assert capsys.readouterr().err == said
