"""A trial whose devices each hold a share of it is the trial on one: real processes that gather and scatter."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.training.spread.sharded import Sharded
from penstock.training.spread.shares import groups
from tests.training.gangs import Gangs
from tests.training.networks import Bundle
from tests.training.spread.test_data_parallel import Contrastive, Doubles, Sized
from tests.training.together import Alone, Trials, go_on

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture(scope="module")
def gangs():
    with Gangs(3) as gangs:
        yield gangs


class Tied(ps.Task):
    """A small transformer whose head is its table of vectors, with dropout, clipping and a schedule a step."""

    batch_size, eval_batch_size, clip_grad_norm = 5, 2, 0.5

    def data(self, config):
        generator = torch.Generator().manual_seed(5)
        rows = torch.randint(7, (16, 4), generator=generator)
        return (rows[:13],), (rows[13:],)

    def model(self, config):
        return Language()

    def optimizer(self, params, config):
        return torch.optim.AdamW(params, lr=0.01)

    def scheduler(self, optimizer, config):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, 60), "step"

    def loss(self, model, batch, config):
        (rows,) = batch
        return F.cross_entropy(model(rows).flatten(0, 1), rows.roll(-1, 1).flatten())


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(6, 2, 8, 0.2, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, rows):
        x = self.table(rows)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Viewed(nn.Linear):
    """Gives a view, which is then changed in place."""

    def forward(self, x):
        return super().forward(x).view(len(x), -1)


class InPlace(Doubles):
    def model(self, config):
        return nn.Sequential(nn.Linear(6, 9), Viewed(9, 5), nn.ReLU(inplace=True), Viewed(5, 2))


def sized(blocks, optimizer, batch_size, input="vector", groups=1):
    return Sized(Bundle(input, blocks, 1, optimizer, groups, 0.5, 4, "nll", False, seed=3), batch_size)


TASKS = {
    "dropout, Adam in two groups": sized(("linear", "leaky_relu", "dropout", "linear"), "adam", 4, groups=2),
    "BatchNorm, SGD with momentum": sized(("conv2d", "batch_norm2d", "pool2d"), "momentum", 4, "image"),
    "a transformer with tied weights, AdamW": Tied(),
    "views that are changed in place": InPlace(),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_trial_that_changes_its_number_of_shares_is_the_trial_on_one(gangs, name):
    """On three devices, two and one; some batches, and the validation data, have fewer parts than there are devices."""
    task, config, curve, state = TASKS[name], {"number": 0, "lr": 0.1}, [], None
    for count, steps in ((3, 5), (2, 3), (2, 3)):
        state, more = gangs.train(task, 0, config, count, steps, state, Sharded)
        curve += more
        gangs.processes[:2] = reversed(gangs.processes[:2])  # the first one is the second then
    trials = Trials(task)
    last = trials.make(0, config)
    last.restore(state, inherited=False)
    curve += go_on(last, 4)
    Alone(trials, 0, config, 15).assert_like(last, curve, name)


def test_each_device_has_its_share_of_the_parameters_and_of_the_optimizers_state(gangs):
    task = sized(("linear", "linear"), "adam", 4)
    whole = sum(p.numel() for p in task.model({"number": 0}).parameters())
    gangs.train(task, 0, {"number": 0}, 2, 3, kind=Sharded)
    assert sum(parameters for parameters, _ in gangs.held) == whole
    assert sum(state for _, state in gangs.held) == 2 * whole
    for parameters, state in gangs.held:
        assert abs(parameters - whole / 2) < 0.2 * whole
        assert state == 2 * parameters


def test_parameters_are_gathered_by_the_members_of_lists_but_never_apart_from_whom_they_are_tied_to():
    model = Language()
    assert groups(model) == [*model.layers]
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ModuleDict({"a": nn.Linear(2, 2)}))
    assert groups(nested) == [nested[0][0], nested[1]["a"]]
    nested[0][0].weight = nested[1]["a"].weight
    assert groups(nested) == []


# Refusals


class Optimized(Doubles):
    def __init__(self, kind, **settings):
        self.kind, self.settings = kind, settings

    def optimizer(self, params, config):
        return self.kind([p for p in params if p.ndim in self.settings.get("ndims", (1, 2))], lr=0.01)

    def scheduler(self, optimizer, config):
        return None


class ByRows(torch.optim.SGD):
    """Divides each step by the rows that it sees."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                own = p.to_local() if hasattr(p, "to_local") else p.data
                grad = p.grad.to_local() if hasattr(p, "to_local") else p.grad
                own.sub_(grad, alpha=group["lr"] / max(1, len(own)))


class Elsewhere(torch.optim.SGD):
    """Steps parameters that it has noted itself."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.noted = self.param_groups[0]["params"]

    def step(self, closure=None):
        for p in self.noted:
            if p.grad is not None:
                p.data.sub_(p.grad, alpha=0.01)


class Scalar(Doubles):
    def model(self, config):
        model = super().model(config)
        model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
        return model


class Penalty(Doubles):
    def loss(self, model, batch, config):
        return super().loss(model, batch, config) + 0.1 * sum(p.square().sum() for p in model.parameters())


class Renormed(Doubles):
    def data(self, config):
        return tuple(((10 * x.abs()).long().clamp(max=49), y) for x, y in super().data(config))

    def model(self, config):
        return nn.Sequential(nn.Embedding(50, 4, max_norm=0.5), nn.Flatten(), nn.Linear(24, 2))


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Contrastive(), "the loss of a batch is .* and the mean over its parts .*: it is no mean over samples"),
        (Optimized(torch.optim.LBFGS), "LBFGS needs all parameters at once: use another optimizer"),
        (Optimized(ByRows), "the steps of ByRows with shares of tensors are not those with whole ones: use another"),
        (Optimized(Elsewhere), "Elsewhere does not look at its param_groups"),
        (Scalar(), "torch cannot share out the model: .*scalar param"),
        (Penalty(), "the loss computes with parameters outside of the modules that they belong to"),
        (Renormed(), "the loss changes these parameters itself: 0.weight"),
    ],
)
def test_what_is_never_shared_out(gangs, task, why):
    assert re.search(why, gangs.train(task, 0, {"lr": 0.1}, 2, 3, kind=Sharded))
