"""Where the kernels of convolutions find their numbers: patches of images, blocks of what is made, spread weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from penstock.training.kernels.geometry import Geometry, axis, between, through

OUTSIDE = tl.constexpr(1 << 20)  # rows down from any image, and twice that is still a number


@triton.jit
def load_patches(
    x, m, k, M, C: tl.constexpr, K: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr, T1: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """Columns ``k`` of the patches of blocks ``m``: zero outside the image.

    What depends on a block or on a column alone is computed for those, and an element has two sums and two comparisons.
    """
    row = m // G1 % G0 * S0
    column = m % G1 * S1
    down = k // C // T1 * D0 - P0
    across = k // C % T1 * D1 - P1
    at = ((m // (G0 * G1) * H0 + row) * H1 + column) * C
    to = (down * H1 + across) * C + k % C
    h = tl.where(m < M, row, OUTSIDE)[:, None] + tl.where(k < K, down, OUTSIDE)[None, :]
    v = column[:, None] + across[None, :]
    inside = (h.to(tl.uint32) < H0) & (v.to(tl.uint32) < H1)  # where it is negative, it is too large
    return tl.load(x + (at[:, None] + to[None, :]), mask=inside, other=0.0)


@triton.jit
def places_made(
    m, n, M, N: tl.constexpr,
    O0: tl.constexpr, O1: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr,
):  # fmt: skip
    """Where columns ``n`` of blocks ``m`` lie in what is made, and whether they are there."""
    row = m // G1 % G0 * B0
    column = m % G1 * B1
    down = n // (N * B1) % B0
    across = n // N % B1
    there = (m < M)[:, None]
    if G0 * B0 > O0:  # the last blocks reach over the edge
        there = there & (row[:, None] + down[None, :] < O0)
    if G1 * B1 > O1:
        there = there & (column[:, None] + across[None, :] < O1)
    at = ((m // (G0 * G1) * O0 + row) * O1 + column) * N
    return at[:, None] + ((down * O1 + across) * N + n % N)[None, :], there


@triton.jit
def _spread(
    w, table, out, trial_step, tap_step, c_step, n_step, T: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, PLACES: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[trial, place of the patch, c, place of the block, n] = w[trial, the tap between them, c, n], or zero."""
    trial = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = e // (PLACES * N)
    own = e // N % PLACES
    c = k % C
    n = e % N
    there = k < K
    tap = tl.load(table + k // C * PLACES + own, mask=there, other=T)
    at = (T - 1 - tap if TURNED else tap) * tap_step + c * c_step + n * n_step
    value = tl.load(w + trial * trial_step + at, mask=there & (tap < T), other=0.0)
    tl.store(out + trial * (K * PLACES * N) + e, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _collect(
    parts, table, out, T: tl.constexpr, C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PLACES: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[trial, tap, c, n] = Σ over parts and places of a block of what lies between a patch and them."""
    trial = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tap = e // (C * N)
    c = e // N % C
    n = e % N
    there = tap < T
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for own in range(0, PLACES):
        place = tl.load(table + tap * PLACES + own, mask=there, other=0)
        at = ((place * C + c) * PLACES + own) * N + n
        for part in range(0, PARTS):
            total += tl.load(parts + (trial * PARTS + part) * (K * PLACES * N) + at, mask=there, other=0.0)
    tl.store(out + trial * (T * C * N) + e, total, mask=there)


@dataclass(frozen=True)
class Cut:
    """A convolution of some channels, cut into blocks: what its kernels are compiled for."""

    constants: dict[str, int]
    blocks: int  # in an image
    columns: int  # of a block
    places: int  # of a block
    between: torch.Tensor
    through: torch.Tensor

    @property
    def common(self) -> dict[str, int]:
        """What the kernels of weights are compiled for."""
        return {name: self.constants[name] for name in ("C", "N", "K")} | {"PLACES": self.places, "BLOCK": 1024}


@cache
def cut(geometry: Geometry, channels: int, made: int, down: int, across: int, device: torch.device) -> Cut:
    """A geometry in blocks of so many places."""
    rows, columns = axis(geometry, 0, down), axis(geometry, 1, across)
    pairs = {"H": geometry.size, "O": geometry.made, "G": (rows.count, columns.count), "B": (rows.block, columns.block)}
    pairs |= {"S": (rows.step, columns.step), "P": (rows.padding, columns.padding)}
    pairs |= {"D": (rows.dilation, columns.dilation)}
    constants = {"C": channels, "N": made, "K": rows.taps * columns.taps * channels, "T1": columns.taps}
    constants |= {f"{name}{i}": pair[i] for name, pair in pairs.items() for i in (0, 1)}
    places = rows.block * columns.block
    tables = (which(geometry, rows, columns).to(device, torch.int32) for which in (between, through))
    return Cut(constants, rows.count * columns.count, places * made, places, *tables)


def spread(w: torch.Tensor, cut: Cut, dtype: torch.dtype, turned: bool) -> torch.Tensor:
    """A trial's weights for a patch and a block, [trials, places × channels, places × outputs].

    ``turned``: they are those of the way there, whose outputs are the channels here.
    """
    size = cut.constants["K"] * cut.columns
    steps = w.transpose(2, 3).stride() if turned else w.stride()
    out = torch.empty(len(w), cut.constants["K"], cut.columns, device=w.device, dtype=dtype)
    _spread[triton.cdiv(size, 1024), len(w)](w, cut.between, out, *steps, T=w.shape[1], TURNED=turned, **cut.common)
    return out


def collect(parts: torch.Tensor, cut: Cut, taps: int) -> torch.Tensor:
    """The gradients of a trial's weights, [trials, taps, channels, outputs], from those of a patch and a block."""
    made, channels = cut.constants["N"], cut.constants["C"]
    out = torch.empty(len(parts), taps, channels, made, device=parts.device, dtype=torch.float32)
    _collect[triton.cdiv(taps * channels * made, 1024), len(parts)](
        parts, cut.through, out, T=taps, PARTS=parts.shape[1], **cut.common
    )
    return out
