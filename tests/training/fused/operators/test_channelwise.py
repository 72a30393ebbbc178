"""Pooling, resizing, padding and the like for all trials at once, each against trials alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.training.fused.operators import channelwise
from penstock.training.fused.stacked import Stacked
from tests.training.alone import check, own
from tests.training.isolated import isolated


@pytest.fixture(autouse=True)
def only_rules(monkeypatch):
    """Nothing here may fall to torch.vmap unnoticed."""
    monkeypatch.setattr("torch.vmap", None)


SIZES = {1: (6,), 2: (6, 5), 3: (4, 5, 6)}
POOLS = [
    ("max_pool", (2,), dict()),
    ("max_pool", (3,), dict(stride=2, padding=1, ceil_mode=True)),
    ("max_pool", (2,), dict(dilation=2, stride=1)),
    ("max_pool", (2,), dict(return_indices=True)),
    ("avg_pool", (2,), dict()),
    ("avg_pool", (3, 2, 1), dict(ceil_mode=True, count_include_pad=False)),
    ("lp_pool", (2.0, 2), dict()),
    ("lp_pool", (3.0, 2), dict(ceil_mode=True)),
    ("adaptive_avg_pool", (1,), dict()),
    ("adaptive_avg_pool", (2,), dict()),
    ("adaptive_max_pool", (2,), dict()),
    ("adaptive_max_pool", (2,), dict(return_indices=True)),
]


@pytest.mark.parametrize(("kind", "args", "options"), POOLS, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_pooling(dims, kind, args, options):
    function = getattr(F, f"{kind}{dims}d")
    positive = lambda x: function(x.square() + 0.1 if kind == "lp_pool" else x, *args, **options)  # noqa: E731
    check(positive, own(2, 3, *SIZES[dims]), layouts=5)
    check(positive, own(3, *SIZES[dims]), layouts=5)  # without a dimension of examples


def test_sizes_per_dimension_and_names():
    check(F.avg_pool2d, own(2, 3, 6, 5), (2, 1), divisor_override=3)
    check(F.adaptive_avg_pool2d, own(2, 3, 6, 5), (None, 2))
    for size in (1, (1, 1)):  # an average, at whatever place the trials are
        check(F.adaptive_avg_pool2d, own(2, 3, 6, 5), size, layouts=5)
        check(F.adaptive_avg_pool2d, own(3, 6, 5), size, layouts=4)
    check(lambda x: torch.max_pool2d(input=x, kernel_size=(2, 3)), own(2, 3, 6, 5))
    check(lambda x: F.max_pool2d(input=x, kernel_size=2, return_indices=True), own(2, 3, 6, 5))


@pytest.mark.parametrize(("mode", "dims"), [
    ("nearest", 1), ("nearest", 2), ("nearest", 3), ("nearest-exact", 2), ("linear", 1), ("bilinear", 2),
    ("bicubic", 2), ("trilinear", 3), ("area", 2),
])  # fmt: skip
def test_interpolate(mode, dims):
    size = SIZES[dims]
    check(F.interpolate, own(2, 3, *size), scale_factor=2, mode=mode, layouts=5)
    check(F.interpolate, own(2, 3, *size), size=[n + 2 for n in size], mode=mode)
    if mode in ("linear", "bilinear", "bicubic", "trilinear"):
        check(F.interpolate, own(2, 3, *size), scale_factor=0.5, mode=mode, align_corners=True)


@pytest.mark.parametrize(
    "around", [(1, 2), (1, 0, 2, 1), (0, 0, 0, 0, 1, 2), (1, 0, 0, 0, 2, 1, 0, 3), (-1, 1)], ids=str
)
@pytest.mark.parametrize("value", [None, 0.0, 1.5])
def test_constant_padding_of_any_dimension(around, value):
    check(F.pad, own(2, 3, 4, 5), around, value=value, layouts=5)
    check(F.pad, own(2, 3, 4, 5), list(around), "constant", value)
    check(torch.constant_pad_nd, own(2, 3, 4, 5), around, 0.0 if value is None else value, layouts=5)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_padding_from_the_border(dims, mode):
    around = (1, 2, 2, 0, 1, 1)[: 2 * dims]
    check(F.pad, own(2, 3, *SIZES[dims]), around, mode=mode, layouts=5)
    check(F.pad, own(3, *SIZES[dims]), around, mode=mode, layouts=4)


@pytest.mark.parametrize(("function", "sizes"), [
    (lambda x: F.pixel_shuffle(x, 2), [(2, 8, 3, 2), (4, 3, 2), (2, 2, 4, 3, 2)]),
    (lambda x: F.pixel_unshuffle(x, 2), [(2, 3, 4, 2), (3, 4, 2), (2, 2, 1, 4, 2)]),
    (lambda x: F.channel_shuffle(x, 2), [(2, 4, 3, 2), (2, 4, 3)]),
    (lambda x: F.local_response_norm(x, 2, alpha=0.5), [(2, 4, 3, 2), (2, 4, 3), (2, 4, 3, 2, 2)]),
    (lambda x: F.local_response_norm(x, size=3, k=2.0), [(2, 4, 3, 2)]),
])  # fmt: skip
def test_functions_across_channels(function, sizes):
    for size in sizes:
        check(function, own(*size), layouts=5)


@pytest.mark.parametrize("module", [
    nn.MaxPool2d(2), nn.MaxPool2d(2, return_indices=True), nn.AvgPool2d(2, 1, 1), nn.LPPool2d(2, 2),
    nn.AdaptiveAvgPool2d(1),
    nn.AdaptiveMaxPool2d((2, 3)), nn.AdaptiveMaxPool2d(2, return_indices=True), nn.Upsample(scale_factor=2),
    nn.UpsamplingBilinear2d(scale_factor=2), nn.ZeroPad2d(1), nn.ConstantPad2d((1, 0, 2, 1), 0.5),
    nn.ReflectionPad2d(1),
    nn.ReplicationPad2d((0, 1, 2, 0)), nn.CircularPad2d(1), nn.PixelShuffle(2), nn.PixelUnshuffle(2),
    nn.ChannelShuffle(2), nn.LocalResponseNorm(2),
], ids=str)  # fmt: skip
def test_modules(module):
    check(lambda x: module(x * x + 0.1), own(2, 4, 6, 4), layouts=3)


def test_patches_fall_to_vmap(monkeypatch):
    monkeypatch.undo()
    check(lambda x: F.unfold(x, (2, 3), padding=1), own(2, 3, 5, 4))
    check(lambda x: F.fold(x, (4, 5), (2, 2)), own(2, 12, 12))
    check(lambda x: x.unfold(1, 2, 1), own(2, 5, 4))


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("function", [
    lambda x: F.max_pool2d(x, 2), lambda x: F.avg_pool2d(x, 3, 2, 1), lambda x: F.adaptive_avg_pool2d(x, 2),
    lambda x: F.adaptive_avg_pool2d(x, 1),
    lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), lambda x: F.pad(x, (1, 1, 1, 1)),
    lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), lambda x: F.local_response_norm(x, 2),
])  # fmt: skip
def test_a_diverged_trial_changes_no_bit_of_the_others(function, at):
    isolated(function, own(2, 4, 6, 6), at=at)
    isolated(function, own(2, 4, 6, 6), at=at, channels_last=True)


def test_folding_copies_nothing_behind_a_convolution():
    folded = torch.randn(2, 12, 4, 4)
    for laid in (folded, folded.contiguous(memory_format=torch.channels_last)):
        x = channelwise.out_of_channels(laid, 3)
        again = channelwise.into_channels(x)
        assert (again.data_ptr(), again.stride()) == (laid.data_ptr(), laid.stride())
    x = Stacked(torch.randn(3, 2, 4, 5, 5), 0)
    assert channelwise.into_batch(x).data_ptr() == x.whole.data_ptr()
    assert F.max_pool2d(x, 2).at == 0
    for asked in (x, Stacked(x.whole.movedim(0, 1), 1), Stacked(x.whole.movedim(0, 1).contiguous(), 1)):
        made = channelwise.into_channels(asked, channels_last=True)
        assert made.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(made, x.whole.movedim(0, 1).flatten(1, 2))


@pytest.mark.parametrize("at", [0, 1])
def test_what_must_be_copied_stays_channels_last(at):
    x = torch.randn(3, 2, 5, 6, 4).permute(0, 1, 4, 2, 3)  # as it comes out of a convolution with a shared weight
    for folded in (channelwise.into_channels(Stacked(x, at)), channelwise.into_batch(Stacked(x, at))):
        assert folded.is_contiguous(memory_format=torch.channels_last)
    x = channelwise.out_of_channels(torch.randn(2, 5, 5, 12).permute(0, 3, 1, 2), 3)
    assert channelwise.into_batch(x).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(channelwise.into_batch(x), x.whole.flatten(0, 1))
