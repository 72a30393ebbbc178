"""Kernels are used in a bundle only where they are as right as torch's own operators."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton")
import penstock as ps
from penstock.training.fused import speeding
from penstock.training.fused.agreement import agree_kernels, agree_plain
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.step import Step
from penstock.training.kernels import normalization
from penstock.training.kernels.choice import available, kernels, wanted
from tests.training.together import Together, Trials, as_traced

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Pictures(ps.Task):
    batch_size = 4

    def data(self, config):
        x, y = torch.randn(8, 2, 5, 5), torch.arange(8) % 3
        return (x, y), (x, y)

    def model(self, config):
        body = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2)]
        return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

    def optimizer(self, params, config):
        return torch.optim.SGD(params, lr=config["lr"])

    def loss(self, model, batch, config):
        return F.cross_entropy(model(batch[0]), batch[1])


def bundle():
    """A bundle after a step, and what its next step reads."""
    trials = Trials(Pictures(), device=DEVICE)
    fused = Together().enter(*(trials.make(n, {"lr": 0.1 * n}) for n in range(1, 5))).step().fused
    batch = next(iter(fused.trials[0].data.train.batches(0, 0, 4)))
    return fused, fused.stepping.inputs(fused.recipe.way, 0, 4, batch, True)


def step(fused, task=None):
    return Step(fused.recipe.way, task or Pictures(), fused.stack.flats)


def test_kernels_that_agree_are_let_in_and_nothing_is_changed():
    fused, inputs = bundle()
    before = [value.clone() for value in inputs.leaves()[0] if isinstance(value, torch.Tensor)]
    agree_kernels(step(fused), inputs)
    after = [value for value in inputs.leaves()[0] if isinstance(value, torch.Tensor)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_kernel_that_is_wrong_for_one_trial_is_refused(monkeypatch):
    fused, inputs = bundle()
    right = normalization.normalize

    def wrong(y, *others):
        made = right(y, *others)
        made[2] *= 1.01
        return made

    monkeypatch.setattr(normalization, "normalize", wrong)
    with pytest.raises(
        Unfusable, match=r"the gradients of trial 2 .* off by .* where torch's own operators are off by"
    ):
        agree_kernels(step(fused), inputs)


def test_a_kernel_that_is_wrong_about_what_a_module_keeps_is_refused(monkeypatch):
    fused, inputs = bundle()
    right = normalization.measured

    def wrong(*given):
        numbers = right(*given)
        numbers[1] *= 1.01  # the variance, of which the deviation was made
        return numbers

    monkeypatch.setattr(normalization, "measured", wrong)
    with pytest.raises(Unfusable, match=r"the buffers of trial \d of the bundle are off by"):
        agree_kernels(step(fused), inputs)


def test_a_traced_step_keeps_the_statistics_that_the_plain_one_keeps():
    fused, inputs = bundle()
    with kernels(True):
        traced = as_traced(step(fused), inputs)
        agree_plain(traced.step, traced, inputs)
    ran = [str(node.target) for node in traced._run.graph.nodes]
    assert ran.count("aten._foreach_mul_.Scalar") == 1
    assert ran.count("aten.new_zeros.default") == 1  # between all parameters, and none in the backward of pooling


def test_kernels_are_used_only_where_they_are_wanted_and_never_for_float64():
    x = torch.zeros(2, device=DEVICE)
    assert not wanted(x)
    with kernels(True):
        assert wanted(x)
        assert not wanted(x.double())
        assert wanted(x, 2**31 - 1)
        assert not wanted(x, 2**31)  # a trial's numbers are counted in 32 bits
        with kernels(False):
            assert not wanted(x)
    assert not wanted(x)
    assert not available(torch.device("cpu"))


@pytest.mark.parametrize(("off", "refused"), [(0.25, False), (0.5, True)])
def test_kernels_may_be_off_by_about_as_much_as_torchs_rounding(monkeypatch, off, refused):
    """Where torch's own operators are off by a tenth, as they may be in bfloat16."""
    fused, inputs = bundle()
    given = Step.gradients

    def rounded(step, inputs, full=False):
        losses, grads = given(step, inputs, full=True)
        much = 0.0 if full else off if wanted(losses) else 0.1
        return losses, [rows * (1 + much) for rows in grads]

    monkeypatch.setattr(Step, "gradients", rounded)
    task = Pictures()
    task.precision = "bf16"
    with pytest.raises(Unfusable) if refused else nullcontext():
        agree_kernels(step(fused, task), inputs)


@pytest.mark.parametrize(
    ("with_kernels", "error", "used"),
    [(1.0, None, True), (3.0, None, False), (1.0, torch.OutOfMemoryError("no memory"), False)],
)
def test_they_are_used_where_they_agree_and_a_step_is_faster_with_them(monkeypatch, with_kernels, error, used):
    """The times are made up, for want of a GPU: the decision is not."""
    fused, inputs = bundle()

    def checked(*given):
        if error is not None:
            raise error

    monkeypatch.setattr(speeding, "available", lambda device: True)
    monkeypatch.setattr(speeding, "agree_kernels", checked)

    class Made:
        def __init__(self, *given):
            self.kernels = wanted(torch.zeros(1, device=DEVICE))

        def seconds(self, inputs):
            return with_kernels if self.kernels else 2.0

    monkeypatch.setattr(speeding, "captured", Made)
    assert fused.speeding._faster(step(fused), inputs, None).kernels is used
    assert fused.recipe.refusals == ([] if error is None else ["kernels: no memory"])
