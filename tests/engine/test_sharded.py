"""Tasks with shards: which devices their trials have, what is refused, and a whole study on real worker processes."""

import pytest
import torch

import penstock as ps
from penstock.bundle import Device, Parted
from penstock.engine.placing import Placing
from penstock.log.events import Placed, read
from tests.contracts.executors import Exact, Shared, alone
from tests.engine.test_placing import Engine


class Sharing(Engine):
    """An engine's surroundings with cards of given (type, node), two of which hold a trial."""

    def __init__(self, cards, modes=("solo", "distributed"), **executor):
        super().__init__(0, modes=modes)
        self.cards[:] = [Device(f"gpu {i}", type, 8, node) for i, (type, node) in enumerate(cards)]
        old = self.placing
        vars(old.executor).update(executor)
        self.placing = Placing(old.executor, self.history, old.schedule, self.log, old.clock, old.intact, shards=2)
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
    assert list(one.placing.waiting) == [3]
    assert one.history.trials[0].status == "running"
    one.placing.left(0)
    one.placing.place()
    assert one.bundles[-1].devices == ("gpu 2", "gpu 4")
    assert not one.views, "no scheduler is asked"


def test_devices_whose_workers_did_not_meet_are_taken_only_where_there_are_no_others():
    one = Sharing([("h200", "a")] * 3)
    with pytest.warns(UserWarning, match="It goes on elsewhere"):
        one.placing.spreading.parted(Parted(("gpu 0", "gpu 1"), "They did not meet."))
    assert one.run(0) == [("distributed", ("gpu 0", "gpu 2"), [0])]
    two = Sharing([("h200", "a")] * 2)
    with pytest.warns(UserWarning, match="It goes on elsewhere"):
        two.placing.spreading.parted(Parted(("gpu 0", "gpu 1"), "They did not meet."))
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


# What is refused before anything is made


def study(task, **settings):
    settings = {"algorithm": ps.Random(budget=2), "trials": 2, "name": "s", **settings}
    return ps.Study(task, {"lr": ps.loguniform(1e-3, 0.5)}, metric="loss", mode="min", **settings)


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
        ({"on": ps.Simulated(devices=4)}, "a simulated cluster has none"),
    ],
)
def test_a_run_that_cannot_give_a_trial_its_devices_is_refused(settings, why):
    with pytest.raises(ps.StudyError, match=f"Shared has shards = 2, so that each trial trains on 2 devices.*{why}"):
        study(Shared()).run(**settings)


class Others(Shared):
    def optimizer(self, params, config):
        return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


def test_a_task_that_cannot_train_is_refused_before_the_first_trial():
    with pytest.raises(ps.TaskError, match=r"Others.optimizer holds none of the model's parameters"):
        study(Others()).run(workers=2, progress=False)


def test_a_study_in_shares_finds_what_it_finds_on_one_device(tmp_path):
    algorithm = ps.SuccessiveHalving(max_budget=4, min_budget=2, reduction=2)
    result = study(Shared(), algorithm=algorithm, dir=tmp_path).run(workers=2, progress=False)
    assert sorted(len(trial.curve) for trial in result.trials) == [2, 4]
    for trial in result.trials:
        for row, other in zip(trial.curve, alone(Exact(), trial.number, trial.config, len(trial.curve)), strict=True):
            assert row["loss"] == pytest.approx(other["loss"], abs=1e-9)
    placed = [e for e in read(tmp_path / "s" / "log.jsonl") if isinstance(e, Placed)]
    assert {(e.mode, len(e.devices), e.share) for e in placed} == {("distributed", 2, 2.0)}
    assert all(type(p) is torch.nn.Parameter for p in result.best.model().parameters())
