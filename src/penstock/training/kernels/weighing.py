"""The gradient of the weights of all trials' convolutions: the product of patches and the output's gradient.

It is summed in parts, which are then added in a fixed order: equal inputs give equal bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.training.kernels.apart import offered as apart
from penstock.training.kernels.apart import weigh_apart
from penstock.training.kernels.choice import exact, runs
from penstock.training.kernels.convolution import convolve, for_each, patches_twin
from penstock.training.kernels.geometry import Geometry, axis, sides
from penstock.training.kernels.patches import collect, cut, load_patches, places_made
from penstock.training.kernels.tuning import Blocks, about, tuned


@triton.jit
def _weigh(
    x, g, out, M, x_step, y_step,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, O0: tl.constexpr, O1: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr,
    B0: tl.constexpr, B1: tl.constexpr, T1: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    PARTS: tl.constexpr, EACH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[trial, part, k, n] = Σ_m patch[m, k] · g[trial, m, n] over the blocks of a part."""
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
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee" if EXACT else "tf32")
    to = (trial * (PARTS * K * columns) + part * (K * columns) + n)[None, :] + (k * columns)[:, None]
    tl.store(out + to, total, mask=(k < K)[:, None] & known[None, :])


def weigh_by(x: torch.Tensor, g: torch.Tensor, geometry: Geometry, blocks: Blocks) -> torch.Tensor:
    """``weigh`` by given block sizes."""
    if "APART" in blocks:
        return weigh_apart(x, g, geometry)
    trials, examples = len(g), x.shape[1]
    by = cut(geometry, x.shape[-1], g.shape[-1], blocks["B0"], blocks["B1"], x.device)
    m, k = examples * by.blocks, by.constants["K"]
    rounds = triton.cdiv(m, blocks["BM"])
    each = triton.cdiv(rounds, blocks["PARTS"])
    parts = triton.cdiv(rounds, each)
    out = torch.empty(trials, parts, k, by.columns, device=x.device, dtype=torch.float32)
    own = {name: n for name, n in blocks.items() if name not in ("B0", "B1", "PARTS")}
    _weigh[parts * triton.cdiv(k, blocks["BK"]), triton.cdiv(by.columns, blocks["BN"]), trials](
        x, g, out, m, x.stride(0), g.stride(0), EXACT=exact(), PARTS=parts, EACH=each, **by.constants, **own
    )
    return collect(out, by, geometry.taps[0] * geometry.taps[1])


def _candidates(geometry: Geometry, channels: int, made: int, trials: int) -> list[Blocks]:
    """Blocks of about 64 columns, cut into enough parts to fill a device."""
    down, across = sides(geometry, made, 64)
    patch = channels * axis(geometry, 0, down).taps * axis(geometry, 1, across).taps
    long = max(16, triton.next_power_of_2(patch))
    columns = min(128, triton.next_power_of_2(max(8, made) * down * across))
    common = Blocks(B0=down, B1=across, BN=columns, num_stages=3, PARTS=max(2, 256 // about(trials)))
    offered = [common | Blocks(BM=64, BK=min(64, long), num_warps=4)]
    if long > 64:
        offered.append(common | Blocks(BM=64, BK=128, num_warps=8))
    if long > 128 and columns < 128:  # the patches in few pieces, so that the gradient is read as often
        offered.append(common | Blocks(BM=32, BK=256, num_warps=8))
        offered.append(common | Blocks(BM=64, BK=256, num_warps=4, num_stages=1))
    return [*offered, *apart(channels, made)]


@torch.library.custom_op("penstock::weigh", mutates_args=(), schema="(Tensor x, Tensor g, int[] geometry) -> Tensor")
def weigh(x: torch.Tensor, g: torch.Tensor, geometry: list[int]) -> torch.Tensor:
    """The gradient of the weights, [trials, taps, channels, outputs], in float32."""
    where = Geometry.from_flat(geometry)
    if not runs(x, where.numbers(x.shape[1], x.shape[-1], g.shape[-1])):
        return weigh_twin(x, g, geometry)
    channels, made = x.shape[-1], g.shape[-1]
    x, g = for_each(x, len(g)), g.contiguous()
    blocks = tuned(
        ("weigh", x.dtype, exact(), *geometry, x.shape[-1], made, about(len(g))),
        lambda: _candidates(where, x.shape[-1], made, len(g)),
        lambda blocks: weigh_by(x, g, where, blocks),
    )
    return weigh_by(x, g, where, blocks)[:, :, :channels].contiguous()


@weigh.register_fake
def _(x: torch.Tensor, g: torch.Tensor, geometry: list[int]) -> torch.Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(len(g), geometry[4] * geometry[5], x.shape[-1], g.shape[-1], dtype=dtype)


def weigh_twin(x: torch.Tensor, g: torch.Tensor, geometry: list[int]) -> torch.Tensor:
    made = torch.einsum("fnhwtc,fnhwo->ftco", patches_twin(x.expand(len(g), -1, -1, -1, -1), geometry), g)
    return made.to(torch.promote_types(x.dtype, torch.float32))


class _Convolution(torch.autograd.Function):
    """Also gives its images back: who reads them there leaves the sum of the two gradients to the kernel."""

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

    Gives what is made, and the images again, to be read instead of ``x``.
    """
    made: Any = _Convolution.apply(x, packed(weight), geometry.flat())
    return made  # type: ignore[no-any-return]


def packed(weight: torch.Tensor) -> torch.Tensor:
    """[trials, outputs, channels, taps, taps] as the kernels read them."""
    return weight.permute(0, 3, 4, 2, 1).flatten(1, 2)
