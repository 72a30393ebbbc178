"""A trial on several devices is the trial on one: random networks, in real processes that exchange gradients."""

import random
import re
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.surrogate.settings import Surrogate
from penstock.surrogate.task import narrowed
from penstock.training.spread import gang, meeting
from penstock.training.spread.data_parallel import Distributed, Outcome, difference
from penstock.training.spread.parts import Part
from penstock.training.spread.sharded import Sharded
from tests.surrogate.models import Narrowable
from tests.tasks import Augmented, Blobs, TimeFirst
from tests.training.gangs import HOST, Gangs
from tests.training.networks import BLOCKS, OPTIMIZERS, Bundle, Network, bundles
from tests.training.together import CPU, Alone, Trials

pytestmark = pytest.mark.usefixtures("in_float64")

STEPS = 8
SIZES = [3, 4, 9]  # of 11 samples, so that a last batch has several, and in one case fewer than there are devices
# What may keep a network from being spread: parameters without a gradient, and what looks at a whole batch at once.
REASONS = re.compile("not use these parameters|part of a batch fails|in the buffer|gradient of .* over|no mean over")
WHOLE = {"idle", "frozen", "tracked", "functional_batch_norm"}


@pytest.fixture(scope="module")
def gangs():
    with Gangs(3) as gangs:
        yield gangs


def check(gangs, task, config, count, steps=STEPS, begun=None, kind=Distributed):
    """The trial is the same on several devices, from where it has begun; or why it is not to be there."""
    found = gangs.train(task, 0, config, count, steps, begun, kind)
    if isinstance(found, str):
        return found
    state, curve = found
    trials = Trials(task)
    spread = trials.make(0, config)
    spread.restore(state, inherited=False)
    Alone(trials, 0, config, steps + (begun["step"] if begun else 0)).assert_like(spread, curve, f"{count} devices")
    return None


class Sized(Network):
    def __init__(self, bundle, batch_size):
        super().__init__(bundle)
        self.batch_size = batch_size


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_each_operator(gangs, name):
    pick = random.Random(name).choice
    task = Sized(bundles(pick, name), pick(SIZES))
    refusal = check(gangs, task, {"number": 0}, pick([2, 3]))
    assert refusal is None or (REASONS.search(refusal) and WHOLE & set(task.bundle.blocks)), refusal


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_each_optimizer(gangs, name):
    blocks = ("linear", "batch_norm", "leaky_relu", "dropout")
    bundle = Bundle("vector", blocks, 1, name, 2, 0.5, None, "nll", False, seed=3)
    assert check(gangs, Sized(bundle, 4), {"number": 0}, 2) is None


def test_a_surrogates_learning_rates_go_by_the_names_of_parameters(gangs):
    task = narrowed(Narrowable(), Surrogate(scale=4))
    assert check(gangs, task, {"optimizer": "Adam", "lr": 0.01}, 2) is None


@settings(
    max_examples=15, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)  # fmt: skip
@given(st.data())
def test_random_networks(gangs, data):
    pick = lambda options: data.draw(st.sampled_from(options))  # noqa: E731
    task = Sized(bundles(pick), pick(SIZES))
    refusal = check(gangs, task, {"number": 0}, pick([2, 3]))
    assert refusal is None or (REASONS.search(refusal) and WHOLE & set(task.bundle.blocks)), refusal


@given(st.integers(1, 50), st.integers(1, 9))
def test_parts_are_all_of_a_batch(whole, count):
    parts = [Part.of(whole, rank, count) for rank in range(count)]
    rows = [row for part in parts if part.present for row in range(part.begin, part.end)]
    assert rows == list(range(whole))
    assert sum(part.weight for part in parts) == pytest.approx(1)
    assert max(part.rows for part in parts) - min(part.rows for part in parts if part.present) <= 1
    assert all(part.rows for part in parts), "who has no part computes something all the same"


class Exactly(Augmented):
    """A dataset read in parts, each sample augmented by its place in the stream."""

    def data(self, config):
        train, valid = super().data(config)
        for one in (train, valid):
            one.x = one.x.double()
        return train, valid


def test_a_dataset_is_read_in_parts(gangs):
    assert check(gangs, Exactly(), {"lr": 0.05}, 3, steps=14) is None


class Searching(Exactly):
    def optimizer(self, params, config):
        return torch.optim.LBFGS(params, lr=0.1, max_iter=3)

    def scheduler(self, optimizer, config):
        return None


def test_an_optimizer_that_looks_at_the_loss(gangs):
    assert check(gangs, Searching(), {}, 2) is None


class Doubles(Blobs):
    def data(self, config):
        (x, y), (v, w) = super().data(config)
        return (x.double(), y), (v.double(), w)


