"""A trial on several devices is the trial on one: random networks, in real processes that exchange gradients."""

import random
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.training.parts import Part
from tests.tasks import Augmented, Blobs
from tests.training.gangs import Gangs
from tests.training.networks import BLOCKS, OPTIMIZERS, Bundle, Network, bundles
from tests.training.together import Alone, Trials

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


def check(gangs, task, config, count, steps=STEPS):
    """The trial is the same on several devices; or why it is not to be there."""
    found = gangs.train(task, 0, config, count, steps)
    if isinstance(found, str):
        return found
    state, curve = found
    trials = Trials(task)
    spread = trials.make(0, config)
    spread.restore(state, inherited=False)
    Alone(trials, 0, config, steps).assert_like(spread, curve, f"{count} devices")
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


# Refusals


class Doubles(Blobs):
    def data(self, config):
        (x, y), (v, w) = super().data(config)
        return (x.double(), y), (v.double(), w)


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


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Contrastive(), "the loss of a batch is .* and the mean over its parts .*: it is no mean over samples"),
        (Weighted(), "it is no mean over samples"),
        (Unused(), "the loss does not use these parameters: spare"),
    ],
)
def test_what_is_never_spread(gangs, task, why):
    assert re.search(why, check(gangs, task, {"lr": 0.1}, 2) or "")
