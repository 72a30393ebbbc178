"""What some operators make of tensors whose sizes are symbols: sizes alone, where torch looks at strides too.

A trace needs no strides. Torch compares those of every view with every other number, by sympy, and computes BatchNorm
in a dozen operators: for a transformer or a deep CNN that took most of a trace's time. All that is made here lies in
the order of its dimensions, and what must be equal is told to the symbols just as torch tells it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Made = Callable[..., Any]


def quick(func: Any, args: tuple[Any, ...]) -> Made | None:
    """What stands for an operator with these arguments; nothing where torch's own is taken.

    Tensors whose sizes are all numbers are torch's: it is quick there, and knows the values of constants.
    """
    name = func.overloadpacket.__name__
    if name in _PLACED and args[0].ndim:
        _placed(args[0], args[1], args[_PLACED[name]])
    known = _KNOWN.get(name)
    sizes = (
        [*args[0].shape, *(args[1] if known is _view and isinstance(args[1], tuple | list) else ())] if known else ()
    )
    if not any(isinstance(size, torch.SymInt) for size in sizes):
        return None
    if known is _view and not isinstance(args[1], tuple | list):  # a view as another type
        return None
    return known


def _empty(like: Tensor, sizes: Sequence[Any]) -> Tensor:
    return torch.empty(tuple(sizes), dtype=like.dtype, device=like.device)


def _view(x: Tensor, sizes: Sequence[Any]) -> Tensor:
    """A view, which ties its sizes from the left as far as they are equal, and the products of the others."""
    old, new = list(x.shape), list(sizes)
    if free := [place for place, size in enumerate(new) if isinstance(size, int) and size == -1]:
        others = prod(size for place, size in enumerate(new) if place not in free)
        whole = prod(old)
        torch._check(whole % others == 0)  # type: ignore[no-untyped-call]
        new[free[0]] = whole // others
    same = 0
    while same < min(len(old), len(new)) and _hint(old[same]) == _hint(new[same]):
        torch._check(old[same] == new[same])  # type: ignore[no-untyped-call]
        same += 1
    torch._check(prod(old[same:]) == prod(new[same:]))  # type: ignore[no-untyped-call]
    return _empty(x, new)


def _permute(x: Tensor, places: Sequence[int]) -> Tensor:
    return _empty(x, [x.shape[place] for place in places])


def _transpose(x: Tensor, one: int, other: int) -> Tensor:
    sizes = list(x.shape)
    sizes[one], sizes[other] = sizes[other], sizes[one]
    return _empty(x, sizes)


def _turned(x: Tensor) -> Tensor:
    return _empty(x, list(x.shape)[::-1])


def _clone(x: Tensor, **how: Any) -> Tensor:
    return _empty(x, x.shape)


def _batch_norm(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The weight, the bias and the means and variances have a number for each channel."""
    for one in others[:4]:
        if isinstance(one, Tensor):
            torch._check(one.shape[0] == x.shape[1])  # type: ignore[no-untyped-call]
    return _empty(x, x.shape), _empty(x, x.shape[1:2]), _empty(x, x.shape[1:2])


_PLACED = {"gather": 2, "scatter": 2, "scatter_add": 2, "scatter_reduce": 2, "index_add": 3, "index_copy": 3}


def _placed(x: Tensor, dim: int, other: Any) -> None:
    """What is gathered or added along one dimension is as large along the others, which torch does not demand."""
    if not isinstance(other, Tensor) or other.ndim != x.ndim:
        return
    for place, (one, size) in enumerate(zip(x.shape, other.shape, strict=True)):
        if place != dim % x.ndim and _hint(one) == _hint(size):
            torch._check(one == size)  # type: ignore[no-untyped-call]


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


_KNOWN: dict[str, Made] = {
    "view": _view,
    "_unsafe_view": _view,
    "permute": _permute,
    "transpose": _transpose,
    "t": _turned,
    "clone": _clone,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
}


class InParts(TorchFunctionMode):
    """Makes of their parts what some functions give: torch's own, in C++, take sizes for plain numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _PARTS.get(getattr(func, "__name__", ""), func)(*args, **(kwargs or {}))


def _cell(gates: int) -> Made:
    """What has the sizes of a recurrent cell's new state: its inputs and its state go through as many gates."""

    def cell(x: Tensor, before: Any, into: Tensor, back: Tensor, *biases: Tensor) -> Any:
        state = before[0] if isinstance(before, tuple | list) else before
        made = F.linear(x, into, *biases[:1]) + F.linear(state, back, *biases[1:])
        new = made.view(*made.shape[:-1], gates, state.shape[-1]).sum(-2)
        return (new, new) if isinstance(before, tuple | list) else new

    return cell


def _instance_norm(x: Tensor, *given: Any, **named: Any) -> Tensor:
    return _batch_norm(x, *(one for one in (*given, *named.values()) if isinstance(one, Tensor)))[0]


def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    made = torch.einsum("...i,oij,...j->...o", x, weight, y)
    return made if bias is None else made + bias


_PARTS: dict[str, Made] = {
    "rnn_tanh_cell": _cell(1),
    "rnn_relu_cell": _cell(1),
    "gru_cell": _cell(3),
    "lstm_cell": _cell(4),
    "instance_norm": _instance_norm,
    "bilinear": _bilinear,
}
