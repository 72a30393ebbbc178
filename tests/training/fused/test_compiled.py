"""Which inputs a step that was made once may be given: nothing that changed since is read from when it was made."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.training.fused import speeding
from penstock.training.fused.agreement import agree_plain
from penstock.training.fused.batches import full
from penstock.training.fused.compiled import FastStep
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.ways import Native
from tests.tasks import Blobs
from tests.training.together import Instead, Together, Trials, as_traced


class Plain(FastStep):
    """As plain as can be: it stands for a compiled or a captured one."""

    def __call__(self, inputs):
        return self._train(*self._tensors(inputs))


class Dropping(Blobs):
    def model(self, config):
        first, second = (nn.Dropout(rate) for rate in config["rates"])
        return nn.Sequential(nn.Linear(6, 8), first, nn.ReLU(), second, nn.Linear(8, 2))


def made(fused, kind=Plain):
    """A step of a bundle, and what it was made for."""
    fused._arrange()
    trial = fused.trials[0]
    batch = next(iter(trial.data.train.batches(trial.epoch, trial.place, trial.batch_size)))
    way = fused.recipe.way
    inputs = fused.stepping.inputs(way, 0, len(fused.trials), batch, True)
    return kind(fused.stepping.step_by(way), inputs), inputs


def test_a_rate_that_differs_takes_no_other_rates_place():
    """One trial goes and another comes; before, the first rate differed, and now the second."""
    trials = Trials(Dropping())
    rates = ((0.5, 0.5), (0.1, 0.5), (0.5, 0.1))
    one, other, third = (trials.make(n, {"lr": 0.1, "rates": pair}) for n, pair in enumerate(rates))
    together = Together().enter(one, other).step()
    step, inputs = made(together.fused)
    assert step.takes(inputs)
    together.leave(other)
    together.enter(third)
    assert not step.takes(made(together.fused)[1])


def test_a_step_with_rates_that_differ_is_traced_as_it_is():
    trials = Trials(Dropping())
    rates = ((0.5, 0.5), (0.1, 0.5))
    fused = Together().enter(*(trials.make(n, {"lr": 0.1, "rates": pair}) for n, pair in enumerate(rates))).step().fused
    step, inputs = made(fused, as_traced)
    agree_plain(step.step, step, inputs)


class Smooth(Blobs):
    """A number in a function of elements, and one in a function that takes one trial's number."""

    def __init__(self, *, plainly):
        self.plainly = plainly

    def loss(self, model, batch, config):
        out = model(batch[0])
        lost = F.cross_entropy(out, batch[1], label_smoothing=config["s"]) / config["s"]
        return lost + F.huber_loss(out[:, 0], out[:, 1], delta=config["s"]) if self.plainly else lost


@pytest.mark.parametrize("plainly", [False, True])
def test_numbers_of_trials_are_inputs_of_a_traced_step_unless_it_took_them_as_pythons(plainly):
    trials = Trials(Smooth(plainly=plainly))
    one, other, third = (trials.make(n, {"lr": 0.1, "s": s}) for n, s in enumerate((0.1, 0.4, 0.7)))
    together = Together(Native).enter(one, other).step()
    step, inputs = made(together.fused, as_traced)
    agree_plain(step.step, step, inputs)
    together.leave(other)
    together.enter(third)
    inputs = made(together.fused)[1]
    assert step.takes(inputs) is not plainly
    if not plainly:
        agree_plain(step.step, step, inputs)


class AtLeast(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("least", torch.full((8,), -torch.inf))

    def forward(self, x):
        return torch.maximum(x, self.least)


class Normal(Blobs):
    def model(self, config):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), AtLeast(), nn.ReLU(), nn.Linear(8, 2))

    def optimizer(self, params, config):
        return torch.optim.SGD(params, lr=config["lr"], momentum=0.9)


def shrunk(inputs, losses):
    inputs.rows[0][1] *= 0.99


def unmoved(inputs, losses):
    next(iter(inputs.state[0].values())).zero_()


def unseen(inputs, losses):
    inputs.buffers["1.running_mean"].zero_()


def uncounted(inputs, losses):
    inputs.buffers["1.num_batches_tracked"] -= 1


def doubled(inputs, losses):
    losses[:2] *= 2


