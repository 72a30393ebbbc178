"""Many steps laid down at once are the same as one by one. On a CPU, a recording is called instead of replayed."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.training.fused import audit, speeding
from penstock.training.fused.compiled import LaidStep
from penstock.training.fused.speeding import Speeding
from tests.tasks import Blobs
from tests.training.recorded import Called, record
from tests.training.together import Together, Trials, farthest, go_on


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    record(monkeypatch)
    monkeypatch.setattr(audit, "EVERY", 10**6)  # audits have tests of their own


class Drawing(Blobs):
    """96 rows in batches of 20: the last batch of an epoch is shorter. Everything is in float64."""

    batch_size = 20

    def __init__(self, optimizer, scheduler=None):
        self.make, self.schedule = optimizer, scheduler

    def data(self, config):
        (x, y), (v, w) = super().data(config)
        return (x[:96].double(), y[:96]), (v.double(), w)

    def model(self, config):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2)).double()

    def optimizer(self, params, config):
        return self.make(params, lr=config["lr"])

    def scheduler(self, optimizer, config):
        return self.schedule(optimizer) if self.schedule else None


def momentum(params, lr):
    return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=lr / 10)


def by_step(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40, cycle_momentum=False), "step"


def by_unit(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def one_ahead(made):
    """Let the second trial be an epoch ahead of the others, so that it has batches of its own."""
    go_on(made[1], 5)
    return made


def leap(together, steps, most):
    """Train by some steps in leaps; gives how many leaps there were."""
    leaps, left = 0, steps
    while left:
        count = together.fused.leap(min(left, most))
        if count:
            leaps += 1
        else:
            together.fused.step()
        left -= max(1, count)
        together.end_units()
    return leaps


CASES = [
    (momentum, None),
    (momentum, by_step),
    (torch.optim.Adam, by_unit),
    (torch.optim.NAdam, None),
    (torch.optim.Adagrad, by_step),
]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("optimizer", "scheduler"), CASES)
def test_steps_laid_down_at_once_are_those_taken_one_by_one(optimizer, scheduler, apart):
    trials = Trials(Drawing(optimizer, scheduler))
    both = []
    for leaping in (False, True):
        made = [trials.make(n, {"lr": 0.01 * (n + 1)}) for n in range(3)]
        made = one_ahead(made) if apart else made
        together = Together().enter(*made).step(2)
        if leaping:
            together.fused.speeding.meet(made)
            together.fused.speeding.expect(100)
            together.step(1)
            assert isinstance(next(iter(together.fused.fast.steps.values())), LaidStep)
            assert leap(together, 29, 8) >= 4
        else:
            together.step(30)
        assert not together.recipe.refusals
        both.append([(together.fused.state(one), together.curve(one)) for one in made])
    assert farthest(*both) <= (1e-12, "")


class Smoothed(Drawing):
    """Each trial has a label smoothing of its own."""

    def loss(self, model, batch, config):
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=config["smoothing"])


def met(trials):
    """Trials of unlike smoothing that are about to have a captured step; nothing is known of their best number."""
    made = [trials.make(n, {"lr": 0.01, "smoothing": 0.1 * n}) for n in range(3)]
    together = Together().enter(*made).step(2)
    together.fused.speeding.meet(made)
    together.fused.speeding.expect(100)
    return together


def test_a_step_alone_is_captured_with_the_trials_own_numbers_and_reads_none_back(monkeypatch):
    """On a GPU, a capture in which Python reads a tensor is cut off; then no step of the bundle was captured at all."""
    record(monkeypatch, reading=False)
    together = met(Trials(Smoothed(momentum))).step(1)
    assert not together.recipe.refusals
    assert together.recipe.capturable
    assert together.fused.speeding.take_times().keys() == {1, 3}


def test_where_a_step_alone_cannot_be_timed_all_trials_go_on_captured(monkeypatch):
    monkeypatch.setattr(Called, "timed", lambda self: 1 / 0)
    together = met(Trials(Smoothed(momentum))).step(1)
    assert together.fused.fast
    assert together.recipe.capturable
    assert together.recipe.size == 3
    assert together.recipe.refusals == ["timed alone: division by zero"]


def test_where_kernels_cannot_be_compiled_at_all_the_step_is_captured_without_them(monkeypatch):
    monkeypatch.setattr(speeding, "available", lambda device: True)
    monkeypatch.setattr(Speeding, "_needed", lambda self, step, inputs: 1 / 0)
    together = met(Trials(Smoothed(momentum))).step(1)
    assert together.fused.fast
    assert together.recipe.refusals == ["kernels: division by zero"]
    assert together.recipe.kernels == {2: False}, "which is not tried again"


def test_a_kernel_that_was_not_foreseen_is_compiled_beside_and_not_in_training(monkeypatch):
    class Beside:
        asked, there = [], True
        ask = asked.append

        def ready(self, jobs):
            return self.there

    @contextmanager
    def needed(load):
        yield missing.copy()

    beside, missing = Beside(), ["a kernel"]
    monkeypatch.setattr(speeding, "available", lambda device: True)
    monkeypatch.setattr(speeding, "compiling", lambda: beside)
    monkeypatch.setattr(speeding, "needed", needed)
    monkeypatch.setattr(speeding, "agree_kernels", lambda step, inputs: 1 / 0 if missing else None)
    monkeypatch.setattr(Speeding, "_needed", lambda self, step, inputs: [])
    together = met(Trials(Smoothed(momentum))).step(1)
    assert together.fused.fast
    assert together.fused.speeding.awaits
    assert beside.asked == [["a kernel"]]
    assert not together.recipe.kernels
    missing.clear()
    together.fused.speeding.look()
    together.step(1)
    assert together.recipe.kernels.keys() == {2}
    assert not together.fused.speeding.awaits
    assert not together.recipe.refusals


def test_trials_come_and_go_between_leaps():
    trials = Trials(Drawing(torch.optim.Adam))
    both = []
    for most in (0, 5):
        made = [trials.make(n, {"lr": 0.01 * (n + 1)}) for n in range(4)]
        together = Together().enter(*made[:3]).step(2)
        for go, come in (((), ()), (made[1:2], ()), ((), made[3:])):
            together.leave(*go)
            together.enter(*come)
            together.fused.speeding.meet(list(together.fused.trials))
            together.fused.speeding.expect(100)
            if most:
                together.step(1)
                assert leap(together, 9, most)
            else:
                together.step(10)
        both.append([(together.fused.state(one), together.curve(one)) for one in made if one is not made[1]])
    assert farthest(*both) <= (1e-12, "")


def test_a_leap_ends_with_a_unit_and_before_an_audit(monkeypatch):
    trials = Trials(Drawing(momentum))
    made = [trials.make(n, {"lr": 0.01}) for n in range(2)]
    together = Together().enter(*made).step(6)
    together.fused.speeding.meet(made)
    together.fused.speeding.expect(100)
    together.step(1)
    assert together.fused.leap(100) == 0  # the first two steps by a faster one are audited
    together.step(1)
    assert together.fused.leap(100) == 0
    together.step(1)
    assert made[0].place == 80
    assert together.fused.leap(100) == 0  # the short batch at the end of the unit is of another kind
    together.step(1)
    assert made[0].unit == 2
    assert together.fused.leap(3) == 3
    assert together.fused.leap(100) == 1
    assert made[0].place == 80


def test_metrics_by_a_recording_are_those_without():
    trials = Trials(Drawing(momentum))
    trials.task.eval_batch_size = 6
    both = []
    for recorded in (False, True):
        made = [trials.make(n, {"lr": 0.01 * (n + 1)}) for n in range(3)]
        together = Together().enter(*made).step(4)
        if recorded:
            together.fused.speeding.meet(made)
            together.fused.speeding.expect(100)
        together.step(16)
        assert bool(together.fused.measures._made) is recorded
        assert not together.fused.measures.refused
        both.append([together.curve(one) for one in made])
    assert both[0] == both[1]
    assert len(both[0][0]) == 4


def test_an_epoch_whose_order_is_being_read_keeps_its_place():
    """Leaps longer than an epoch: the orders of two epochs are on the device, and a third has to wait."""
    trials = Trials(Drawing(momentum))
    trials.task.batch_size, trials.task.unit_steps = 48, 40
    both = []
    for most in (0, 30):
        made = [trials.make(n, {"lr": 0.01 * (n + 1)}) for n in range(2)]
        together = Together().enter(*made).step(1)
        together.fused.speeding.meet(made)
        together.fused.speeding.expect(100)
        together.step(15)
        _ = leap(together, 20, most) if most else together.step(20)
        both.append([together.fused.state(one) for one in made])
    assert farthest(*both) <= (1e-12, "")
