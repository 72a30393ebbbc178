"""What a task keeps outside of its models: attributes of the task and of classes, and globals of the user's modules.

``Task.model`` may leave something of a config there, such as a weight of the loss or a target network. The last
trial's value would then be every trial's. So the places are looked at before and after a model is made. A trial has
its own values back when it goes on, and trials are fused only where these values are equal. A look at a trial leaves
no trace there.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from penstock.task import Task
from penstock.training.fused.stacked import Unfusable

Holder = Any  # a task, a class or a module of Python
Place = tuple[str, str]  # the key of a holder, and the name there
Values = dict[Place, Any]
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAKING = {"__init__", "model", "data", "optimizer"}  # methods that run when a trial is made, and not in its steps
_classes: WeakKeyDictionary[type, dict[type, None]] = WeakKeyDictionary()  # of modules in models, by class of the task
_used: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()  # names in a class's methods
_replaced: WeakKeyDictionary[type, dict[Place, None]] = WeakKeyDictionary()  # by making models, by class of the task
ABSENT = object()
_SELF = "self"


@dataclass(frozen=True)
class Kept:
    """The values that were outside of a trial's model once it was made."""

    task: Task
    values: Mapping[Place, Any] = field(default_factory=dict)

    def bring_back(self) -> None:
        """Let these values be there again where making models replaces them."""
        if own := self._own():
            _write(_holders(self.task), own)

    def compared(self) -> dict[str, Any]:
        """The values that must be equal to fuse, by name; refuses a value that is each trial's own."""
        found, holders = {}, _holders(self.task)
        for (key, name), value in self._own().items():
            where = f"{_title(holders[key])}.{name}"
            if value is not ABSENT and not isinstance(value, (*_PLAIN, torch.Tensor, list, tuple, dict)):
                raise Unfusable(
                    f"model() leaves a {type(value).__name__} in {where}, which the steps of all trials would share: "
                    "make it a part of the model"
                )
            found[where] = None if value is ABSENT else value
        return found

    def _own(self) -> Values:
        """The values at places where making a model has ever replaced one, and where steps may read."""
        return {at: self.values.get(at, ABSENT) for at in _replaced.get(type(self.task), ())}


def kept(task: Task, model: nn.Module, before: Values) -> Kept:
    """The values that are outside of a model that was just made; ``before`` are the values from before that."""
    known, there = _classes.setdefault(type(task), {}), _holders(task)
    known.update({kind: None for kind in map(type, model.modules()) if kind not in known and _own(kind.__module__)})
    after = look(task)
    # Of classes that are seen for the first time it is not known which of their values the model has just set.
    changed = [at for at in replaced(before, after) if at[0] in there or at[1] in _set_by_model(task)]
    if changed:
        used, places = _names(task), _replaced.setdefault(type(task), {})
        places.update({at: None for at in changed if at[1] in used})
    return Kept(task, after)


def look(task: Task) -> Values:
    """The values that are outside of models now."""
    return {
        (key, name): value
        for key, holder in _holders(task).items()
        for name, value in vars(holder).items()
        if not name.startswith("__") and not isinstance(value, _CODE)
    }


_CODE = (type, types.FunctionType, types.ModuleType, property, staticmethod, classmethod)


def replaced(before: Values, after: Values) -> Values:
    """The values that differ from before, with ABSENT for names that are gone."""
    now = {at: value for at, value in after.items() if not _same(before.get(at, ABSENT), value)}
    return {**now, **{at: ABSENT for at in before if at not in after}}


def _same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and isinstance(old, _PLAIN) and bool(old == new))


def written(task: Task, before: Values) -> str:
    """The first name that was replaced since ``before`` and that steps may read, for a person; nothing if none was."""
    used, holders = _names(task), _holders(task)
    for key, name in replaced(before, look(task)):
        if name in used:
            return f"{_title(holders[key])}.{name}"
    return ""


@contextmanager
def untouched(task: Task) -> Iterator[None]:
    """Put back whatever a look at a trial changes: values that steps may read, and the content of the task's own."""
    before, used = look(task), _names(task)
    contents = Contents(value for (key, _), value in before.items() if key == _SELF)
    try:
        yield
    finally:
        changed = [at for at in replaced(before, look(task)) if at[1] in used]
        _write(_holders(task), {at: before.get(at, ABSENT) for at in changed})
        contents.put_back()


LARGE = 1 << 20  # numbers of a tensor, such as data, that no step is expected to write
_CONTENT = (torch.Tensor, nn.Module, list, dict, set)


