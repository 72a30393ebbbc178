"""Signatures: who can be one model with whom."""

import functools
import gc
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.training.check import describe
from penstock.training.data import DataCache
from penstock.training.loop import Training
from penstock.training.signature import compared
from tests.tasks import Blobs

CPU = torch.device("cpu")
CONFIG = {"lr": 0.1}


class Built(Blobs):
    """A model from a function of the config, and whatever else is set on it."""

    def __init__(self, make, optimizer=None, **settings):
        self.make, self.step = make, optimizer
        vars(self).update(settings)

    def model(self, config):
        return self.make(config)

    def optimizer(self, params, config):
        return self.step(list(params), config) if self.step else super().optimizer(params, config)


def signature(task, config=CONFIG, known=None):
    data = DataCache(task, 0, CPU).get(config)
    training = Training(task, 0, config, data, seed=0, device=CPU, metric="loss", mode="min")
    return describe(training, [] if known is None else known, train=False)


def net(*layers):
    return nn.Sequential(nn.Linear(6, 4), *layers, nn.Linear(4, 2))


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * 1.0


def pair(make):
    """The signatures of two models that a function makes from 1 and from 2, anew each time as a task does."""
    made = signature(Built(lambda c: make(1))), signature(Built(lambda c: make(2)))
    assert not any(one.reason for one in made)
    return [one.signature for one in made]


@pytest.mark.parametrize(
    "make",
    [
        lambda k: net(nn.LeakyReLU(0.1 * k)), lambda k: net(nn.Dropout(0.1 * k)), lambda k: net(nn.ELU(k)),
        lambda k: net(nn.BatchNorm1d(4, eps=10.0**-k, momentum=0.1 * k)), lambda k: net(nn.LayerNorm(4, eps=10.0**-k)),
        lambda k: net(nn.Identity()),
    ],
)  # fmt: skip
def test_numbers_that_fused_operators_take_per_trial_may_differ(make):
    one, other = pair(make)
    assert one == other is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda k: net(Scaled(k)),
        lambda k: net(Scaled([1, {"a": k}])),
        lambda k: net(Scaled((lambda: 1, lambda: 2)[k - 1])),
        lambda k: net(Scaled(torch.tensor([1.0, k]))),
        lambda k: net(Scaled((F.relu, F.gelu)[k - 1])),
        lambda k: net(Scaled(functools.partial(F.leaky_relu, negative_slope=k))),
        lambda k: net((nn.ReLU(), nn.Tanh())[k - 1]),
        lambda k: net(nn.Softplus(k)),
        lambda k: net(*[nn.ReLU()] * k),
        lambda k: nn.Sequential(nn.Linear(6, 3 + k), nn.Linear(3 + k, 2)),
        lambda k: net(nn.GroupNorm(2 * k, 4)),
        lambda k: net(nn.BatchNorm1d(4, momentum=(None, 0.1)[k - 1])),
        lambda k: net(nn.BatchNorm1d(4, affine=k == 1)),
        lambda k: net().requires_grad_(k == 1) if k == 1 else _frozen(net()),
        lambda k: net(Scaled(lambda *, by=k: by)),
        lambda k: net(Scaled(_scaling(k))),
        lambda k: net(Scaled(_marked(k))),
        lambda k: net((Scaled, Other)[k - 1](1)),
        lambda k: net((Here, There)[k - 1]()),
        lambda k: net(Calls(k)),
        lambda k: _tied(net(nn.Linear(4, 4)), k),
        lambda k: net(nn.Dropout(0.5, inplace=k == 1)),
    ],
)
def test_whatever_else_a_forward_could_read_must_be_equal(make):
    one, other = pair(make)
    assert one != other


class Other(Scaled):
    pass


def _scaling(k):
    return lambda x: x * k


def _marked(k):
    def function(x):
        return x * function.by

    function.by = k
    return function


Here, There = (type("Local", (nn.ReLU,), {}) for _ in range(2))  # of one name, and of no module