@pytest.mark.parametrize("diverged", [False, True])
@pytest.mark.parametrize("spoil", [None, shrunk, unmoved, unseen, uncounted, doubled])
def test_a_step_that_does_anything_else_than_the_plain_one_is_refused(spoil, diverged):
    class Spoilt(Plain):
        def __call__(self, inputs):
            losses = super().__call__(inputs)
            if spoil is not None:
                spoil(inputs, losses)
            return losses

    trials = Trials(Normal())
    fused = Together().enter(*(trials.make(n, {"lr": 0.1}) for n in range(3))).step().fused
    step, inputs = made(fused, Spoilt)
    if diverged:
        inputs.rows[0][2] = torch.nan
    if spoil is None:
        agree_plain(step.step, step, inputs)
    else:
        with pytest.raises(Unfusable, match="the compiled step differs from the plain one by"):
            agree_plain(step.step, step, inputs)


def test_a_step_is_made_while_the_trials_device_is_the_current_one(monkeypatch):
    """A graph that is recorded on another device is empty, and a bundle that replays it learns nothing."""
    current, seen = [], []

    @contextmanager
    def device_of(tensor):
        current.append(tensor.device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    Instead(monkeypatch)
    monkeypatch.setattr(speeding, "CompiledStep", lambda *given: seen.extend(current) or Plain(*given[:2]))
    trials = Trials(Blobs())
    together = Together().enter(*(trials.make(n, {"lr": 0.1}) for n in range(2))).step()
    together.fused.speeding.wanted = "compiled"
    together.step()
    assert seen == [torch.device("cpu")]
    assert not current


def test_nothing_is_captured_of_trials_on_a_cpu_whatever_other_devices_there_are(monkeypatch):
    monkeypatch.setattr(speeding, "captured", None)
    trials = Trials(Blobs())
    together = Together().enter(*(trials.make(n, {"lr": 0.1}) for n in range(2))).step()
    together.fused.speeding.wanted = "captured"
    together.step()
    assert not together.recipe.refusals
    assert together.recipe.capturable


@pytest.mark.parametrize(("value", "taken"), [(3, True), (4, False), (torch.zeros(1), False), ([3], False)])
def test_a_number_that_a_batch_holds_beside_its_tensors_was_read_once(value, taken):
    trials = Trials(Blobs())
    fused = Together().enter(*(trials.make(n, {"lr": 0.1}) for n in range(2))).step().fused
    step, inputs = made(fused)
    inputs.batch = (*inputs.batch, 3)
    step = Plain(step.step, inputs)
    inputs.batch = (*inputs.batch[:-1], value)
    assert step.takes(inputs) is taken


@pytest.mark.parametrize(
    ("shape", "shared", "whole"),
    [((16, 6), True, True), ((10, 16), True, False), ((2, 16, 6), False, True), ((2, 10, 16), False, False)],
)
def test_a_short_batch_of_as_many_features_as_a_full_one_has_rows_is_a_short_one(shape, shared, whole):
    assert full((torch.zeros(shape),), shared, 16) is whole


class Alternating(Blobs):
    """Its optimizer has no form for many trials."""

    def optimizer(self, params, config):
        return torch.optim.Adamax(params, lr=config["lr"])


def test_no_faster_step_is_made_where_the_trials_optimizers_step_one_after_another():
    trials = Trials(Alternating())
    together = Together().enter(*(trials.make(n, {"lr": 0.1}) for n in range(2))).step()
    together.fused.speeding.wanted = "compiled"
    together.step()
    assert together.recipe.refusals == ["compiled: the trials' optimizers step one after another"]
    assert not together.recipe.compilable


class WithGraph(torch.optim.Optimizer):
    """Computes with autograd in its own step, as an optimizer of the user's may."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                (slope,) = torch.autograd.grad((p * p.grad).sum(), p)
                p.data.sub_(slope, alpha=group["lr"])


class OwnOptimizer(Blobs):
    def optimizer(self, params, config):
        return WithGraph(params, config["lr"])


def test_a_trials_own_optimizer_may_differentiate_in_its_step_as_it_may_alone():
    trials = Trials(OwnOptimizer())
    ours = [trials.make(number, {"lr": 0.1}) for number in range(2)]
    together = Together().enter(*ours).step(3)
    alone, _ = trials.alone(1, {"lr": 0.1}, 3)
    theirs = alone.model.state_dict()
    for name, value in together.fused.state(ours[1])["model"].items():
        assert torch.allclose(value.double(), theirs[name].double(), atol=1e-6), name