class Contents:
    """What is inside of some values now: the numbers of tensors, and the entries of containers, however nested.

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
            if isinstance(value, _CONTENT) and id(value) not in self._kept:
                self._kept[id(value)] = value, _content(value)
                left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()

    def put_back(self) -> None:
        """Let all of it be there again."""
        for value, content in self._kept.values():
            _fill(value, content)


def _content(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value._version, value.detach().clone() if value.numel() <= LARGE else None
    if isinstance(value, nn.Module):
        return [(tensor, tensor.detach().clone()) for tensor in (*value.parameters(), *value.buffers())]
    return value.copy()


def _fill(value: Any, content: Any) -> None:
    with torch.no_grad():
        if isinstance(value, torch.Tensor):
            version, kept = content
            if kept is not None and value._version != version:
                value.copy_(kept)
        elif isinstance(value, nn.Module):
            for tensor, kept in content:
                tensor.copy_(kept)
        elif isinstance(value, list):
            value[:] = content
        else:
            value.clear()
            value.update(content)


def _holders(task: Task) -> dict[str, Holder]:
    """The task, its classes and their modules; and the classes of the user's modules in its models, and theirs."""
    classes = dict.fromkeys([kind for kind in type(task).__mro__ if kind not in Task.__mro__])
    classes.update(_classes.get(type(task), {}))
    homes = dict.fromkeys(kind.__module__ for kind in classes)
    return {
        _SELF: task,
        **{f"class {id(kind)}": kind for kind in classes},
        **{f"module {name}": sys.modules[name] for name in homes if name in sys.modules and _own(name)},
    }


def _own(module: str) -> bool:
    """Whether a module of Python is the user's, and no installed library's."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module not in sys.stdlib_module_names and (file is None or "site-packages" not in file)


def _title(holder: Holder) -> str:
    return "self" if isinstance(holder, Task) else str(getattr(holder, "__qualname__", holder.__name__))


def _write(holders: Mapping[str, Holder], values: Mapping[Place, Any]) -> None:
    for (key, name), value in values.items():
        if value is not ABSENT:
            setattr(holders[key], name, value)
        elif name in vars(holders[key]):
            delattr(holders[key], name)


def _names(task: Task) -> frozenset[str]:
    """The names that the steps of a trial may read: in the methods of the task and of the models' own classes.

    A name that code gives as text counts too, as in ``getattr(self, "weight")``.
    """
    kinds = [*(kind for kind in type(task).__mro__ if kind not in Task.__mro__), *_classes.get(type(task), ())]
    return frozenset().union(*(_names_in(kind) for kind in kinds))


def _set_by_model(task: Task) -> set[str]:
    """The names that ``model`` and the functions of its module that it calls assign somewhere."""
    home = vars(sys.modules.get(type(task).__module__, types))
    codes = [code for code in [_code(type(task).model)] if code is not None]
    every = _codes(codes, home)
    return {str(one.argval) for code in every for one in dis.get_instructions(code) if one.opname in _STORES}


_STORES = {"STORE_ATTR", "STORE_GLOBAL"}


def _names_in(kind: type) -> frozenset[str]:
    found = _used.get(kind)
    if found is None:
        codes = [
            code for name, method in vars(kind).items() if name not in _MAKING and (code := _code(method)) is not None
        ]
        found = _used[kind] = frozenset(_names_of(codes, vars(sys.modules.get(kind.__module__, types))))
    return found


def _code(method: Any) -> types.CodeType | None:
    method = getattr(method, "__func__", getattr(method, "fget", method))
    while hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return getattr(method, "__code__", None)


def _names_of(codes: list[types.CodeType], home: Mapping[str, Any]) -> set[str]:
    names = set[str]()
    for code in _codes(codes, home):
        said = {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
        names |= {*code.co_names, *said}
    return names


def _codes(codes: list[types.CodeType], home: Mapping[str, Any]) -> set[types.CodeType]:
    """Some code, the code inside it, and the functions of the same module that it names."""
    seen, left = set[types.CodeType](), list(codes)
    while left:
        code = left.pop()
        if code not in seen:
            seen.add(code)
            left += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
            left += [found for name in code.co_names if (found := _code(home.get(name))) is not None]
    return seen


def may_draw_outside(task: Task) -> bool:
    """Whether the steps of a trial may draw from Python's or numpy's generators, by the names in their code."""
    names = _names(task)
    if "random" in names:
        return True
    homes = [vars(holder) for holder in _holders(task).values() if isinstance(holder, types.ModuleType)]
    return any(_draws(home[name]) for home in homes for name in names & home.keys())


def _draws(value: Any) -> bool:
    owner = getattr(value, "__self__", None)
    return type(owner).__module__ in ("random", "numpy.random.mtrand")
