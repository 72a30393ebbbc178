"""Indexing by tensors, and writing into parts of a tensor: with the trials as one more dimension of the index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.training.fused.promoting import promote
from penstock.training.fused.stacked import Stacked, by_rows, by_vmap, name_of, refusal, rule, whole_dim

_PLAIN = int | slice | type(None) | type(...)
_MASKS = (torch.bool, torch.uint8)


def _parts(index: Any, device: torch.device) -> tuple[Any, ...]:
    """The parts of an index; lists in it are tensors."""
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(torch.as_tensor(p, device=device) if isinstance(p, list | range) else p for p in parts)


def _of_all(parts: Sequence[Any]) -> bool:
    """Whether all trials share an index that its trials as one more dimension leave as it is."""
    return not any(isinstance(p, bool | Stacked) or not isinstance(p, _PLAIN | torch.Tensor) for p in parts)


def _side_by_side(parts: Sequence[Any]) -> bool:
    """Whether the dimensions that tensors take lie next to each other: only then does their result stay in place."""
    advanced = [i for i, p in enumerate(parts) if isinstance(p, int | torch.Tensor)]
    return advanced[-1] - advanced[0] + 1 == len(advanced)


def _behind(parts: Sequence[Any]) -> tuple[Any, ...]:
    """The same index where the trials are one more dimension at the end."""
    return (*parts, slice(None)) if any(p is ... for p in parts) else tuple(parts)


@rule("__getitem__")
def getitem(func: Any, x: Any, index: Any) -> Any:
    """An index that all trials share is one into the whole; one of their own takes each trial's number beside it."""
    parts = index if isinstance(index, tuple) else (index,)
    if isinstance(x, Stacked):
        for part in parts:
            if isinstance(part, bool) or not isinstance(part, _PLAIN):
                break
        else:
            return _sliced(x, parts)
        parts = _parts(index, x.device)
        if _of_all(parts):
            if _side_by_side(parts):
                return Stacked(x.moved(0)[(slice(None), *parts)], 0)
            made = x.moved(x.ndim)[_behind(parts)]
            return Stacked(made, made.ndim - 1)
    own = _own(x, parts)
    return by_vmap(_take, x, index) if own is None else own


def _sliced(x: Stacked, parts: tuple[Any, ...]) -> Stacked:
    """Slices, integers, None and … move no values."""
    given = sum(p is not None and p is not ... for p in parts)
    if ... not in parts:
        parts = (*parts, ...)
    place = parts.index(...)
    filled = (*parts[:place], *[slice(None)] * (x.ndim - given), *parts[place + 1 :])
    inner: list[Any] = []
    own, at = 0, None
    for part in filled:
        if part is not None:
            if own == x.at:
                at = sum(not isinstance(p, int) for p in inner)
                inner.append(slice(None))
            own += 1
        inner.append(part)
    if at is None:
        at = sum(not isinstance(p, int) for p in inner)
        inner.append(slice(None))
    return Stacked(x.whole[tuple(inner)], at)


def _own(x: Any, parts: tuple[Any, ...]) -> Stacked | None:
    """``x[index]`` or ``x[:, index]`` for integers of a trial's own."""
    *before, which = parts
    if not isinstance(which, Stacked) or which.dtype not in (torch.int64, torch.int32):
        return None
    if any(not isinstance(p, slice) or p != slice(None) for p in before):
        return None
    place = len(before)
    if not isinstance(x, Stacked):
        return Stacked(x[(*before, which.whole)], which.at + place)
    rows = torch.arange(x.trials, device=x.device).view(-1, *[1] * which.ndim)
    return Stacked(x.moved(place)[(*before, rows, which.moved(0))], place)


def _take(x: torch.Tensor, index: Any) -> torch.Tensor:
    return x[index]


_take.__name__ = "__getitem__"  # the name in messages


@rule("__setitem__")
def setitem(func: Any, x: Any, index: Any, value: Any) -> None:
    """Write into the part of the whole that an index names; a tensor of all trials first gets a row for each."""
    parts = _parts(index, x.device)
    if not isinstance(x, Stacked):
        x = promote("__setitem__", x, next(p.trials for p in (value, *parts) if isinstance(p, Stacked)))
    if _of_all(parts):
        x.moved(x.ndim)[_behind(parts)] = _last(value)
        return
    (mask, *rest), number = parts, not isinstance(value, torch.Tensor) or value.ndim == 0
    if not rest and isinstance(mask, torch.Tensor) and mask.dtype in _MASKS and number:
        x.masked_fill_(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)).bool(), value)
        return
    by_rows(_put, x, index, value)


def _last(value: Any) -> Any:
    """A value with the trials behind its dimensions, so that it broadcasts as one trial's does."""
    if isinstance(value, Stacked):
        return value.moved(value.ndim)
    return value.unsqueeze(-1) if isinstance(value, torch.Tensor) and value.ndim else value


def _put(x: torch.Tensor, index: Any, value: Any) -> None:
    x[index] = value


_put.__name__ = "__setitem__"


