"""Numbers that are a function of (trial seed, step, call, element) and of nothing else (invariant 3).

An element's 64 bits are splitmix64's hash of its row-major index, from a start that belongs to trial, step and call.
Everything else is made of those bits element by element, so that a trial has the same numbers alone, in a bundle, under
vmap, compiled or in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Formula = Callable[[Tensor], Tensor]  # from the bits of elements to their numbers


def _int64(value: int) -> int:
    return ((value + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


_GOLDEN = _int64(0x9E3779B97F4A7C15)
_CALL = _int64(0xD1B54A32D192ED03)
_FACTORS = (30, _int64(0xBF58476D1CE4E5B9)), (27, _int64(0x94D049BB133111EB))
# How many bits a number in [0, 1) has: as many as its type tells apart at its upper end.
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def bits(index: Tensor, lo: int | Tensor, hi: int | Tensor, call: int) -> Tensor:
    """64 bits for each index, by the step's key and the call's number.

    ``lo`` and ``hi`` are int32, as those of ``masks.keep``: Python's, or tensors that broadcast against ``index``.
    """
    z: Tensor = index * _GOLDEN + start(lo, hi, call)  # a new tensor, which may be written
    for shift, factor in _FACTORS:
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def start(lo: int | Tensor, hi: int | Tensor, call: int) -> Any:
    """The state that the elements of one call count from: the hash of the step's key and the call."""
    if isinstance(lo, Tensor) and isinstance(hi, Tensor):
        z: Any = (hi.to(torch.int64) << 32) + (lo.to(torch.int64) & 0xFFFFFFFF) + _int64((call + 1) * _CALL)
        wrap: Callable[[Any], Any] = _as_it_is
    else:
        z = _int64((int(hi) << 32) + (int(lo) & 0xFFFFFFFF) + (call + 1) * _CALL)
        wrap = _int64
    for shift, factor in _FACTORS:
        z = wrap((z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _as_it_is(z: Tensor) -> Tensor:
    return z


def index(shape: Sequence[int], device: torch.device) -> Tensor:
    """The row-major index of each element."""
    return torch.arange(math.prod(shape), dtype=torch.int64, device=device).view(tuple(shape))


# Formulas. Each is done in float64, or exactly in integers, and cast once at the end.


def _top(bits: Tensor, count: int) -> Tensor:
    return (bits >> (64 - count)).bitwise_and_((1 << count) - 1)


def uniform(dtype: torch.dtype) -> Formula:
    """Numbers in [0, 1), all exact; a narrow type has the leading bits of a wide one."""
    count = _BITS[dtype]
    return lambda bits: _top(bits, count).to(dtype).mul_(2.0**-count)


def inside(bits: Tensor) -> Tensor:
    """Float64 in (0, 1), symmetric about a half: neither logarithm is infinite."""
    return _top(bits, 52).to(torch.float64).add_(0.5).mul_(2.0**-52)


def normal(bits: Tensor) -> Tensor:
    """Standard normal float64, by the inverse of the distribution function; the farthest lie 8.1 from 0."""
    return torch.erfinv(inside(bits).mul_(2).sub_(1)).mul_(math.sqrt(2))


def exponential(bits: Tensor) -> Tensor:
    """Standard exponential float64, above 0."""
    return inside(bits).log_().neg_()


def integers(low: int, high: int) -> Formula:
    """Whole numbers from ``low`` to below ``high``; all are as likely, to one part in 2**63 / (high - low)."""
    return lambda bits: torch.remainder(_top(bits, 63), high - low) + low


def permutation(bits: Tensor) -> Tensor:
    """The indices of the last dimension in the order of their bits."""
    return torch.argsort(bits, dim=-1, stable=True)
