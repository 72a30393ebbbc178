"""Numbers of a config in a loss, in metrics and in modules: each trial of one bundle has its own."""

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.log.events import Placed
from penstock.training.check import describe
from penstock.training.fused.general import General
from penstock.training.fused.numbers import Notes, Number
from penstock.training.fused.stacked import Unfusable
from penstock.training.unlike import Signatures
from tests.studies import log, studies
from tests.training.fused.test_watched import Plain
from tests.training.together import Together, Trials, farthest

SPACE = {
    "lr": ps.loguniform(0.01, 0.3),
    "s": ps.uniform(0.15, 0.6),
    "t": ps.uniform(0.5, 3.0),
    "k": ps.choice([1, 2]),
    "n": ps.randint(1, 5),
}


class Smooth(Plain):
    def loss(self, model, batch, config):
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=config["s"])


class Likely(Smooth):
    """Targets that are probabilities, and weights of classes."""

    def loss(self, model, batch, config):
        target, weight = F.one_hot(batch[1], 2).double() * 0.8 + 0.1, torch.tensor([1.0, 2.0]).to(batch[0])
        first = F.cross_entropy(model(batch[0]), target, label_smoothing=config["s"], reduction="sum")
        return first + nn.CrossEntropyLoss(weight, label_smoothing=config["s"])(model(batch[0]), batch[1])


class Scale(nn.Module):
    def __init__(self, temperature, gamma):
        super().__init__()
        self.temperature, self.gamma, self.layer = temperature, gamma, nn.Linear(8, 2)

    def forward(self, x):
        return self.layer(x.abs() ** self.gamma) / self.temperature


class Attributes(Smooth):
    """Numbers in modules, the same and derived ones, and in a sum of two losses."""

    def model(self, config):
        last = Scale(config["t"], config["s"] + 1.0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), last).double()

    def loss(self, model, batch, config):
        out = model(batch[0])
        other = F.mse_loss(out, F.one_hot(batch[1], 2).double())
        return config["s"] * F.cross_entropy(out, batch[1]) + (1 - config["s"]) * other


class Powers(nn.Module):
    """Integers of which one enters arithmetic, one is never read, and one is a shape."""

    def __init__(self, power, other, parts=2):
        super().__init__()
        self.power, self.other, self.parts, self.layer = power, other, parts, nn.Linear(8, 2)

    def forward(self, x):
        return self.layer(x.abs().view(len(x), self.parts, -1).flatten(1) ** self.power) / (self.power + 1)


class Integers(Smooth):
    """Numbers of which some trials have the same, and others not."""

    def model(self, config):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Powers(config["n"], config["k"])).double()


class Relabelled(Smooth):
    """An integer meets a tensor of integers, which are targets."""

    def loss(self, model, batch, config):
        return F.cross_entropy(model(batch[0]), (batch[1] * config["n"] + 1) % 2)


class Tiled(Scale):
    """An integer for which nothing but Python's own can stand, beside floats that each trial has for itself."""

    many = 0

    def forward(self, x):
        assert isinstance(self.many, int)
        return super().forward(x) * self.many


class Tiles(Smooth):
    def model(self, config):
        last = Tiled(config["t"], config["s"] + 1.0)
        last.many = 1
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), last).double()


class Clamped(Smooth):
    """Bounds, a shared batch that is scaled, and a function that takes a number of one trial alone."""

    def loss(self, model, batch, config):
        c = config["t"]
        out = torch.clamp(model(batch[0] * config["s"]), -c, c).clamp(min=-2.0, max=c)
        return F.cross_entropy(out, batch[1]) + F.huber_loss(out[:, 0], batch[1].double(), delta=c)


class Focal(Smooth):
    def loss(self, model, batch, config):
        lost = F.log_softmax(model(batch[0]), -1).gather(1, batch[1][:, None])
        return -((1 - lost.exp()) ** config["t"] * lost).mean() * config["n"]


class Agreed(Smooth):
    """A branch that all trials take."""

    def loss(self, model, batch, config):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * config["s"] if config["s"] > 0.1 else loss