@rule("index_put_", "index_put", "_index_put_impl_")
def index_put(func: Any, x: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False) -> Any:
    into = _written_into(name_of(func), x, values, *indices)
    if _of_all([i for i in indices if i is not None]):
        into.moved(into.ndim).index_put_(tuple(indices), _last(values), accumulate=accumulate)
    else:
        by_rows(torch.Tensor.index_put_, into, tuple(indices), values, accumulate=accumulate)
    return into


def _full(x: Any, trials: int, at: int = 0) -> torch.Tensor:
    """A tensor with the trials at ``at``: a trial's own, or a shared one, repeated."""
    return x.moved(at) if isinstance(x, Stacked) else x.unsqueeze(at).expand(*x.shape[:at], trials, *x.shape[at:])


def _written_into(name: str, x: Any, *others: Any) -> Stacked:
    """The tensor that is written into, in place or as a copy."""
    trials = next(v.trials for v in (x, *others) if isinstance(v, Stacked))
    if name.endswith("_"):
        return x if isinstance(x, Stacked) else promote(name, x, trials)
    return Stacked(x.whole.clone(), x.at) if isinstance(x, Stacked) else Stacked(x.expand(trials, *x.shape).clone())


@rule("gather", "take_along_dim")
def gather(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Along a trial's dimension, by an index of all trials or of their own."""
    if name_of(func) == "gather":
        dim, index = _bound(("dim", "index", "sparse_grad"), args, kwargs)[:2]
    else:
        index, dim = _bound(("indices", "dim"), args, kwargs)
        if dim is None:
            return torch.take_along_dim(input.reshape(-1), index.reshape(-1), 0)
        dim %= input.ndim
        others = ([*v.shape[:dim], 1, *v.shape[dim + 1 :]] for v in (input, index))
        shape = list(np.broadcast_shapes(*others))
        input, index = (v.expand(*shape[:dim], v.shape[dim], *shape[dim + 1 :]) for v in (input, index))
    if input.ndim == 0:
        return by_vmap(torch.gather, input, dim, index)
    trials = next(v.trials for v in (input, index) if isinstance(v, Stacked))
    return Stacked(torch.gather(_full(input, trials), dim % input.ndim + 1, _full(index, trials)), 0)


@rule("index_select")
def index_select(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    dim, index = _bound(("dim", "index"), args, kwargs)
    if isinstance(index, Stacked) or input.ndim == 0:
        shape = [1] * input.ndim
        if isinstance(index, Stacked) and input.ndim:
            shape[dim % input.ndim] = -1
            return torch.take_along_dim(input, index.reshape(shape), dim % input.ndim)
        return by_vmap(func, input, dim, index)
    return Stacked(input.whole.index_select(whole_dim(input, dim), index), input.at)


_SCATTERS = ("scatter", "scatter_add", "scatter_reduce")


@rule(*_SCATTERS, *(f"{name}_" for name in _SCATTERS))
def scatter(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Write along a trial's dimension, by an index of all trials or of their own."""
    name = name_of(func)
    dim, index, value, *rest = _bound(("dim", "index", "src", "reduce"), args, _named(kwargs, value="src"))
    if isinstance(dim, str) or x.ndim == 0:
        return by_rows(func, x, *args, **kwargs)
    into = _written_into(name, x, index, value)
    trials, place = into.trials, dim % into.ndim
    more = {k: v for k, v in kwargs.items() if k == "include_self"}
    if rest and rest[0] is not None:
        more["reduce"] = rest[0]
    if isinstance(value, torch.Tensor):
        value = _full(value, trials)
    elif name.startswith(("scatter_add", "scatter_reduce")):
        raise refusal(name, "its src is no tensor")
    method = getattr(torch.Tensor, name.rstrip("_") + "_")
    method(into.moved(0), place + 1, _full(index, trials), value, **more)
    return into


@rule("index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_")
def index_add(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Write whole slices of a trial's dimension, by an index of all trials; one of their own goes trial by trial."""
    name = name_of(func)
    dim, index, source = _bound(("dim", "index", "source"), args, _named(kwargs, value="source"))[:3]
    into, more = _written_into(name, x, index, source), {k: v for k, v in kwargs.items() if k == "alpha"}
    method = getattr(torch.Tensor, name.rstrip("_") + "_")
    if isinstance(index, Stacked) or into.ndim == 0 or (isinstance(source, Stacked) and source.ndim != into.ndim):
        by_rows(method, into, dim, index, source, **more)
        return into
    if isinstance(source, torch.Tensor) and source.ndim:
        source = _full(source, into.trials, into.at)
    method(into.whole, whole_dim(into, dim), index, source, **more)
    return into


@rule("masked_scatter", "masked_scatter_")
def masked_scatter(func: Any, x: Any, mask: Any, source: Any) -> Any:
    """One trial after another: the places that are filled depend on the mask."""
    into = _written_into(name_of(func), x, mask, source)
    by_rows(torch.Tensor.masked_scatter_, into, mask, source)
    return into


def _bound(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments in the order of their names, wherever they were given."""
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name) for name in names]


def _named(kwargs: dict[str, Any], **others: str) -> dict[str, Any]:
    """Keyword arguments under one name of those that torch knows for each."""
    return {others.get(name, name): value for name, value in kwargs.items()}
