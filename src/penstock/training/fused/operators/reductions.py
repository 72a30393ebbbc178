"""Functions along some of a trial's dimensions, or over all of them."""

from __future__ import annotations

from typing import Any

import torch

from penstock.training.fused.operators.elementwise import several
from penstock.training.fused.stacked import Stacked, by_vmap, name_of, rule, whole_dim

_REDUCING = "sum nansum mean nanmean prod amax amin max min argmax argmin any all logsumexp var std median"
_KEEPING = "softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin flip roll_ sort argsort topk"
_WHOLE = {"sum", "nansum", "mean", "nanmean", "prod", "amax", "amin", "any", "all", "argmax", "argmin"}
_PLAIN_OF = {"max": torch.amax, "min": torch.amin}


@rule(*_REDUCING.split(), *_KEEPING.split())
def along(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A function with a ``dim``: the same of the whole tensor, along the whole's dimension."""
    name = name_of(func)
    if args and isinstance(args[0], torch.Tensor) and name in ("max", "min"):
        return several(torch.maximum if name == "max" else torch.minimum, x, *args)
    if name == "topk" and "k" in kwargs:
        kwargs = dict(kwargs)
        args = (kwargs.pop("k"), *args)
    if name == "topk" and "dim" not in kwargs:
        args, kwargs = (args[0], args[1] if len(args) > 1 else -1, *args[2:]), kwargs
        place: int | None = 1
    elif name in ("sort", "argsort") and "dim" not in kwargs and not args:
        place, args = 0, (-1,)
    else:
        place = None if "dim" in kwargs else 0
    dims = kwargs.get("dim") if place is None else args[place] if len(args) > place else None
    if dims is None or (isinstance(dims, tuple | list) and not dims):
        return _whole(func, x, kwargs) if _over_all(name, args, kwargs) else by_vmap(func, x, *args, **kwargs)
    if isinstance(dims, bool) or not isinstance(dims, int | tuple | list) or (x.ndim == 0):
        return by_vmap(func, x, *args, **kwargs)
    many = (dims,) if isinstance(dims, int) else tuple(dims)
    inner = tuple(whole_dim(x, d) for d in many)
    new: Any = inner[0] if isinstance(dims, int) else inner
    if place is None:
        kwargs = {**kwargs, "dim": new}
    else:
        args = (*args[:place], new, *args[place + 1 :])
    made = func(x.whole, *args, **kwargs)
    first = made if isinstance(made, torch.Tensor) else made[0]
    gone = first.ndim < x.whole.ndim
    at = x.at - sum(d < x.at for d in inner) if gone else x.at
    if isinstance(made, torch.Tensor):
        return Stacked(made, at)
    return type(made)([Stacked(part, at) for part in made])


def _over_all(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (name in _WHOLE or name in _PLAIN_OF) and not args and not set(kwargs) - {"dtype", "dim"}


def _whole(func: Any, x: Stacked, kwargs: dict[str, Any]) -> Stacked:
    flat = x.moved(0).reshape(x.trials, -1)
    rest = {k: v for k, v in kwargs.items() if k != "dim"}
    return Stacked(_PLAIN_OF.get(name_of(func), func)(flat, dim=1, **rest), 0)
