"""Normalizations of all trials at once, each against trials alone: their buffers, their own eps and momentum."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from penstock.training.fused.stacked import Stacked, Unfusable
from tests.training.alone import Own, check, own, shared
from tests.training.isolated import isolated


class Number(float):
    """A number of which every trial has its own, as it reaches a rule."""


def number(value):
    if not isinstance(value, Stacked):
        return float(torch.as_tensor(value).detach())
    made = Number(torch.nan)
    made.value = value.detach()
    return made


EPS, MOMENTUM = (Own(torch.tensor(values, dtype=torch.float64)) for values in [(1e-5, 0.1, 2.0), (0.1, 0.9, 0.5)])
NUMBERS = [dict(), dict(momentum=MOMENTUM), dict(eps=EPS), dict(momentum=MOMENTUM, eps=EPS)]
SIZES = [(5, 4), (3, 4, 2), (3, 4, 2, 3), (2, 4, 2, 1, 3)]


@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_without_running_statistics(norm, size):
    if norm is F.instance_norm and len(size) == 2:
        size = (3, 4, 5)
    for weight, bias in [(own, own), (own, shared), (own, None), (None, own), (shared, own)]:
        values = [make and make(4, seed=n) for n, make in enumerate((weight, bias))]
        for x in (own(*size), shared(*size)):
            check(lambda x, w, b: norm(x, None, None, w, b, True, eps=1e-3), x, *values)
    check(lambda x: norm(x, None, None, None, None, True), own(*size), layouts=5)
    check(lambda x, w, b: norm(x, None, None, w, b, True), own(*size), shared(4), shared(4))


def steps(norm, training):
    """Three calls in a row that update the same statistics; they come out beside the result."""

    def run(x, mean, var, weight, bias, momentum=0.1, eps=1e-5):
        mean, var = mean.detach().clone(), (var.detach() * 0.1 + 1).clone()
        for n in range(3):
            x = norm(x * (n + 1) + n, mean, var, weight, bias, training, number(momentum), number(eps))
        return x, mean, var

    return run


@pytest.mark.parametrize("own_numbers", NUMBERS, ids=list)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
def test_running_statistics_after_several_steps(norm, training, own_numbers):
    run = steps(norm, training)
    for size in [(5, 4), (3, 4, 2, 3)] if norm is F.batch_norm else [(3, 4, 5)]:
        check(run, own(*size), own(4, seed=1), own(4, seed=2), own(4, seed=3), own(4, seed=4), **own_numbers)
        check(run, own(*size), own(4, seed=1), own(4, seed=2), None, None, **own_numbers)
        check(run, shared(*size), own(4, seed=1), own(4, seed=2), own(4, seed=3), shared(4), **own_numbers)


@pytest.mark.parametrize("own_numbers", [dict(), dict(eps=EPS), dict(eps=EPS, momentum=MOMENTUM)], ids=list)
def test_shared_statistics_may_be_read_and_not_written(own_numbers):
    x, mean, var, weight = own(3, 4, 2), shared(4), shared(4).square() + 1, own(4)

    def run(x, w, momentum=0.1, eps=1e-5, training=False):
        return F.batch_norm(x, mean, var, w, None, training, number(momentum), number(eps))

    check(run, x, weight, **own_numbers)
    before = mean.clone()
    with pytest.raises(
        Unfusable, match=r"batch_norm at .*test_normalization.py:\d+: .*statistics that the trials share"
    ):
        run(Stacked(x.tensor), Stacked(weight.tensor), training=True)
    assert torch.equal(mean, before)


def test_what_is_written_lies_where_the_statistics_do():
    x, double = Stacked(own(5, 4).tensor), dict(dtype=torch.float64)
    for rows in (torch.zeros(3, 4, **double), torch.zeros(3, 9, **double)[:, 2:6], torch.zeros(4, 3, **double).T):
        F.batch_norm(x, Stacked(rows), Stacked(torch.ones(3, 4, **double)), training=True, momentum=1.0)
        torch.testing.assert_close(rows, x.whole.mean(1))


def test_the_functions_of_torch_itself():
    def run(norm, x, mean, var, weight, bias):
        mean, var = mean.detach().clone(), (var.detach() * 0.1 + 1).clone()
        return norm(x, weight, bias, mean, var, True, 0.2, 1e-3, False), mean, var

    args = own(3, 4, 2), own(4, seed=1), own(4, seed=2), own(4, seed=3), own(4, seed=4)
    check(lambda *args: run(torch.batch_norm, *args), *args)
    check(lambda *args: run(torch.instance_norm, *args), *args)
    check(lambda x, w, b: torch.layer_norm(x, (4, 2), w, b, 1e-3, False), args[0], own(4, 2), own(4, 2, seed=1))
    check(lambda x, w, b: torch.group_norm(x, 2, w, b, 1e-3, False), args[0], own(4), own(4, seed=1))
    check(lambda x, w: torch.rms_norm(input=x, normalized_shape=(2,), weight=w, eps=1e-3), args[0], own(2))


AFFINE = [(own, own), (own, None), (None, own), (own, shared), (shared, own), (shared, shared), (None, None)]


@pytest.mark.parametrize(("weight", "bias"), AFFINE)
@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3)], ids=str)
def test_layer_norm(shape, weight, bias):
    weight, bias = (make and make(*shape, seed=n) for n, make in enumerate((weight, bias)))
    norm = lambda x, w, b, eps=1e-5: F.layer_norm(x, shape, w, b, number(eps))  # noqa: E731
    check(norm, own(2, 4, 3), weight, bias, layouts=4)
    check(norm, own(2, 4, 3), weight, bias, eps=EPS, layouts=4)
    if isinstance(weight, Own) or isinstance(bias, Own):
        check(norm, shared(2, 4, 3), weight, bias)
        check(norm, shared(2, 4, 3), weight, bias, eps=EPS)


@pytest.mark.parametrize("weight", [own, shared, None])
@pytest.mark.parametrize("shape", [(3,), (4, 3)], ids=str)
def test_rms_norm(shape, weight):
    weight = weight and weight(*shape)
    norm = lambda x, w, eps=None: F.rms_norm(x, shape, w, eps if eps is None else number(eps))  # noqa: E731
    check(norm, own(2, 4, 3), weight, layouts=4)
    check(norm, own(2, 4, 3), weight, eps=EPS, layouts=4)
    if isinstance(weight, Own):
        check(norm, shared(2, 4, 3), weight)
        check(norm, shared(2, 4, 3), weight, eps=EPS)


@pytest.mark.parametrize(
    ("weight", "bias"), [pair for pair in AFFINE if pair != (None, own)]
)  # torch itself fails at it
@pytest.mark.parametrize("size", [(3, 4), (3, 4, 2), (3, 4, 2, 2), (2, 4, 1, 2, 3)], ids=str)
def test_group_norm(size, weight, bias):
    weight, bias = (make and make(4, seed=n) for n, make in enumerate((weight, bias)))
    for groups in (1, 2, 4) if len(size) > 2 else (1, 2):
        norm = lambda x, w, b, eps=1e-5, groups=groups: F.group_norm(x, groups, w, b, number(eps))  # noqa: E731
        check(norm, own(*size), weight, bias, layouts=3)
        check(norm, own(*size), weight, bias, eps=EPS)
        if isinstance(weight, Own) or isinstance(bias, Own):
            check(norm, shared(*size), weight, bias)
            check(norm, shared(*size), weight, bias, eps=EPS)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("module", "size"), [
    (nn.BatchNorm1d(4), (5, 4)), (nn.BatchNorm1d(4, affine=False), (3, 4, 2)),
    (nn.BatchNorm2d(4, momentum=0.3), (3, 4, 2, 2)),
    (nn.BatchNorm2d(4, track_running_stats=False), (3, 4, 2, 2)), (nn.BatchNorm3d(4, eps=0.1), (2, 4, 2, 1, 2)),
    (nn.InstanceNorm1d(4), (3, 4, 5)), (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (3, 4, 2, 2)),
    (nn.InstanceNorm2d(4, affine=True), (4, 2, 3)), (nn.LayerNorm(3), (2, 4, 3)),
    (nn.LayerNorm((4, 3), bias=False), (2, 4, 3)),
    (nn.LayerNorm(3, elementwise_affine=False), (2, 3)), (nn.GroupNorm(2, 4), (3, 4, 2)), (nn.RMSNorm(3), (2, 4, 3)),
], ids=str)  # fmt: skip
def test_modules(module, size, training):
    floating = {name: value for name, value in module.state_dict().items() if value.is_floating_point()}
    module = module.double().train(training)

    def run(x, *values):
        buffers = {name: value.detach().clone() for name, value in module.named_buffers()}
        mine = buffers | dict(zip(floating, values, strict=True))
        mine |= {name: mine[name].detach().square() for name in buffers}
        if "num_batches_tracked" in buffers:
            mine["num_batches_tracked"] = buffers["num_batches_tracked"] + (x.detach().flatten()[0] * 0).long()
        outputs = [functional_call(module, mine, (x + n,)) for n in range(3)]
        return outputs, [mine[name] for name in buffers]

    values = [own(*value.shape, seed=n) for n, value in enumerate(floating.values())]
    check(run, own(*size), *values)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("numbers", [dict(), dict(eps=EPS)], ids=list)
@pytest.mark.parametrize("norm", [
    lambda x, w, b, eps=1e-5: F.batch_norm(x, None, None, w, b, True, 0.1, number(eps)),
    lambda x, w, b, eps=1e-5: steps(F.batch_norm, True)(x, w * 0, b * 0, w, b, Stacked(MOMENTUM.tensor), eps),
    lambda x, w, b, eps=1e-5: F.batch_norm(x, w.detach(), b.detach().square(), w, b, False, 0.1, number(eps)),
    lambda x, w, b, eps=1e-5: F.instance_norm(x, None, None, w, b, eps=number(eps)),
    lambda x, w, b, eps=1e-5: F.layer_norm(x, (4,), w, b, number(eps)),
    lambda x, w, b, eps=1e-5: F.rms_norm(x, (4,), w, number(eps)) + b,
    lambda x, w, b, eps=1e-5: F.group_norm(x, 2, w, b, number(eps)),
])  # fmt: skip
def test_a_diverged_trial_changes_no_bit_of_the_others(norm, numbers, at):
    eps = {name: Stacked(value.tensor) for name, value in numbers.items()}
    for channels_last in (False, True):
        values = own(3, 4, 4, 4), own(4, seed=1), own(4, seed=2)
        isolated(lambda *values: norm(*values, **eps), *values, at=at, channels_last=channels_last)


@pytest.mark.parametrize("eps", [1e-5, EPS], ids=["eps", "own eps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [
    lambda x, w, b, eps: F.batch_norm(x, None, None, w, b, True, 0.1, number(eps)),
    lambda x, w, b, eps: F.instance_norm(x, None, None, w, b, eps=number(eps)),
    lambda x, w, b, eps: F.layer_norm(x, (4,), w, b, number(eps)),
    lambda x, w, b, eps: F.layer_norm(x, (4,), None, None, number(eps)),
    lambda x, w, b, eps: F.rms_norm(x, (4,), w, number(eps)),
    lambda x, w, b, eps: F.group_norm(x, 2, w, b, number(eps)),
    lambda x, w, b, eps: F.group_norm(x, 2, None, None, number(eps)),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_autocast_gives_the_types_it_gives_alone(norm, dtype, eps):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x, parts = own(3, 4, 4, dtype=dtype), [own(4, seed=n, dtype=torch.float32) for n in (1, 2)]
        check(norm, x, *parts, eps, tolerance=0.1 if dtype == torch.bfloat16 else 1e-4)
