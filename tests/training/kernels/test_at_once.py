"""Small kernels of all layers, launched once in a recorded step, whose bits are those of a plain step."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton")
import penstock as ps
from penstock.training.fused.compiled import CapturedStep
from penstock.training.fused.recording import Pool
from penstock.training.fused.step import Step, Torn, unchanged
from penstock.training.kernels import all_layers, at_once, patches
from penstock.training.kernels.choice import kernels
from tests.training.recorded import record
from tests.training.together import Together, Trials

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN, ALL = ("_spread", "_collect"), ("_spread_all", "_collect_all")


class Layers(nn.Module):
    """A stride, a filter of one place, a frozen layer, a layer used twice and weights in another order."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 2, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(2)
        self.twice = nn.Conv2d(2, 2, 1, bias=False)
        self.frozen = nn.Conv2d(2, 2, 1, bias=False).requires_grad_(False)
        self.turned = nn.Conv2d(3, 2, 1, bias=False)

    def forward(self, x):
        x = self.norm(self.down(x)).relu()
        x = self.frozen(self.twice(self.twice(x)))
        return F.conv2d(x, self.turned.weight.transpose(0, 1)).mean((2, 3))


class Two(nn.Module):
    """Two layers, and whatever is done to the second between them; ``frozen``: the first is not trained."""

    def __init__(self, between=lambda layer, x: 0.0, frozen=False):
        super().__init__()
        self.one, self.other = nn.Conv2d(1, 2, 1, bias=False), nn.Conv2d(2, 2, 1, bias=False)
        self.one.requires_grad_(not frozen)
        self.between = between

    def forward(self, x):
        x = self.one(x)
        more = self.between(self.other, x)
        return self.other(x).mean((2, 3)) + more


class Pictures(ps.Task):
    batch_size = 2

    def __init__(self, *network):
        self.network = network

    def data(self, config):
        x, y = torch.randn(4, 1, 3, 2), torch.arange(4) % 2
        return (x, y), (x, y)

    def model(self, config):
        kind, *given = self.network
        return kind(*given)

    def optimizer(self, params, config):
        return torch.optim.SGD(params, lr=config["lr"], momentum=0.9)

    def loss(self, model, batch, config):
        return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture
def launched(monkeypatch):
    """How often each kernel was launched."""
    counts = Counter()

    class Counted:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            counts[self.name] += 1
            return self.kernel[grid]

    for module, names in ((patches, PLAIN), (all_layers, ALL)):
        for name in names:
            monkeypatch.setattr(module, name, Counted(name, getattr(module, name)))
    return counts


class Bundle:
    """Trials of a network whose next step is taken again and again."""

    def __init__(self, *network):
        self.trials = Trials(Pictures(*network), device=DEVICE)
        self.together = Together()

    def enter(self, *numbers):
        self.together.enter(*(self.trials.make(n, {"lr": 0.1 * n + 0.1}) for n in numbers)).step()
        return self

    def next(self):
        """The step, and its inputs."""
        fused = self.together.fused
        batch = next(iter(fused.trials[0].data.train.batches(0, 0, 2)))
        inputs = fused.stepping.inputs(fused.recipe.way, 0, len(fused.trials), batch, True)
        return Step(fused.recipe.way, self.trials.task, fused.stack.flats), inputs


def taken(step, inputs, launched):
    """Everything that a step makes and writes, and its launches; what it has written is put back."""
    launched.clear()
    with kernels(True), unchanged(inputs.written()):
        made = [step(inputs), *inputs.written()]
        return [tensor.clone() for tensor in made], dict(launched)


def same(step, inputs, launched):
    """The launches of a step's second run, whose bits are those of its first, which is a plain step."""
    first, plain = taken(step, inputs, launched)
    again, launches = taken(step, inputs, launched)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    return plain, launches


def test_a_repeated_step_has_one_launch_for_all_weights_and_one_for_all_gradients(launched):
    """Autograd adds up the gradients of a layer that is used twice, so these two do not wait."""
    step, inputs = Bundle(Layers).enter(0, 1).next()
    plain, again = same(step.repeated(), inputs, launched)
    assert plain == {"_spread": 9, "_collect": 4, "_spread_all": 1, "_collect_all": 1}
    assert again == {"_spread_all": 1, "_collect_all": 1, "_collect": 2}


def halved(layer, x):
    with torch.no_grad():
        layer.weight.mul_(0.5)
    return 0.0


def set_anew(layer, x):
    layer.weight.data = layer.weight * 0.5
    return 0.0


@pytest.mark.parametrize("write", [halved, set_anew])
def test_weights_that_were_written_meanwhile_are_laid_out_anew(launched, write):
    step, inputs = Bundle(Two, write, True).enter(0).next()
    _, again = same(step.repeated(), inputs, launched)
    assert again == {"_spread_all": 1, "_spread": 1, "_collect_all": 1}


def slope(layer, x):
    """A gradient that the loss reads."""
    (found,) = torch.autograd.grad(layer(x).square().mean(), layer.weight, retain_graph=True)
    return found.square().sum()


def test_a_gradient_that_a_loss_reads_does_not_wait(launched):
    step, inputs = Bundle(Two, slope).enter(0).next()
    _, again = same(step.repeated(), inputs, launched)
    assert again["_collect"] >= 1
    assert again["_collect_all"] == 1


def test_gradients_that_are_read_before_they_are_joined_are_an_error(launched):
    """They did wait, as nobody had read them in the first run: a recording would be wrong."""
    step, inputs = Bundle(Two).enter(0).next()
    repeated = step.repeated()
    taken(repeated, inputs, launched)
    step.way.parting.gradients = lambda losses, wanted: [
        grad * 1 for grad in torch.autograd.grad(losses.sum(), list(wanted.values()))
    ]
    with pytest.raises(Torn, match="was read or written before"):
        taken(repeated, inputs, launched)


def test_trials_come_and_go_between_recordings(launched, monkeypatch):
    record(monkeypatch)
    bundle = Bundle(Two)
    for come in ((0,), (1, 2)):
        bundle.together.leave(*bundle.together.fused.trials)
        step, inputs = bundle.enter(*come).next()
        plain, _ = taken(step, inputs, launched)
        with kernels(True):
            fast = CapturedStep(step, inputs, Pool())
        recorded, launches = taken(fast, inputs, launched)
        assert launches == {"_spread_all": 1, "_collect_all": 1}
        assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))


def test_where_there_are_too_many_numbers_each_layer_has_its_own_launches(launched, monkeypatch):
    monkeypatch.setattr(at_once, "ROOM", 0)
    step, inputs = Bundle(Two).enter(0).next()
    plain, again = same(step.repeated(), inputs, launched)
    assert plain == again == {"_spread": 3, "_collect": 2}


def test_the_kernels_of_a_recorded_step_are_foreseen(launched):
    bundle = Bundle(Two).enter(0)
    bundle.together.fused.speeding._needed(*bundle.next())
    assert launched == {"_spread": 3, "_collect": 2, "_spread_all": 1, "_collect_all": 1}
