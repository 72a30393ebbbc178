"""Tasks with shards: which devices their trials have, what is refused, and a whole study on real worker processes."""

import pytest
import torch

import penstock as ps
from penstock.bundle import Device, Parted
from penstock.engine.clocking import Pace
from penstock.engine.placing import Placing
from penstock.log.events import Failed, Placed, Reported
from penstock.log.reader import read
from penstock.scheduling.base import Assignment, Demand, View, room
from penstock.scheduling.sharded import sharded
from penstock.speed.model import UNKNOWN, SpeedModel
from tests.contracts.executors import Exact, Shared, alone
from tests.engine.test_placing import Engine, bereft
from tests.studies import studies


class Sharing(Engine):
    """An engine's surroundings with cards of given (type, node), two of which hold a trial."""

    def __init__(self, cards, modes=("solo", "distributed"), **executor):
        super().__init__(0, schedule=sharded, modes=modes)
        self.cards[:] = [Device(f"gpu {i}", type, 8, node) for i, (type, node) in enumerate(cards)]
        old = self.placing
        vars(old.executor).update(executor)
        pace = Pace(SpeedModel("never"))
        self.placing = Placing(
            old.executor, self.history, old.schedule, self.log, old.clock, old.keeper, pace=pace, shards=2
        )
        self.placing.look()

    def run(self, *trials):
        for trial in trials:
            self.ask(trial)
        self.placing.place()
        return [(b.mode, b.devices, [p.trial for p in b.placements]) for b in self.bundles]


def test_each_trial_has_its_devices_of_one_type_and_on_one_node_where_that_can_be():
    one = Sharing([("h200", "a"), ("l4", "a"), ("h200", "b"), ("l4", "c"), ("h200", "b"), ("h200", "d")])
    made = one.run(0, 1, 2, 3)
    assert made[0] == ("distributed", ("gpu 2", "gpu 4"), [0])
    assert {frozenset(devices) for _, devices, _ in made[1:]} == {
        frozenset({"gpu 0", "gpu 5"}),
        frozenset({"gpu 1", "gpu 3"}),
    }
    assert list(one.placing.queue.waiting) == [3]
    assert one.history.trials[0].status == "running"
    one.placing.left(0)
    one.placing.place()
    assert one.bundles[-1].devices == ("gpu 2", "gpu 4")
    assert {demand.width for _, demands, _ in one.views for demand in demands} == {2}, "the scheduler is asked"


def test_devices_whose_workers_did_not_meet_are_taken_only_where_there_are_no_others():
    one = Sharing([("h200", "a")] * 3)
    with pytest.warns(UserWarning, match="It goes on elsewhere"):
        one.placing.elastic.parted(Parted(("gpu 0", "gpu 1"), "They did not meet."))
    assert one.run(0) == [("distributed", ("gpu 0", "gpu 2"), [0])]
    two = Sharing([("h200", "a")] * 2)
    with pytest.warns(UserWarning, match="It goes on elsewhere"):
        two.placing.elastic.parted(Parted(("gpu 0", "gpu 1"), "They did not meet."))
    assert two.run(0) == [("distributed", ("gpu 0", "gpu 1"), [0])]


@pytest.mark.parametrize(
    ("cards", "executor", "there"),
    [
        ([("h200", "a"), ("l4", "a")], {}, "1 of type h200 and 1 of type l4"),
        ([("h200", "a")], {}, "1 of type h200"),
        ([("h200", "a")] * 2, {"modes": ("solo",)}, "2 of type h200"),
        ([("h200", "a"), ("l4", "a")], {"flexible": True}, "1 of type h200 and 1 of type l4"),
    ],
)
def test_where_a_trial_can_never_have_its_devices_the_study_says_so(cards, executor, there):
    with pytest.raises(ps.StudyError, match=rf"shards = 2 need .* there are {there}: run it with workers=2 or more"):
        Sharing(cards, **executor).run(0)