class Dropped(Smooth):
    def loss(self, model, batch, config):
        return F.cross_entropy(model(F.dropout(batch[0], config["s"])), batch[1])


class Measured(Smooth):
    def metrics(self, model, batch, config):
        short = config["s"] if len(batch[0]) < 40 else 1.0
        return {"loss": F.cross_entropy(model(batch[0]) / config["t"], batch[1]) * short}


class InPlace(Smooth):
    def loss(self, model, batch, config):
        out = model(batch[0]).mul(2).div_(config["t"]).add(torch.ones(2).to(batch[0]), alpha=config["s"])
        out = out.masked_fill(out > config["t"], config["s"]) + torch.where(out < 0, config["s"], out)
        return F.cross_entropy(torch.lerp(out, out * 2, config["s"]), batch[1]) + config["t"] ** -config["s"]


class Holds(nn.Module):
    """Keeps the whole config, of which it reads a few values."""

    def __init__(self, config):
        super().__init__()
        self.config, self.layer = config, nn.Linear(8, 2)

    def forward(self, x):
        return self.layer(x) * self.config["t"] if self.config.get("how", "scaled") == "scaled" else self.layer(x)


class Held(Smooth):
    def model(self, config):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Holds(config)).double()


class AttributeDict(dict):
    """As Lightning has it."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class HoldsByAttribute(Holds):
    def __init__(self, config):
        super().__init__({})
        self.hparams, self.first = AttributeDict(config), AttributeDict(config)

    def forward(self, x):
        out = self.layer(x) * self.hparams.t + {**self.first}["s"]
        return out if hasattr(self.hparams, "k") and not hasattr(self.hparams, "depth") else out + 1


class Hparams(Smooth):
    def model(self, config):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), HoldsByAttribute(config)).double()


class Branching(HoldsByAttribute):
    def forward(self, x):
        return self.layer(x) * 2 if self.hparams.k == 2 else self.layer(x)


class HparamsBranch(Smooth):
    def model(self, config):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Branching(config)).double()


class Copied(Smooth):
    """Takes its config as a whole, in many ways."""

    def loss(self, model, batch, config):
        out = model(batch[0])
        parts = [config.copy()["s"], {**config}["s"], dict(config)["s"], dict(config.items())["s"], (config | {})["s"]]
        parts += [({} | config)["s"], list(config.values())[1], [config[name] for name in config][1]]
        return sum(F.cross_entropy(out, batch[1], label_smoothing=part) * part for part in parts)


class Encoder(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, rate, batch_first=True)
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.layer(self.first(x.unsqueeze(-1))).mean(1))


class Transformer(Smooth):
    """Learning rate, weight decay, label smoothing and dropout: what people tune of a transformer."""

    def model(self, config):
        return Encoder(config["s"] / 2).double()

    def optimizer(self, params, config):
        return torch.optim.AdamW(params, lr=config["lr"] / 10, weight_decay=config["t"] / 10)


study = studies(Smooth, SPACE, algorithm=ps.Random(budget=3), trials=5, keep=5)


def run(task, sharing):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ps.SoloWarning)
        return study(task(), name=sharing).run(progress=False, sharing=sharing)


def same(task):
    """Whether curves and last states are those of a solo study; gives the signatures of the fused one."""
    alone, together = run(task, "solo"), run(task, "fused")
    for one, other in zip(alone.trials, together.trials, strict=True):
        far, where = farthest([other.curve, other.last_state()], [one.curve, one.last_state()])
        assert far <= 1e-9, f"trial {one.number} is {far:.2g} from its run alone at {where}"
    assert {event.mode for event in log("fused") if isinstance(event, Placed)} == {"fused"}
    return {event.signature for event in log("fused") if getattr(event, "signature", None)}


class Adapts(Smooth):
    """A step inside of the loss, at a rate of the trial's own (MAML)."""

    def loss(self, model, batch, config):
        params = dict(model.named_parameters())
        with torch.enable_grad():
            lost = F.cross_entropy(model(batch[0]), batch[1])
            grads = torch.autograd.grad(lost, list(params.values()), create_graph=True)
        stepped = {name: p - config["s"] * grad for (name, p), grad in zip(params.items(), grads, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, stepped, (batch[0],)), batch[1])


