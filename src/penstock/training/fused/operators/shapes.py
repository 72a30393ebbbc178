"""Functions that rearrange: done on the whole tensors, which keep the trials in a dimension of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from penstock.training.fused.stacked import Stacked, by_vmap, name_of, rule, whole_dim


def _sizes(args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], Sequence) else args


@rule("view", "reshape", "view_as", "reshape_as")
def reshape(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> Any:
    """The trials stay where they are if only dimensions behind them change; otherwise they come to the front."""
    if (len(args) == 1 and isinstance(args[0], torch.dtype)) or "dtype" in kwargs:
        return by_vmap(func, x, *args, **kwargs)
    args = args or tuple(kwargs[name] for name in ("other",) if name in kwargs)
    if not isinstance(x, Stacked):  # a shared tensor that takes the shape of a trial's
        return x.reshape(args[0].shape)
    like = len(args) == 1 and isinstance(args[0], torch.Tensor) and name_of(func).endswith("_as")
    size = tuple(args[0].shape) if like else tuple(map(int, _sizes(args)))  # a size may be a tensor of one number
    size = size or tuple(kwargs.get("shape", kwargs.get("size", ())))
    if -1 in size:
        known = -math.prod(size)
        size = tuple(x.numel() // known if s == -1 and known else s for s in size)
    if x.at and size[: x.at] == tuple(x.shape[: x.at]) and x.whole.stride(-1) == 1:
        return Stacked(x.whole.reshape(*x.whole.shape[: x.at + 1], *size[x.at :]), x.at)
    return Stacked(x.moved(0).reshape(x.trials, *size), 0)


@rule("flatten")
def flatten(func: Any, x: Stacked, start_dim: int = 0, end_dim: int = -1) -> Any:
    if x.ndim == 0:
        return x.reshape(1)
    start, end = start_dim % x.ndim, end_dim % x.ndim
    return x.reshape(*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :])


@rule("unflatten")
def unflatten(func: Any, x: Stacked, dim: int, sizes: Any) -> Any:
    dim %= x.ndim
    return x.reshape(*x.shape[:dim], *_sizes_of(sizes, x.shape[dim]), *x.shape[dim + 1 :])


def _sizes_of(sizes: Any, whole: int) -> tuple[int, ...]:
    known = -math.prod(sizes)
    return tuple(whole // known if s == -1 else s for s in sizes)


@rule("unsqueeze")
def unsqueeze(func: Any, x: Stacked, dim: int) -> Stacked:
    dim = dim + x.ndim + 1 if dim < 0 else dim
    if dim <= x.at:
        return Stacked(x.whole.unsqueeze(dim), x.at + 1)
    return Stacked(x.whole.unsqueeze(dim + 1), x.at)


@rule("squeeze")
def squeeze(func: Any, x: Stacked, *dims: Any, dim: Any = None) -> Any:
    given = dims[0] if dims else dim
    wanted = range(x.ndim) if given is None else [given] if isinstance(given, int) else given
    gone = {d % x.ndim for d in wanted if x.shape[d] == 1}
    return x.reshape([s for d, s in enumerate(x.shape) if d not in gone]) if x.at else Stacked(
        x.whole.reshape(x.trials, *[s for d, s in enumerate(x.shape) if d not in gone]), 0
    )  # fmt: skip


@rule("permute")
def permute(func: Any, x: Stacked, *dims: Any, **kwargs: Any) -> Stacked:
    order = [d % x.ndim for d in (_sizes(dims) if dims else kwargs["dims"])]
    return Stacked(x.moved(0).permute(0, *(d + 1 for d in order)), 0)


@rule("transpose", "swapaxes", "swapdims")
def transpose(func: Any, x: Stacked, *dims: int, **kwargs: int) -> Stacked:
    first, second = (*dims, *(kwargs[name] for name in _TWO if name in kwargs))
    return Stacked(x.whole.transpose(whole_dim(x, first), whole_dim(x, second)), x.at)


_TWO = ("dim0", "axis0", "dim1", "axis1")


@rule("t")
def t(func: Any, x: Stacked) -> Any:
    return x.transpose(0, 1) if x.ndim == 2 else x


@rule("expand", "expand_as", "broadcast_to")
def expand(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    size = tuple(args[0].shape) if isinstance(args[0] if args else None, torch.Tensor) else _sizes(args)
    size = size or tuple(kwargs["other"].shape if "other" in kwargs else kwargs["size"])
    if not isinstance(x, Stacked):
        return x.expand(size)
    inner = x.moved(0).reshape(x.trials, *[1] * (len(size) - x.ndim), *x.shape)
    return Stacked(inner.expand(x.trials, *size), 0)


@rule("repeat", "tile")
def repeat(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> Stacked:
    times = _sizes(args or tuple(kwargs.values()))
    if len(times) < x.ndim:
        times = (1,) * (x.ndim - len(times)) + tuple(times)
    inner = x.moved(0).reshape(x.trials, *[1] * (len(times) - x.ndim), *x.shape)
    return Stacked(inner.repeat(1, *times), 0)


def _together(tensors: Sequence[Any]) -> tuple[list[torch.Tensor], int]:
    first = next(x for x in tensors if isinstance(x, Stacked))
    at, trials = first.at, first.trials
    return [
        x.moved(at) if isinstance(x, Stacked) else x.unsqueeze(at).expand(*x.shape[:at], trials, *x.shape[at:])
        for x in tensors
    ], at


@rule("cat", "concat", "concatenate")
def cat(func: Any, tensors: Sequence[Any], dim: int = 0, *, axis: int | None = None) -> Stacked:
    full = [x for x in tensors if not (x.ndim == 1 and x.shape[0] == 0)] or list(tensors)
    inner, at = _together(full)
    dim = (dim if axis is None else axis) % full[0].ndim
    dtype = inner[0].dtype
    for x in inner[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return Stacked(torch.cat([x.to(dtype) for x in inner], dim + (dim >= at)), at)


@rule("stack")
def stack(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    return torch.cat([x.unsqueeze(dim) for x in tensors], dim)


@rule("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
def split(func: Any, x: Stacked, *how: Any, dim: int = 0, **named: Any) -> Any:
    how, dim = (*how, *named.values())[0], how[1] if len(how) > 1 else dim
    return tuple(Stacked(part, x.at) for part in func(x.whole, how, dim=whole_dim(x, dim)))


@rule("unbind")
def unbind(func: Any, x: Stacked, dim: int = 0) -> Any:
    dim = whole_dim(x, dim)
    return tuple(Stacked(part, x.at - (dim < x.at)) for part in x.whole.unbind(dim))


@rule("__iter__")
def iterate(func: Any, x: Stacked) -> Any:
    return iter(x.unbind(0))


@rule("select")
def select(func: Any, x: Stacked, dim: int, index: int) -> Stacked:
    dim = whole_dim(x, dim)
    return Stacked(x.whole.select(dim, index), x.at - (dim < x.at))


@rule("narrow")
def narrow(func: Any, x: Any, dim: int, start: Any, length: Any) -> Any:
    start, length = int(start), int(length)  # a start may be a tensor
    return Stacked(x.whole.narrow(whole_dim(x, dim), start, length), x.at) if isinstance(x, Stacked) else (
        x.narrow(dim, start, length))  # fmt: skip


@rule("movedim", "moveaxis")
def movedim(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> Stacked:
    return Stacked(func(x.moved(x.ndim), *_positive(args, x.ndim), **_named(kwargs, x.ndim)), x.ndim)


def _positive(values: Any, ndim: int) -> list[Any]:
    return [[v % ndim for v in value] if isinstance(value, Sequence) else value % ndim for value in values]


def _named(values: dict[str, Any], ndim: int) -> dict[str, Any]:
    return dict(zip(values, _positive(values.values(), ndim), strict=True))


@rule("tril", "triu")
def triangle(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> Stacked:
    return Stacked(func(x.moved(0), *args, **kwargs), 0)


@rule("as_strided")
def as_strided(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> Stacked:
    """By the strides that ``stride()`` tells of a trial's tensor: those of one that lies in order in its memory."""
    given = dict(zip(("size", "stride", "storage_offset"), args, strict=False)) | kwargs
    whole = x.moved(0).contiguous()
    start = whole.storage_offset() + (given.get("storage_offset") or 0)
    own = whole.as_strided((x.trials, *given["size"]), (x.numel(), *given["stride"]), start)
    return Stacked(own, 0)
