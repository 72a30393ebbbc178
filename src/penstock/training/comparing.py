"""Values as text that is equal for equal values alone, so that what two models hold can be compared, in any process.

What has a value is compared by it: numbers, containers, tensors, and objects by what they hold. Classes and functions
are compared by their names where a module gives them under these, and by their code where they were made inside a
function. Only what is left, such as an open file or a generator of random numbers, is unlike anything else.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import hashlib
import itertools
import logging
import os
import random
import re
import sys
import threading
import types
import typing
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parametrize

UNLIKE = "unlike any other"
MOST = 100_000  # objects and containers inside one value; a larger one is taken for unlike
_different = itertools.count()
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_TOLD = (  # kinds whose repr is their value
    torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout, torch.finfo, torch.iinfo, np.dtype, range,
    slice, type(Ellipsis), type(NotImplemented), torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_DRAWING = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
_WRITTEN = {  # by Python into every class; all but its place in the file is compared otherwise
    "__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__firstlineno__", "__static_attributes__",
    "__annotations__", "__annotations_cache__", "__annotate_func__", "__annotate__", "__conditional_annotations__",
    "__slotnames__",
}  # fmt: skip
_MANAGED_DICT = 1 << 4  # of a class's flags: its objects' dict is not counted in their size


def compared(value: Any) -> str:
    """A value as text that is equal for equal values alone.

    >>> compared({"widths": (64, 32)}), compared(0.1) == compared(0.2)
    ("{'widths': (64, 32)}", False)
    """
    return repr(value) if type(value) in _PLAIN else Comparing()(value)


class Comparing:
    """Compares the values of one model, whose own modules go by their ``names``, by id.

    What several modules hold, such as a library's config, is looked at once.
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        self._names = names or {}
        self._made: dict[int, tuple[Any, str]] = {}  # by id: objects, which are kept alive, and their texts
        self._count = 0
        self._order: dict[int, int] = {}  # by id: the places of objects inside of the value that is looked at
        self._kept: list[Any] = []  # alive, so that no other object gets its id

    def __call__(self, value: Any) -> str:
        """The value as text."""
        return repr(value) if type(value) in _PLAIN else self._look(value, self._text)

    def class_of(self, module: torch.nn.Module) -> str:
        """The class of a module as text. What its ``__init__`` sees has done its work, as the module is made."""
        return self._look(type(module), lambda kind: self._named(kind) or self._class(kind, makes=False))

    def _look(self, value: Any, text: Callable[[Any], str]) -> str:
        if (known := self._made.get(id(value))) is not None:
            return known[1]
        self._count, self._order, self._kept = 0, {}, []
        try:
            made = text(value)
        except Exception:  # too large or too deep, or a class whose objects cannot be looked at
            made = _unlike(value)
        self._made[id(value)] = value, made
        return made

    def _text(self, value: Any) -> str:
        kind = type(value)
        if kind in _PLAIN:
            return repr(value)
        if (name := self._names.get(id(value))) is not None:
            return f"<{name}>"
        if isinstance(value, enum.Enum):
            return f"{self._text(kind)}.{value.name}({self._text(value.value)})"
        if isinstance(value, _TOLD):
            return repr(value)
        if isinstance(value, torch.Tensor | np.ndarray | np.generic):
            return self._array(value)
        if isinstance(value, type):
            return self._named(value) or self._class(value)
        if isinstance(value, types.MethodType):
            return f"{self._text(value.__func__)} of {self._text(value.__self__)}"
        if isinstance(value, types.FunctionType):
            return self._named(value) or self._function(value)
        if (again := self._again(value)) is not None:
            return again
        try:
            return self._holding(value)
        finally:
            if _shared(value):  # equal values are equal, whether they are one object or two
                del self._order[id(value)]

    def _again(self, value: Any) -> str | None:
        """The place of a value that is being looked at, or None for one that is new."""
        if (place := self._order.get(id(value))) is not None:
            return f"<the same as {place}>"
        self._count += 1
        if self._count > MOST:
            raise _TooLarge
        self._order[id(value)] = self._count
        self._kept.append(value)
        return None

    def _holding(self, value: Any) -> str:
        """An object or container by what it holds."""
        kind = type(value)
        if isinstance(value, int | float | complex | str | bytes):  # of a class of its own
            plain: Any = next(base for base in _PLAIN[2:] if isinstance(value, base))
            return f"{self._text(kind)} {plain.__repr__(value)}{self._fields(value)}"
        if isinstance(value, list | tuple | set | frozenset):
            items = [self._text(v) for v in value]
            if isinstance(value, set | frozenset):
                items.sort()
            name = "" if kind is tuple else kind.__name__ if kind in (list, set, frozenset) else self._text(kind)
            return f"{name}({', '.join(items)}){self._fields(value)}"
        if isinstance(value, Mapping):
            name = "" if kind is dict else self._text(kind)
            items = [f"{self._text(k)}: {self._text(v)}" for k, v in value.items()]
            # The objects of OmegaConf keep what they have read beside what they hold.
            return (
                f"{name}{{{', '.join(items)}}}{'' if kind.__module__.startswith('omegaconf') else self._fields(value)}"
            )
        if isinstance(value, functools.partial | functools.partialmethod):
            name = kind.__name__
            return f"{name}({', '.join(self._text(part) for part in (value.func, value.args, value.keywords))})"
        if isinstance(value, property):
            return f"property({', '.join(self._text(part) for part in (value.fget, value.fset, value.fdel))})"
        if isinstance(value, classmethod | staticmethod):
            return f"{kind.__name__}({self._text(value.__func__)})"
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.CellType):
            return self._text(value.cell_contents) if filled(value) else "<empty>"
        return self._object(value)

    def _object(self, value: Any) -> str:
        kind = type(value)
        if isinstance(value, logging.Logger):
            return f"logger {value.name!r}"
        if isinstance(value, os.PathLike):
            return f"{self._text(kind)} {os.fspath(value)!r}"
        if isinstance(value, re.Pattern):
            return f"pattern {value.pattern!r} {value.flags}"
        if isinstance(value, _LOCKS):
            return kind.__name__
        if isinstance(value, weakref.ref):
            return f"weakref({self._text(value())})"
        if isinstance(value, torch.jit.ScriptFunction):
            return f"scripted {value.code!r}"
        if (origin := typing.get_origin(value)) is not None:
            return f"{self._text(origin)}[{', '.join(self._text(arg) for arg in typing.get_args(value))}]"
        if isinstance(value, _DRAWING) or hasattr(kind, "__next__"):
            return _unlike(value)  # each use of it changes it
        if isinstance(value, types.SimpleNamespace) or _only_python(kind):
            return f"{self._text(kind)}{self._fields(value) or '()'}"
        if isinstance(value, np.ufunc):
            return f"ufunc {value.__name__}"
        return self._named(value) or self._reduced(value)

    def _fields(self, value: Any) -> str:
        """The attributes of an object, whatever its class makes of reading them."""
        fields = dict(_held(value))
        if isinstance(value, defaultdict):
            fields["default_factory"] = value.default_factory
        if not fields:
            return ""
        items = sorted((name, held) for name, held in fields.items() if isinstance(name, str))
        return f"({', '.join(f'{name}={self._text(held)}' for name, held in items)})"

    def _reduced(self, value: Any) -> str:
        """An object with a state that is not Python's, by what a copy of it would be made of."""
        if type(value) is object:
            return _unlike(value)  # there is nothing to it but which one it is
        try:
            made = value.__reduce_ex__(4)
        except Exception:
            return _unlike(value)
        if isinstance(made, str):
            return f"{self._text(type(value))} {made}"
        made = [list(part) if isinstance(part, Iterator) else part for part in made]
        return f"{self._text(type(value))}({', '.join(self._text(part) for part in made)})"

    def _array(self, value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            if value.dtype.hasobject:
                return f"array {value.dtype} {value.shape} {self._text(value.tolist())}"
            return f"array {value.dtype} {value.shape} {_digest(value.tobytes())}"
        if value.device.type == "meta":
            return f"tensor {value.dtype} {tuple(value.shape)} meta"
        if value.is_sparse or value.layout != torch.strided:
            parts = [self._array(part) for part in _parts(value)]
            return f"tensor {value.layout} {tuple(value.shape)} ({', '.join(parts)})"
        data = value.detach().cpu().contiguous().resolve_conj().resolve_neg()
        content = _digest(bytes(data.reshape(-1).view(torch.uint8).numpy()))
        return f"tensor {value.dtype} {tuple(value.shape)} {content}"

    # Classes and functions

    def _named(self, value: Any) -> str | None:
        """The name of what its module gives under that name, and of everything that is built in."""
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if not isinstance(name, str) or not isinstance(module, str | None):
            if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
                return f"module {value.__name__}"
            return None
        if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, types.ModuleType | None):
            return f"{name} of {self._text(value.__self__)}"
        if isinstance(value, _BUILT_IN):
            return f"{module or self._text(getattr(value, '__objclass__', None))}.{name}"
        found: Any = sys.modules.get(module or "")
        for part in name.split("."):
            found = getattr(found, part, None)
        return f"{module}.{name}" if found is value else None

    def _function(self, value: types.FunctionType) -> str:
        """A lambda or a function made inside another, by its code and what that can see."""
        if value.__module__ == parametrize.__name__:  # it sees the module that was parametrized first, in copies too
            return f"{value.__module__}.{value.__qualname__}"
        if (again := self._again(value)) is not None:
            return again
        given = (value.__defaults__, value.__kwdefaults__, value.__dict__)
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        seen = ", ".join(f"{name}={self._text(cell)}" for name, cell in cells)
        return f"{value.__module__}.{value.__qualname__}({seen}) {self._code(value.__code__)} {self._text(given)}"

    def _code(self, code: types.CodeType) -> str:
        where = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        told = _digest(code.co_code + code.co_exceptiontable + repr((where, shape)).encode())
        return f"code {told} ({', '.join(self._text(const) for const in code.co_consts)})"

    def _class(self, value: type, *, makes: bool = True) -> str:
        """A class made inside a function, by its bases and its members; whether it still ``makes`` objects."""
        if (again := self._again(value)) is not None:
            return again
        of_bases = [self._named(base) or self._class(base, makes=makes) for base in value.__bases__]
        bases = ", ".join([self._text(type(value)), *of_bases])
        passed = _WRITTEN if makes else _WRITTEN | {"__init__"}
        members = sorted((name, held) for name, held in vars(value).items() if name not in passed)
        told = ", ".join(f"{name}={self._text(held)}" for name, held in members if name != "__abstractmethods__")
        return f"class {value.__module__}.{value.__qualname__}({bases})({told})"


