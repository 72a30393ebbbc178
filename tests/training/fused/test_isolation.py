"""Invariant 2: a trial trained with others as one model is the trial trained alone. Random networks of every operator.

Each trial is trained alone, and again with other roundings where the two differ: that is the rounding control.
"""

import random
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.training.check import describe
from penstock.training.fused.general import General
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.ways import Native
from tests.training.networks import BLOCKS, OPTIMIZERS, Bundle, Network, bundles
from tests.training.together import Alone, Together, Trials

pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # torch.vmap says where it is slow
]
STEPS = 13


# What may keep the general way from a network: an operator that torch.vmap has no rule for, or a number that differs.
REASONS = re.compile(
    r"^(general: )?(\S+ differs from trial to trial|the loss at \S+: torch.vmap has no rule for aten::\w+)"
)


def check(bundle):
    trials = Trials(Network(bundle))
    configs = [{"number": number} for number in range(bundle.trials)]
    made = [trials.make(number, config) for number, config in enumerate(configs)]
    assert len({describe(one, [], train=False).signature for one in made}) == 1, "what is to be one bundle is not"
    alone = [Alone(trials, number, config, STEPS) for number, config in enumerate(configs)]
    for way in (Native, General):
        ours = [trials.make(number, config) for number, config in enumerate(configs)]
        together = Together(way).enter(*ours)
        if refusal := refused(together):
            assert way is General, f"the native way must take every network here: {refusal}"
            assert REASONS.search(refusal), refusal
            continue
        assert together.recipe.alone is None, f"evaluation was not fused: {together.recipe.alone}"
        together.leave(*ours)
        for one, expected in zip(ours, alone, strict=True):
            expected.assert_like(one, together.curve(one), way.name)


def refused(together):
    try:
        together.step(STEPS)
    except Unfusable as error:
        return str(error)


def drawn(name):
    """The bundle in which a block is tried."""
    return bundles(random.Random(name).choice, name)


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_each_operator_in_company(name):
    check(drawn(name))


# Those that blocks are tried with in two groups of parameters alone; the others are tried with in one.
IN_ONE_GROUP = ("adadelta", "adamw", "amsgrad", "nadam")


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_each_optimizer_in_company(name):
    blocks = ("linear", "idle", "batch_norm", "leaky_relu", "frozen", "dropout")
    groups = 1 if name in IN_ONE_GROUP else 2
    clip = 0.5 if groups == 1 else None
    check(Bundle("vector", blocks, 3, name, groups, clip, None, "nll", False, seed=groups))


def test_each_optimizer_is_tried_with_one_group_of_parameters_and_with_two():
    tried = {(bundle.optimizer, bundle.groups) for bundle in map(drawn, BLOCKS)}
    tried |= {(name, 1 if name in IN_ONE_GROUP else 2) for name in OPTIMIZERS}
    assert tried == {(name, groups) for name in OPTIMIZERS for groups in (1, 2)}


@settings(
    max_examples=8, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)  # fmt: skip
@given(st.data())
def test_random_networks_in_company(data):
    bundle = bundles(lambda options: data.draw(st.sampled_from(options)))
    check(bundle)
