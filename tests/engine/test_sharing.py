"""Whole studies whose trials share a device: fused, solo and from one to the other."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.log.events import Measured, Placed
from penstock.training.fused import measuring
from penstock.training.fused.stepping import Stepping
from tests.studies import log, studies
from tests.tasks import Augmented, Blobs, Noisy

pytestmark = pytest.mark.usefixtures("long_enough")

SPACE = {"lr": ps.loguniform(1e-3, 0.5), "dropout": ps.uniform(0, 0.5)}


class Exact(Blobs):
    """In float64, with a dropout rate of its own."""

    def data(self, config):
        (x, y), (a, b) = super().data(config)
        return (x.double(), y), (a.double(), b)

    def model(self, config):
        return nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(config["dropout"]), nn.Linear(12, 2)
        ).double()


study = studies(Exact, SPACE, algorithm=ps.ASHA(max_budget=4, reduction=2), trials=8)


def curves(result):
    return [[row["loss"] for row in trial.curve] for trial in result.trials]


def logged(kind, name="s"):
    return [event for event in log(name) if isinstance(event, kind)]


def alike(some, others):
    assert [len(row) for row in some] == [len(row) for row in others]
    for one, other in zip(some, others, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize(
    "algorithm",
    [ps.ASHA(max_budget=4, reduction=2), ps.SuccessiveHalving(max_budget=4, reduction=2), ps.Random(budget=3)],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_fused_trials_find_what_they_find_alone(algorithm):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ps.SoloWarning)
        together = study(algorithm=algorithm).run(progress=False, sharing="fused")
    assert {event.mode for event in logged(Placed)} == {"fused"}
    alone = study(algorithm=algorithm, name="alone").run(progress=False, sharing="solo")
    alike(curves(together), curves(alone))
    assert together.best.number == alone.best.number
    weights, own = together.best.model().state_dict(), alone.best.model().state_dict()
    for name in own:
        torch.testing.assert_close(weights[name], own[name], rtol=1e-9, atol=1e-9)


def test_a_population_takes_over_states_in_a_bundle_as_it_does_alone():
    settings = {"algorithm": ps.PBT(population=6, max_budget=6, interval=2), "trials": None}
    space = {"lr": ps.loguniform(1e-3, 0.5), "dropout": 0.2}
    together = study(space=space, **settings).run(progress=False, sharing="fused")
    alone = study(space=space, name="alone", **settings).run(progress=False, sharing="solo")
    assert [t.config for t in together.trials] == [t.config for t in alone.trials]
    alike(curves(together), curves(alone))


def test_a_study_goes_on_in_another_mode():
    whole = study(name="whole", algorithm=ps.Random(budget=6)).run(progress=False, sharing="solo")
    target = sorted(row[1] for row in curves(whole))[2]
    for sharing, stop in (("solo", {"target": target}), ("fused", {"deadline": 1e9}), ("solo", {"trials": 10})):
        found = study(algorithm=ps.Random(budget=6), **stop).run(progress=False, sharing=sharing)
    modes = {event.mode for event in logged(Placed)}
    assert modes == {"solo", "fused"}
    alike(curves(found)[:8], curves(whole))
    assert len(found.trials) == 10


def test_two_workers_train_a_bundle_each():
    together = study(algorithm=ps.Random(budget=2)).run(progress=False, sharing="fused", workers=2)
    placed = logged(Placed)
    assert {event.devices for event in placed} == {("cpu:0",), ("cpu:1",)}
    assert {event.mode for event in placed} == {"fused"}
    assert {event.device for event in logged(Measured)} <= {"cpu:0", "cpu:1"}
    alike(
        curves(together), curves(study(name="alone", algorithm=ps.Random(budget=2)).run(progress=False, sharing="solo"))
    )


def test_trials_over_a_dataset_are_fused_too():
    task = Augmented()
    space = {"lr": ps.loguniform(1e-3, 0.1)}
    together = study(task, space=space, algorithm=ps.Random(budget=2)).run(progress=False, sharing="fused")
    alone = study(task, space=space, name="alone", algorithm=ps.Random(budget=2)).run(progress=False, sharing="solo")
    for one, other in zip(curves(together), curves(alone), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


class Branches(Exact):
    def loss(self, model, batch, config):
        loss = super().loss(model, batch, config)
        return loss * 2 if loss > 0.7 else loss


class Draws(Exact):
    def loss(self, model, batch, config):
        noise = torch.rand(batch[0].shape, generator=torch.Generator().manual_seed(len(batch[0])))
        return super().loss(model, (batch[0] + noise, batch[1]), config)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Counting(nn.Sequential):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class Counts(Exact):
    def model(self, config):
        return Counting(*super().model(config))


class Closes(Exact):
    def optimizer(self, params, config):
        return torch.optim.LBFGS(params, lr=0.1, max_iter=2)

    def scheduler(self, optimizer, config):
        return None


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (Draws(), "rand with a generator of the task's own draws numbers that trials cannot share"),
        (Noisy(), "draws from Python's or numpy's random generator"),
        (Counts(), "the model changes an attribute of its own in its forward, and reads it: calls"),
        (Closes(), "LBFGS needs a closure"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ps.Task) else "",
)
@pytest.mark.parametrize("sharing", ["auto", "fused"])
def test_what_cannot_be_fused_trains_solo_and_says_why(task, reason, sharing, monkeypatch):
    took = measuring.Measuring.took  # fusing would pay, so that a step which cannot be fused comes
    monkeypatch.setattr(measuring.Measuring, "took", lambda self, size, seconds, bytes: took(self, size, 1.0, bytes))
    settings = {"algorithm": ps.Random(budget=2), "trials": 3}
    with pytest.warns(ps.SoloWarning, match=reason):
        found = study(task, **settings).run(progress=False, sharing=sharing)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ps.SoloWarning)
        alone = study(task, name="alone", **settings).run(progress=False, sharing="solo")
    assert curves(found) == curves(alone), "bit for bit: nothing of the attempt is left in them"


@pytest.mark.parametrize("sharing", ["auto", "fused"])
def test_what_could_not_be_fused_is_not_tried_again_unless_it_is_asked_for(sharing, monkeypatch):
    took = measuring.Measuring.took
    monkeypatch.setattr(measuring.Measuring, "took", lambda self, size, seconds, bytes: took(self, size, 1.0, bytes))
    settings = {"algorithm": ps.Random(budget=2), "trials": 3}
    with pytest.warns(ps.SoloWarning, match="the model changes an attribute"):
        study(Counts(), **settings).run(progress=False)
    assert [event.mode for event in logged(Placed)] == ["fused"] * 3 + ["solo"] * 3
    with pytest.warns(ps.SoloWarning, match="3 of 3 trials train solo: the model changes an attribute"):
        study(Counts(), name="next", **settings).run(progress=False, sharing=sharing)
    tried = ["fused"] * 3 if sharing == "fused" else []
    assert [event.mode for event in logged(Placed, "next")] == tried + ["solo"] * 3
    again = 'an earlier study found this, sharing="fused" tries again'
    told = [event.reason for event in logged(Measured, "next") if event.signature != "solo"]
    assert [again in reason for reason in told] == [sharing == "auto"], "a line for penstock show"


def test_what_did_not_pay_is_not_tried_again_and_the_log_says_why(monkeypatch):
    took = measuring.Measuring.took
    slower = lambda self, size, _, bytes: took(self, size, 1.2 * size, bytes)  # noqa: E731
    monkeypatch.setattr(measuring.Measuring, "took", slower)
    settings = {"algorithm": ps.Random(budget=2), "trials": 3}
    study(**settings).run(progress=False)
    study(name="next", **settings).run(progress=False)
    assert [event.mode for event in logged(Placed, "next")] == ["solo"] * 3
    (line,) = logged(Measured, "next")
    assert (line.size, line.table) == (1, {})
    assert line.reason.startswith("measured before: alone a trial trains at 1 steps/s")


def test_trials_that_branch_on_their_own_values_are_fused_in_parts():
    settings = {"algorithm": ps.Random(budget=2), "trials": 3}
    found = study(Branches(), **settings).run(progress=False, sharing="fused")
    assert {event.mode for event in logged(Placed)} == {"fused"}
    alike(curves(found), curves(study(Branches(), name="alone", **settings).run(progress=False, sharing="solo")))


def test_a_backward_of_ones_own_is_not_lost_in_a_batched_forward():
    class Doubles(Exact):
        def loss(self, model, batch, config):
            return F.cross_entropy(Twice.apply(model(batch[0])), batch[1])

    settings = {"algorithm": ps.Random(budget=2), "trials": 3}
    found = study(Doubles(), **settings).run(progress=False, sharing="fused")
    assert {event.mode for event in logged(Placed)} == {"fused"}
    alike(curves(found), curves(study(Doubles(), name="alone", **settings).run(progress=False, sharing="solo")))


def test_metrics_that_look_at_values_are_measured_one_by_one():
    class Items(Exact):
        def metrics(self, model, batch, config):
            return {"loss": self.loss(model, batch, config).item()}

    together = study(Items(), algorithm=ps.Random(budget=2)).run(progress=False, sharing="fused")
    assert {event.mode for event in logged(Placed)} == {"fused"}
    first, then = (event.reason for event in logged(Measured))
    assert then.startswith(f"{first}; measured one by one, because of item at ")
    alike(curves(together), curves(study(Items(), name="a", algorithm=ps.Random(budget=2)).run(sharing="solo")))


def test_trials_with_other_models_form_other_bundles():
    class Widths(Exact):
        def model(self, config):
            return nn.Sequential(nn.Linear(6, config["width"]), nn.ReLU(), nn.Linear(config["width"], 2)).double()

    space = {"lr": ps.loguniform(1e-3, 0.5), "width": ps.choice([3, 5])}
    together = study(Widths(), space=space, trials=8).run(progress=False, sharing="fused")
    alike(
        curves(together), curves(study(Widths(), space=space, trials=8, name="a").run(progress=False, sharing="solo"))
    )


def test_what_was_measured_is_logged_and_serves_the_next_study(monkeypatch):
    times = {1: 1.0, 2: 1.0, 3: 1.1, 4: 1.2}
    took = measuring.Measuring.took
    monkeypatch.setattr(
        measuring.Measuring, "took", lambda self, size, seconds, bytes: took(self, size, times.get(size, 1.3), bytes)
    )
    study(trials=5, algorithm=ps.Random(budget=2)).run(progress=False)
    (found,) = logged(Measured)
    assert (found.way, found.size, found.table[4]) == ("native", 512, 1.2)
    assert "5 trials together" in found.reason
    study(trials=5, algorithm=ps.Random(budget=2), name="next").run(progress=False)
    (used,) = logged(Measured, "next")
    assert not used.table, "the profile was kept"
    assert used.reason == f"measured before: {found.reason}"
    lines = [json.loads(line) for line in Path(".penstock/profiles.jsonl").read_text().splitlines()]
    assert [line["size"] for line in lines if line["kind"] == "sharing"] == [512]


@pytest.mark.parametrize("sharing", ["auto", "fused", "solo"])
def test_no_trial_is_made_twice(sharing, monkeypatch):
    took = measuring.Measuring.took  # a step takes a second whatever the size: a trial that goes on solo is made again
    monkeypatch.setattr(measuring.Measuring, "took", lambda self, size, seconds, bytes: took(self, size, 1.0, bytes))

    class Counted(Exact):
        made = 0

        def model(self, config):
            Counted.made += 1
            return super().model(config)

    settings = {"trials": 20, "algorithm": ps.Random(budget=2)}
    result = study(Counted(), **settings).run(progress=False, sharing=sharing)
    # Besides each trial once: the dry batch, and another of its kind that shows what is drawn at random.
    assert Counted.made == 20 + 2
    alike(curves(result), curves(study(name="alone", **settings).run(progress=False, sharing="solo")))


def test_where_fusing_is_slower_trials_train_solo(monkeypatch):
    took = measuring.Measuring.took
    monkeypatch.setattr(
        measuring.Measuring, "took", lambda self, size, seconds, bytes: took(self, size, 1.0 * size**1.1, bytes)
    )
    result = study(trials=6, algorithm=ps.Random(budget=3)).run(progress=False)
    (found,) = logged(Measured)
    assert found.size == 1
    assert "not worth it" in found.reason
    assert [event.mode for event in logged(Placed)][-6:] == ["solo"] * 6
    alike(curves(result), curves(study(name="a", trials=6, algorithm=ps.Random(budget=3)).run(sharing="solo")))


def test_simulated_lack_of_memory_halves_the_bundle_and_loses_nothing(monkeypatch):
    step = Stepping._step

    def short_of_memory(self, first, last, *rest):
        if last - first > 2:
            self.trials[first].model[1].running_mean.add_(7.0)  # as a forward that got halfway would
            raise torch.OutOfMemoryError("simulated")
        return step(self, first, last, *rest)

    monkeypatch.setattr(Stepping, "_step", short_of_memory)
    result = study(trials=6, algorithm=ps.Random(budget=2)).run(progress=False, sharing="fused")
    assert logged(Measured)[-1].reason == "memory ran out with more than 2 trials together"
    monkeypatch.undo()
    alike(curves(result), curves(study(name="a", trials=6, algorithm=ps.Random(budget=2)).run(sharing="solo")))
