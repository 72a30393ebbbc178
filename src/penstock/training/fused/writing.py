"""Attributes that a forward writes into its own modules, and whether one module may then run for several trials.

In a bundle, one module has the attributes of all trials. That is right for a value that is the same after every forward
(a library notes the kind of its loss), for a value that each forward writes before it reads it (the last attention),
and for a count that nothing but its own sum reads. It is wrong for whatever else a step leaves to the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from penstock.training.copying import copied
from penstock.training.differing import legible
from penstock.training.signature import attributes
from penstock.training.unlike import labelled, unequal

Run = Callable[[nn.Module, Any], object]  # the loss of a model on a batch
ADVICE = "register it as a buffer, so that each trial has its own, or compute it anew in each forward"


def carried(before: list[str], after: list[str], plain: nn.Module, state: Any, batch: Any, run: Run) -> str:
    """The attribute that a forward leaves to the next one, as a refusal; nothing where there is none.

    ``before`` and ``after`` are a model's ``attributes`` around a forward, ``plain`` is a copy of it, and ``state`` its
    weights. The copy runs with other weights and another batch: what is the same then is the same for all trials.
    """
    written = unequal(labelled(before), labelled(after))
    try:
        model = copied(plain)
        model.load_state_dict(state)
        model.train()
        with torch.no_grad():
            for p in model.parameters():
                if p.is_floating_point():
                    p.mul_(1.25).add_(0.01)
        changing = set()
        for given in (tree_map(_repeated, batch), batch):
            run(model, given)
            now = labelled(attributes(model))
            changing |= {name for name, _, text in written if now.get(name) != text}
            changing |= {name for name, _, _ in unequal(labelled(after), now)}
        read = _read(model, changing, lambda: run(model, batch)) if changing else set()
    except Exception:
        read = {name for name, _, _ in written}  # the forward does not bear to be tried
    if not read:
        return ""
    name, old, new = next((one for one in written if one[0] in read), (min(read), None, None))
    values = "" if old is None or new is None else f" is {legible(old)} before and {legible(new)} after"
    return (
        f"the model changes an attribute of its own in its forward, and reads it: {name}{values}. To fuse it, {ADVICE}"
    )


def _repeated(leaf: Any) -> Any:
    """A batch of other rows and the same shapes: the first half twice."""
    if not isinstance(leaf, torch.Tensor) or not leaf.ndim or len(leaf) < 2:
        return leaf
    return leaf[torch.arange(len(leaf), device=leaf.device) // 2]


def _read(model: nn.Module, names: set[str], run: Callable[[], object]) -> set[str]:
    """The attributes among ``names`` that a run reads before it writes them, or whose count it uses."""
    read: set[str] = set()
    left = set(names)
    for path, module in model.named_modules():
        own = {name: label for name in vars(module) if (label := f"{path}.{name}".lstrip(".")) in names}
        if own:
            left -= set(own.values())
            module.__class__ = _watching(type(module), own, read)
    run()
    return read | left  # a parameter, or an attribute that a run has taken away


def _watching(kind: type[nn.Module], own: dict[str, str], read: set[str]) -> type[nn.Module]:
    """A class like the given one, whose objects note which of their ``own`` attributes are read as they were before."""
    fresh: set[str] = set()

    def get(self: Any, name: str) -> Any:
        value = super(made, self).__getattribute__(name)
        if name not in own or name in fresh:
            return value
        if type(value) in (int, float):
            return _Count(value, lambda: read.add(own[name]))
        read.add(own[name])
        return value

    def put(self: Any, name: str, value: Any) -> None:
        if isinstance(value, _Count):
            value = value.value  # counted on, and as old as it was
        else:
            fresh.add(name)
        super(made, self).__setattr__(name, value)

    made: type[nn.Module] = type(kind.__name__, (kind,), {"__getattribute__": get, "__setattr__": put})
    return made


class _Count:
    """A number that may be added to; any other use of it is noted, and gives the number."""

    def __init__(self, value: float, use: Callable[[], object]) -> None:
        self.value, self.use = value, use

    def __add__(self, more: Any) -> Any:
        if type(more) in (int, float):
            return _Count(self.value + more, self.use)
        return self._used() + more

    __radd__ = __add__

    def __sub__(self, less: Any) -> Any:
        return self + -less if type(less) in (int, float) else self._used() - less

    def _used(self) -> Any:
        self.use()
        return self.value


def _by(operator: str) -> Callable[..., Any]:
    return lambda count, *others: getattr(count._used(), operator)(*others)


for _operator in (
    "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__",
    "__pow__", "__rpow__", "__rsub__", "__neg__", "__pos__", "__abs__", "__lt__", "__le__", "__gt__", "__ge__",
    "__eq__", "__ne__", "__bool__", "__int__", "__float__", "__index__", "__round__", "__hash__", "__str__",
    "__repr__", "__format__", "__divmod__", "__lshift__", "__rshift__", "__and__", "__or__", "__xor__",
):  # fmt: skip
    setattr(_Count, _operator, _by(_operator))
