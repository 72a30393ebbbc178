"""Convolutions of all trials at once, each against trials alone: every option, layout and rewrite."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from penstock.training.fused.operators import convolution
from penstock.training.fused.operators.channelwise import into_channels
from penstock.training.fused.stacked import Stacked
from tests.training.alone import check, own, shared
from tests.training.isolated import isolated


@pytest.fixture
def rewrites(monkeypatch):
    """The rewrites of a GPU, on the CPU; gives a list of those that were used."""
    used = []
    monkeypatch.setattr(convolution, "_rewrites", lambda x: True)
    for name in ("_product", "_halving"):
        rewrite = getattr(convolution, name)
        monkeypatch.setattr(
            convolution, name, lambda *args, name=name, rewrite=rewrite: used.append(name) or rewrite(*args)
        )
    return used


OPTIONS = [
    dict(),
    dict(stride=2),
    dict(padding=1),
    dict(padding=2, dilation=2, stride=2),
    dict(padding="same"),
    dict(padding="same", dilation=3),
    dict(padding="valid"),
    dict(groups=2),
    dict(groups=4, padding=1),
]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution_with_every_option(dims, options):
    conv, size, kernel = getattr(F, f"conv{dims}d"), (7, 8, 6)[:dims], (3, 2, 3)[:dims]
    weight = (4, 4 // options.get("groups", 1), *kernel)
    check(conv, own(2, 4, *size), own(*weight), own(4), **options)
    check(conv, shared(2, 4, *size), own(*weight), own(4), **options)
    check(conv, own(4, *size), own(*weight), None, **options)  # without a dimension of examples
    check(conv, shared(4, *size), own(*weight), **options)
    check(conv, own(2, 4, *size), shared(*weight), own(4), **options)


@pytest.mark.parametrize("options", [
    dict(), dict(stride=2, output_padding=1), dict(padding=1, dilation=2), dict(groups=2), dict(groups=4, stride=2),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolution_with_every_option(dims, options):
    conv, size, kernel = getattr(F, f"conv_transpose{dims}d"), (4, 5, 3)[:dims], (3, 2, 3)[:dims]
    weight = (4, 6 // 2 if "groups" in options else 6, *kernel)
    outputs = weight[1] * options.get("groups", 1)
    check(conv, own(2, 4, *size), own(*weight), own(outputs), **options)
    check(conv, shared(2, 4, *size), own(*weight), own(outputs), **options)
    check(conv, own(4, *size), own(*weight), **options)
    check(conv, shared(4, *size), own(*weight), own(outputs), **options)
    check(conv, own(2, 4, *size), shared(*weight), own(outputs), **options)


@pytest.mark.parametrize(("x", "weight", "bias"), [
    (own, own, own), (own, own, shared), (own, own, None), (own, shared, own), (own, shared, shared),
    (own, shared, None), (shared, own, own), (shared, own, shared), (shared, own, None), (shared, shared, own),
])  # fmt: skip
def test_any_of_the_three_may_be_shared(x, weight, bias):
    for conv in (F.conv2d, F.conv_transpose2d):
        for size in [(3, 4, 5, 5), (4, 5, 5)]:
            check(conv, x(*size), weight(4, 4, 3, 3), bias and bias(4), layouts=5 if weight is shared else 2)


def test_arguments_by_name_and_lists():
    check(
        lambda x, w, b: torch.conv2d(input=x, weight=w, bias=b, stride=[2, 1]), own(2, 2, 6, 6), own(4, 2, 3, 3), own(4)
    )
    check(lambda x, w: F.conv1d(x, weight=w, stride=(2,)), own(2, 2, 6), own(4, 2, 3))


@pytest.mark.parametrize("module", [
    nn.Conv1d(4, 6, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
    nn.Conv2d(4, 8, 3, groups=4, padding="same"), nn.Conv3d(4, 2, 2),
    nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    nn.Conv2d(4, 4, 3, padding=(1, 2), padding_mode="reflect"), nn.ConvTranspose1d(4, 2, 3),
    nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), nn.ConvTranspose3d(4, 2, 2),
], ids=str)  # fmt: skip
def test_modules(module):
    names = [name for name, _ in module.named_parameters()]
    values = [own(*value.shape) for value in module.parameters()]
    run = lambda x, *values: functional_call(module, dict(zip(names, values, strict=True)), (x,))  # noqa: E731
    size = (5, 4, 6)[: module.weight.ndim - 2]
    check(run, own(2, 4, *size), *values)
    check(run, shared(2, 4, *size), *values)


@pytest.mark.parametrize(("kernel", "options", "used"), [
    ((1, 1), dict(), "_product"), ((1, 1), dict(stride=2), "_product"), ((1, 1), dict(stride=(1, 3)), "_product"),
    ((1, 1), dict(padding="valid", dilation=2), "_product"), ((3, 3), dict(stride=2, padding=1), "_halving"),
    ((3, 3), dict(stride=[2, 2], padding=(1, 1), dilation=1), "_halving"),
], ids=str)  # fmt: skip
def test_the_rewrites_are_the_convolution_itself(rewrites, kernel, options, used):
    for size in [(2, 4, 6, 6), (1, 4, 2, 8), (4, 4, 6), (3, 4, 2, 2)]:
        check(F.conv2d, own(*size), own(5, 4, *kernel), own(5), tolerance=1e-12, **options)
        check(F.conv2d, own(*size), own(5, 4, *kernel), tolerance=1e-12, **options)
    assert set(rewrites) == {used}


@pytest.mark.parametrize(("size", "kernel", "options"), [
    ((2, 4, 5, 6), (3, 3), dict(stride=2, padding=1)), ((2, 4, 6, 5), (3, 3), dict(stride=2, padding=1)),
    ((2, 4, 6, 6), (3, 3), dict(stride=2, padding=1, dilation=2)),
    ((2, 4, 6, 6), (3, 3), dict(stride=2, padding=(1, 0))),
    ((2, 4, 6, 6), (3, 3), dict(stride=(2, 1), padding=1)), ((2, 4, 6, 6), (3, 2), dict(stride=2, padding=1)),
    ((2, 4, 6, 6), (1, 1), dict(padding=1)), ((2, 4, 6, 6), (1, 1), dict(padding="same")),
    ((2, 4, 6, 6), (1, 1), dict(groups=2)), ((2, 4, 6, 6), (3, 3), dict(stride=2, padding=1, groups=4)),
], ids=str)  # fmt: skip
def test_what_is_nearly_like_a_rewrite_is_not_rewritten(rewrites, size, kernel, options):
    check(F.conv2d, own(*size), own(4, 4 // options.get("groups", 1), *kernel), own(4), **options)
    assert not rewrites


def test_a_rewritten_convolution_allows_what_a_plain_one_does(rewrites):
    x, weight = own(2, 4, 4, 4), own(4, 4, 1, 1)
    check(lambda x, w: F.relu(F.conv2d(x, w), inplace=True) + x, x, weight)

    def penalty(x, weight):  # a gradient of a gradient
        made = F.conv2d(Stacked(x), Stacked(weight)).whole
        slopes = torch.autograd.grad(made.pow(3).sum(), [x, weight], create_graph=True)
        return [torch.autograd.grad(slope.square().sum(), [x, weight], retain_graph=True) for slope in slopes]

    x, weight = x.tensor.requires_grad_(), weight.tensor.requires_grad_()
    fast = penalty(x, weight)
    assert rewrites
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "_rewrites", lambda x: False)
        torch.testing.assert_close(fast, penalty(x, weight), rtol=1e-10, atol=1e-10)


def test_a_frozen_trial_weight_or_input_needs_no_gradient(rewrites):
    x, weight = (Stacked(value.tensor, 0) for value in (own(2, 4, 4, 4), own(3, 4, 1, 1)))
    for needs in (x, weight):
        needs.whole.requires_grad_()
        F.conv2d(x, weight).whole.sum().backward()
        assert needs.whole.grad is not None
        needs.whole = needs.whole.detach()


PATHS = {
    "grouped": (F.conv2d, own(2, 4, 6, 6), own(4, 4, 3, 3), own(4)),
    "depthwise": (F.conv2d, own(2, 4, 6, 6), own(4, 1, 3, 3), own(4), 1, 1, 1, 4),
    "transposed": (F.conv_transpose2d, own(2, 4, 4, 4), own(4, 3, 2, 2), own(3)),
    "shared input": (F.conv2d, shared(2, 4, 6, 6), own(4, 4, 3, 3), own(4)),
    "shared weight": (F.conv2d, own(2, 4, 6, 6), shared(4, 4, 3, 3), own(4)),
    "1d": (F.conv1d, own(2, 4, 6), own(4, 4, 3), own(4)),
    "product": (F.conv2d, own(2, 4, 6, 6), own(4, 4, 1, 1), own(4), 2),
    "halving": (F.conv2d, own(2, 4, 6, 6), own(4, 4, 3, 3), own(4), 2, 1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("path", PATHS)
def test_a_diverged_trial_changes_no_bit_of_the_others(request, path, at, dtype):
    if path in ("product", "halving"):
        request.getfixturevalue("rewrites")
    func, *args = PATHS[path]
    args = [type(v)(v.tensor.to(dtype)) if hasattr(v, "tensor") else v for v in args]
    args = [v.to(dtype) if isinstance(v, torch.Tensor) else v for v in args]
    isolated(func, *args, at=at)
    isolated(func, *args, at=at, channels_last=True)


def lies_channels_last(x):
    """Folding the trials into the channels copies nothing and gives torch's channels-last order."""
    folded = into_channels(x)
    same = folded.untyped_storage().data_ptr() == x.whole.untyped_storage().data_ptr()
    return x.at == 1 and same and folded.is_contiguous(memory_format=torch.channels_last)


