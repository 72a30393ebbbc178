"""Convolutions of all trials at once, each trial with weights of its own and few channels.

Images lie as [trials, examples, height, width, channels], so that a trial's images are one piece of memory; the images
of a batch that the trials share are there once, [1, examples, …]. A convolution is a product of patches and weights:
the patches, [examples × blocks, places × channels], are gathered while the product is computed and never written (an
implicit GEMM). The input's gradient is a convolution too, of the output's gradient with the weights turned around.

The programs of the kernels belong to one trial each: no trial's number is ever multiplied with another's, not even by
zero. Where a whole patch fits into one product, a program has several blocks and reads its weights once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from penstock.training.kernels.apart import MANY, convolve_apart
from penstock.training.kernels.apart import offered as apart
from penstock.training.kernels.choice import exact, runs, splits
from penstock.training.kernels.geometry import Geometry, axis, sides
from penstock.training.kernels.patches import add_product, cut, load_patches, places_made, spread
from penstock.training.kernels.tuning import Blocks, about, tuned
from penstock.training.uncompiled import operator


@triton.jit(do_not_specialize=["M"])
def _convolve(
    x, w, y, addend, M, x_step, y_step,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr, ADD: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, O0: tl.constexpr, O1: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr,
    B0: tl.constexpr, B1: tl.constexpr, T1: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EACH: tl.constexpr,
    SPLIT: tl.constexpr = 0,
):  # fmt: skip
    """y[trial, m, n] = Σ_k patch[m, k] · w[trial, k, n]"""
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    columns: tl.constexpr = N * B0 * B1
    trial = tl.program_id(2).to(tl.int64)
    known = n < columns
    x += trial * x_step
    y += trial * y_step
    addend += trial * y_step
    w += trial * (K * columns) + n
    if BK >= K:
        every = tl.arange(0, BK)
        weights = tl.load(
            w[None, :] + (every * columns)[:, None], mask=(every < K)[:, None] & known[None, :], other=0.0
        )
    for block in range(0, EACH):
        m = (tl.program_id(0) * EACH + block) * BM + tl.arange(0, BM)
        if BK >= K:
            a = load_patches(x, m, every, M, C, K, H0, H1, G0, G1, T1, S0, S1, P0, P1, D0, D1)
            total = add_product(a, weights, tl.zeros((BM, BN), dtype=tl.float32), EXACT, SPLIT)
        else:
            total = tl.zeros((BM, BN), dtype=tl.float32)
            for start in tl.range(0, K, BK):
                k = start + tl.arange(0, BK)
                a = load_patches(x, m, k, M, C, K, H0, H1, G0, G1, T1, S0, S1, P0, P1, D0, D1)
                b = tl.load(w[None, :] + (k * columns)[:, None], mask=(k < K)[:, None] & known[None, :], other=0.0)
                total = add_product(a, b, total, EXACT, SPLIT)
        at, there = places_made(m, n, M, N, O0, O1, G0, G1, B0, B1)
        there = there & known[None, :]
        if ADD:
            total += tl.load(addend + at, mask=there, other=0.0).to(tl.float32)
        tl.store(y + at, total.to(y.dtype.element_ty), mask=there)


def convolve_by(
    x: torch.Tensor,
    w: torch.Tensor,
    geometry: Geometry,
    addend: torch.Tensor | None,
    turned: bool,
    blocks: Blocks,
) -> torch.Tensor:
    """``convolve`` by given block sizes."""
    if "APART" in blocks:
        return convolve_apart(x[..., : w.shape[3 if turned else 2]], w, geometry, addend, turned)
    trials, examples, channels, made = len(w), x.shape[1], x.shape[-1], w.shape[2 if turned else 3]
    by = cut(geometry, channels, made, blocks["B0"], blocks["B1"], x.device)
    y = x.new_empty(trials, examples, *geometry.made, made)
    m = examples * by.blocks
    _convolve[triton.cdiv(m, blocks["BM"] * blocks["EACH"]), triton.cdiv(by.columns, blocks["BN"]), trials](
        x, spread(w, by, x.dtype, turned), y, y if addend is None else addend, m, x.stride(0), y.stride(0),
        EXACT=exact(), ADD=addend is not None,
        **by.constants, **{name: n for name, n in blocks.items() if name not in ("B0", "B1")},
    )  # fmt: skip
    return y


def for_each(x: torch.Tensor, trials: int) -> torch.Tensor:
    """The images of every trial. Shared images stay one piece of memory, and get channels that are read by fours."""
    if len(x) == trials:
        return x.contiguous()
    return pad(x, (0, -x.shape[-1] % 4)).contiguous().expand(trials, -1, -1, -1, -1)


def candidates(geometry: Geometry, channels: int, made: int, split: bool) -> list[Blocks]:
    """Blocks of 32 to 256 columns, enough work for a tensor core; patches in pieces, or whole."""
    if max(geometry.taps) == 1:
        down, across = geometry.up
        columns = min(128, triton.next_power_of_2(max(8, made * down * across)))
        common = Blocks(B0=down, B1=across, BN=columns, BK=16 if channels <= 8 else 32, EACH=1, num_warps=4)
        return [common | Blocks(BM=128, num_stages=4), common | Blocks(BM=256, num_stages=3), *apart(channels, made)]
    offered: list[Blocks] = []
    sizes = [(64, 128, 32, 4, 4), (128, 128, 32, 4, 4), (64, 128, 64, 8, 3)]
    if split:
        sizes = [(64, 128, 32, 4, 1), (64, 128, 32, 8, 1)]
    elif min(channels, made) >= MANY:
        sizes += [(256, 128, 64, 8, 3)]
    for width, BM, BK, warps, stages in sizes:
        down, across = sides(geometry, made, width)
        columns = min(max(width, 128), triton.next_power_of_2(max(8, made * down * across)))
        one = Blocks(B0=down, B1=across, BM=BM, BN=columns, BK=BK, EACH=1, num_warps=warps, num_stages=stages)
        if split and warps == 4:
            one["SPLIT"] = 1
        offered += [one] if one not in offered else []
    for width in (32, 64):
        down, across = sides(geometry, made, width)
        patch = channels * axis(geometry, 0, down).taps * axis(geometry, 1, across).taps
        whole, columns = triton.next_power_of_2(max(16, patch)), triton.next_power_of_2(max(8, made * down * across))
        if whole <= 256:
            common = Blocks(B0=down, B1=across, BN=columns, BK=whole, EACH=16, num_stages=1)
            offered += [common | Blocks(BM=128, num_warps=8), common | Blocks(BM=64, num_warps=4)]
    return [*offered, *apart(channels, made)]


@operator
@torch.library.custom_op(
    "penstock::convolve",
    mutates_args=(),
    schema="(Tensor x, Tensor w, int[] geometry, Tensor? addend, bool turned) -> Tensor",
)
def convolve(
    x: torch.Tensor, w: torch.Tensor, geometry: list[int], addend: torch.Tensor | None, turned: bool
) -> torch.Tensor:
    """Images convolved with each trial's weights, [trials, taps, channels, outputs], plus an addend.

    ``turned``: the weights are those of the forward, for its gradient.
    """
    where = Geometry.from_flat(geometry)
    if not runs(x, where.numbers(x.shape[1], x.shape[-1], w.shape[2 if turned else 3])):
        return convolve_twin(x, w, geometry, addend, turned)
    made = w.shape[2 if turned else 3]
    x = for_each(x, len(w))
    given = (x, w, where, None if addend is None else addend.contiguous(), turned)
    blocks = tuned(
        ("convolve", x.dtype, exact(), *geometry, x.shape[-1], made, addend is None, about(len(w))),
        lambda: candidates(where, x.shape[-1], made, splits(x)),
        lambda blocks: convolve_by(*given, blocks),
    )
    return convolve_by(*given, blocks)


@convolve.register_fake
def _(x: torch.Tensor, w: torch.Tensor, geometry: list[int], addend: Any, turned: bool) -> torch.Tensor:
    return x.new_empty(len(w), x.shape[1], geometry[2], geometry[3], w.shape[2 if turned else 3])


# The twin


def patches_twin(x: torch.Tensor, geometry: list[int]) -> torch.Tensor:
    """[trials, examples, height, width, taps, channels]: the patches, written out."""
    where = Geometry.from_flat(geometry)
    for dim, up in enumerate(where.up, 2):
        if up > 1:
            x = torch.stack([x, *[torch.zeros_like(x)] * (up - 1)], dim + 1).flatten(dim, dim + 1)
    span = [(n - 1) * s + (t - 1) * d + 1 for n, s, t, d in
            zip(where.made, where.stride, where.taps, where.dilation, strict=True)]  # fmt: skip
    far = [max(0, n - p - size) for n, p, size in zip(span, where.padding, x.shape[2:4], strict=True)]
    near = [max(0, p) for p in where.padding]
    x = pad(x, (0, 0, near[1], far[1], near[0], far[0]))
    taps = []
    for i in range(where.taps[0]):
        for j in range(where.taps[1]):
            a, b = (max(0, -p) + t * d for p, t, d in zip(where.padding, (i, j), where.dilation, strict=True))
            rows = x[:, :, a : a + (where.made[0] - 1) * where.stride[0] + 1 : where.stride[0]]
            taps.append(rows[:, :, :, b : b + (where.made[1] - 1) * where.stride[1] + 1 : where.stride[1]])
    return torch.stack(taps, 4)


def convolve_twin(
    x: torch.Tensor, w: torch.Tensor, geometry: list[int], addend: torch.Tensor | None, turned: bool
) -> torch.Tensor:
    weights = (w.flip(1).transpose(2, 3) if turned else w).to(x.dtype)
    y = torch.einsum("fnhwtc,ftco->fnhwo", patches_twin(x.expand(len(w), -1, -1, -1, -1), geometry), weights)
    return (y if addend is None else y + addend).contiguous()
