"""The addresses that the kernels of convolutions use: patches of images, blocks of outputs, spread weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from penstock.training.kernels.at_once import Layout, at_once
from penstock.training.kernels.geometry import Geometry, axis, between, through

MOST = 256  # entries of a number that are added at a time
ADDED = tl.constexpr(4096)  # entries of all numbers that a program adds at a time
WARPS = 8  # of such a program
OUTSIDE = tl.constexpr(1 << 20)  # rows below any image; twice as many still fit into 32 bits


@triton.jit
def load_patches(
    x, m, k, M, C: tl.constexpr, K: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr, T1: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """Columns ``k`` of the patches of blocks ``m``: zero outside the image.

    Terms of a block or a column alone are computed once each; an element costs two sums and two comparisons.
    """
    row = m // G1 % G0 * S0
    column = m % G1 * S1
    down = k // C // T1 * D0 - P0
    across = k // C % T1 * D1 - P1
    at = ((m // (G0 * G1) * H0 + row) * H1 + column) * C
    to = (down * H1 + across) * C + k % C
    h = tl.where(m < M, row, OUTSIDE)[:, None] + tl.where(k < K, down, OUTSIDE)[None, :]
    v = column[:, None] + across[None, :]
    inside = (h.to(tl.uint32) < H0) & (v.to(tl.uint32) < H1)  # a negative number is too large as an unsigned one
    return tl.load(x + (at[:, None] + to[None, :]), mask=inside, other=0.0)


@triton.jit
def add_product(a, b, total, EXACT: tl.constexpr, SPLIT: tl.constexpr):
    """total + a · b. SPLIT: float32 as the sum of two bfloat16, which is nearer than TF32, in three products."""
    if SPLIT:
        high, low = _split(a)
        other, rest = _split(b)
        total = tl.dot(high, other, total)
        total = tl.dot(high, rest, total)
        return tl.dot(low, other, total)
    return tl.dot(a, b, total, input_precision="ieee" if EXACT else "tf32")


@triton.jit
def _split(x):
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def places_made(
    m, n, M, N: tl.constexpr,
    O0: tl.constexpr, O1: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr,
):  # fmt: skip
    """Where columns ``n`` of blocks ``m`` lie in the output, and whether they exist."""
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
def lay_out(
    w, table, out, trial, own, row, n, first, trial_step, tap_step, c_step, n_step, T, C, OWN, N, K, PLACES,
    DENSE: tl.constexpr,
):  # fmt: skip
    """out[trial, place of the patch, c, place of the block, n] = w[trial, the tap between them, c, n], or zero.

    This is done for rows (c, place of the patch) and columns ``n`` of one place of the block, ``own``. The taps of a
    channel lie side by side in a parameter; DENSE: without gaps. The channels from OWN on are the images' alone.
    """
    patch = K // C
    c = row // patch
    place = row % patch
    there = (row < K)[:, None] & (n < N)[None, :]
    w += trial * trial_step
    if DENSE:
        value = tl.load(w + row[:, None] + (n * n_step)[None, :], mask=there, other=0.0)
    else:
        tap = tl.load(table + place * PLACES + own, mask=row < K, other=T)
        at = first + tap * tap_step + c * c_step
        known = there & ((tap < T) & (c < OWN))[:, None]
        value = tl.load(w + at[:, None] + (n * n_step)[None, :], mask=known, other=0.0)
    to = out + trial * K * PLACES * N + (((place * C + c) * PLACES + own) * N)[:, None] + n[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["first", "trial_step", "tap_step", "c_step", "n_step", "T", "C", "OWN", "K", "PLACES"])
def _spread(
    w, table, out, first, trial_step, tap_step, c_step, n_step, T, C, OWN, N, K, PLACES,
    DENSE: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """``lay_out`` for all of a layer's weights.

    It is compiled for no one layer. A program has one place of the block: one place after another would each wait for
    memory.
    """
    trial = tl.program_id(2).to(tl.int64)
    own = tl.program_id(0) % PLACES
    row = tl.program_id(0) // PLACES * BR + tl.arange(0, BR)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    lay_out(
        w, table, out, trial, own, row, n, first, trial_step, tap_step, c_step, n_step, T, C, OWN, N, K, PLACES, DENSE
    )


@triton.jit
def add_up(
    parts, table, out, trial, number, T, C, OWN, N, K, PLACES, PARTS, BQ: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """out[trial, n, c, tap] = the sum over parts, and over places of a block, of the entries at that tap, c < OWN.

    This is done for BE numbers (c, tap, n): BQ entries of each are added at a time, in a fixed order.
    """
    row = number // N
    n = number % N
    c = row // T
    size = K * PLACES * N
    parts += trial * PARTS * size + c * (PLACES * N) + n
    table += row % T * PLACES
    total = tl.zeros((BQ, BE), dtype=tl.float32)
    first = 0
    while first < PARTS * PLACES:
        entry = first + tl.arange(0, BQ)
        own = entry % PLACES
        there = (entry < PARTS * PLACES)[:, None] & (c < OWN)[None, :]
        place = tl.load(table[None, :] + own[:, None], mask=there, other=0)
        at = (entry // PLACES * size + own * N)[:, None] + place * (C * PLACES * N)
        total += tl.load(parts[None, :] + at, mask=there, other=0.0)
        first += BQ
    tl.store(out + trial * OWN * T * N + n * (OWN * T) + row, tl.sum(total, 0), mask=c < OWN)


@triton.jit(do_not_specialize=["T", "C", "OWN", "N", "K", "PLACES", "PARTS"])
def _collect(parts, table, out, T, C, OWN, N, K, PLACES, PARTS, BE: tl.constexpr, BQ: tl.constexpr):
    """``add_up`` for all of a layer's weights. It is compiled for no one layer."""
    trial = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * BE + tl.arange(0, BE)
    add_up(parts, table, out, trial, number, T, C, OWN, N, K, PLACES, PARTS, BQ, BE)


