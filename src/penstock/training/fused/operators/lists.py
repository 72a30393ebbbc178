"""Torch's functions of lists of tensors, such as ``torch._foreach_mul``: tensor by tensor, each by its own rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.training.fused.stacked import refusal, rule

_NAMES = [name for name in dir(torch) if name.startswith("_foreach_")]
_ALONE = {"norm": torch.linalg.vector_norm, "max": torch.max}
_BOUNDED = {"maximum": "min", "minimum": "max", "clamp_min": "min", "clamp_max": "max"}


@rule(*_NAMES)
def of_lists(func: Any, first: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Lists go side by side; any other argument is one for all."""
    name = func.__name__.removeprefix("_foreach_")
    kwargs = {"other" if key == "scalar" else key: value for key, value in kwargs.items()}
    made = []
    for place, x in enumerate(first):
        given = [_at(value, place) for value in args]
        named = {key: _at(value, place) for key, value in kwargs.items()}
        if "scalars" in named:
            named[_SCALAR.get(name.rstrip("_"), "other")] = named.pop("scalars")
        made.append(_one(name, x, given, named))
    return None if name.endswith("_") else made


_SCALAR = {"addcmul": "value", "addcdiv": "value", "lerp": "weight", "pow": "exponent"}


def _at(value: Any, place: int) -> Any:
    return value[place] if isinstance(value, list | tuple) else value


def _one(name: str, x: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    bare = name.rstrip("_")
    other = args[0] if args else kwargs.get("other")
    if bare in _ALONE:
        return _ALONE[bare](x, *args, **kwargs)
    if bare in _BOUNDED and not isinstance(other, torch.Tensor):
        return getattr(x, "clamp_" if name.endswith("_") else "clamp")(**{_BOUNDED[bare]: other})
    if bare in ("addcmul", "addcdiv") and len(args) == 3:
        args, kwargs = args[:2], {"value": args[2], **kwargs}
    function = getattr(torch.Tensor, name, None)
    if function is None:
        raise refusal(f"_foreach_{name}", "it has no form for one tensor; write a loop over the list")
    return function(x, *args, **kwargs)
