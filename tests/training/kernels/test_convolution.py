"""Convolutions by kernels against their twins, over shapes and block sizes of every kind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from torch.nn.functional import conv2d

from penstock.training.fused import operators  # noqa: F401  registers the rules
from penstock.training.fused.stacked import Stacked
from penstock.training.kernels import convolution as convolving
from penstock.training.kernels import patches, weighing
from penstock.training.kernels.apart import APART
from penstock.training.kernels.choice import kernels
from penstock.training.kernels.convolution import convolve, convolve_by, convolve_twin
from penstock.training.kernels.geometry import Geometry, axis
from penstock.training.kernels.weighing import convolution, weigh, weigh_by, weigh_twin
from tests.training.kernels.poisoned import poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def cases(draw):
    taps, stride = draw(pairs), draw(pairs)
    dilation = draw(st.sampled_from([(1, 1), (2, 1)]))
    padding = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
    size = tuple(
        draw(st.integers(max(1, d * (t - 1) + 1 - 2 * p), 7)) for t, d, p in zip(taps, dilation, padding, strict=True)
    )
    geometry = Geometry.of(size, taps, stride, padding, dilation)
    trials, examples = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    channels, made = draw(st.sampled_from([1, 2, 3, 8])), draw(st.sampled_from([1, 3, 8, 17]))
    shared = draw(st.booleans())
    blocks = {"B0": draw(st.integers(1, 3)), "B1": draw(st.integers(1, 3)), "num_warps": 4, "num_stages": 1}
    blocks |= {"BM": draw(st.sampled_from([16, 32])), "BN": draw(st.sampled_from([16, 32]))}
    blocks |= {"BK": draw(st.sampled_from([16, 128])), "EACH": draw(st.integers(1, 3))}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(1 if shared else trials, examples, *size, channels, generator=generator).to(DEVICE)
    w = torch.randn(trials, made, channels, taps[0] * taps[1], generator=generator).to(DEVICE).permute(0, 3, 2, 1)
    w = w if draw(st.booleans()) else w.contiguous()  # as a parameter has them, or not
    g = torch.randn(trials, examples, *geometry.made, made, generator=generator).to(DEVICE)
    return x, w, g, geometry, blocks


def near(made: torch.Tensor, exact: torch.Tensor, sizes: torch.Tensor) -> None:
    """Within the rounding of a float32 sum, of which ``sizes`` has the terms' absolute values added up."""
    assert made.shape == exact.shape
    assert bool(((made.double() - exact).abs() <= 2e-6 * sizes + 1e-30).all())


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.booleans())
def test_equals_the_twin_in_float64(case, added):
    x, w, g, geometry, blocks = case
    flat, turned = geometry.flat(), geometry.turned()
    x = x.expand(len(w), *x.shape[1:])
    wide = (x.double(), w.double(), flat, None, False)
    sizes = convolve_twin(wide[0].abs(), wide[1].abs(), *wide[2:])
    for by in (blocks, APART):
        near(convolve_by(x, w, geometry, None, False, by), convolve_twin(*wide), sizes)

    addend = torch.randn(x.shape, device=DEVICE) if added else None
    wide = (g.double(), w.double(), turned.flat(), None if addend is None else addend.double(), True)
    sizes = convolve_twin(wide[0].abs(), wide[1].abs(), wide[2], None, True)
    for by in (blocks, APART):
        back = convolve_by(g, w, turned, addend, True, by)
        near(back, convolve_twin(*wide), sizes if addend is None else sizes + addend.abs())

    del blocks["EACH"]
    exact, sizes = (weigh_twin(f(x.double()), f(g.double()), flat) for f in (lambda v: v, torch.abs))
    for by in (blocks | {"PARTS": 2}, APART):
        near(weigh_by(x, g, geometry, x.shape[-1], by), exact, sizes)


