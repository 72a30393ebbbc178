"""Exact attention of short sequences and narrow heads: a program holds all keys of a batch row and head.

Torch's kernels are made for long sequences: they widen heads of 16 to 64, and want queries, keys and values copied out
of the projection that they are slices of. Here all are read where they lie. Between forward and backward only the
logarithm of each row's sum is kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.training.kernels.choice import runs
from penstock.training.kernels.tuning import Blocks, about, tuned
from penstock.training.uncompiled import operator

LONGEST, LARGEST = 256, 8192  # keys, and keys times width: registers hold no more gradients
LOG2E = math.log2(math.e)  # the kernels, like the hardware, use powers and logarithms of 2


@triton.jit
def _tile(
    x, STEP: tl.constexpr, FIRST: tl.constexpr, LENGTH: tl.constexpr, W: tl.constexpr,
    BL: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """The addresses of a head's rows from FIRST on, [BL, BW], and which of the rows exist."""
    length, width = FIRST + tl.arange(0, BL), tl.arange(0, BW)
    there = (length < LENGTH)[:, None] & (width < W)[None, :]
    if LENGTH * STEP >= 2**31:
        length = length.to(tl.int64)
    return x + length[:, None] * STEP + width[None, :], there


@triton.jit
def _load(
    x, STEP: tl.constexpr, FIRST: tl.constexpr, LENGTH: tl.constexpr, W: tl.constexpr,
    BL: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    at, there = _tile(x, STEP, FIRST, LENGTH, W, BL, BW)
    return tl.load(at, mask=there, other=0.0)


@triton.jit
def _near(x, PRECISION: tl.constexpr):
    """Round to TF32 where products use it: a tensor core would cut the bits off.

    Backward subtracts from a product a number that forward computed from another one: both must be of the same numbers,
    and the weights that were multiplied must be the ones that were summed.
    """
    if PRECISION == "tf32":
        near = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, near, x)  # rounding would drop the bits that make a NaN one
    return x