def test_where_a_function_takes_nothing_but_a_plain_number_the_line_is_told():
    class Sampled(Smooth):
        def loss(self, model, batch, config):
            return F.cross_entropy(model(batch[0]), batch[1]) * torch.as_tensor(config["s"])

    def described(number, s):
        return describe(Trials(Sampled()).make(number, {"lr": 0.1, "s": s, "k": 2}), [], train=False, seen=seen)

    seen = Signatures()
    _, (name, clause) = (described(number, s).unlike for number, s in enumerate((0.1, 0.4)))
    assert name == "config['s']"
    line = Sampled.loss.__wrapped__.__code__.co_firstlineno + 1
    assert clause.endswith(f"(a plain number is needed at {__file__}:{line})")


@pytest.mark.parametrize(
    "task",
    [
        Smooth,
        Adapts,
        Likely,
        Attributes,
        Integers,
        Relabelled,
        Tiles,
        Clamped,
        Focal,
        Agreed,
        Dropped,
        Measured,
        InPlace,
        Held,
        Hparams,
        Copied,
        Transformer,
    ],
    ids=lambda task: task.__name__,
)
def test_trials_of_one_bundle_have_numbers_of_their_own(task):
    assert len(same(task)) == 1


class Shaped(Smooth):
    def loss(self, model, batch, config):
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) * config["s"] + out.topk(config["k"], 0).values.mean()


class Parts(Smooth):
    def model(self, config):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Powers(config["n"], 1, 2 * config["k"])).double()


class Branches(Smooth):
    def loss(self, model, batch, config):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * config["s"] if config["k"] == 2 else loss


@pytest.mark.parametrize("task", [Shaped, Parts, Branches, HparamsBranch])
def test_a_number_that_decides_a_shape_or_a_branch_groups_the_trials(task):
    assert len(same(task)) == 2


def test_the_general_way_takes_no_number_of_one_trial_for_all():
    trials = Trials(Smooth())
    configs = [{"lr": 0.1, "s": s} for s in (0.1, 0.4)]
    together = Together(General).enter(*(trials.make(n, config) for n, config in enumerate(configs)))
    with pytest.raises(Unfusable, match=r'config\["s"\] differs from trial to trial'):
        together.step()


def number(*rows):
    return Number("n", rows, Notes())


def test_numbers_compute_as_pythons_do():
    n = number(2.0, 0.5)
    assert (3 - n).rows == [1.0, 2.5]
    assert (2**n).rows == [4.0, 2**0.5]
    assert (-n / 4 + n % 2).rows == [-0.5, 0.375]
    assert ((1 - n) * n).value.moved(0).tolist() == [-2.0, 0.25]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.half, torch.int64, torch.bool])
@pytest.mark.parametrize("rows", [(0.1, 0.7), (3, 5)], ids=str)
@pytest.mark.parametrize("shape", [(), (4,)], ids=str)
def test_a_number_has_as_little_say_in_types_as_pythons(dtype, rows, shape):
    x = (torch.ones(shape) * 3).to(dtype)
    for function in (lambda x, n: x * n, lambda x, n: n + x, lambda x, n: x > n, lambda x, n: x / n):
        made = function(x, number(*rows))
        for row, alone in zip(made.moved(0), (function(x, own) for own in rows), strict=True):
            assert row.dtype == alone.dtype
            assert torch.equal(row, alone)


def test_where_python_needs_one_number_all_trials_must_have_it():
    assert float(number(2.0, 2.0)) == 2.0
    assert number(1, 2) < 3
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(Unfusable) as refused:
        float(number(1.0, 2.0))
    assert str(refused.value) == (
        f"n at {__file__}:{line}: it differs from trial to trial, and a plain number is needed here"
    )
    with pytest.raises(
        Unfusable, match=r"n > 1\.5 at .*: it holds for some trials and not for others: use torch\.where"
    ):
        _ = number(1.0, 2.0) > 1.5
