"""What is inside of values, such as those that a task keeps, so that a check of a trial can put all of it back."""

from __future__ import annotations

import os
import random
import sys
import types
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

PLAIN = (bool, int, float, complex, str, bytes, type(None))
CODE = (type, types.FunctionType, types.ModuleType, property, staticmethod, classmethod)
STORES = {"STORE_ATTR", "STORE_GLOBAL"}  # operations of code that write an attribute or a global
ABSENT = object()
LARGE = 1 << 20  # numbers of a tensor, such as data, that no step is expected to write
LONG = 1 << 16  # entries of a list, such as texts, in which no step is expected to write


class Contents:
    """What is inside of some values now: the numbers of tensors and arrays, the entries of containers, and what
    optimizers and objects of the user's classes hold, however nested.

    >>> seen = [[1], 2]
    >>> contents = Contents([seen]); seen[0].append(3); seen.pop(); contents.put_back(); seen
    2
    [[1], 2]
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}
        left = list(values)
        while left:
            value = left.pop()
            if isinstance(value, PLAIN) or id(value) in self._kept:
                continue
            content, inside = _content(value)
            if content is not None:
                self._kept[id(value)] = value, content
            left += inside

    def put_back(self) -> None:
        """Let all of it be there again."""
        for value, content in self._kept.values():
            _fill(value, content)


def _content(value: Any) -> tuple[Any, Iterable[Any]]:
    """What a value holds itself, None where nothing can change in it; and the values inside."""
    if isinstance(value, torch.Tensor):
        return (value._version, value.detach().clone() if value.numel() <= LARGE else None), ()
    if isinstance(value, np.ndarray):
        return (value.copy() if value.size <= LARGE else None), ()
    if isinstance(value, nn.Module):
        return [(tensor, tensor.detach().clone()) for tensor in (*value.parameters(), *value.buffers())], ()
    if isinstance(value, dict):  # whose own class may read entries in ways of its own
        return dict.copy(value), dict.values(value)
    if isinstance(value, list | deque):
        return value.copy(), value if len(value) <= LONG else ()
    if isinstance(value, set):
        return value.copy(), ()
    if isinstance(value, tuple):
        return None, value
    if (position := _position(value)) is not None:
        return position, ()
    if isinstance(value, torch.optim.Optimizer) or (of_user(type(value).__module__) and not isinstance(value, CODE)):
        found = attributes_of(value)
        return found, found.values()
    return None, ()


def _fill(value: Any, content: Any) -> None:
    with torch.no_grad():
        if isinstance(value, torch.Tensor):
            version, kept = content
            if kept is not None and value._version != version:
                value.copy_(kept)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                value[...] = content
        elif isinstance(value, nn.Module):
            for tensor, kept in content:
                tensor.copy_(kept)
        elif isinstance(value, list):
            value[:] = content
        elif _position(value) is not None:
            _set_position(value, content)
        elif isinstance(value, deque):
            value.clear()
            value.extend(content)
        elif isinstance(value, dict | set):
            value.clear()
            value.update(content)
        else:
            now = attributes_of(value)
            for name in now.keys() - content.keys():
                object.__delattr__(value, name)
            for name, kept in content.items():
                if now.get(name, ABSENT) is not kept:
                    object.__setattr__(value, name, kept)


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that an object has of its own, in its ``__dict__`` and its slots."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def _slots(kind: type) -> list[str]:
    named = vars(kind).get("__slots__", ())
    named = [named] if isinstance(named, str) else named
    return [name for name in named if isinstance(vars(kind).get(name), types.MemberDescriptorType)]


def _position(generator: Any) -> Any:
    """Where a random generator of the user's own stands; None for any other value."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else None


def _set_position(generator: Any, position: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = position
    elif isinstance(generator, random.Random):
        generator.setstate(position)
    else:
        generator.set_state(position)


def of_user(module: str) -> bool:
    """Whether a module of Python is the user's, and neither an installed library's nor Penstock's own."""
    if of_penstock(module):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or module in sys.stdlib_module_names:
        return module not in sys.stdlib_module_names
    first = module.partition(".")[0]
    root = getattr(sys.modules.get(first), "__file__", None) or file
    folder = os.path.dirname(root)
    return not _installed(os.path.dirname(folder) if os.path.basename(root).startswith("__init__.") else folder)


def of_penstock(module: str) -> bool:
    """Whether a module of Python is one of Penstock's own."""
    return module.partition(".")[0] == "penstock"


@cache
def _installed(folder: str) -> bool:
    """Whether pip has installed packages into a folder."""
    with suppress(OSError):
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    return "site-packages" in folder