@dataclass(frozen=True)
class Cut:
    """A convolution of some channels, cut into blocks; its kernels are compiled for these numbers."""

    constants: dict[str, int]
    blocks: int  # in an image
    columns: int  # of a block
    places: int  # of a block
    between: torch.Tensor
    through: torch.Tensor


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


def offsets(w: torch.Tensor, turned: bool) -> tuple[int, int, int, int, int, int]:
    """Where the first tap lies, the steps from trial to trial, tap, channel and output, and the number of taps.

    ``turned``: the weights are those of the forward, whose outputs are the channels here.
    """
    trial, tap, c, n = w.transpose(2, 3).stride() if turned else w.stride()
    taps = w.shape[1]
    return ((taps - 1) * tap, trial, -tap, c, n, taps) if turned else (0, trial, tap, c, n, taps)


def spread(w: torch.Tensor, cut: Cut, dtype: torch.dtype, turned: bool) -> torch.Tensor:
    """A trial's weights for a patch and a block, [trials, places × channels, places × outputs].

    Images may have more channels than the weights have.
    """
    if (here := at_once()) is not None and (laid := here.lay(Layout(w.detach(), cut, dtype, turned))) is not None:
        return laid
    first, trial, tap, c, n, taps = offsets(w, turned)
    own_channels = w.shape[3 if turned else 2]
    channels, made, k = (cut.constants[name] for name in ("C", "N", "K"))
    out = torch.empty(len(w), k, cut.columns, device=w.device, dtype=dtype)
    dense = not turned and cut.places == 1 and (tap, c) == (1, taps) and own_channels == channels
    wide = min(32, triton.next_power_of_2(made))
    own = {"DENSE": dense, "BR": 1024 // wide, "BN": wide}
    _spread[triton.cdiv(k, own["BR"]) * cut.places, triton.cdiv(made, wide), len(w)](
        w, cut.between, out, first, trial, tap, c, n, taps, channels, own_channels, made, k, cut.places, **own
    )
    return out


def entries_of(count: int, cut: Cut) -> int:
    """How many entries of a number are added at a time: a power of four, for fewer kernels."""
    return int(min(MOST, 4 ** math.ceil(math.log(count * cut.places, 4))))


def collect(parts: torch.Tensor, cut: Cut, out: torch.Tensor) -> None:
    """Add up the gradients of a trial's weights from those of a patch and a block.

    The gradients lie as the parameter does, [trials, outputs, channels, taps].
    """
    trials, count, k, _ = parts.shape
    _, made, channels, taps = out.shape
    entries = entries_of(count, cut)
    own = {"BE": ADDED.value // entries, "BQ": entries, "num_warps": WARPS}
    _collect[triton.cdiv(made * channels * taps, own["BE"]), trials](
        parts, cut.through, out, taps, cut.constants["C"], channels, made, k, cut.places, count, **own
    )
