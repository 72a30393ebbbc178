"""The mean and variance of each trial's channels: in parts, combined so that nothing is lost between them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.training.kernels.choice import runs
from penstock.training.kernels.tuning import Blocks, about, tuned
from penstock.training.uncompiled import operator

# PROGRAMS sum blocks of ELEMENTS, UNROLL of them at a time.
SUMMING = [
    Blocks(ELEMENTS=elements, PROGRAMS=programs, num_warps=4, UNROLL=unroll)
    for elements in (2048, 4096)
    for programs in (2048, 4096)
    for unroll in (1, 2)
]


@triton.jit
def _moments(
    y, out, R, C: tl.constexpr, CP: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr, BR: tl.constexpr,
    UNROLL: tl.constexpr,
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
    to = out + (trial * PARTS + part) * (2 * C) + c
    tl.store(to, origin + total / count, mask=c < C)
    tl.store(to + C, tl.sum(squares, 0) - total * (total / count), mask=c < C)


@triton.jit
def _combine(
    parts, out, second, R, C: tl.constexpr, PARTS: tl.constexpr, PLACES: tl.constexpr,
    CP: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """out[0, trial] = the mean of each channel, and its variance ``second`` numbers further; a part has PLACES."""
    trial = tl.program_id(0)
    c = tl.program_id(1) * CP + tl.arange(0, CP)
    parts += trial.to(tl.int64) * (PARTS * 2 * C)
    sums = tl.zeros((BP, CP), dtype=tl.float32)
    for block in range(0, (PARTS + BP - 1) // BP):
        p = block * BP + tl.arange(0, BP)
        there = (p < PARTS)[:, None] & (c < C)[None, :]
        count = tl.maximum(tl.minimum(R - p * PLACES, PLACES), 0).to(tl.float32)
        sums += count[:, None] * tl.load(parts + (p * 2 * C)[:, None] + c[None, :], mask=there, other=0.0)
    mean = tl.sum(sums, 0) / R
    squares = tl.zeros((BP, CP), dtype=tl.float32)
    for block in range(0, (PARTS + BP - 1) // BP):
        p = block * BP + tl.arange(0, BP)
        there = (p < PARTS)[:, None] & (c < C)[None, :]
        count = tl.maximum(tl.minimum(R - p * PLACES, PLACES), 0).to(tl.float32)
        at = parts + (p * 2 * C)[:, None] + c[None, :]
        off = tl.where(there, tl.load(at, mask=there, other=0.0) - mean[None, :], 0.0)
        squares += tl.load(at + C, mask=there, other=0.0) + count[:, None] * off * off
    tl.store(out + trial * C + c, mean, mask=c < C)
    tl.store(out + second + trial * C + c, tl.sum(squares, 0) / R, mask=c < C)


@triton.jit
def _total(parts, out, C: tl.constexpr, PARTS: tl.constexpr, CP: tl.constexpr, BP: tl.constexpr):
    """out[row] = Σ parts[row], in a fixed order."""
    row = tl.program_id(0)
    c = tl.program_id(1) * CP + tl.arange(0, CP)
    parts += row.to(tl.int64) * (PARTS * C)
    sums = tl.zeros((BP, CP), dtype=tl.float32)
    for block in range(0, (PARTS + BP - 1) // BP):
        p = block * BP + tl.arange(0, BP)
        there = (p < PARTS)[:, None] & (c < C)[None, :]
        sums += tl.load(parts + (p * C)[:, None] + c[None, :], mask=there, other=0.0)
    tl.store(out + row * C + c, tl.sum(sums, 0), mask=c < C)


def whole(y: torch.Tensor, elements: int, most: int = 2**30) -> dict[str, int]:
    """The launch options of a kernel over a trial's [places, channels]: blocks of elements, at ``most`` so wide."""
    channels = y.shape[-1]
    padded = min(most, triton.next_power_of_2(channels))
    return {"R": y[0].numel() // channels, "C": channels, "CP": padded, "BR": max(1, elements // padded)}


def parts(y: torch.Tensor, blocks: Blocks) -> tuple[tuple[int, int, int], dict[str, int]]:
    """The grid and launch options of a kernel that sums a trial's places in parts, which fill the device.

    A program has few channels: otherwise there would be many parts of a few places each.
    """
    own = whole(y, blocks["ELEMENTS"], most=64)
    wide, rounds = triton.cdiv(own["C"], own["CP"]), triton.cdiv(own["R"], own["BR"])
    each = triton.cdiv(rounds, min(rounds, triton.cdiv(blocks["PROGRAMS"], about(len(y)) * wide)))
    own |= {"PARTS": triton.cdiv(rounds, each), "EACH": each}
    return (own["PARTS"], len(y), wide), own


def _few(channels: int, count: int) -> dict[str, int]:
    """The launch options of a kernel that adds parts: few channels of many parts at a time."""
    CP = min(16, triton.next_power_of_2(channels))
    return {"C": channels, "PARTS": count, "CP": CP, "BP": min(2048 // CP, triton.next_power_of_2(count))}


def total(summed: torch.Tensor) -> torch.Tensor:
    """[…, parts, channels] summed over the parts."""
    *rows, count, channels = summed.shape
    own, out = _few(channels, count), summed.new_empty(*rows, channels)
    _total[out.numel() // channels, triton.cdiv(channels, own["CP"])](summed, out, num_warps=4, **own)
    return out


def shape(kernel: str, y: torch.Tensor) -> tuple[str | int | torch.dtype, ...]:
    """The numbers that the best blocks of a kernel depend on."""
    return kernel, y.dtype, y[0].numel(), y.shape[-1], about(len(y))


@operator
@torch.library.custom_op("penstock::moments", mutates_args=(), schema="(Tensor y) -> Tensor")
def moments(y: torch.Tensor) -> torch.Tensor:
    """The mean and variance of each trial's channels, [2, trials, channels]."""
    if not runs(y, y[0].numel()):
        return moments_twin(y)
    y = y.contiguous()
    blocks = tuned(shape("moments", y), lambda: SUMMING, lambda blocks: moments_by(y, blocks))
    return moments_by(y, blocks)


def moments_by(y: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """``moments`` by given block sizes."""
    grid, own = parts(y, blocks)
    summed = torch.empty(len(y), own["PARTS"], 2, own["C"], device=y.device, dtype=torch.float32)
    out = torch.empty(2, len(y), own["C"], device=y.device, dtype=torch.float32)
    _moments[grid](y, summed, num_warps=blocks["num_warps"], UNROLL=blocks["UNROLL"], **own)
    few = _few(own["C"], own["PARTS"])
    _combine[len(y), triton.cdiv(own["C"], few["CP"])](
        summed, out, len(y) * own["C"], own["R"], PLACES=own["EACH"] * own["BR"], num_warps=4, **few
    )
    return out


@moments.register_fake
def _(y: torch.Tensor) -> torch.Tensor:
    return y.new_empty(2, len(y), y.shape[-1], dtype=torch.promote_types(y.dtype, torch.float32))


def moments_twin(y: torch.Tensor) -> torch.Tensor:
    wide = y.flatten(1, -2).to(torch.promote_types(y.dtype, torch.float32))
    return torch.stack([wide.mean(1), wide.var(1, correction=0)])
