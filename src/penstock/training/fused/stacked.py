"""One tensor per trial of a bundle, seen as one trial's: the user's code computes with these in the native way.

The task's loss runs once for the whole bundle, on ``Stacked`` tensors in the place of the parameters. A torch
function that meets one is given to its rule in ``operators/``, which computes for all trials at once what the function
computes for one: a batched matrix product for a linear layer, a grouped convolution for a convolution. A function
without a rule is mapped over the trials by ``torch.vmap``, and one that vmap refuses is called for one trial after
another. A function that gives each trial a result of another shape is refused, with the operator and the line.

The rules work on ordinary tensors with one dimension more, so gradients are ordinary autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from penstock.training.fused.refusing import Unfusable as Unfusable
from penstock.training.fused.refusing import first_line, parted
from penstock.training.fused.refusing import name_of as name_of
from penstock.training.fused.refusing import refusal as refusal
from penstock.training.kernels.at_once import at_once

Rule = Callable[..., Any]
_RULES: dict[str, Rule] = {}
_FOUND: dict[Any, Rule] = {}


class Stacked(torch.Tensor):
    """One tensor of every trial: ``whole`` has the trials along its dimension ``at``, the rest is a trial's own shape.

    >>> x = Stacked(torch.zeros(5, 3, 4), 1)
    >>> x.shape, x.trials
    (torch.Size([5, 4]), 3)
    """

    whole: torch.Tensor
    at: int

    @staticmethod
    def __new__(cls, whole: torch.Tensor, at: int = 0) -> Stacked:
        shape = list(whole.shape)
        del shape[at]
        made: Stacked = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=whole.dtype, device=whole.device)
        made.whole, made.at = whole, at
        return made

    def __init__(self, whole: torch.Tensor, at: int = 0) -> None:
        pass

    # These properties are read all the time, and torch's own would make a detour of microseconds.

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return self.whole.dim() - 1

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        whole = self.whole.shape
        return whole[1:] if self.at == 0 else torch.Size((*whole[: self.at], *whole[self.at + 1 :]))

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.whole.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.whole.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.whole.is_cuda

    @property
    def requires_grad(self) -> bool:
        return self.whole.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.whole.requires_grad_(value)

    def dim(self) -> int:
        return self.whole.dim() - 1

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def trials(self) -> int:
        """How many trials are stacked."""
        return self.whole.shape[self.at]

    def moved(self, at: int) -> torch.Tensor:
        """``whole`` with the trials along another dimension."""
        return self.whole if self.at == at else self.whole.movedim(self.at, at)

    def hold(self, whole: torch.Tensor) -> None:
        """Hold another tensor of the same values."""
        self.whole = whole

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Stacked({tuple(self.shape)} of {self.trials} trials at {self.at})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _first and (made := _first[0](func, args, kwargs)) is not NotImplemented:
            return made
        rule = _FOUND.get(func)
        if rule is None:
            rule = _FOUND[func] = _find(func)
        if not kwargs:
            return rule(func, *args)
        if not _RENAMED.keys().isdisjoint(kwargs):
            args, kwargs = _as_documented(func, args, kwargs)
        if kwargs.get("out") is not None:
            return _written(rule, func, args, dict(kwargs))
        return rule(func, *args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise refusal(str(func), "it works on the memory of a trial's tensor")


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of torch functions and methods of these names: ``rule(func, *args, **kwargs)``.

    At least one argument is a ``Stacked``; the others are plain tensors, the same for all trials, and plain values.
    """

    def register(made: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, made))
        return made

    return register


def rule_of(func: Any) -> Rule:
    """The rule of a torch function."""
    rule = _FOUND.get(func)
    return _find(func) if rule is None else rule


_first: list[Callable[..., Any]] = []


def ask_first(function: Callable[..., Any] | None) -> None:
    """Let a function see every call first, which gives the result or NotImplemented; None: let nothing do so."""
    _first[:] = [] if function is None else [function]


# Torch takes numpy's names of arguments too; and the first argument, which rules take by its place, by name.
_RENAMED = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other", "input": ""}


