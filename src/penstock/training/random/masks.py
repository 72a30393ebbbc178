"""Dropout whose masks are a function of (trial seed, step, call, element) and of nothing else (invariant 3).

Torch's generators give a trial other masks when it shares a batched kernel with others. Here a mask is the hash of each
element's index under the step's key: for one trial or for a bundle at once, on any device, eager, under vmap, compiled
or in a CUDA graph, the bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.seeds import step_key
from penstock.training.random import draws

_ALPHA = 1.7580993408473766  # SELU's saturation value, as in torch's alpha_dropout
_VIEWS_KEPT = 256
_hashes: dict[torch.device, list[Tensor]] = {}
_views: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def base(shape: Sequence[int], device: torch.device) -> Tensor:
    """An even int32 hash of each element's row-major index; no two indices below 2**31 share one."""
    if torch.compiler.is_compiling():
        return _hash(math.prod(shape), device).view(tuple(shape))  # fused into the kernel that reads it
    found = _views.get((tuple(shape), device))
    if found is not None:
        return found
    count = math.prod(shape)
    kept = _hashes.setdefault(device, [])
    if not kept or kept[-1].numel() < count:
        made = _hash(1 << max(16, (count - 1).bit_length()), device)
        capturing = made.is_cuda and torch.cuda.is_current_stream_capturing()
        if type(made) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(made) or capturing:
            return made[:count].view(
                tuple(shape)
            )  # a tensor cannot outlive the transform or the graph that it was made in
        if made.is_cuda:
            torch.cuda.current_stream(device).synchronize()  # other streams read it too
        kept.append(made)  # smaller ones stay, as captured graphs may read them; all are twice the largest
    if len(_views) >= _VIEWS_KEPT:
        _views.clear()
    return _views.setdefault((tuple(shape), device), kept[-1][:count].view(tuple(shape)))


def _hash(count: int, device: torch.device) -> Tensor:
    # A permutation of 31 bits, so that >>, which copies the sign, shifts in zeros. The last bit is keep's to use.
    index = torch.arange(count, dtype=torch.int32, device=device)
    index = (index ^ (index >> 15)).mul_(0x2C1B3C6D).bitwise_and_(0x7FFFFFFF)
    index = (index ^ (index >> 12)).mul_(0x297A2D39).bitwise_and_(0x7FFFFFFF)
    return (index ^ (index >> 15)).mul_(2)


def keep(base: Tensor, lo: int | Tensor, hi: int | Tensor, call: int, p: float | Tensor) -> Tensor:
    """Which elements dropout keeps: each with probability 1-p, by the step's key and the call's index.

    ``lo`` and ``hi`` are int32: Python's, or tensors that broadcast against ``base``. A tensor ``p`` has the bits of a
    Python one where it is float64. With base b, t = b·k1 + k0 is odd, and t + t² a permutation of the odd numbers onto
    the even ones whose high bits depend on all of t (RC6 mixes so). As the sum is never 2**31 - 1, p=1 drops all.
    """
    k0: Any = (lo ^ _int32(call * 0x9E3779B9)) | 1
    k1: Any = (hi ^ _int32(call * 0x85EBCA6B)) | 1
    if not isinstance(k0, Tensor):
        t = torch.rsub(base, k0, alpha=-k1)
        return t.addcmul_(t, t) >= threshold(p)
    # One pass over a GPU's memory instead of two; on a CPU, addcmul is slow where it broadcasts.
    t = torch.addcmul(k0, base, k1) if base.is_cuda else base * k1 + k0
    return torch.addcmul(t, t, t) >= threshold(p)


def threshold(p: float | Tensor) -> int | Tensor:
    """The int32 below which ``keep`` drops: -2**31 for p=0, which keeps all, and 2**31 - 1 for p=1."""
    if isinstance(p, Tensor):
        return (torch.round(p.double() * 2**31) * 2 - 2**31).clamp(-(2**31), 2**31 - 1).to(torch.int32)
    return min(round(p * 2**31) * 2 - 2**31, 2**31 - 1)


def halves(key: int) -> tuple[int, int]:
    """The two int32 that ``keep`` takes, from a key of 63 bits."""
    return _int32(key), _int32(key >> 31)


