"""A trial whose devices each hold a share of it is the trial on one: real processes that gather and scatter."""

import random

import pytest
import torch

from penstock.training.sharded import Sharded
from tests.training.gangs import Gangs
from tests.training.networks import BLOCKS, OPTIMIZERS, Bundle, bundles
from tests.training.test_distributed import REASONS, SIZES, STEPS, WHOLE, Sized
from tests.training.together import Alone, Trials


@pytest.fixture(scope="module")
def gangs():
    with Gangs(3) as gangs:
        yield gangs


@pytest.fixture(scope="module", autouse=True)
def _in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def check(gangs, task, config, count, steps=STEPS):
    found = gangs.train(task, 0, config, count, steps, kind=Sharded)
    if isinstance(found, str):
        return found
    state, curve = found
    trials = Trials(task)
    spread = trials.make(0, config)
    spread.restore(state, inherited=False)
    Alone(trials, 0, config, steps).assert_like(spread, curve, f"{count} devices")
    return None


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_each_operator(gangs, name):
    pick = random.Random(name).choice
    task = Sized(bundles(pick, name), pick(SIZES))
    refusal = check(gangs, task, {"number": 0}, pick([2, 3]))
    print(name, refusal)
    assert refusal is None or (REASONS.search(refusal) and WHOLE & set(task.bundle.blocks)), refusal


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_each_optimizer(gangs, name):
    blocks = ("linear", "batch_norm", "leaky_relu", "dropout")
    bundle = Bundle("vector", blocks, 1, name, 2, 0.5, None, "nll", False, seed=3)
    assert check(gangs, Sized(bundle, 4), {"number": 0}, 2) is None
