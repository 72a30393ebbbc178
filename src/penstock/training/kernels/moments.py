"""The mean and variance of each trial's channels: in parts, combined so that nothing is lost between them.

The kernel that combines the parts also gives all else that a BatchNorm needs: there is no launch for a few numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.training.kernels.choice import runs
from penstock.training.kernels.tuning import Blocks, about, tuned
from penstock.training.uncompiled import operator

PARTS = 1024  # of a trial at most: so many are combined at a time
FEW = 8  # channels whose parts a program combines
# PROGRAMS sum blocks of ELEMENTS, UNROLL of them at a time.
SUMMING = [
    Blocks(ELEMENTS=elements, PROGRAMS=programs, num_warps=4, UNROLL=unroll)
    for elements in (2048, 4096)
    for programs in (2048, 4096)
    for unroll in (1, 2)
]


@triton.jit(do_not_specialize=["EACH"])
def _moments(
    y, out, R, EACH, C: tl.constexpr, CP: tl.constexpr, BR: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out[trial, part] = the mean, and the sum of squares around it.

    The sums are of differences from the part's first row: nothing is lost where the mean is far from zero.
    """
    trial, part = tl.program_id(1), tl.program_id(0)
    c = tl.program_id(2) * CP + tl.arange(0, CP)
    y += trial.to(tl.int64) * R * C
    first = part * EACH * BR
    origin = tl.load(y + tl.minimum(first, R - 1) * C + c, mask=c < C, other=0.0).to(tl.float32)
    sums = tl.zeros((BR, CP), dtype=tl.float32)
    squares = tl.zeros((BR, CP), dtype=tl.float32)
    for block in tl.range(0, EACH, loop_unroll_factor=UNROLL):
        r = first + block * BR + tl.arange(0, BR)
        there = (r < R)[:, None] & (c < C)[None, :]
        value = tl.load(y + (r * C)[:, None] + c[None, :], mask=there, other=0.0).to(tl.float32)
        value = tl.where(there, value - origin[None, :], 0.0)
        sums += value
        squares += value * value
    count = tl.maximum(tl.minimum(R - first, EACH * BR), 1).to(tl.float32)
    total = tl.sum(sums, 0)
    to = out + (trial * tl.num_programs(0) + part) * (2 * C) + c
    tl.store(to, origin + total / count, mask=c < C)
    tl.store(to + C, tl.sum(squares, 0) - total * (total / count), mask=c < C)


