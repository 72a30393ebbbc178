"""Functions of each element: the same function on the whole tensors, once their dimensions are aligned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from penstock.training.fused.operators.kept import counted
from penstock.training.fused.operators.normalized import Normalized, added
from penstock.training.fused.promoting import promote
from penstock.training.fused.stacked import Stacked, align, by_rows, by_vmap, name_of, refusal, rule

_UNARY = """abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh
bitwise_not ceil celu conj conj_physical cos cosh deg2rad digamma elu erf erfc erfinv exp exp2 expm1 fix floor frac
gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf isposinf isreal leaky_relu lgamma log
log10 log1p log2 logical_not logit logsigmoid mish nan_to_num neg negative positive rad2deg reciprocal relu relu6
round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh
tanhshrink threshold trunc __abs__ __invert__ __neg__ __pos__"""
_BINARY = """add addcdiv addcmul arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift
bitwise_xor clamp clamp_max clamp_min clip copysign div divide dist_ eq float_power floor_divide fmax fmin fmod ge
greater greater_equal gt heaviside hypot isclose ldexp le lerp less less_equal logaddexp logaddexp2 logical_and
logical_or logical_xor lt masked_fill maximum minimum mul multiply ne nextafter not_equal polar pow prelu_ remainder
rsub sub subtract true_divide where xlogy
__add__ __and__ __div__ __eq__ __floordiv__ __ge__ __gt__ __le__ __lshift__ __lt__ __mod__ __mul__ __ne__ __or__
__pow__ __radd__ __rand__ __rdiv__ __rfloordiv__ __rlshift__ __rmod__ __rmul__ __ror__ __rpow__ __rrshift__
__rshift__ __rsub__ __rtruediv__ __rxor__ __sub__ __truediv__ __xor__"""
_IN_PLACE = """__iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__ __imod__ __imul__ __ior__ __ipow__ __irshift__
__isub__ __itruediv__ __ixor__ copy_"""
_TYPES = "bfloat16 bool byte char clone cpu cuda detach double float half int long short to type"
_LIKE = "empty_like full_like ones_like zeros_like"


@rule(*_UNARY.split(), *_TYPES.split())
def one(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of one tensor's elements."""
    if isinstance(kwargs.get("other"), Stacked):
        kwargs = {**kwargs, "other": kwargs["other"].whole}
    if not isinstance(x, Stacked) or any(isinstance(a, Stacked) for a in args):
        if isinstance(x, torch.Tensor) and name_of(func) == "to" and isinstance(args[0], Stacked):
            return func(x, args[0].whole, *args[1:], **kwargs)
        if isinstance(x, Stacked) and name_of(func) == "to":
            return Stacked(func(x.whole, args[0].whole, *args[1:], **kwargs), x.at)
        return by_vmap(func, x, *args, **kwargs)
    inplace = kwargs.get("inplace") or (args and args[-1] is True and name_of(func) in _INPLACE_LAST)
    if isinstance(x, Normalized):
        six = (kwargs.get("min_val"), kwargs.get("max_val")) == (0, 6)  # as nn.ReLU6 has it
        if (made := x.activated("relu6" if six else name_of(func).strip("_"), bool(inplace))) is not None:
            return made
    if (sloped := _SLOPED.get(name_of(func))) is not None:
        name, function = sloped
        value: Any = kwargs.get(name, args[0] if args else None)
        if hasattr(value, "value"):
            made = function(x, value.value)
            return x.copy_(made) if inplace else made
    if inplace:
        func(x.whole, *args, **kwargs)
        return x
    return Stacked(func(x.whole, *args, **kwargs), x.at)


_INPLACE_LAST = {"relu", "relu6", "leaky_relu", "elu", "selu", "celu", "silu", "mish", "hardtanh", "hardswish",
                 "hardsigmoid", "threshold"}  # fmt: skip
# Functions with a number that may differ from trial to trial.
_SLOPED: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "leaky_relu": ("negative_slope", lambda x, slope: torch.where(x > 0, x, x * slope)),
    "elu": ("alpha", lambda x, alpha: torch.where(x > 0, x, torch.expm1(x.clamp(max=0)) * alpha)),
    "celu": ("alpha", lambda x, alpha: torch.where(x > 0, x, torch.expm1(x.clamp(max=0) / alpha) * alpha)),
}