def _as_documented(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    if getattr(func, "__module__", None) not in (None, "torch", "torch._C"):
        return args, kwargs  # a function written in Python has names of its own
    kwargs = {_RENAMED.get(name) or name: value for name, value in kwargs.items()}
    if not args and "input" in kwargs and "condition" not in kwargs:
        args = (kwargs.pop("input"),)
    return args, kwargs


def _find(func: Any) -> Rule:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property such as Tensor.shape
        return _PROPERTIES.get(func.__self__.__name__, _as_it_is)
    if name == "__set__":
        return _SETTERS.get(func.__self__.__name__, _refuse)
    return _RULES.get(name, by_vmap)


def _as_it_is(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def by_vmap(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The rule of every function without one of its own: torch maps it over the trials, or they have it in turn."""
    leaves, spec = tree_flatten((args, kwargs))
    which = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Stacked)]

    def one(*tensors: torch.Tensor) -> Any:
        mine = list(leaves)
        for i, tensor in zip(which, tensors, strict=True):
            mine[i] = tensor
        own_args, own_kwargs = tree_unflatten(mine, spec)
        return func(*own_args, **own_kwargs)

    name = name_of(func)
    try:
        made = torch.vmap(one, in_dims=tuple(leaves[i].at for i in which))(*(leaves[i].whole for i in which))
    except Exception as error:
        if "called random operation" in str(error):
            raise refusal(name, "it draws from one generator for all trials") from None
        return by_rows(func, *args, **kwargs)
    if _in_place(name) and isinstance(args[0], Stacked):
        return args[0]
    return tree_map(lambda tensor: Stacked(tensor, 0) if isinstance(tensor, torch.Tensor) else tensor, made)


def by_rows(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function for one trial after another, and stack its results."""
    leaves, spec = tree_flatten((args, kwargs))
    which = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Stacked)]
    name, made = name_of(func), []
    for row in range(leaves[which[0]].trials):
        mine = list(leaves)
        for i in which:
            mine[i] = leaves[i].whole.select(leaves[i].at, row)
        own_args, own_kwargs = tree_unflatten(mine, spec)
        try:
            made.append(tree_flatten(func(*own_args, **own_kwargs)))
        except Unfusable:
            raise
        except Exception as error:
            raise refusal(name, f"{type(error).__name__}: {first_line(error)}") from error
    if _in_place(name) and isinstance(args[0], Stacked):
        return args[0]
    first, shape = made[0]
    if any(spec != shape or len(rows) != len(first) for rows, spec in made):
        raise parted(name, "it gives each trial a result of another kind", [(len(rows), spec) for rows, spec in made])
    return tree_unflatten([joined(name, rows) for rows in zip(*(rows for rows, _ in made), strict=True)], shape)


def joined(name: str, rows: Sequence[Any]) -> Any:
    """One result of all trials from each trial's own."""
    first = rows[0]
    if isinstance(first, Stacked):
        raise refusal(name, "it computes with every trial's parameters where it was called for one trial")
    if isinstance(first, torch.Tensor):
        if any(row.shape != first.shape for row in rows):
            text = f"its result has another shape in each trial, such as {_shapes(rows)}: {_DENSE}"
            raise parted(name, text, [row.shape for row in rows])
        return Stacked(torch.stack(list(rows)), 0)
    if any(type(row) is not type(first) or row != first for row in rows[1:]):
        text = f"its result differs from trial to trial, such as {first!r} and {rows[-1]!r}: {_STAY}"
        raise parted(name, text, [(type(row), row) for row in rows])
    return first


_DENSE = "multiply by the mask, or use torch.where, so that all shapes stay the same"
_STAY = "keep it in a tensor"


def _shapes(rows: Sequence[torch.Tensor]) -> str:
    return " and ".join(str(list(shape)) for shape in list(dict.fromkeys(row.shape for row in rows))[:2])


def _in_place(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _written(rule: Rule, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call that writes its result into tensors that it is given."""
    out = kwargs.pop("out")
    outs = list(out) if isinstance(out, tuple | list) else [out]
    stacked = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Stacked)]
    made = rule(func, *args, **kwargs) if stacked else func(*args, **kwargs)
    for into, value in zip(outs, made if isinstance(out, tuple | list) else [made], strict=True):
        if into.shape != value.shape:
            raise refusal(name_of(func), f"out= has the shape {list(into.shape)}, its result {list(value.shape)}")
        _RULES["copy_"](torch.Tensor.copy_, into, value)
    return out


def _agreed(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A plain value of a tensor, where all trials have the same: a branch or a size that they share."""
    return by_rows(func, *args, **kwargs)


def _outside(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A value that leaves torch: each trial goes on with its own."""
    if (trials := next(v.trials for v in (*args, *kwargs.values()) if isinstance(v, Stacked))) > 1:
        raise parted(name_of(func), "it takes one trial's numbers out of torch: compute with tensors", range(trials))
    return by_rows(func, *args, **kwargs)


def _refuse(func: Any, *args: Any, **kwargs: Any) -> Any:
    name = name_of(func)
    raise refusal(name, _REFUSED.get(name, "it takes one trial's tensor out of the bundle"))


_REFUSED = {
    "backward": "the gradients of a loss are computed once it is returned; use torch.autograd.grad inside of it",
    "register_hook": "it would see the gradients of all trials at once; scale or clamp the tensor itself",
    "retain_grad": "a gradient is kept for one trial's tensor; use torch.autograd.grad",
}
for _name in ("__bool__", "__float__", "__int__", "__index__", "__complex__", "item", "tolist", "is_nonzero", "equal",
              "allclose", "__contains__"):  # fmt: skip
    _RULES[_name] = _agreed

for _name in ("nonzero", "unique", "unique_consecutive", "_unique2", "masked_select", "argwhere", "bincount"):
    _RULES[_name] = by_rows  # the values decide the shape

for _name in ("__array__", "numpy"):
    _RULES[_name] = _outside

for _name in ("__reduce_ex__", "__deepcopy__", "backward", "register_hook", "data_ptr",
              "untyped_storage", "retain_grad", "set_", "resize_"):  # fmt: skip
    _RULES[_name] = _refuse

for _name in ("size", "dim", "ndimension", "nelement", "numel", "__len__", "is_floating_point", "is_complex",
              "is_signed", "get_device", "element_size", "is_contiguous", "is_tensor", "stride", "__hash__",
              "is_inference", "has_names"):  # fmt: skip
    _RULES[_name] = _as_it_is


def _transposed(func: Any, x: Stacked) -> Any:
    return x.transpose(-2, -1) if x.ndim > 1 else x


def _detached(func: Any, x: Stacked) -> Stacked:
    return Stacked(x.whole.detach(), x.at)


def _no_grad(func: Any, x: Stacked) -> None:
    return None


def _set_requires_grad(func: Any, x: Stacked, value: bool) -> None:
    x.whole.requires_grad_(value)


def _set_data(func: Any, x: Stacked, value: Any) -> None:
    """``p.data = value``: no version is counted, and a tensor that a backward keeps has the new values too."""
    if not isinstance(value, torch.Tensor) or value.shape != x.shape or value.dtype != x.dtype:
        raise refusal("data", f"a tensor of another kind takes the place of {list(x.shape)} {x.dtype}")
    whole = value.moved(x.at) if isinstance(value, Stacked) else value.unsqueeze(x.at)
    x.whole.data.copy_(whole.detach())
    if (here := at_once()) is not None:
        here.hide()


_SETTERS: dict[str, Rule] = {"requires_grad": _set_requires_grad, "data": _set_data}
_PROPERTIES: dict[str, Rule] = {
    "T": _transposed,
    "mT": _transposed,
    "data": _detached,
    "grad": _no_grad,
    "is_leaf": lambda func, x: x.whole.is_leaf,
    "grad_fn": lambda func, x: x.whole.grad_fn,
    "real": by_vmap,
    "imag": by_vmap,
    "H": by_vmap,
    "mH": by_vmap,
}


def align(values: Sequence[Any]) -> tuple[list[Any], int]:
    """Operands that broadcast as one trial's would: their plain tensors, with the trials along one dimension.

    That dimension is the one of the first operand of full rank, so that the layout of a convolution's output stays.
    """
    rank, at = -1, 0
    for v in values:
        if isinstance(v, Stacked):
            if (own := v.whole.dim() - 1) > rank:
                rank, at = own, v.at
        elif isinstance(v, torch.Tensor) and (own := v.dim()) > rank:
            rank, at = own, 0
    at = next((v.at for v in values if isinstance(v, Stacked) and v.whole.dim() - 1 == rank), 0)
    return [_fit(v, rank, at, values) if isinstance(v, torch.Tensor) else v for v in values], at


def _fit(value: torch.Tensor, rank: int, at: int, values: Sequence[Any]) -> torch.Tensor:
    right = rank - at  # how many of a trial's dimensions lie behind the trials
    if not isinstance(value, Stacked):
        if rank == 0:
            return value.reshape(1)  # among scalars, each has a say in the type
        return value.unsqueeze(value.ndim - right) if value.ndim > right else value
    if value.ndim == rank:
        return value.moved(at)
    whole = value.moved(0).reshape(value.trials, *[1] * (rank - value.ndim), *value.shape).movedim(0, at)
    return whole if value.ndim or value.dtype == torch.bool else whole.to(_weak_type(value, values))


def _weak_type(scalar: Stacked, values: Sequence[Any]) -> torch.dtype:
    """A trial's scalar does not change the type of a tensor with dimensions of its own kind."""
    strong = [v.dtype for v in values if isinstance(v, torch.Tensor) and v.ndim]
    like = torch.empty(1, dtype=strong[0])
    for dtype in strong[1:]:
        like = torch.empty(1, dtype=torch.promote_types(like.dtype, dtype))
    return torch.result_type(like, torch.empty((), dtype=scalar.dtype))


def whole_dim(x: Stacked, dim: int) -> int:
    """The dimension of ``whole`` for a dimension of one trial."""
    if dim < 0:
        dim += x.ndim
    return dim + (dim >= x.at)
