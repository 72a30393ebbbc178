"""The mean and variance of each trial's channels: in parts, combined so that nothing is lost between them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.training.kernels.choice import runs

ELEMENTS = 2048  # of a block
PROGRAMS = 2048  # that sum: enough to fill a device several times over


@triton.jit
def _moments(y, out, R, C: tl.constexpr, CP: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr, BR: tl.constexpr):
    """out[trial, part] = the mean, and the sum of squares around it.

    The sums are of differences from the part's first row: nothing is lost where the mean is far from zero.
    """
    trial, part = tl.program_id(1), tl.program_id(0)
    c = tl.arange(0, CP)
    y += trial.to(tl.int64) * R * C
    first = part * EACH * BR
    origin = tl.load(y + tl.minimum(first, R - 1) * C + c, mask=c < C, other=0.0).to(tl.float32)
    sums = tl.zeros((BR, CP), dtype=tl.float32)
    squares = tl.zeros((BR, CP), dtype=tl.float32)
    for block in range(0, EACH):
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
    parts, out, R, C: tl.constexpr, CP: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr, BR: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    """out[trial] = mean and variance of each channel."""
    trial = tl.program_id(0)
    c = tl.arange(0, CP)
    parts += trial.to(tl.int64) * (PARTS * 2 * C)
    sums = tl.zeros((BP, CP), dtype=tl.float32)
    for block in range(0, (PARTS + BP - 1) // BP):
        p = block * BP + tl.arange(0, BP)
        there = (p < PARTS)[:, None] & (c < C)[None, :]
        count = tl.maximum(tl.minimum(R - p * (EACH * BR), EACH * BR), 0).to(tl.float32)
        sums += count[:, None] * tl.load(parts + (p * 2 * C)[:, None] + c[None, :], mask=there, other=0.0)
    mean = tl.sum(sums, 0) / R
    squares = tl.zeros((BP, CP), dtype=tl.float32)
    for block in range(0, (PARTS + BP - 1) // BP):
        p = block * BP + tl.arange(0, BP)
        there = (p < PARTS)[:, None] & (c < C)[None, :]
        count = tl.maximum(tl.minimum(R - p * (EACH * BR), EACH * BR), 0).to(tl.float32)
        at = parts + (p * 2 * C)[:, None] + c[None, :]
        off = tl.where(there, tl.load(at, mask=there, other=0.0) - mean[None, :], 0.0)
        squares += tl.load(at + C, mask=there, other=0.0) + count[:, None] * off * off
    tl.store(out + trial * (2 * C) + c, mean, mask=c < C)
    tl.store(out + trial * (2 * C) + C + c, tl.sum(squares, 0) / R, mask=c < C)


def sizes(y: torch.Tensor) -> dict[str, int]:
    """What a kernel over a trial's [places, channels] is launched with."""
    channels = y.shape[-1]
    padded = triton.next_power_of_2(channels)
    return {"R": y[0].numel() // channels, "C": channels, "CP": padded, "BR": max(1, ELEMENTS // padded)}


def parts_of(y: torch.Tensor) -> dict[str, int]:
    """The same, with the parts that a trial's places are summed in so that the device is full."""
    own = sizes(y)
    blocks = triton.cdiv(own["R"], own["BR"])
    each = triton.cdiv(blocks, min(blocks, triton.cdiv(PROGRAMS, len(y))))
    return {**own, "PARTS": triton.cdiv(blocks, each), "EACH": each}


@torch.library.custom_op("penstock::moments", mutates_args=(), schema="(Tensor y) -> Tensor")
def moments(y: torch.Tensor) -> torch.Tensor:
    """The mean and variance of each trial's channels, [trials, 2, channels]."""
    if not runs(y, y[0].numel()):
        return moments_twin(y)
    own = parts_of(y)
    parts = torch.empty(len(y), own["PARTS"], 2, own["C"], device=y.device, dtype=torch.float32)
    out = torch.empty(len(y), 2, own["C"], device=y.device, dtype=torch.float32)
    _moments[own["PARTS"], len(y)](y.contiguous(), parts, num_warps=4, **own)
    _combine[(len(y),)](parts, out, BP=max(1, min(64, ELEMENTS // own["CP"])), num_warps=4, **own)
    return out


@moments.register_fake
def _(y: torch.Tensor) -> torch.Tensor:
    return y.new_empty(len(y), 2, y.shape[-1], dtype=torch.promote_types(y.dtype, torch.float32))


def moments_twin(y: torch.Tensor) -> torch.Tensor:
    wide = y.flatten(1, -2).to(torch.promote_types(y.dtype, torch.float32))
    return torch.stack([wide.mean(1), wide.var(1, correction=0)], 1)