@triton.jit(do_not_specialize=["R", "C", "PARTS", "PLACES", "weight_step", "bias_step"])
def _combine(
    parts, weight, weight_step, bias, bias_step, each, eps, out, unbiased, R, C, PARTS, PLACES,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, OWN: tl.constexpr, CP: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The rows of ``out`` [5, trials, channels] are those of ``moments``; a part has PLACES.

    OWN: trials have an ``eps`` of their own.
    """
    trial = tl.program_id(0)
    c = tl.program_id(1) * CP + tl.arange(0, CP)
    p = tl.arange(0, BP)
    there = (p < PARTS)[:, None] & (c < C)[None, :]
    at = parts + trial.to(tl.int64) * (PARTS * 2 * C) + (p * 2 * C)[:, None] + c[None, :]
    count = tl.maximum(tl.minimum(R - p * PLACES, PLACES), 0).to(tl.float32)[:, None]
    own = tl.load(at, mask=there, other=0.0)
    around = tl.load(at + C, mask=there, other=0.0)
    origin = tl.load(parts + trial.to(tl.int64) * (PARTS * 2 * C) + c, mask=c < C, other=0.0)
    mean = origin + tl.sum(tl.where(there, count * (own - origin[None, :]), 0.0), 0) / R  # as near as can be
    off = tl.where(there, own - mean[None, :], 0.0)
    variance = tl.sum(around + count * off * off, 0) / R
    rstd = tl.rsqrt(variance + (tl.load(each + trial).to(tl.float32) if OWN else eps))
    scale = rstd
    if WEIGHT:
        scale = tl.load(weight + trial.to(tl.int64) * weight_step + c, mask=c < C, other=0.0).to(tl.float32) * rstd
    shift = tl.zeros((CP,), dtype=tl.float32)
    if BIAS:
        shift = tl.load(bias + trial.to(tl.int64) * bias_step + c, mask=c < C, other=0.0).to(tl.float32)
    row = tl.num_programs(0) * C
    to = out + trial * C + c
    tl.store(to, mean, mask=c < C)
    tl.store(to + row, variance * unbiased, mask=c < C)
    tl.store(to + 2 * row, rstd, mask=c < C)
    tl.store(to + 3 * row, scale, mask=c < C)
    tl.store(to + 4 * row, shift, mask=c < C)


def whole(y: torch.Tensor, elements: int, most: int = 2**30) -> dict[str, int]:
    """The launch options of a kernel over a trial's [places, channels]: blocks of elements, at ``most`` so wide."""
    channels = y.shape[-1]
    padded = min(most, triton.next_power_of_2(channels))
    return {"R": y[0].numel() // channels, "C": channels, "CP": padded, "BR": max(1, elements // padded)}


def parts(y: torch.Tensor, blocks: Blocks) -> tuple[tuple[int, int, int], dict[str, int]]:
    """The grid and launch options of a kernel that sums a trial's places in parts, which fill the device.

    A program has few channels: otherwise there would be many parts of a few places each. There are no more parts than
    are quickly combined.
    """
    own = whole(y, blocks["ELEMENTS"], most=64)
    wide, rounds = triton.cdiv(own["C"], own["CP"]), triton.cdiv(own["R"], own["BR"])
    each = triton.cdiv(rounds, min(rounds, PARTS, triton.cdiv(blocks["PROGRAMS"], about(len(y)) * wide)))
    return (triton.cdiv(rounds, each), len(y), wide), own | {"EACH": each}


def few(grid: tuple[int, int, int], own: dict[str, int]) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid and launch options of a kernel that combines such parts: one kernel for any number of them."""
    options = {"R": own["R"], "C": own["C"], "PARTS": grid[0], "CP": FEW, "BP": PARTS, "num_warps": 8}
    return (grid[1], triton.cdiv(own["C"], FEW)), options


def in_rows(value: torch.Tensor | None, other: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
    """A weight or bias as kernels read it, its step from trial to trial, and whether there is one."""
    if value is None:
        return other, 0, False
    value = value if value.stride(1) == 1 else value.contiguous()
    return value, value.stride(0), True


def shape(kernel: str, y: torch.Tensor) -> tuple[str | int | torch.dtype, ...]:
    """The numbers that the best blocks of a kernel depend on."""
    return kernel, y.dtype, y[0].numel(), y.shape[-1], about(len(y))


@operator
@torch.library.custom_op(
    "penstock::moments",
    mutates_args=(),
    schema="(Tensor y, Tensor? weight=None, Tensor? bias=None, Tensor? each=None, float eps=0.0) -> Tensor",
)
def moments(
    y: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    each: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """The numbers of a BatchNorm of each trial's channels, [5, trials, channels].

    They are the mean and the unbiased variance, as running statistics have them; the reciprocal deviation, the scale
    (that times the weight) and the bias. ``each``: the trials' own ``eps``.
    """
    if not runs(y, y[0].numel()):
        return moments_twin(y, weight, bias, each, eps)
    y, given = y.contiguous(), (weight, bias, each, eps)
    blocks = tuned(shape("moments", y), lambda: SUMMING, lambda blocks: moments_by(y, *given, blocks))
    return moments_by(y, *given, blocks)


def moments_by(
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    each: torch.Tensor | None,
    eps: float,
    blocks: Blocks,
) -> torch.Tensor:
    """``moments`` by given block sizes."""
    grid, own = parts(y, blocks)
    summed = torch.empty(len(y), grid[0], 2, own["C"], device=y.device, dtype=torch.float32)
    out = torch.empty(5, len(y), own["C"], device=y.device, dtype=torch.float32)
    _moments[grid](y, summed, num_warps=blocks["num_warps"], UNROLL=blocks["UNROLL"], **own)
    (weight, weight_step, weighs), (bias, bias_step, biased) = in_rows(weight, out), in_rows(bias, out)
    wide, options = few(grid, own)
    _combine[wide](
        summed, weight, weight_step, bias, bias_step, out if each is None else each.contiguous(), eps, out,
        _unbiased(own["R"]), PLACES=own["EACH"] * own["BR"],
        WEIGHT=weighs, BIAS=biased, OWN=each is not None, **options,
    )  # fmt: skip
    return out


@moments.register_fake
def _(y: torch.Tensor, *others: Any) -> torch.Tensor:
    return y.new_empty(5, len(y), y.shape[-1], dtype=torch.promote_types(y.dtype, torch.float32))


def moments_twin(
    y: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    each: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    wide = y.flatten(1, -2).to(torch.promote_types(y.dtype, torch.float32))
    mean, variance = wide.mean(1), wide.var(1, correction=0)
    rstd = torch.rsqrt(variance + (eps if each is None else each.to(wide.dtype).unsqueeze(1)))
    scale = rstd.clone() if weight is None else weight * rstd
    shift = torch.zeros_like(mean) if bias is None else bias.to(wide.dtype)
    return torch.stack([mean, variance * _unbiased(wide.shape[1]), rstd, scale, shift])


def _unbiased(places: int) -> float:
    """A variance of so many places divides by one less; a single place has none."""
    return places / max(1, places - 1)
