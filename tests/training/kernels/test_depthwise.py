"""Depthwise convolutions: the kernels against the twins in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.training.kernels import depthwise as kernels
from penstock.training.kernels.depthwise import depthwise, depthwise_op, depthwise_twin
from penstock.training.kernels.geometry import Geometry
from tests.training.kernels.poisoned import poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SAME = Geometry.of((5, 4), (3, 3), (1, 1), (1, 1), (1, 1))
HALF = Geometry.of((5, 4), (3, 3), (2, 2), (1, 1), (1, 1))


@contextmanager
def plan(r0: int, r1: int, ahead: int, parts: int, held: int, threads: int, channels: int) -> Iterator[None]:
    """Let all kernels run with these block sizes: small ones, so that small images take many programs."""
    patches, sums = (
        {"R0": r0, "R1": r1, "AHEAD": ahead, "HELD": held},
        {"R0": r0, "R1": r1, "PARTS": parts, "HELD": held},
    )
    with mock.patch.multiple(kernels, PATCHES=[patches], SUMS=[sums], THREADS=threads, CHANNELS=channels):
        yield


def drawn(
    geometry: Geometry, trials: int = 2, examples: int = 2, channels: int = 3, seed: int = 0
) -> list[torch.Tensor]:
    """Images, filters, and a gradient of what is made of them."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((examples, *geometry.size), (geometry.taps[0] * geometry.taps[1],), (examples, *geometry.made))
    return [torch.randn(trials, *shape, channels, generator=random).to(DEVICE) for shape in shapes]


def results(func: Any, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, geometry: Geometry) -> list[torch.Tensor]:
    """What is made, and the gradients of images and filters."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    made = func(x, w, geometry)
    return [made.detach(), *torch.autograd.grad(made, (x, w), g.to(made.dtype))]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def near(found: list[torch.Tensor], given: list[torch.Tensor], geometry: Geometry, unit: float = 2**-23) -> None:
    """Within a few roundings of each product: by the twin in float64, and the twin of absolute values."""
    expected = results(depthwise_twin, *(v.double() for v in given), geometry)
    scales = results(depthwise_twin, *(v.double().abs() for v in given), geometry)
    for value, right, scale in zip(found, expected, scales, strict=True):
        assert value.shape == right.shape
        assert bool(((value.double() - right).abs() <= 16 * unit * scale).all())


PAIRS = {"taps": (1, 3), "stride": (1, 3), "padding": (0, 2), "dilation": (1, 2)}


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    taps, stride, padding, dilation = (draw(st.tuples(*[st.integers(*bounds)] * 2)) for bounds in PAIRS.values())
    least = [max(1, d * (t - 1) + 1 - 2 * p) for t, p, d in zip(taps, padding, dilation, strict=True)]
    size = tuple(low + draw(st.integers(0, 5)) for low in least)
    return Geometry.of(size, taps, stride, padding, dilation)


plans = st.builds(
    plan,
    *(st.integers(1, 5) for _ in range(2)), st.integers(0, 3), st.integers(1, 3), st.sampled_from((1, 2)),
    st.sampled_from((8, 32) if DEVICE == "cpu" else (32, 64)), st.sampled_from((2, 8)),
)  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(geometries(), plans, st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.integers(0, 99))
def test_kernels_are_within_rounding_of_the_twin(
    geometry: Geometry, blocks: Any, trials: int, examples: int, channels: int, seed: int
) -> None:
    given = drawn(geometry, trials, examples, channels, seed)
    with blocks, poisoned():
        found = results(depthwise, *given, geometry)
    near(found, given, geometry)


@pytest.mark.parametrize("geometry", [SAME, HALF])
def test_every_candidate_makes_the_same_bits(geometry: Geometry) -> None:
    given = drawn(geometry, trials=1)
    expected = results(depthwise, *given, geometry)
    for patches, sums in itertools.product(kernels.PATCHES, kernels.SUMS):
        with mock.patch.multiple(kernels, PATCHES=[patches], SUMS=[sums]), poisoned():
            found = results(depthwise, *given, geometry)
        assert same(found[:2], expected[:2])  # filters' gradients are added in parts of their own
        near(found, given, geometry)


@pytest.mark.parametrize("geometry", [SAME, HALF])
def test_half_precision_is_rounded_once(geometry: Geometry) -> None:
    x, w, g = (v.half() for v in drawn(geometry))
    made, of_x, of_w = results(depthwise, x, w, g, geometry)
    assert made.dtype == of_x.dtype == of_w.dtype == torch.float16
    near([made, of_x, of_w], [x, w, g], geometry, 2**-15)  # half a unit of a number of ten bits, by near's sixteen
    assert results(depthwise, x, w.float(), g, geometry)[2].dtype == torch.float32  # filters may be kept in more


@pytest.mark.parametrize("geometry", [SAME, HALF])
def test_trials_do_not_meet(geometry: Geometry) -> None:
    given = drawn(geometry, trials=3)
    expected = results(depthwise, *given, geometry)
    assert same(results(depthwise, *given, geometry), expected)  # and two runs give equal bits
    for spoiled in given:
        spoiled[1] = float("nan")
    found = results(depthwise, *given, geometry)
    assert same([v[::2] for v in found], [v[::2] for v in expected])
    assert all(v[1].isnan().all() for v in found)


def test_what_is_not_contiguous_or_empty_is_taken() -> None:
    x, w, _ = given = drawn(SAME)
    turned = [
        x.transpose(1, 4).contiguous().transpose(1, 4),
        w.mT.contiguous().mT,
        torch.ones((), device=DEVICE).expand(2, 2, 5, 4, 3),
    ]
    assert same(results(depthwise, *turned, SAME), results(depthwise, x, w, turned[2].contiguous(), SAME))
    made, of_x, of_w = results(depthwise, *(v if v is w else v[:, :0] for v in given), SAME)
    assert made.shape == of_x.shape == (2, 0, 5, 4, 3)
    assert torch.equal(of_w, torch.zeros_like(w))


@pytest.mark.parametrize("geometry", [SAME, HALF])
def test_the_twin_runs_where_there_is_no_kernel(geometry: Geometry) -> None:
    x, w, g = (v.double() for v in drawn(geometry, channels=1))
    assert same(results(depthwise, x, w, g, geometry), results(depthwise_twin, x, w, g, geometry))
    x, w = x.requires_grad_(), w.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: depthwise(x, w, geometry), (x, w), fast_mode=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        made, of_x, of_w = results(depthwise, x.bfloat16(), w.float(), g, geometry)
    assert (made.dtype, of_x.dtype, of_w.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("geometry", [SAME, HALF])
def test_a_step_is_traced_with_its_gradients(geometry: Geometry) -> None:
    given = drawn(geometry)
    traced = make_fx(lambda x, w, g: results(depthwise, x, w, g, geometry), tracing_mode="fake")(*given)
    names = {str(node.target) for node in traced.graph.nodes}
    assert {f"penstock.depthwise{of}.default" for of in ("", "_input_gradient", "_weight_gradient")} <= names
    assert same(traced(*given), results(depthwise, *given, geometry))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(depthwise_op, (*(v.requires_grad_() for v in given[:2]), geometry.flat()), test_utils=checks)