def test_devices_that_may_come_are_waited_for_and_asked_for():
    one = Sharing([("h200", "a")], flexible=True, scales=True)
    with pytest.warns(UserWarning, match="Trials wait for 2 devices of one type, and there are 1 of type h200"):
        assert one.run(0, 1) == []
    assert one.requests == [4], "two for each"
    one.cards.append(Device("gpu 1", "h200", 8, "b"))
    one.placing.look()
    assert one.run() == [("distributed", ("gpu 0", "gpu 1"), [0])]


# The scheduler


def schedule(cards, demands, apart=(), held=()):
    """Trial -> devices, on cards of given (type, node)."""
    devices = {f"gpu {i}": Device(f"gpu {i}", type, 8, node) for i, (type, node) in enumerate(cards)}
    left = {name: one for name, one in room(devices, []).items() if name not in held}
    view = View(devices, {}, left, apart=[frozenset(names) for names in apart])
    made = sharded(view, demands, UNKNOWN)
    assert all(one == Assignment(one.trial, one.devices, len(one.devices)) for one in made)
    return {one.trial: one.devices for one in made}


def wide(*widths):
    return [Demand(trial, "g", 1, width=width) for trial, width in enumerate(widths)]


def test_the_trial_that_waited_longest_is_next_and_nobody_passes_it():
    four = [("h200", "a")] * 4
    assert schedule(four, wide(2, 2, 2)) == {0: ("gpu 0", "gpu 1"), 1: ("gpu 2", "gpu 3")}
    assert schedule(four, wide(3, 2, 1)) == {0: ("gpu 0", "gpu 1", "gpu 2")}, "one device is left, and two are wanted"
    assert schedule(four, wide(8, 1)) == {}
    assert schedule(four, wide(2, 2), held=("gpu 1",)) == {0: ("gpu 0", "gpu 2")}


def test_a_trial_has_devices_of_one_type():
    assert schedule([("h200", "a"), ("l4", "a"), ("l4", "b")], wide(2)) == {0: ("gpu 1", "gpu 2")}
    assert schedule([("h200", "a"), ("l4", "a")], wide(2)) == {}


def test_sets_of_devices_that_are_apart_are_passed_over_as_long_as_there_are_others():
    three = [("h200", "a")] * 3
    assert schedule(three, wide(2), apart=[("gpu 0", "gpu 1")]) == {0: ("gpu 0", "gpu 2")}
    assert schedule(three[:2], wide(2), apart=[("gpu 0", "gpu 1")]) == {0: ("gpu 0", "gpu 1")}


# What is refused before anything is made


study = studies(Shared, {"lr": ps.loguniform(1e-3, 0.5)}, trials=2)


def having(**settings):
    return type("Having", (Exact,), settings)()


@pytest.mark.parametrize("shards", [0, -1, 1.5, True, "2", None])
def test_shards_must_be_a_number_of_devices(shards):
    with pytest.raises(ps.TaskError, match=r"Having.shards must be a whole number of devices, 1 or more, got"):
        study(having(shards=shards))


def test_a_gradient_scaler_and_shards_do_not_go_together():
    with pytest.raises(ps.TaskError, match=r'Having.precision is "fp16".*shards = 2: use "bf16" or "fp32"'):
        study(having(shards=2, precision="fp16"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "without workers= there is one: use workers=2 or more"),
        ({"workers": 1}, "got workers=1: use workers=2 or more"),
        ({"workers": 2, "sharing": "fused"}, "got sharing='fused': leave it out"),
        ({"workers": 2, "sharing": "solo"}, "got sharing='solo': leave it out"),
        ({"on": ps.Simulated(devices=4), "sharing": "fused"}, "got sharing='fused': leave it out"),
    ],
)
def test_a_run_that_cannot_give_a_trial_its_devices_is_refused(settings, why):
    with pytest.raises(ps.StudyError, match=f"Shared has shards = 2, so that each trial trains on 2 devices.*{why}"):
        study().run(**settings)


