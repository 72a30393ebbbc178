"""Signatures: who can be one model with whom."""

import collections
import datetime
import decimal
import enum
import functools
import itertools
import logging
import random
import re
import threading
import typing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.training.check import describe
from penstock.training.comparing import compared
from penstock.training.data import DataCache
from penstock.training.loop import Training
from penstock.training.unlike import Signatures
from tests.tasks import Blobs
from tests.training.together import Together, Trials, farthest

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


def signature(task, config=CONFIG, known=None, seen=None):
    data = DataCache(task, 0, CPU).get(config)
    training = Training(task, 0, config, data, seed=0, device=CPU, metric="loss", mode="min")
    return describe(training, [] if known is None else known, train=False, seen=seen)


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
        lambda k: net(nn.Identity()), lambda k: net(Scaled(k)), lambda k: net(Scaled(0.1 * k)),
        lambda k: net(_making(k)),
    ],
)  # fmt: skip
def test_numbers_that_fused_operators_take_per_trial_may_differ(make):
    one, other = pair(make)
    assert one == other is not None


@pytest.mark.parametrize(
    "make",
    [
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
        lambda k: net(_made_here(k)),
        lambda k: net(Scaled(type(_making(k)))),
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


Here, There = (type("Local", (nn.ReLU,), {"by": by}) for by in range(2))  # of one name, and of no module


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


def _made_here(by=1):
    class Inner(nn.ReLU):
        def forward(self, x):
            return super().forward(x) * by

    return Inner()


def _making(rate):
    """A module of a class whose ``__init__`` sees a number of its trial, and whose forward does not."""

    class Base(nn.Dropout):
        def __init__(self):
            super().__init__(0.1 * rate)

    class Inner(Base):
        def __init__(self):
            super().__init__()
            self.p = min(self.p, 0.1 * rate)

    return Inner()


@dataclass
class Settings:
    width: int = 3
    inner: object = None


class Slotted:
    __slots__ = ("__private", "a")

    def __init__(self):
        self.a, self.__private = 1, [2]


class PretrainedConfig:
    """Reads and writes as transformers' own does: by names that stand for others."""

    attribute_map = {"width": "hidden_size"}

    def __init__(self, **given):
        self.hidden_size, self.dtype, self.id2label = 4, torch.float32, {0: "a"}
        vars(self).update(given)

    def __setattr__(self, name, value):
        super().__setattr__(self.attribute_map.get(name, name), value)

    def __getattribute__(self, name):
        return super().__getattribute__(super().__getattribute__("attribute_map").get(name, name))


class AttributeDict(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Kind(enum.Enum):
    ONE = 1


def _cyclic():
    held = Settings(inner=[])
    held.inner += [held, {"again": held}]
    return held


COUNT = itertools.count()
EQUAL = {
    "dataclass": lambda: Settings(inner={"deep": Settings()}),
    "namespace": lambda: SimpleNamespace(a=1, b=SimpleNamespace(c=[1])),
    "pretrained config": PretrainedConfig,
    "hparams": lambda: AttributeDict(lr=0.1, more=AttributeDict(a=1)),
    "slots": Slotted,
    "enum": lambda: [Kind.ONE, {Kind.ONE: 1}],
    "path": lambda: Path("a") / "b",
    "logger": lambda: logging.getLogger("a.b"),
    "partial": lambda: functools.partial(_scaling(2), 3),
    "lambda inside a lambda": lambda: lambda: lambda x: x + 1,
    "local class": lambda: type(_made_here()),
    "object of a local class": _made_here,
    "module that is not registered": lambda: [nn.LeakyReLU(0.3)],
    "method": lambda: nn.LeakyReLU(0.3).forward,
    "method of an object": lambda: Settings().__repr__,
    "defaultdict": lambda: collections.defaultdict(lambda: [], a=1),
    "arrays": lambda: [np.arange(3), np.float32(2), np.array([None, "a"]), torch.arange(3), np.tanh],
    "torch": lambda: [
        torch.float16,
        torch.device("cpu"),
        torch.Size([1]),
        torch.ops.aten.relu,
        torch.relu,
        torch.finfo,
    ],
    "sparse": lambda: torch.eye(3).to_sparse(),
    "scripted function": lambda: torch.jit.script(_doubled),
    "date, decimal, pattern": lambda: [datetime.date(2020, 1, 2), decimal.Decimal("1.5"), re.compile("a+", re.I)],
    "lock": threading.RLock,
    "cycle": _cyclic,
    "counter": lambda: collections.Counter("aab"),
    "namedtuple": lambda: collections.namedtuple("Point", "x y")(1, 2),
    "typing": lambda: [list[int], int | None, typing.Literal["a"]],
}


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (
            lambda: net(Drawn()),
            "1.angles is a tensor of float32 (4,), with other content in one model than in another of the same config: "
            "register it as a buffer or a parameter, or make it from the config alone",
        ),
        (
            lambda: net(Scaled(object())),
            "1.scale is an object, which has no value to compare: "
            "make it inside the forward, or keep it outside of the model",
        ),
        (
            lambda: net(Scaled([1, {"a": random.Random(0)}])),
            "1.scale[1]['a'] is a Random, which has no value to compare: "
            "make it inside the forward, or keep it outside of the model",
        ),
        (
            lambda: net(Scaled(SimpleNamespace(by=next(COUNT)))),
            "1.scale.by is 0 in one model and 1 in another of the same config: make it from the config alone",
        ),
        (
            lambda: net(_made_here(next(COUNT))),
            "module 1.forward.by is 0 in one model and 1 in another of the same config: make it from the config alone",
        ),
    ],
)
def test_what_is_another_in_each_model_or_cannot_be_compared_fuses_with_nobody(make, what, monkeypatch):
    monkeypatch.setitem(globals(), "COUNT", itertools.count())
    described = signature(Built(lambda c: make()))
    assert described.signature is None
    assert described.reason == f"the model's {what}"


class Uncopied:
    def __deepcopy__(self, memo):
        raise TypeError("there is one alone")


def test_what_has_a_value_but_cannot_be_copied_or_run_for_several_trials_is_named():
    assert signature(Built(lambda c: net(Scaled(Uncopied())))).reason == (
        "the model cannot be copied (there is one alone): make what cannot be copied inside the forward"
    )
    assert signature(Built(lambda c: net(torch.jit.script(nn.ReLU())))).reason == (
        "the module 1 is compiled by torch.jit.script or trace, which reads one trial's parameters: leave it as it was "
        "written"
    )


def test_what_torch_does_not_copy_is_shared_by_a_bundle():
    task = Built(lambda c: net(Scaled(torch.jit.script(_doubled)), Scaled(threading.Lock())))
    trials = Trials(task)
    runs = [trials.make(number, {"lr": 0.1}) for number in range(2)]
    together = Together().enter(*runs).step(2)
    together.leave(*runs)
    alone, _ = trials.alone(1, {"lr": 0.1}, 2)
    assert farthest(runs[1].state(), alone.state())[0] < 1e-5


def test_a_parameter_that_is_held_a_second_time_is_named():
    def make(config):
        model = net()
        model.kept = {"first": [model[0].bias]}
        return model

    assert signature(Built(make)).reason == (
        "the model's kept holds the parameter 0.bias a second time, outside of what torch registers: read it by its "
        "own name in the forward, or keep a ParameterList"
    )


def _sgd(**flags):
    return lambda params, config: torch.optim.SGD(params, lr=0.1, **flags)


@pytest.mark.parametrize(
    ("one", "other", "clause"),
    [
        ((lambda c: net(_making(1))), (lambda c: net(_made_here())), "module 1 is Inner, with other content"),
        ((lambda c: net(_making(1))), (lambda c: net(nn.Tanh())), "module 1 is Inner in one trial and Tanh in another"),
        (_sgd(), (lambda p, c: torch.optim.AdamW(p)), "the optimizer is SGD in one trial and AdamW in another"),
        (_sgd(momentum=0.9), _sgd(momentum=0.9, nesterov=True),
         "group 1 of the optimizer['nesterov'] is False in one trial and True in another"),
    ],
)  # fmt: skip
def test_models_and_optimizers_of_two_kinds_are_told_by_their_names(one, other, clause):
    seen = Signatures()
    for make in (one, other):
        of_model = make.__code__.co_argcount == 1
        _, said = signature(Built(make) if of_model else Built(lambda c: net(), make), seen=seen).unlike
    assert said.startswith(clause)


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_what_is_equal_by_value_is_equal_in_every_model(make):
    one, other = pair(lambda k: net(Scaled(make())))
    assert one == other is not None


def test_a_lazy_module_is_described_after_its_first_batch():
    one, other = (signature(Built(lambda c, n=n: nn.Sequential(nn.LazyLinear(n), nn.LazyLinear(2)))) for n in (4, 5))
    assert (one.reason, other.reason) == ("", "")
    assert one.signature != other.signature
    assert one.signature == signature(Built(lambda c: nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2)))).signature