class Measured(Doubles):
    """Normalized by each batch of the validation, of which workers have unequally many, and random there."""

    def model(self, config):
        normal = nn.BatchNorm1d(12, track_running_stats=False)
        return nn.Sequential(nn.Linear(6, 12), normal, nn.ReLU(), nn.Linear(12, 2))

    def metrics(self, model, batch, config):
        x, y = batch
        noise = 0.1 * torch.randn(())
        return {"loss": F.cross_entropy(F.dropout(model(x), 0.5), y) + noise, **super().metrics(model, batch, config)}


def test_each_worker_measures_batches_of_its_own(gangs):
    assert check(gangs, Measured(), {"lr": 0.05}, 3) is None


class Sequences(Doubles):
    """Time first, in three steps: as many as a worker has of the 10 rows of a last batch."""

    def model(self, config):
        return TimeFirst()


@pytest.mark.parametrize(("before", "kind"), [(0, Distributed), (5, Distributed), (5, Sharded)])
def test_a_short_batch_whose_length_is_that_of_another_dimension(gangs, before, kind):
    run, _ = Trials(Sequences()).alone(0, {"lr": 0.05}, before)
    assert check(gangs, Sequences(), {"lr": 0.05}, 3, begun=run.state() if before else None, kind=kind) is None


def test_rounding_in_half_precision_is_no_reason_not_to_be_spread():
    """A bias before a BatchNorm has no gradient but rounding, a hundredth of others in bfloat16."""

    def step(bias):
        return Outcome(torch.ones(()), {"weight": torch.ones(4), "bias": torch.full((4,), bias)}, {})

    assert difference(step(0.01), step(-0.01), "bf16") == ""
    assert "gradient of bias" in difference(step(0.01), step(-0.01), "fp32")
    assert "gradient of bias" in difference(step(0.1), step(-0.1), "bf16")


def test_nobody_waits_for_a_first_worker_that_has_gone(monkeypatch):
    with socket.create_server((HOST, 0)) as gone:
        port = gone.getsockname()[1]
    monkeypatch.setattr(meeting, "TCPStore", lambda *_, **__: pytest.fail("it waits for a store that is not there"))
    with pytest.raises(gang.Apart, match="refused"):
        gang.Gang.join(f"{HOST}:{port}", 1, 2, CPU)


# Refusals


class Contrastive(Doubles):
    def loss(self, model, batch, config):
        out = F.normalize(model(batch[0]), dim=-1)
        return F.cross_entropy(out @ out.T, torch.arange(len(out)))


class Weighted(Doubles):
    def loss(self, model, batch, config):
        return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([0.2, 0.8]))


class Unused(Doubles):
    def model(self, config):
        model = super().model(config)
        model.register_parameter("spare", nn.Parameter(torch.ones(2)))
        return model


class Frozen(Doubles):
    """Its first layer trains for a few steps only."""

    def model(self, config):
        return Freezing()


class Freezing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 12), nn.Linear(12, 2)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += self.training
        hidden = self.inner(x).relu()
        return self.outer(hidden if self.steps < 6 else hidden.detach())


class Renormed(Doubles):
    def data(self, config):
        return tuple(((10 * x.abs()).long().clamp(max=49), y) for x, y in super().data(config))

    def model(self, config):
        return nn.Sequential(nn.Embedding(50, 4, max_norm=0.5), nn.Flatten(), nn.Linear(24, 2))


class Late(Doubles):
    def model(self, config):
        return Positions()


class Positions(nn.Linear):
    """Makes a buffer when it is first called."""

    def __init__(self):
        super().__init__(6, 2)

    def forward(self, x):
        if not hasattr(self, "places"):
            self.register_buffer("places", torch.linspace(0, 1, x.shape[1]), persistent=False)
        return super().forward(x + self.places)


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Contrastive(), "the loss of a batch is .* and the mean over its parts .*: it is no mean over samples"),
        (Weighted(), "it is no mean over samples"),
        (Unused(), "the loss does not use these parameters: spare"),
        (Frozen(), "the loss does not always use these parameters: inner.weight, inner.bias"),
        (Renormed(), "the loss changes these parameters itself: 0.weight"),
        (Late(), "the model makes these buffers while it computes: places"),
    ],
)
def test_what_is_never_spread(gangs, task, why):
    assert re.search(why, check(gangs, task, {"lr": 0.1}, 2) or "")


def test_a_metric_is_averaged_over_the_batches_that_have_it():
    parts = [[(0, 4, {"loss": 1.0, "rare": 5.0})], [(1, 2, {"loss": 4.0})]]
    run = SimpleNamespace(gang=SimpleNamespace(gather=lambda rows: parts))
    assert Distributed.averaged(run, parts[0]) == {"loss": 2.0, "rare": 5.0}