class _TooLarge(Exception):
    """A value holds too much to be compared."""


_BUILT_IN = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip


def _shared(value: Any) -> bool:
    """Whether a value is made of other values, and so is compared anew wherever it is held."""
    return isinstance(value, list | tuple | set | frozenset | Mapping | types.SimpleNamespace | types.CellType) or (
        hasattr(type(value), "__dataclass_fields__")
    )


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    with suppress(AttributeError):  # an object of slots alone
        yield from object.__getattribute__(value, "__dict__").items()
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
        try:
            yield name, object.__getattribute__(value, name)
        except AttributeError:
            continue  # the slot is empty


def _only_python(kind: type) -> bool:
    """Whether all that objects of a class hold is in their dict and slots, as Python's pickle asks."""
    size = object.__basicsize__ + 8 * len(copyreg._slotnames(kind))  # type: ignore[attr-defined]
    if kind.__dictoffset__ and not kind.__flags__ & _MANAGED_DICT:
        size += 8
    if kind.__weakrefoffset__ > 0:
        size += 8
    return not kind.__itemsize__ and kind.__basicsize__ <= size and kind is not object


def _parts(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if value.layout == torch.sparse_coo:
        value = value.detach().coalesce()
        return value.indices(), value.values()
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return value.crow_indices(), value.col_indices(), value.values()
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return value.ccol_indices(), value.row_indices(), value.values()
    return (value.to_dense(),)


def filled(cell: types.CellType) -> bool:
    """Whether a cell of a closure holds a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _unlike(value: Any) -> str:
    return f"{type(value).__qualname__} {UNLIKE} {next(_different)}"
