"""The gradient of the weights of all trials' convolutions: the product of patches and the output's gradient.

The gradient is summed in parts, which are then added in a fixed order: equal inputs give equal bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.training.kernels.apart import MANY, weigh_apart
from penstock.training.kernels.apart import offered as apart
from penstock.training.kernels.at_once import sums
from penstock.training.kernels.choice import exact, runs, splits
from penstock.training.kernels.convolution import convolve, for_each, patches_twin
from penstock.training.kernels.geometry import Geometry, axis, sides
from penstock.training.kernels.patches import MOST, add_product, collect, cut, load_patches, places_made
from penstock.training.kernels.tuning import Blocks, about, tuned
from penstock.training.uncompiled import operator


@triton.jit(do_not_specialize=["M", "PARTS", "EACH"])
def _weigh(
    x, g, out, M, x_step, y_step, PARTS, EACH,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, O0: tl.constexpr, O1: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr,
    B0: tl.constexpr, B1: tl.constexpr, T1: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr = 0,
):  # fmt: skip
    """out[trial, part, k, n] = Σ_m patch[m, k] · g[trial, m, n] over the blocks of a part.

    It is compiled for a layer, whatever the batch size and the number of trials.
    """
    part = tl.program_id(0) % PARTS
    k = tl.program_id(0) // PARTS * BK + tl.arange(0, BK)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    columns: tl.constexpr = N * B0 * B1
    trial = tl.program_id(2).to(tl.int64)
    known = n < columns
    x += trial * x_step
    g += trial * y_step
    total = tl.zeros((BK, BN), dtype=tl.float32)
    for block in range(0, EACH):
        m = (part * EACH + block) * BM + tl.arange(0, BM)
        a = load_patches(x, m, k, M, C, K, H0, H1, G0, G1, T1, S0, S1, P0, P1, D0, D1)
        at, there = places_made(m, n, M, N, O0, O1, G0, G1, B0, B1)
        b = tl.load(g + at, mask=there & known[None, :], other=0.0)
        total = add_product(tl.trans(a), b, total, EXACT, SPLIT)
    to = (trial * (PARTS * K * columns) + part * (K * columns) + n)[None, :] + (k * columns)[:, None]
    tl.store(out + to, total, mask=(k < K)[:, None] & known[None, :])


def weigh_by(x: torch.Tensor, g: torch.Tensor, geometry: Geometry, channels: int, blocks: Blocks) -> torch.Tensor:
    """``weigh`` by given block sizes, for the first ``channels`` of the images."""
    if "APART" in blocks:
        return weigh_apart(x[..., :channels], g, geometry)
    trials, examples = len(g), x.shape[1]
    by = cut(geometry, x.shape[-1], g.shape[-1], blocks["B0"], blocks["B1"], x.device)
    m, k = examples * by.blocks, by.constants["K"]
    rounds = triton.cdiv(m, blocks["BM"])
    each = triton.cdiv(rounds, blocks["PARTS"])
    parts = triton.cdiv(rounds, each)
    made, taps = g.shape[-1], geometry.taps[0] * geometry.taps[1]
    into = sums(by, (trials, parts, k, by.columns), (trials, made, channels, taps), x.device)
    own = {name: n for name, n in blocks.items() if name not in ("B0", "B1", "PARTS")}
    _weigh[parts * triton.cdiv(k, blocks["BK"]), triton.cdiv(by.columns, blocks["BN"]), trials](
        x, g, into.parts, m, x.stride(0), g.stride(0), parts, each, EXACT=exact(), **by.constants, **own
    )
    if not into.waits:
        collect(into.parts, by, into.out)
    return into.out.permute(0, 3, 2, 1)


def candidates(geometry: Geometry, channels: int, made: int, trials: int, split: bool) -> list[Blocks]:
    """Blocks of 32 to 256 columns, cut into enough parts to fill a device."""
    sizes = [(64, 64, 64, 4, 3), (64, 64, 128, 8, 3), (64, 32, 256, 8, 3), (64, 64, 256, 4, 1)]
    if split:  # nothing is copied ahead, so more programs at a time pay more
        sizes = [(64, 64, 128, 8, 1), (64, 32, 128, 4, 1), (64, 64, 64, 4, 1), (32, 32, 128, 8, 1)]
    elif min(channels, made) >= MANY:
        sizes += [(128, 64, 128, 4, 3), (256, 32, 128, 8, 4)]
    offered: list[Blocks] = []
    for width, BM, BK, warps, stages in sizes:
        down, across = sides(geometry, made, width)
        patch = channels * axis(geometry, 0, down).taps * axis(geometry, 1, across).taps
        columns = triton.next_power_of_2(max(8, made) * down * across)
        BN, BK = min(max(width, 128), columns), min(BK, max(16, triton.next_power_of_2(patch)))
        if 4096 * warps < BK * BN:  # the registers do not hold so many
            continue
        programs = about(trials) * triton.cdiv(patch, BK) * triton.cdiv(columns, BN)
        most = 2 * MOST // (down * across)  # or adding the parts takes longer than making them
        parts = max(1 if programs >= 1024 else 2, min(most, (1024 if split else 256) // programs))
        one = Blocks(B0=down, B1=across, BN=BN, BK=BK, BM=BM, num_warps=warps, num_stages=stages, PARTS=parts)
        if split:
            one["SPLIT"] = 1
        offered += [one] if one not in offered else []
    return [*offered, *apart(channels, made)]


@operator
@torch.library.custom_op("penstock::weigh", mutates_args=(), schema="(Tensor x, Tensor g, int[] geometry) -> Tensor")
def weigh(x: torch.Tensor, g: torch.Tensor, geometry: list[int]) -> torch.Tensor:
    """The gradient of the weights, [trials, taps, channels, outputs], in float32; it lies as the parameter does."""
    where = Geometry.from_flat(geometry)
    if not runs(x, where.numbers(x.shape[1], x.shape[-1], g.shape[-1])):
        return weigh_twin(x, g, geometry)
    channels, made = x.shape[-1], g.shape[-1]
    x, g = for_each(x, len(g)), g.contiguous()
    blocks = tuned(
        ("weigh", x.dtype, exact(), *geometry, x.shape[-1], made, about(len(g))),
        lambda: candidates(where, x.shape[-1], made, len(g), splits(x)),
        lambda blocks: weigh_by(x, g, where, channels, blocks),
    )
    return weigh_by(x, g, where, channels, blocks)


@weigh.register_fake
def _(x: torch.Tensor, g: torch.Tensor, geometry: list[int]) -> torch.Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    made = x.new_empty(len(g), g.shape[-1], x.shape[-1], geometry[4] * geometry[5], dtype=dtype)
    return made.permute(0, 3, 2, 1)


def weigh_twin(x: torch.Tensor, g: torch.Tensor, geometry: list[int]) -> torch.Tensor:
    made = torch.einsum("fnhwtc,fnhwo->foct", patches_twin(x.expand(len(g), -1, -1, -1, -1), geometry), g)
    return made.to(torch.promote_types(x.dtype, torch.float32)).contiguous().permute(0, 3, 2, 1)


class _Convolution(torch.autograd.Function):
    """Also gives its images back: if other operators read those, the kernel sums both gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, geometry: list[int]) -> Any:
        ctx.geometry = geometry
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return convolve(x, w, geometry, None, False), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x, w), (g, other) = ctx.saved_tensors, grads
        if g is None:
            return other, None, None
        turned = Geometry.from_flat(ctx.geometry).turned().flat()
        return (
            convolve(g, w, turned, other, True) if ctx.needs_input_grad[0] else None,
            weigh(x, g, ctx.geometry).to(w.dtype) if ctx.needs_input_grad[1] else None,
            None,
        )


def convolution(x: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
    """[trials or 1, examples, height, width, channels] with [trials, outputs, channels, taps, taps], differentiable.

    Gives the output, and the images again, to be read instead of ``x``.
    """
    made: Any = _Convolution.apply(x, packed(weight), geometry.flat())
    return made  # type: ignore[no-any-return]


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Weights [trials, outputs, channels, taps, taps] in the order that the kernels read."""
    return weight.permute(0, 3, 4, 2, 1).flatten(1, 2)