def test_a_network_stays_channels_last_from_the_first_convolution_on(monkeypatch, rewrites):
    monkeypatch.setattr(convolution, "_channels_last", lambda x: x.ndim == 4)
    stem, wide, point, depth, line = (
        Stacked(torch.randn(3, *size), 0) for size in [(4, 3, 3, 3), (4, 4, 3, 3), (4, 4, 1, 1), (4, 1, 3, 3), (4,)]
    )
    x = torch.randn(2, 3, 16, 16)
    for step in [
        lambda x: F.conv2d(x, stem, padding=1),
        lambda x: F.conv2d(x, wide, line, padding=1),
        lambda x: F.batch_norm(x, None, None, line, line, training=True),
        lambda x: F.relu(x),
        lambda x: F.conv2d(x, point, line),
        lambda x: F.relu(x, inplace=True),
        lambda x: F.conv2d(x, depth, line, padding=1, groups=4),
        lambda x: x + x,
        lambda x: F.pad(x, (1, 1, 1, 1)),
        lambda x: F.pad(x[:, :2, 1:-1, 1:-1], (0, 0, 0, 0, 1, 1)),
        lambda x: F.conv2d(x, wide, line, stride=2, padding=1),
        lambda x: F.interpolate(x, scale_factor=2),
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.conv2d(x, point, stride=2),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: Stacked(x.moved(0).contiguous(), 0),
        lambda x: F.conv2d(x, wide, padding=1),
        lambda x: F.adaptive_avg_pool2d(x, 1),
    ]:
        x = step(x)
        assert x.at == 0 or lies_channels_last(x)
    assert rewrites == ["_product", "_halving", "_product"]


@pytest.mark.parametrize("rewritten", [False, True])
def test_autocast_gives_the_types_it_gives_alone(request, rewritten):
    if rewritten:
        request.getfixturevalue("rewrites")
    for kernel, options in [((1, 1), dict(stride=2)), ((3, 3), dict(stride=2, padding=1)), ((3, 3), dict(groups=2))]:
        args = [own(2, 4, 4, 4), own(4, 4 // options.get("groups", 1), *kernel), own(4)]
        args = [Stacked(value.tensor.float().requires_grad_(), 0) for value in args]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = F.conv2d(*args, **options)
            alone = F.conv2d(*(value.whole[1] for value in args), **options)
        assert made.dtype == alone.dtype == torch.bfloat16
        torch.testing.assert_close(made.moved(0)[1], alone, rtol=0.02, atol=0.02)
        made.whole.float().sum().backward()
        assert all(value.whole.grad.dtype == torch.float32 for value in args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        only_bias = F.conv2d(args[0], shared(4, 2, 3, 3).float(), args[2], groups=2)
        assert only_bias.dtype == torch.bfloat16
        check(F.conv2d, own(2, 4, 4, 4), own(4, 4, 1, 1))  # float64 stays as it is
