"""Whether a task's code names a random function anywhere that its loss can reach, though it may not call it yet.

A mode that keys draws is off where the first forward drew nothing. A draw that only a later batch makes must be keyed
all the same, or a trial that is stopped before it would go on with other numbers than one that is not.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from torch import nn

_NAMES = frozenset(
    """rand randn rand_like randn_like normal normal_ uniform_ bernoulli bernoulli_ multinomial randint randint_like
    randperm exponential_ geometric_ cauchy_ log_normal_ random_ poisson gumbel_softmax native_dropout rsample
    rrelu""".split()  # noqa: SIM905
)
_LIBRARIES = ("torch.", "penstock.")


def mentions_draws(function: Callable[..., Any], model: nn.Module) -> bool:
    """Whether a method of a task, a module's forward, or what they call by name, names a random function of torch."""
    kinds = {type(module) for module in model.modules()}
    owner = getattr(function, "__self__", None)
    methods: dict[str, list[types.FunctionType]] = {}
    for home in {base for kind in (*kinds, type(owner)) for base in kind.__mro__}:
        for name, value in vars(home).items():
            if isinstance(value, types.FunctionType):
                methods.setdefault(name, []).extend(_plain(value))
    left = [*methods.get("forward", []), *_plain(function)]
    seen: set[types.CodeType] = set()
    while left:
        one = left.pop()
        if one.__code__ in seen:
            continue
        seen.add(one.__code__)
        names = set(_names(one.__code__))
        if names & _NAMES:
            return True
        left += [method for name in names for method in methods.get(name, ())]
        left += _called(one, names)
    return False


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _called(function: types.FunctionType, names: set[str]) -> Iterator[types.FunctionType]:
    """The functions that a function reaches by a global name, or by a module's."""
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType) and _own(value.__name__):
            for attribute in names & vars(value).keys():
                yield from _plain(vars(value)[attribute])
        else:
            yield from _plain(value)


def _plain(value: Any) -> list[types.FunctionType]:
    found = getattr(value, "__func__", value)
    if callable(found) and hasattr(found, "__wrapped__"):
        found = inspect.unwrap(found)
    return [found] if isinstance(found, types.FunctionType) and _users(found) else []


def _users(function: types.FunctionType) -> bool:
    return _own(function.__module__ or "")


@cache
def _own(module: str) -> bool:
    return not f"{module}.".startswith(_LIBRARIES)