class Calls(nn.Module):
    """Keeps a method of one of its layers."""

    def __init__(self, k):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.call = self.layers[k - 1].forward

    def forward(self, x):
        return self.call(x)


def _tied(model, k):
    if k == 1:
        model[1].bias = model[0].bias
    return model


def _frozen(model):
    model[0].bias.requires_grad_(False)
    return model


def _hooked(model):
    model.register_forward_hook(lambda module, args, out: out)
    return model


class Drawn(nn.Module):
    """A plain tensor that is another in every trial, which one model for all of them would not have."""

    def __init__(self):
        super().__init__()
        self.angles = torch.randn(4)

    def forward(self, x):
        return x * self.angles


def _made_here():
    class Inner(nn.ReLU):
        pass

    return Inner()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: net(Drawn()), "1.angles"),
        (lambda: net(Scaled(object())), "1.scale"),
        (lambda: net(Scaled(nn.LeakyReLU(0.3).forward)), "1.scale"),  # of a module that nothing compares
        (lambda: net(Scaled([1, {"a": object()}])), "1.scale"),
        (lambda: _hooked(net()), "_forward_hooks"),
        (lambda: net(_made_here()), "module 1"),
        (lambda: net(Scaled(random.random())), "1.scale"),
    ],
)
def test_what_is_another_in_each_model_or_cannot_be_compared_fuses_with_nobody(make, what):
    described = signature(Built(lambda c: make()))
    assert described.signature is None
    assert described.reason == f"the model's {what} is another each time that it is made, or cannot be compared"


def test_classes_made_one_after_another_are_never_taken_for_one():
    seen = set()
    for _ in range(5):
        seen.add(compared(type(_made_here())))
        gc.collect()  # the next may lie where this one lay
    assert len(seen) == 5


def test_a_model_that_gets_its_shapes_in_its_first_forward_trains_alone():
    described = signature(Built(lambda c: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))))
    assert described.signature is None
    assert described.reason == "0.weight gets its shape in the first forward"


SGD, ADAM = torch.optim.SGD, torch.optim.Adam


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (lambda p, c: SGD(p, lr=0.1), lambda p, c: SGD(p, lr=0.2, weight_decay=0.1), True),
        (lambda p, c: SGD(p, lr=0.1), lambda p, c: SGD(p, lr=0.1, momentum=0.9), False),
        (lambda p, c: SGD(p, lr=0.1, momentum=0.5), lambda p, c: SGD(p, lr=0.1, momentum=0.9), True),
        (lambda p, c: SGD(p, lr=0.1, momentum=0.9), lambda p, c: SGD(p, lr=0.1, momentum=0.9, nesterov=True), False),
        (lambda p, c: ADAM(p), lambda p, c: ADAM(p, betas=(0.5, 0.9), eps=1e-3), True),
        (lambda p, c: ADAM(p), lambda p, c: ADAM(p, amsgrad=True), False),
        (lambda p, c: ADAM(p), lambda p, c: torch.optim.NAdam(p), False),
        (lambda p, c: ADAM(p), lambda p, c: ADAM([{"params": p[:2]}, {"params": p[2:], "lr": 1.0}]), False),
    ],
)
def test_of_an_optimizer_its_kind_flags_and_groups_must_be_equal(one, other, equal):
    made = [signature(Built(lambda c: net(), optimizer)).signature for optimizer in (one, other)]
    assert (made[0] == made[1]) is equal


@pytest.mark.parametrize(
    "changed",
    [{"precision": "bf16"}, {"clip_grad_norm": 1.0}, {"batch_size": 8}, {"unit_steps": 3}],
    ids=str,
)
def test_settings_of_the_task_are_part_of_it(changed):
    assert signature(Built(lambda c: net())).signature != signature(Built(lambda c: net(), **changed)).signature