def test_a_lazy_module_that_the_first_batch_does_not_reach_is_named():
    def make(config):
        model = net()
        model.spare = nn.LazyLinear(2)
        model.forward = lambda x: model[1](model[0](x))
        return model

    assert signature(Built(make)).reason == (
        "spare.weight gets its shape in the first forward, which does not reach it: give its shape"
    )


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
        range(config["top"])  # which needs a plain number
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
    assert len({signature(Reads(), config, known).signature for config in both}) == 1, "a number of each trial"


class Soft(nn.Sequential):
    pass


class Unkeyed(nn.Module):
    def forward(self, x):
        return x + torch.rand(2, generator=torch.Generator())


class ByModel(Blobs):
    """Its loss reads a value where the model is of one kind, and draws where it is of another."""

    def model(self, config):
        return {"plain": nn.Sequential, "soft": Soft}.get(config["kind"], nn.Sequential)(
            nn.Linear(6, 2), Unkeyed() if config["kind"] == "random" else nn.Identity()
        )

    def loss(self, model, batch, config):
        return super().loss(model, batch, config) * (float(config["heat"]) if isinstance(model, Soft) else 1.0)


@pytest.mark.parametrize("order", [("plain", "soft", "random"), ("random", "soft", "plain")])
def test_what_a_loss_does_with_one_model_says_nothing_about_another(order):
    known, found = [], {}
    for kind in order:
        found[kind] = [signature(ByModel(), {"lr": 0.1, "kind": kind, "heat": heat}, known) for heat in (1.0, 2.0)]
    one, other = (d.signature for d in found["plain"])
    assert one == other is not None
    one, other = (d.signature for d in found["soft"])
    assert one != other
    assert all("rand with a generator of the task's own" in d.reason for d in found["random"])


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