@triton.jit
def _factor(
    x, STEP: tl.constexpr, FIRST: tl.constexpr, LENGTH: tl.constexpr, W: tl.constexpr, PRECISION: tl.constexpr,
    BL: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Rows for a product."""
    return _near(_load(x, STEP, FIRST, LENGTH, W, BL, BW), PRECISION)


@triton.jit
def _store(
    x, rows, STEP: tl.constexpr, FIRST: tl.constexpr, LENGTH: tl.constexpr, W: tl.constexpr,
    BL: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    at, there = _tile(x, STEP, FIRST, LENGTH, W, BL, BW)
    tl.store(at, rows.to(x.dtype.element_ty), mask=there)


@triton.jit
def _seen(
    s, other: tl.constexpr, FIRST: tl.constexpr, START: tl.constexpr, LK: tl.constexpr, CAUSAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """``other`` where a query does not see a key; keys lie along dimension KEYS. Blocks that are seen whole stay."""
    m, n = tl.expand_dims(FIRST + tl.arange(0, BM), KEYS), tl.expand_dims(START + tl.arange(0, BN), 1 - KEYS)
    if CAUSAL and START + BN - 1 > FIRST:
        s = tl.where(n <= m, s, other)
    if START + BN > LK:
        s = tl.where(n < LK, s, other)
    return s


@triton.jit
def _attend_rows(
    q, k, v, out, lse, scale, QS: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, OS: tl.constexpr,
    LQ: tl.constexpr, LK: tl.constexpr, W: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    FIRST: tl.constexpr, END: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Attend by the queries from FIRST on, which see keys up to END."""
    a = _factor(q, QS, FIRST, LQ, W, PRECISION, BM, BW)
    for start in tl.static_range(0, END, BN):
        s = tl.dot(a, tl.trans(_factor(k, KS, start, LK, W, PRECISION, BN, BW)), input_precision=PRECISION)
        s = _seen(s, -float("inf"), FIRST, start, LK, CAUSAL, BM, BN, 1)
        b = _factor(v, VS, start, LK, W, PRECISION, BN, BW)
        if start == 0:
            top = tl.max(s, 1) * scale
            p = _near(tl.exp2(s * scale - top[:, None]), PRECISION)
            total = tl.sum(p, 1)
            made = tl.dot(p.to(b.dtype), b, input_precision=PRECISION)
        else:
            higher = tl.maximum(top, tl.max(s, 1) * scale)
            p = _near(tl.exp2(s * scale - higher[:, None]), PRECISION)
            less = tl.exp2(top - higher)
            total = total * less + tl.sum(p, 1)
            made = tl.dot(p.to(b.dtype), b, made * less[:, None], input_precision=PRECISION)
            top = higher
    _store(out, made * (1.0 / total)[:, None], OS, FIRST, LQ, W, BM, BW)
    m = FIRST + tl.arange(0, BM)
    tl.store(lse + m, top + tl.log2(total), mask=m < LQ)


@triton.constexpr_function
def _reach(first, bm, bn):
    """The width of the block of keys that queries from ``first`` on see: early queries see few."""
    return min(bn, triton.next_power_of_2(first + bm))


@triton.jit
def _attend(
    q, k, v, out, lse, scale, QS: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, OS: tl.constexpr,
    HEADS: tl.constexpr, LQ: tl.constexpr, LK: tl.constexpr, W: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """out = softmax(q kᵀ) v, of BM queries of a row and head; scale is in powers of 2."""
    PARTS: tl.constexpr = (LQ + BM - 1) // BM
    part, place = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    row, head = (place // HEADS).to(tl.int64), place % HEADS
    q += row * QS[0] + head * QS[1]
    k += row * KS[0] + head * KS[1]
    v += row * VS[0] + head * VS[1]
    out += row * OS[0] + head * OS[1]
    lse += (row * HEADS + head) * LQ
    for first in tl.static_range(0, LQ, BM):
        if part == first // BM:  # a branch for each, so that the compiler knows which keys it sees
            _attend_rows(
                q, k, v, out, lse, scale, QS[2], KS[2], VS[2], OS[2], LQ, LK, W, CAUSAL, PRECISION, first,
                min(first + BM, LK) if CAUSAL else LK, BM, _reach(first, BM, BN) if CAUSAL else BN, BW,
            )  # fmt: skip


@triton.jit
def _attend_back(
    g, q, k, v, out, lse, dq, dk, dv, scale, GS: tl.constexpr, QS: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr,
    OS: tl.constexpr, DQS: tl.constexpr, DKS: tl.constexpr, DVS: tl.constexpr, LOG2E: tl.constexpr,
    HEADS: tl.constexpr, LQ: tl.constexpr, LK: tl.constexpr, W: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """All gradients of a row and head. Keys lie along the first dimension: only for dq is a block turned."""
    row, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    g += row * GS[0] + head * GS[1]
    q += row * QS[0] + head * QS[1]
    k += row * KS[0] + head * KS[1]
    v += row * VS[0] + head * VS[1]
    out += row * OS[0] + head * OS[1]
    dq += row * DQS[0] + head * DQS[1]
    dk += row * DKS[0] + head * DKS[1]
    dv += row * DVS[0] + head * DVS[1]
    lse += (row * HEADS + head) * LQ
    # A value for each block of queries. With HOLD the blocks are loaded once, all loads in flight before the first
    # product: for tensor cores that read shared memory. Cores that read registers had better load again.
    queries, grads, norms, deltas, sums = (), (), (), (), ()  # type: Any, Any, Any, Any, Any
    for first in tl.static_range(0, LQ, BM):
        m = first + tl.arange(0, BM)
        y = _factor(g, GS[2], first, LQ, W, PRECISION, BM, BW)
        deltas += (tl.sum(y.to(tl.float32) * _load(out, OS[2], first, LQ, W, BM, BW).to(tl.float32), 1),)
        norms += (tl.load(lse + m, mask=m < LQ, other=0.0),)
        sums += (tl.zeros((BM, BW), dtype=tl.float32),)
        if HOLD:
            queries += (_factor(q, QS[2], first, LQ, W, PRECISION, BM, BW),)
            grads += (y,)
    for start in tl.static_range(0, LK, BN):
        a = _factor(k, KS[2], start, LK, W, PRECISION, BN, BW)
        b = _factor(v, VS[2], start, LK, W, PRECISION, BN, BW)
        da, db = tl.zeros((BN, BW), dtype=tl.float32), tl.zeros((BN, BW), dtype=tl.float32)
        for first in tl.static_range(start // BM * BM if CAUSAL else 0, LQ, BM):
            if HOLD:
                x, y = queries[first // BM], grads[first // BM]
            else:
                x = _factor(q, QS[2], first, LQ, W, PRECISION, BM, BW)
                y = _factor(g, GS[2], first, LQ, W, PRECISION, BM, BW)
            s = tl.dot(a, tl.trans(x), input_precision=PRECISION)
            p = tl.exp2(s * (scale * LOG2E) - norms[first // BM][None, :])
            p = _seen(p, 0.0, first, start, LK, CAUSAL, BM, BN, 0)
            dp = tl.dot(b, tl.trans(y), input_precision=PRECISION)
            ds = (p * (dp - deltas[first // BM][None, :])).to(a.dtype)
            db = tl.dot(p.to(a.dtype), y, db, input_precision=PRECISION)
            da = tl.dot(ds, x, da, input_precision=PRECISION)
            more = tl.dot(tl.trans(ds), a, sums[first // BM], input_precision=PRECISION)
            sums = sums[: first // BM] + (more,) + sums[first // BM + 1 :]  # noqa: RUF005
        _store(dk, da * scale, DKS[2], start, LK, W, BN, BW)
        _store(dv, db, DVS[2], start, LK, W, BN, BW)
    for first in tl.static_range(0, LQ, BM):
        _store(dq, sums[first // BM] * scale, DQS[2], first, LQ, W, BM, BW)


# The largest length times width a candidate is for: beyond, it spills registers, or takes minutes to compile. Four
# warps and 64 rows are for Hopper's wgmma; fewer for mma.sync, with fewer barriers and more programs at a time.
FORWARD = [
    (8192, Blocks(BM=64, BN=128, num_warps=4)),
    (4096, Blocks(BM=32, BN=128, num_warps=2)),
]
BACKWARD = [
    (2048, Blocks(BM=64, BN=64, HOLD=1, num_warps=4, maxnreg=128)),  # four programs on a multiprocessor
    (8192, Blocks(BM=64, BN=64, HOLD=1, num_warps=4)),
    (2048, Blocks(BM=32, BN=32, HOLD=0, num_warps=2)),
]


def candidates(offered: list[tuple[int, Blocks]], length: int, width: int) -> list[Blocks]:
    """The candidates for such a size, with no blocks longer than the sequence, and none twice."""
    long, wide = _padded(length), _padded(width)
    fit = [blocks for largest, blocks in offered if long * wide <= largest]
    cut = [blocks | {name: min(blocks[name], long) for name in ("BM", "BN")} for blocks in fit]
    return [blocks for i, blocks in enumerate(cut) if blocks not in cut[:i]]


def _padded(n: int) -> int:
    """A length padded to a power of two that ``tl.dot`` takes."""
    padded: int = triton.next_power_of_2(n)
    return max(16, padded)


def _precision(x: Tensor) -> str:
    return "tf32" if x.dtype == torch.float32 and x.is_cuda and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _in_rows(*given: Tensor) -> list[Tensor]:
    """A tensor with contiguous rows."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in given]


def _empty(x: Tensor) -> Tensor:
    """[batch, heads, length, width], with the heads of a place side by side, so that joining them copies nothing."""
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


def _constants(q: Tensor, k: Tensor, causal: bool, **steps: Tensor) -> dict[str, Any]:
    width = q.shape[3]
    shape = {"HEADS": q.shape[1], "LQ": q.shape[2], "LK": k.shape[2], "W": width, "CAUSAL": causal}
    return (
        shape | {name: x.stride()[:3] for name, x in steps.items()} | {"BW": _padded(width), "PRECISION": _precision(q)}
    )


def _chosen(name: str, offered: list[tuple[int, Blocks]], q: Tensor, k: Tensor, causal: bool, launch: Any) -> Blocks:
    (rows, heads, queries, width), keys = q.shape, k.shape[2]
    shape = (name, q.dtype, _precision(q), causal, queries, keys, width, about(rows * heads))
    return tuned(shape, lambda: candidates(offered, max(queries, keys), width), launch)


@operator
@torch.library.custom_op(
    "penstock::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor, Tensor)",
)
def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The attended values, and log2 Σ exp of each query's scores; ``scale`` is positive."""
    if not runs(q):
        return attend_twin(q, k, v, causal, scale)
    q, k, v = _in_rows(q, k, v)
    out, lse = _empty(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    constants = _constants(q, k, causal, QS=q, KS=k, VS=v, OS=out)

    def launch(blocks: Blocks) -> None:
        programs = q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], blocks["BM"])
        _attend[programs,](q, k, v, out, lse, scale * LOG2E, **constants, **blocks)

    launch(_chosen("attention", FORWARD, q, k, causal, launch))
    return out, lse


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _empty(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@operator
@torch.library.custom_op(
    "penstock::attention_back",
    mutates_args=(),
    schema="(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal, float scale)"
    " -> (Tensor, Tensor, Tensor)",
)
def attend_back(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, from that of ``out``."""
    dq, dk, dv = _empty(q), _empty(k), _empty(v)
    if not runs(q):
        for d, made in zip((dq, dk, dv), attend_back_twin(g, q, k, v, out, lse, causal, scale), strict=True):
            d.copy_(made)
        return dq, dk, dv
    g, q, k, v, out = _in_rows(g, q, k, v, out)
    lse = lse.contiguous()
    steps = {"GS": g, "QS": q, "KS": k, "VS": v, "OS": out, "DQS": dq, "DKS": dk, "DVS": dv}
    constants = _constants(q, k, causal, **steps) | {"LOG2E": LOG2E}

    def launch(blocks: Blocks) -> None:
        _attend_back[q.shape[0] * q.shape[1],](g, q, k, v, out, lse, dq, dk, dv, scale, **constants, **blocks)

    launch(_chosen("attention_back", BACKWARD, q, k, causal, launch))
    return dq, dk, dv


@attend_back.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(q), _empty(k), _empty(v)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    s: Tensor = q @ k.mT * scale
    unseen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    return s.masked_fill(unseen, -math.inf) if causal else s


def attend_twin(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    s = _scores(q.to(wide), k.to(wide), causal, scale)
    lse = s.logsumexp(-1, keepdim=True)
    return _empty(q).copy_((s - lse).exp() @ v.to(wide)), lse.squeeze(-1) * LOG2E


def attend_back_twin(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    g, q, k, v, out = (x.to(lse.dtype) for x in (g, q, k, v, out))
    p = (_scores(q, k, causal, scale) - lse.unsqueeze(-1) / LOG2E).exp()
    ds = p * (g @ v.mT - (g * out).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ g


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        out, lse = attend(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = causal, scale
        made: Tensor = out
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *attend_back(grads[0], *ctx.saved_tensors, *ctx.how), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    """``F.scaled_dot_product_attention`` of [batch, heads, length, width] that ``takes`` takes, differentiable."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not scale > 0:
        q, scale = q * scale, 1.0
    made: Tensor = _Attention.apply(q, k, v, causal, scale)
    return made


def takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Whether ``attention`` can be called: no mask, no dropout, as many heads of keys as of queries, and small enough.

    >>> q = torch.zeros(2, 4, 128, 16)
    >>> takes(q, q, q, None, 0.0), takes(q.double(), q, q, None, 0.0)
    (True, False)
    """
    if mask is not None or dropout > 0 or any(x.ndim != 4 or x.dtype != q.dtype or x.numel() == 0 for x in (q, k, v)):
        return False
    if q.is_cuda and q.dtype == torch.float32 and _precision(q) == "ieee":  # without tensor cores, registers spill
        return False
    length = max(q.shape[2], k.shape[2])
    alike = q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3] and k.shape == v.shape
    return alike and length <= LONGEST and _padded(length) * _padded(q.shape[3]) <= LARGEST
