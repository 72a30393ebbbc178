"""Functions that treat every channel, or every example, by itself: trials become more channels, or more examples.

Behind a convolution the trials lie next to the channels, [examples, trials, channels, ...]: folding the two is free, in
either memory format, and the output lies the same way. Trials in front of the examples fold into the examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from penstock.training.fused.stacked import Stacked, name_of, rule, whole_dim


def into_channels(x: Stacked, channels_last: bool = False) -> torch.Tensor:
    """[examples, trials × channels, ...], copied only where the trials lie elsewhere, or in another order."""
    inner = x.moved(1)
    if inner.ndim == 5 and (channels_last or inner.stride(2) == 1):
        folded = inner.permute(0, 3, 4, 1, 2).flatten(3).permute(0, 3, 1, 2)
        return folded.contiguous(memory_format=torch.channels_last) if channels_last else folded
    return inner.flatten(1, 2)


def out_of_channels(folded: torch.Tensor, trials: int) -> Stacked:
    return Stacked(torch.unflatten(folded, 1, (trials, -1)), 1)


def into_batch(x: Stacked) -> torch.Tensor:
    """[trials × examples, channels, ...], or [examples × trials, ...] where the trials come second."""
    inner = x.whole if x.at < 2 else x.moved(0)
    if inner.ndim == 5 and inner.stride(2) == 1:
        return inner.permute(0, 1, 3, 4, 2).flatten(0, 1).permute(0, 3, 1, 2)
    return inner.flatten(0, 1)


def out_of_batch(folded: torch.Tensor, like: Stacked) -> Stacked:
    """The inverse of ``into_batch(like)``."""
    at = like.at if like.at < 2 else 0
    return Stacked(torch.unflatten(folded, 0, (-1, like.trials) if at else (like.trials, -1)), at)


_POOLS = [f"{kind}{dims}d" for kind in ("max_pool", "avg_pool", "lp_pool", "adaptive_avg_pool", "adaptive_max_pool")
          for dims in (1, 2, 3)]  # fmt: skip
_POOLS += [f"{name}_with_indices" for name in _POOLS if "max" in name]


@rule(*_POOLS)
def pool(func: Any, input: Stacked, *args: Any, **kwargs: Any) -> Any:
    """Pooling, with or without a dimension of examples; indices count within one plane."""
    if name_of(func) == "adaptive_avg_pool2d" and not kwargs and args in ((1,), ((1, 1),), ([1, 1],)):
        # What torch computes. But torch then says how the result lies, and the gradient is copied for that.
        at = input.at if input.at <= input.ndim - 2 else 0
        return Stacked(input.moved(at).mean((-2, -1), keepdim=True), at)
    dims = int(name_of(func).partition("pool")[2][0])
    return _by_channel(func, input, input.ndim == dims + 2, *args, **kwargs)


@rule("interpolate")
def interpolate(func: Any, input: Stacked, *args: Any, **kwargs: Any) -> Any:
    return _by_channel(func, input, True, *args, **kwargs)


def _by_channel(func: Any, x: Stacked, batched: bool, *args: Any, **kwargs: Any) -> Any:
    if not batched:  # the trials are the examples
        return tree_map(lambda made: Stacked(made, 0), func(x.moved(0), *args, **kwargs))
    if x.at == 1:
        folded = func(into_channels(x), *args, **kwargs)
        return tree_map(lambda made: out_of_channels(made, x.trials), folded)
    return tree_map(lambda made: out_of_batch(made, x), func(into_batch(x), *args, **kwargs))


@rule("local_response_norm", "channel_shuffle", "native_channel_shuffle")
def across_channels(func: Any, input: Stacked, *args: Any, **kwargs: Any) -> Any:
    """Functions in which the channels of an example meet."""
    return out_of_batch(func(into_batch(input), *args, **kwargs), input)


@rule("pixel_shuffle", "pixel_unshuffle")
def rearrange(func: Any, input: Stacked, *args: Any, **kwargs: Any) -> Any:
    """Functions of the last three dimensions, which allow any others in front."""
    at = input.at if input.at <= input.ndim - 3 else 0
    return Stacked(func(input.moved(at), *args, **kwargs), at)


@rule("pad")
def pad(func: Any, input: Stacked, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    if mode == "constant":
        return constant_pad(func, input, pad, value or 0)
    return _by_channel(func, input, input.ndim == len(pad) // 2 + 2, pad, mode=mode)


@rule("constant_pad_nd")
def constant_pad(func: Any, input: Stacked, pad: Sequence[int], value: float = 0) -> Stacked:
    """Pad any dimensions, wherever the trials are: in the order of memory, so that the layout stays."""
    inner = input.whole
    around = {whole_dim(input, -1 - n): tuple(pad[2 * n : 2 * n + 2]) for n in range(len(pad) // 2)}
    order = sorted(range(inner.ndim), key=inner.stride, reverse=True)
    sides = [side for dim in reversed(order) for side in around.get(dim, (0, 0))]
    made = torch.constant_pad_nd(inner.permute(order), sides, value)
    return Stacked(made.permute([order.index(dim) for dim in range(inner.ndim)]), input.at)
