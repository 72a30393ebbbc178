"""One tensor per trial of a bundle, seen as one trial's: the user's code computes with these in the native way.

The task's loss runs once for the whole bundle, on ``Stacked`` tensors in the place of the parameters. A torch
function that meets one is given to its rule in ``operators/``, which computes for all trials at once what the function
computes for one: a batched matrix product for a linear layer, a grouped convolution for a convolution. A function
without a rule is mapped over the trials by ``torch.vmap``. A function that vmap refuses too is refused, with the
operator and the line.

The rules work on ordinary tensors with one dimension more, so gradients are ordinary autograd's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from penstock.errors import PenstockError

Rule = Callable[..., Any]
_RULES: dict[str, Rule] = {}
_FOUND: dict[Any, Rule] = {}
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


class Unfusable(PenstockError):
    """Trials that cannot be trained as one model; the message names the operator and the line."""


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
        raise refusal("requires_grad", "it is set for one trial's tensor")

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
        rule = _FOUND.get(func)
        if rule is None:
            rule = _FOUND[func] = _find(func)
        return rule(func, *args, **kwargs) if kwargs else rule(func, *args)

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


def _find(func: Any) -> Rule:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property such as Tensor.shape
        return _PROPERTIES.get(func.__self__.__name__, _as_it_is)
    if name == "__set__":
        return _refuse
    return _RULES.get(name, by_vmap)


def _as_it_is(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def by_vmap(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The rule of every function without one of its own: torch maps it over the trials."""
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
        raise refusal(name, str(error).strip().splitlines()[0]) from error
    if name.endswith("_") and not name.endswith("__") and isinstance(args[0], Stacked):
        return args[0]
    return tree_map(lambda tensor: Stacked(tensor, 0) if isinstance(tensor, torch.Tensor) else tensor, made)


def _refuse(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise refusal(name_of(func), "its result depends on the values of one trial, which the others do not share")


for _name in ("__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__", "__reduce_ex__",
              "__deepcopy__", "item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "nonzero", "unique",
              "masked_select", "backward", "register_hook", "data_ptr", "untyped_storage", "__contains__",
              "retain_grad", "set_", "resize_"):  # fmt: skip
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
    return whole if value.ndim else whole.to(_weak_type(value, values))


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


def name_of(func: Any) -> str:
    """The name of a torch function in messages."""
    return str(getattr(func, "__name__", func))


def refusal(operator: str, why: str) -> Unfusable:
    """The error for an operator that cannot be done for several trials at once, with the line that called it."""
    return Unfusable(f"{operator} at {_line()}: {why}")


def _line() -> str:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((*_OWN, "<")):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "an unknown line"