class Others(Shared):
    def optimizer(self, params, config):
        return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


def test_a_task_that_cannot_train_is_refused_before_the_first_trial():
    with pytest.raises(ps.TaskError, match=r"Others.optimizer holds none of the model's parameters"):
        study(Others()).run(workers=2, progress=False)


def test_a_study_in_shares_finds_what_it_finds_on_one_device(tmp_path):
    algorithm = ps.SuccessiveHalving(max_budget=4, min_budget=2, reduction=2)
    result = study(algorithm=algorithm, dir=tmp_path).run(workers=2, progress=False)
    assert sorted(len(trial.curve) for trial in result.trials) == [2, 4]
    for trial in result.trials:
        for row, other in zip(trial.curve, alone(Exact(), trial.number, trial.config, len(trial.curve)), strict=True):
            assert row["loss"] == pytest.approx(other["loss"], abs=1e-9)
    placed = [e for e in read(tmp_path / "s" / "log.jsonl") if isinstance(e, Placed)]
    assert {(e.mode, len(e.devices), e.share) for e in placed} == {("distributed", 2, 2.0)}
    assert all(type(p) is torch.nn.Parameter for p in result.best.model().parameters())


def test_a_study_in_shares_runs_simulated_where_each_trial_trains_on_one_device_in_simulated_time(tmp_path):
    algorithm = ps.SuccessiveHalving(max_budget=4, min_budget=2, reduction=2)
    on = ps.Simulated(devices=4, unit_seconds=10.0, curve=ps.Curve(scaling=(1.0, 0.6)))
    made = study(algorithm=algorithm, trials=3, dir=tmp_path)
    result = made.run(on=on, progress=False)
    assert sorted(len(trial.curve) for trial in result.trials) == [2, 2, 4]
    for trial in result.trials:
        curve = [{name: value for name, value in row.items() if name != "budget"} for row in trial.curve]
        assert curve == alone(Exact(), trial.number, trial.config, len(trial.curve))
    log = list(read(tmp_path / "s" / "log.jsonl"))
    placed = [e for e in log if isinstance(e, Placed)]
    assert {(e.mode, len(e.devices), e.share) for e in placed} == {("distributed", 2, 2.0)}
    assert [e.clock for e in placed] == [0, 0, 12, 24], "two at once on four devices, for two units of 6 seconds"
    assert {e.usage.device_seconds for e in log if isinstance(e, Reported)} == {12}


def test_a_simulated_cluster_that_is_too_small_is_refused_and_one_that_grows_is_waited_for(tmp_path):
    with pytest.raises(ps.StudyError, match=r"shards = 2 need as many devices of one type.* there are 1 of type"):
        study(dir=tmp_path).run(on=ps.Simulated(devices=1, unit_seconds=10.0), progress=False)
    growing = ps.Simulated(devices=1, most=2, provision=30.0, unit_seconds=10.0)
    with pytest.warns(UserWarning, match="Trials wait for 2 devices of one type, and there are 1 of type simulated"):
        study(dir=tmp_path, name="t").run(on=growing, progress=False)
    placed = [e for e in read(tmp_path / "t" / "log.jsonl") if isinstance(e, Placed)]
    assert [(e.clock, e.mode, len(e.devices)) for e in placed] == [(30, "distributed", 2), (50, "distributed", 2)]


def test_a_lost_state_of_a_donor_fails_one_trial_with_one_message_and_the_others_go_on():
    one = Sharing([("h200", "a")] * 2)
    said = bereft(one)
    one.placing.ask(one.history.trials[2])
    one.placing.place()
    (failed,) = [line for line in one.lines if isinstance(line, Failed)]
    assert (failed.trial, failed.final) == (1, True)
    assert "one device cannot train its donor again" in failed.error
    assert [(number, donor) for number, donor, _ in said] == [(1, 0)]
    one.placing.place()
    assert [p.trial for bundle in one.bundles for p in bundle.placements] == [2]