@rule(*_BINARY.split())
def several(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of several tensors' elements, which broadcast."""
    if not kwargs and (made := added(name_of(func), args, False)) is not None:
        return made
    if len(args) == 1 and not kwargs and name_of(func) == "where":  # the places where it is true
        return by_rows(func, *args)
    names = list(kwargs)
    aligned, at = align([*args, *kwargs.values()])
    made = func(*aligned[: len(args)], **dict(zip(names, aligned[len(args) :], strict=True)))
    return made if made is NotImplemented else Stacked(made, at)


def in_place(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that writes its result into its first tensor."""
    if not isinstance(x, Stacked):
        x = promote(name_of(func), x, next(v.trials for v in (*args, *kwargs.values()) if isinstance(v, Stacked)))
    if not kwargs and counted(name_of(func), x, args):
        return x
    if isinstance(x, Normalized) and not kwargs:
        name = name_of(func)
        made = x.activated(name.strip("_"), True) if not args else added(name, (x, *args), True)
        if made is not None:
            return made
    # The first operand decides where the trials lie: the result must not go into a copy of it.
    aligned, at = align([x, *args, *kwargs.values()])
    if at != x.at or aligned[0] is not x.whole:
        raise refusal(name_of(func), "its result has more dimensions than the tensor it is written into")
    func(*aligned[: len(args) + 1], **dict(zip(kwargs, aligned[len(args) + 1 :], strict=True)))
    return x


rule(*_IN_PLACE.split(), *(f"{name}_" for name in _UNARY.split() + _BINARY.split() if name[0] != "_"))(in_place)
rule("zero_", "fill_", "requires_grad_", "detach_")(in_place)


@rule("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout")
def dropout(func: Any, x: Stacked, p: Any = 0.5, training: bool | None = None, *more: Any, **options: Any) -> Any:
    """In training, ``Keyed`` has taken the call before."""
    draws = options.get("train", "alpha" not in name_of(func)) if training is None else training
    if draws and p != 0:
        raise refusal(name_of(func), "it was given no keys of trial and step")
    return x


@rule("contiguous")
def contiguous(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> Stacked:
    """Nothing to do: rules choose layouts by themselves."""
    return x


@rule(*_LIKE.split())
def like(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> Stacked:
    return Stacked(func(x.whole, *args, **kwargs), x.at)


@rule("new_zeros", "new_ones", "new_empty", "new_full")
def new(func: Any, x: Stacked, *size: Any, **kwargs: Any) -> Stacked:
    rest: tuple[Any, ...] = ()
    if "size" in kwargs:
        size, kwargs = (kwargs["size"], *size), {name: value for name, value in kwargs.items() if name != "size"}
    if isinstance(size[0], list | tuple):
        size, rest = tuple(size[0]), size[1:]
    return Stacked(func(x.whole, (x.trials, *size), *rest, **kwargs), 0)


@rule("new")
def new_of_old(func: Any, x: Stacked, *size: Any, **kwargs: Any) -> Any:
    """The constructor of old, as torch.distributions calls it with a shape; with anything else it copies."""
    shape = size[0] if len(size) == 1 and isinstance(size[0], torch.Size) else size
    if kwargs or not all(isinstance(n, int) for n in shape):
        return by_vmap(func, x, *size, **kwargs)
    return Stacked(x.whole.new_empty((x.trials, *shape)), 0)


@rule("type_as")
def type_as(func: Any, x: torch.Tensor, other: torch.Tensor) -> Any:
    return x.to(other.dtype)


@rule("prelu")
def prelu(func: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
    """Slopes of each channel, or one for all channels."""
    if weight.numel() > 1 and x.ndim > 1:
        weight = weight.reshape(-1, *[1] * (x.ndim - 2))
    return torch.where(x >= 0, x, weight * x)


@rule("glu")
def glu(func: Any, x: Stacked, dim: int = -1) -> Any:
    first, second = x.chunk(2, dim)
    return first * second.sigmoid()