class Reads(Blobs):
    def data(self, config):
        config.get("rows")
        return super().data(config)

    def loss(self, model, batch, config):
        loss = super().loss(model, batch, config)
        return loss * config["smooth"] if config.get("how") == "smooth" else loss

    def metrics(self, model, batch, config):
        config["top"]
        return super().metrics(model, batch, config)


BASE = {"lr": 0.1, "smooth": 0.5, "how": "plain", "top": 1, "rows": 3}


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ({"lr": 0.2}, True),
        ({"smooth": 0.6}, True),
        ({"how": "smooth"}, False),
        ({"top": 2}, False),
        ({"rows": 4}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("shared", [True, False])
def test_values_that_loss_metrics_or_data_read_must_be_equal(change, equal, shared):
    known = [] if shared else None
    one = signature(Reads(), BASE, known)
    other = signature(Reads(), {**BASE, **change}, known)
    assert (one.signature == other.signature) is equal
    assert not shared or len(known) == (1 if equal or "rows" in change else 2)
    both = {**BASE, "how": "smooth"}, {**BASE, "how": "smooth", "smooth": 0.6}
    assert len({signature(Reads(), config, known).signature for config in both}) == 2


class Soft(nn.Sequential):
    pass


class ByModel(Blobs):
    """Its loss reads a value where the model is of one kind, and draws where it is of another."""

    def model(self, config):
        return {"plain": nn.Sequential, "soft": Soft}.get(config["kind"], nn.Sequential)(
            nn.Linear(6, 2), nn.RReLU() if config["kind"] == "random" else nn.Identity()
        )

    def loss(self, model, batch, config):
        return super().loss(model, batch, config) * (config["heat"] if isinstance(model, Soft) else 1.0)


@pytest.mark.parametrize("order", [("plain", "soft", "random"), ("random", "soft", "plain")])
def test_what_a_loss_does_with_one_model_says_nothing_about_another(order):
    known, found = [], {}
    for kind in order:
        found[kind] = [signature(ByModel(), {"lr": 0.1, "kind": kind, "heat": heat}, known) for heat in (1.0, 2.0)]
    one, other = (d.signature for d in found["plain"])
    assert one == other is not None
    one, other = (d.signature for d in found["soft"])
    assert one != other
    assert all("rrelu draws from torch's generator" in d.reason for d in found["random"])


def test_it_says_how_much_a_state_takes_and_the_batch_size():
    described = signature(Built(lambda c: net()), {**CONFIG, "batch_size": 8})
    assert described.batch_size == 8
    assert described.bytes > 0


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (Built(lambda c: net(), precision="fp16"), "gradient scale of its own"),
        (Built(lambda c: net(), lambda p, c: torch.optim.LBFGS(p)), "LBFGS needs a closure"),
        (Built(lambda c: net(), lambda p, c: SGD([*p, nn.Parameter(torch.ones(1))], lr=1)), "not the model's"),
        (Built(lambda c: net(), lambda p, c: SGD(p[:2], lr=1), clip_grad_norm=1.0), "clip_grad_norm counts gradients"),
    ],
)
def test_what_can_be_fused_with_nobody_says_why(task, reason, monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args: None)
    described = signature(task)
    assert described.signature is None
    assert reason in described.reason


OTHER = """
from tests.tasks import Blobs
from tests.training.test_signature import signature
print(signature(Blobs()).signature)
"""


def test_another_process_gives_the_same():
    repo = Path(__file__).parents[2]
    told = subprocess.run([sys.executable, "-c", OTHER], capture_output=True, text=True, check=True, cwd=repo)
    assert told.stdout.strip() == signature(Blobs()).signature


def test_equal_values_are_compared_as_equal_and_others_not():
    assert compared([1, (2.0, "a"), {"k": None}]) == compared([1, (2.0, "a"), {"k": None}])
    assert len({compared(v) for v in (1, 1.0, True, "1", (1,), [1], {1}, {1: 1}, None)}) == 9
    assert compared(object()) != compared(object())
    assert compared(float("nan")) == compared(float("nan"))
    assert isinstance(ps.SoloWarning("why"), UserWarning)