def test_equal_values_are_compared_as_equal_and_others_not():
    assert compared([1, (2.0, "a"), {"k": None}]) == compared([1, (2.0, "a"), {"k": None}])
    assert len({compared(v) for v in (1, 1.0, True, "1", (1,), [1], {1}, {1: 1}, None)}) == 9
    assert compared(object()) != compared(object())
    unequal = [Settings(), Settings(4), SimpleNamespace(width=3), AttributeDict(a=1), {"a": 1}, Kind.ONE, Path("a")]
    unequal += [PretrainedConfig(), PretrainedConfig(_attn="eager"), AttributeDict(a=2), _scaling(1), _scaling(2)]
    unequal += [_made_here(1), _made_here(2), type(_made_here(1)), torch.eye(2), torch.eye(2).to_sparse(), Slotted()]
    unequal += [collections.OrderedDict(a=1), nn.ReLU(), nn.ReLU(inplace=True), lambda: 1, lambda: 2, lambda: None]
    assert len({compared(v) for v in unequal}) == len(unequal)
    assert compared(float("nan")) == compared(float("nan"))
    assert isinstance(ps.SoloWarning("why"), UserWarning)


class Sparse(nn.Module):
    def __init__(self, *, buffer):
        super().__init__()
        self.layer = nn.Linear(6, 2)
        if buffer:
            self.register_buffer("links", torch.eye(6).to_sparse())
        else:
            self.links = torch.eye(6).to_sparse()

    def forward(self, x):
        return self.layer((self.links @ x.T).T)


def test_a_module_that_keeps_a_sparse_tensor_can_be_studied():
    one, other = (Built(lambda c, buffer=buffer: Sparse(buffer=buffer)) for buffer in (False, True))
    assert signature(one).signature is not None
    assert signature(other).reason == (
        "the buffer links is sparse, and buffers of several trials are stacked: keep it as a plain attribute, which "
        "the trials of a bundle share"
    )
    space, settings = {"lr": ps.uniform(0, 0.1)}, {"metric": "loss", "mode": "min", "algorithm": ps.Random(budget=1)}
    for task in (one, other):
        study = ps.Study(task, space, trials=2, **settings, name=f"s{task is one}")
        assert study.run(progress=False, sharing="solo").best.model() is not None


def test_backward_hooks_extra_state_and_complex_parameters_are_refused_by_name():
    def hooked(config):
        model = net(nn.ReLU())
        model[1].register_full_backward_hook(lambda module, given, came: None)
        return model

    assert signature(Built(hooked)).reason == (
        "the module 1 has a backward hook, which would see the gradients of all trials at once: use a hook of a "
        "parameter, or a torch.autograd.Function in the forward"
    )

    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"count": 1}

        def set_extra_state(self, state):
            pass

    assert signature(Built(lambda config: Counting(6, 2))).reason == (
        "the module Counting saves what get_extra_state gives, which the steps of all trials would share: register a "
        "buffer"
    )

    class Phases(nn.Module):
        def __init__(self):
            super().__init__()
            self.turn, self.last = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64)), nn.Linear(4, 2)

        def forward(self, x):
            return self.last((x.to(torch.complex64) @ self.turn).abs())

    assert signature(Built(lambda config: Phases())).reason == (
        "the parameter turn is complex, and optimizers step real and imaginary parts apart: keep a real parameter, and "
        "use torch.view_as_complex in the forward"
    )


def test_a_difference_of_values_that_trials_keep_is_named_by_where_they_are():
    class Keeps(Blobs):
        def __init__(self):
            self.settings = {"scale": 0.0}

        def model(self, config):
            self.settings["scale"] = config["scale"]
            return net(nn.ReLU())

        def loss(self, model, batch, config):
            return self.settings["scale"] * super().loss(model, batch, config)

    from penstock.training.unlike import Signatures

    task, seen, known = Keeps(), Signatures(), []
    found = [
        describe(Trials(task).make(number, {"lr": 0.1, "scale": scale}), known, train=False, seen=seen).unlike
        for number, scale in enumerate((1.0, 2.0))
    ]
    assert found[1] == ("self.settings.scale", "self.settings.scale is 1.0 in one trial and 2.0 in another")