@pytest.mark.parametrize("laid_out", [torch.Tensor.contiguous, lambda w: w])
def test_one_trial_after_another_on_images_of_one_channel(laid_out):
    """Images one place wide in the end, which oneDNN gets wrong where their one channel lies last."""
    geometry = Geometry.of((5, 4), (2, 3), (1, 2), (0, 0), (1, 1))
    x, w = (
        torch.randn(2, 3, 5, 4, 1, device=DEVICE),
        laid_out(torch.randn(2, 17, 1, 6, device=DEVICE).permute(0, 3, 2, 1)),
    )
    wide = [(f(x.double()), f(w.double()), geometry.flat(), None, False) for f in (lambda v: v, torch.abs)]
    near(convolve_by(x, w, geometry, None, False, APART), convolve_twin(*wide[0]), convolve_twin(*wide[1]))


@pytest.mark.parametrize(
    ("channels", "made", "stride", "taps"),
    [(8, 8, 1, 3), (16, 16, 1, 3), (8, 16, 2, 3), (8, 16, 2, 1), (3, 8, 1, 3), (64, 64, 1, 3)],
)
def test_with_the_blocks_that_are_used(channels, made, stride, taps):
    """What the candidates say for the layers of a ResNet, on images too small for a whole block too."""
    geometry = Geometry.of((6, 5), (taps, taps), (stride, stride), (taps // 2, taps // 2), (1, 1))
    x, w = torch.randn(2, 2, 6, 5, channels, device=DEVICE), torch.randn(2, taps**2, channels, made, device=DEVICE)
    y = convolve(x, w, geometry.flat(), None, False)
    torch.testing.assert_close(y, convolve_twin(x, w, geometry.flat(), None, False), rtol=1e-5, atol=1e-4)
    g, turned = torch.randn_like(y), geometry.turned().flat()
    back = convolve(g, w, turned, None, True)
    torch.testing.assert_close(back, convolve_twin(g, w, turned, None, True), rtol=1e-5, atol=1e-4)
    of_w = weigh(x, g, geometry.flat())
    assert of_w.permute(0, 3, 2, 1).is_contiguous()  # as the parameter, and as said to whoever compiles
    torch.testing.assert_close(of_w, weigh_twin(x, g, geometry.flat()), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("across", [1, 2])
def test_weights_are_read_where_they_lie_in_a_parameter(turned, across):
    geometry = Geometry.of((4, 5), (3, 3), (1, 1), (1, 1), (1, 1))
    x, w = torch.randn(2, 1, 4, 5, 4, device=DEVICE), torch.randn(2, 4, 4, 9, device=DEVICE).permute(0, 3, 2, 1)
    blocks = {"B0": 1, "B1": across, "BM": 16, "BN": 16, "BK": 16, "EACH": 1, "num_warps": 4, "num_stages": 1}
    with poisoned():
        one, other = (convolve_by(x, v, geometry, None, turned, blocks) for v in (w, w.contiguous()))
    assert torch.equal(one, other)
    wide = (x.double(), w.double(), geometry.flat(), None, turned)
    torch.testing.assert_close(one.double(), convolve_twin(*wide), rtol=1e-4, atol=1e-4)


def test_gradients_of_weights_are_added_up_from_their_parts():
    """Ten rounds of sixteen places in four parts, the last of them shorter."""
    geometry = Geometry.of((7, 7), (3, 3), (1, 1), (1, 1), (1, 1))
    x, g = torch.randn(2, 3, 7, 7, 2, device=DEVICE), torch.randn(2, 3, 7, 7, 4, device=DEVICE)
    blocks = {"B0": 1, "B1": 1, "BM": 16, "BN": 16, "BK": 16, "num_warps": 4, "num_stages": 1, "PARTS": 4}
    flat = geometry.flat()
    exact, sizes = (weigh_twin(f(x.double()), f(g.double()), flat) for f in (lambda v: v, torch.abs))
    near(weigh_by(x, g, geometry, x.shape[-1], blocks), exact, sizes)


def test_more_entries_than_are_added_at_a_time_and_channels_that_are_left_out():
    """Forty parts of eight places; the images got a channel to be read by fours."""
    geometry, channels, made = Geometry.of((7, 7), (3, 3), (1, 1), (1, 1), (1, 1)), 3, 5
    by = patches.cut(geometry, 4, made, 2, 4, torch.device(DEVICE))
    parts = torch.randn(2, 40, by.constants["K"], by.columns, device=DEVICE)
    with poisoned():
        found = torch.empty(2, made, channels, 9, device=DEVICE)
        patches.collect(parts, by, found)
    apart = parts.double().sum(1).unflatten(2, (8, made)).unflatten(1, (-1, 4))
    own = torch.arange(8, device=DEVICE)
    rows = [apart[:, by.through[tap], :channels, own].sum(0) for tap in range(9)]
    torch.testing.assert_close(found.double().permute(0, 3, 2, 1), torch.stack(rows, 1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("trials", [1, 2, 3])
def test_the_first_blocks_of_few_trials_fill_a_device_with_few_parts(trials):
    """Of the layers of a small ResNet on MNIST; at first one trial had 128 parts of eight places, added in turn."""
    for channels, size in ((4, 28), (8, 28), (16, 14), (32, 7), (64, 7)):
        geometry = Geometry.of((size, size), (3, 3), (1, 1), (1, 1), (1, 1))
        blocks = weighing.candidates(geometry, channels, max(8, channels), trials, False)[0]
        rows, columns = (axis(geometry, dim, blocks[name]) for dim, name in ((0, "B0"), (1, "B1")))
        programs = trials * blocks["PARTS"] * -(-channels * rows.taps * columns.taps // blocks["BK"])
        assert programs >= 128
        assert blocks["PARTS"] * rows.block * columns.block <= 2 * patches.MOST


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter knows no bfloat16")
@pytest.mark.parametrize(("channels", "made", "stride"), [(4, 8, 1), (8, 8, 1), (16, 32, 2), (64, 64, 1)])
def test_where_tf32_is_allowed_all_that_is_offered_is_at_least_as_near(channels, made, stride):
    torch.backends.cudnn.allow_tf32 = True  # put back by the fixture
    geometry = Geometry.of((9, 8), (3, 3), (stride, stride), (1, 1), (1, 1))
    x, w = torch.randn(2, 64, 9, 8, channels, device=DEVICE), torch.randn(2, 9, channels, made, device=DEVICE)
    exact = convolve_twin(x.double(), w.double(), geometry.flat(), None, False)
    g = torch.randn(exact.shape, device=DEVICE)
    back = (g, w, geometry.turned(), None, True)
    made_by = {
        "there": (lambda by: convolve_by(x, w, geometry, None, False, by), exact),
        "back": (lambda by: convolve_by(*back, by), convolve_twin(g.double(), w.double(), back[2].flat(), None, True)),
        "weigh": (
            lambda by: weigh_by(x, g, geometry, channels, by),
            weigh_twin(x.double(), g.double(), geometry.flat()),
        ),
    }
    offered = {
        "there": convolving.candidates(geometry, channels, made, True),
        "back": convolving.candidates(back[2], made, channels, True),
        "weigh": weighing.candidates(geometry, channels, made, 2, True),
    }
    assert any("SPLIT" in by for by in offered["there"])
    for what, (run, true) in made_by.items():
        for by in offered[what]:
            off = float((run(by).double() - true).norm() / true.norm())
            assert off < (3e-5 if "SPLIT" in by else 1e-3), (what, by)
            assert torch.equal(run(by), run(by))


def layer(shared: bool = False) -> tuple[torch.Tensor, torch.Tensor, Geometry]:
    geometry = Geometry.of((5, 6), (3, 3), (2, 1), (1, 1), (1, 1))
    x, weight = torch.randn(1 if shared else 3, 2, 5, 6, 3), torch.randn(3, 5, 3, 3, 3)
    return x.to(DEVICE).requires_grad_(not shared), weight.to(DEVICE).requires_grad_(), geometry


@pytest.mark.parametrize("shared", [False, True])
def test_is_torchs_convolution_with_its_gradients(shared):
    x, weight, geometry = layer(shared)
    made, _ = convolution(x, weight, geometry)
    plain = torch.stack([
        conv2d(x[0 if shared else i].permute(0, 3, 1, 2), weight[i], None, (2, 1), 1)
        for i in range(3)
    ]).permute(0, 1, 3, 4, 2)  # fmt: skip
    torch.testing.assert_close(made, plain, rtol=1e-5, atol=1e-5)
    wanted = [weight] if shared else [x, weight]
    g = torch.randn_like(made)
    for ours, theirs in zip(torch.autograd.grad(made, wanted, g), torch.autograd.grad(plain, wanted, g), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_in_mixed_precision_a_weight_is_cast_by_the_kernel_and_its_gradient_is_not_rounded():
    x, weight, _ = layer()
    images, g = x.detach().permute(0, 1, 4, 2, 3).half(), torch.randn(3, 2, 5, 5, 6, device=DEVICE).half()
    with kernels(True), torch.autocast(DEVICE, torch.float16):
        made = conv2d(Stacked(images), Stacked(weight), padding=1).moved(0)
    (of_weight,) = torch.autograd.grad(made, weight, g)
    wide = weight.detach().half().double().requires_grad_()
    exact = torch.stack([conv2d(images[i].double(), wide[i], padding=1) for i in range(3)])
    (of_wide,) = torch.autograd.grad(exact, wide, g.double())
    assert (made.dtype, of_weight.dtype) == (torch.float16, torch.float32)
    assert float((made.double() - exact).norm()) < 1e-3 * float(exact.norm())
    assert float((of_weight.double() - of_wide).norm()) < 1e-6 * float(of_wide.norm())


def test_who_reads_the_images_again_has_the_gradient_added():
    x, weight, geometry = layer()
    made, again = convolution(x, weight, geometry)
    both = torch.autograd.grad(made.sum() + (again * 3).sum(), x)[0]
    apart = torch.autograd.grad(convolution(x, weight, geometry)[0].sum(), x)[0] + 3
    torch.testing.assert_close(both, apart)
    only = torch.autograd.grad((convolution(x, weight, geometry)[1] * 3).sum(), x)[0]
    assert torch.equal(only, torch.full_like(x, 3))


@pytest.mark.parametrize("shared", [False, True])  # shared images get a channel that no trial's weights have
def test_a_trial_that_diverges_leaves_the_others_bits(shared):
    x, weight, geometry = layer(shared)

    def everything(x, weight):
        made, _ = convolution(x, weight, geometry)
        return (made, *torch.autograd.grad(made, [weight] if shared else [weight, x], torch.ones_like(made)))

    with torch.no_grad():
        sick, ill = x.clone(), weight.clone()
        ill[1] = float("inf")
        if not shared:
            sick[1] = float("nan")
    ills = everything(sick.requires_grad_(not shared), ill.requires_grad_())
    for well, other in zip(everything(x, weight), ills, strict=True):
        assert torch.equal(well[0], other[0])
        assert torch.equal(well[2], other[2])
    assert all(not torch.isfinite(other[1]).all() for other in ills[: 1 if shared else 3])


def test_every_number_is_written_and_two_runs_are_equal():
    x, weight, geometry = layer()
    runs = []
    for _ in range(2):
        with poisoned():
            made, _ = convolution(x, weight, geometry)
            runs.append((made, *torch.autograd.grad(made.sum(), [x, weight])))
    for one, other in zip(*runs, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)


def test_blocks_of_an_axis():
    """A direction of stride 1 with three taps: two places read four, from one before the first."""
    found = axis(Geometry.of((8, 8), (3, 3), (1, 1), (1, 1), (1, 1)), 0, 2)
    assert (found.block, found.count, found.taps, found.step, found.padding) == (2, 4, 4, 2, 1)
    assert found.tap == ((0, 1, 2, -1), (-1, 0, 1, 2))
    back = axis(Geometry.of((8, 8), (3, 3), (2, 2), (1, 1), (1, 1)).turned(), 0, 1)
    assert (back.block, back.taps, back.step) == (2, 2, 1)  # two places of the input at a time, of two of the output


def test_numbers_are_counted_as_the_kernels_lay_them_out():
    """Shared images get channels that are read by fours, which must be countable in 32 bits too."""
    images = Geometry.of((2**14, 2**14), (3, 3), (4, 4), (1, 1), (1, 1))
    assert images.numbers(2, 1, 1) == 2**31
    assert images.numbers(1, 3, 1) == 2**30
    assert images.numbers(1, 4, 128) == 2**31