def _int32(value: int) -> int:
    return ((value + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def rate(p: Any) -> Any:
    """A rate as a number or a tensor of rates."""
    return getattr(p, "value", p)


class StepKeys:
    """The keys of the draws of the current step, and the count of calls so far.

    Every call of a function that may draw counts, at rate 0 too: trials of one bundle differ in their rates.
    """

    def __init__(self, lo: int | Tensor, hi: int | Tensor) -> None:
        self.lo, self.hi, self.calls = lo, hi, 0

    def count_from(self, calls: int) -> None:
        """Count the next calls from an index on."""
        self.calls = calls

    def next(self) -> int:
        """The index of the next call."""
        self.calls += 1
        return self.calls - 1

    def mask(self, shape: Sequence[int], device: torch.device, p: Any) -> Tensor:
        """The elements that the next call keeps of a tensor of this shape."""
        return keep(base(shape, device), self.lo, self.hi, self.next(), rate(p))

    def draw(self, shape: Sequence[int], device: torch.device, formula: draws.Formula) -> Tensor:
        """The numbers that the next call draws for a tensor of this shape."""
        return formula(draws.bits(draws.index(shape, device), self.lo, self.hi, self.next()))

    def uniform(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Numbers in [0, 1) that the next call draws."""
        return self.draw(shape, device, draws.uniform(dtype))

    def write(self, into: Tensor, drawn: Tensor, name: str) -> Tensor:
        """Write what was drawn into a tensor, for a function of a name that does that; gives the tensor."""
        return into.copy_(drawn)

    @property
    def seeded(self) -> bool:
        """Whether the task has seeded torch's generator itself, and so wants its own numbers."""
        return False


class SoloKeys(StepKeys):
    """One trial's keys. They count calls in the seed of torch's generator, from the step's key on.

    Activation checkpointing runs a part of the forward again in the backward and brings that generator back for it:
    so it brings back the count too. Where other code has seeded the generator, the count is kept here alone.
    """

    def __init__(self, seed: int, step: int) -> None:
        self.start = step_key(seed, step)
        self.counted = False  # whether torch's generator was seeded for these keys
        super().__init__(*halves(self.start))

    def seed(self, generators: Sequence[torch.Generator]) -> None:
        """Seed torch's generators for the next call."""
        for generator in generators:
            generator.manual_seed(self.start + self.calls)
        self.counted = True

    def next(self) -> int:
        generator = torch.default_generator
        call = generator.initial_seed() - self.start
        if 0 <= call <= self.calls:
            generator.manual_seed(self.start + call + 1)
        else:
            call = self.calls
        self.calls = max(self.calls, call + 1)
        return call

    @property
    def seeded(self) -> bool:
        return self.counted and not 0 <= torch.default_generator.initial_seed() - self.start <= self.calls


def dropout(
    x: Tensor, p: Any, keys: StepKeys, training: bool = True, channels: bool = False, inplace: bool = False
) -> Tensor:
    """``F.dropout``; with ``channels``, whole channels of [N, C, ...], as ``torch.feature_dropout``."""
    mask = _mask(x, p, keys, training, channels)
    if mask is None:
        return x
    scale, wide = 1 / _kept(rate(p)), _wide(x)
    out: Tensor
    if isinstance(scale, Tensor):
        out = ((x * mask).to(wide) * scale.to(wide)).to(x.dtype)
        return x.copy_(out) if inplace else out
    if inplace:
        return x.mul_(mask).mul_(scale)
    if x.device.type == "cpu" and x.dtype == wide:
        return x * mask.to(wide).mul_(
            scale
        )  # the same bits, but faster, though the backward holds four bytes and not one
    out = x * mask * scale
    return out


def alpha_dropout(
    x: Tensor, p: Any, keys: StepKeys, training: bool = True, channels: bool = False, inplace: bool = False
) -> Tensor:
    """``F.alpha_dropout``; with ``channels``, ``F.feature_alpha_dropout``."""
    mask = _mask(x, p, keys, training, channels)
    if mask is None:
        return x
    p, wide = rate(p), _wide(x)
    variance = (_ALPHA * _ALPHA * p + 1) * _kept(p)
    scale: Any = 1 / (torch.sqrt(variance) if isinstance(p, Tensor) else math.sqrt(variance))
    a, b, c = scale, _ALPHA * scale, _ALPHA * scale * p
    if isinstance(p, Tensor):
        a, b, c = a.to(wide), b.to(wide), c.to(wide)
    out = ((x * mask).to(wide) * a + ((mask.to(wide) - 1) * b + c)).to(x.dtype)
    return x.copy_(out) if inplace else out


def may_drop(p: Any) -> bool:
    """Whether a rate can drop anything; a tensor of rates is not looked into."""
    return isinstance(p, Tensor) or p > 0


def _mask(x: Tensor, p: Any, keys: StepKeys, training: bool, channels: bool) -> Tensor | None:
    if not training:
        return None
    if not may_drop(p) or not x.numel():
        keys.next()
        return None
    if not channels:
        return keys.mask(x.shape, x.device, p)
    if x.dim() < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    return keys.mask((*x.shape[:2], *[1] * (x.dim() - 2)), x.device, p)


def _kept(p: Any) -> Any:
    return 1 - p + (p >= 1)  # 1 where all is dropped: a mask of zeros needs no scale, and 0 · inf is no number


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)  # torch multiplies a half tensor by a number in this type
