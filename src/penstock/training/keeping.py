"""What a task keeps outside of its models: attributes of the task and of classes, and globals of the user's modules.

Making a trial's data, model, optimizer or scheduler may leave something of a config there, such as a weight of the
loss or a target network; also inside of a dict, a list or an object that is there. The last trial's value would then
be every trial's. So the places are looked at before and after a trial is made. A trial has its own values back when it
goes on, and trials are fused only where these values are equal. A look at a trial leaves no trace there.
"""

from __future__ import annotations

import dis
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from penstock.task import Task
from penstock.training.contents import ABSENT, CODE, PLAIN, STORES, Contents, attributes_of, of_penstock, of_user
from penstock.training.fused.stacked import Unfusable

Holder = Any  # a task, a class or a module of Python
Place = tuple[str, tuple[Any, ...]]  # the key of a holder, the name there, and the way to a value inside
Values = dict[Place, Any]
_MAKING = {"__init__", "model", "data", "features", "optimizer", "scheduler"}  # methods that make a trial, and no step
_classes: WeakKeyDictionary[type, dict[type, None]] = WeakKeyDictionary()  # of modules in models, by class of the task
_used: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()  # names in a class's methods
_replaced: WeakKeyDictionary[type, dict[Place, None]] = WeakKeyDictionary()  # by making trials, by class of the task
_SELF = "self"


@dataclass(frozen=True)
class Kept:
    """The values that were outside of a trial's model once it was made."""

    task: Task
    values: Values = field(default_factory=dict)

    def bring_back(self) -> None:
        """Let these values be there again where making trials replaces them."""
        if own := self._own():
            _write(self.task, own)

    def renew(self) -> None:
        """Note these values anew, as a scheduler of this trial may have written some."""
        if own := self._own():
            now = look(self.task)
            self.values.update({at: now.get(at, ABSENT) for at in own})

    def compared(self) -> dict[str, Any]:
        """The values that must be equal to fuse, by name; refuses a value that is each trial's own."""
        found = {}
        for at, value in self._own().items():
            where = _named(self.task, at)
            if value is not ABSENT and not isinstance(value, (*PLAIN, torch.Tensor, list, tuple, dict)):
                raise Unfusable(
                    f"making a trial leaves a {type(value).__name__} in {where}, which the steps of all trials would "
                    "share: make it a part of the model"
                )
            found[where] = None if value is ABSENT else value
        return found

    def _own(self) -> Values:
        """The values at places where making a model has ever replaced one, and where steps may read."""
        return {at: self.values.get(at, ABSENT) for at in _replaced.get(type(self.task), ())}


def kept(task: Task, model: nn.Module, before: Values, left: Values) -> Kept:
    """The values that are outside of a trial that was just made.

    ``before`` are the values from before that, and ``left`` those that making its data left.
    """
    known, there = _classes.setdefault(type(task), {}), _holders(task)
    known.update({kind: None for kind in map(type, model.modules()) if kind not in known and of_user(kind.__module__)})
    after = look(task)
    # Of classes that are seen for the first time it is not known which of their values the model has just set.
    changed = [at for at in replaced(before, after) if at[0] in there or at[1][0] in _set_by_model(task)]
    if changed or left:
        used, places = _names(task), _replaced.setdefault(type(task), {})
        places.update({at: None for at in (*left, *changed) if at[1][0] in used})
    return Kept(task, after)


@contextmanager
def left_by(task: Task) -> Iterator[Values]:
    """The values that some code leaves outside of models, once it is through; ``put`` has them there again."""
    before, left = look(task), Values()
    yield left
    left.update(replaced(before, look(task)))


def put(task: Task, values: Values) -> None:
    """Let values be at their places."""
    if values:
        _write(task, values)


def look(task: Task) -> Values:
    """The values that are outside of models now; where steps may read, also those inside of containers and objects."""
    used, found = _names(task), Values()
    for key, holder in _holders(task).items():
        for name, value in vars(holder).items():
            if name.startswith("__"):
                continue
            if not isinstance(value, CODE):
                found[key, (name,)] = value
            if name in used:
                _look_inside(found, key, (name,), value, {id(holder)})
    return found


INSIDE = 256  # entries of a container that is looked into, and steps of a way inside
_ENTRIES = "its entries"


def _look_inside(found: Values, key: str, way: tuple[Any, ...], value: Any, seen: set[int]) -> None:
    """Note what is inside of a dict, a list, a class or an object of the user's, however nested."""
    if isinstance(value, PLAIN) or len(way) > 4 or id(value) in seen or isinstance(value, nn.Module | torch.Tensor):
        return
    inside = _inside(value)
    if inside is None:
        return
    seen = seen | {id(value)}
    if isinstance(value, list | deque):
        found[key, (*way, _ENTRIES)] = tuple(value)
    for name, one in inside.items():
        if not isinstance(value, list | deque):
            found[key, (*way, name)] = one
        _look_inside(found, key, (*way, name), one, seen)


def _inside(value: Any) -> dict[Any, Any] | None:
    """The entries or attributes of a value; None where it is not looked into."""
    if isinstance(value, dict):  # whose own class may read entries in ways of its own
        return dict.copy(value) if len(value) <= INSIDE else None
    if isinstance(value, list | deque):
        return dict(enumerate(value)) if len(value) <= INSIDE else None
    if isinstance(value, type):
        plain = of_user(value.__module__) and not issubclass(value, nn.Module | Task)
        return (
            {k: v for k, v in vars(value).items() if not k.startswith("__") and not isinstance(v, CODE)}
            if plain
            else None
        )
    if isinstance(value, CODE) or not (of_user(type(value).__module__) or isinstance(value, types.SimpleNamespace)):
        return None
    return attributes_of(value)


def replaced(before: Values, after: Values) -> Values:
    """The values that differ from before, with ABSENT for names that are gone."""
    now = {at: value for at, value in after.items() if not _same(before.get(at, ABSENT), value)}
    return {**now, **{at: ABSENT for at in before if at not in after}}


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, tuple):
        return len(old) == len(new) and all(map(_same, old, new))
    return isinstance(old, PLAIN) and bool(old == new)


def written(task: Task, before: Values) -> str:
    """The first value that was replaced since ``before`` and that steps may read, for a person; nothing if none was.

    What is new in a dict may be remembered there to spare computing it again, and what is new in a list noted there.
    """
    used = _names(task)
    for at, now in replaced(before, look(task)).items():
        if at[1][0] in used and (len(at[1]) == 1 or (at in before and not _longer(before[at], now))):
            return _named(task, at)
    return ""


def _longer(old: Any, now: Any) -> bool:
    """Whether a list has but new entries behind the old ones."""
    return isinstance(now, tuple) and isinstance(old, tuple) and _same(old, now[: len(old)])


def written_by(task: Task, names: set[str]) -> str:
    """A value that steps may read, among those of some names, for a person; nothing if there is none."""
    shared = names & _names(task)
    return next((_named(task, at) for at in look(task) if at[1][-1] in shared and at[1][0] in _names(task)), "")


@contextmanager
def untouched(task: Task) -> Iterator[None]:
    """Put back whatever a look at a trial changes: values that steps may read, and the content of the task's own."""
    before, used = look(task), _names(task)
    contents = Contents(value for (key, way), value in before.items() if key == _SELF and len(way) == 1)
    try:
        yield
    finally:
        changed = [at for at in replaced(before, look(task)) if at[1][0] in used]
        _write(task, {at: before.get(at, ABSENT) for at in changed})
        contents.put_back()


def _holders(task: Task) -> dict[str, Holder]:
    """The task, its classes and their modules; and the classes of the user's modules in its models, and theirs."""
    classes = dict.fromkeys(_kinds(task))
    classes.update(_classes.get(type(task), {}))
    homes = dict.fromkeys(kind.__module__ for kind in classes)
    return {
        _SELF: task,
        **{f"class {id(kind)}": kind for kind in classes},
        **{f"module {name}": sys.modules[name] for name in homes if name in sys.modules and of_user(name)},
    }


def _kinds(task: Task) -> list[type]:
    """The user's classes of a task. One of Penstock's own may stand before them, as in the task of a surrogate."""
    return [kind for kind in type(task).__mro__ if kind not in Task.__mro__ and not of_penstock(kind.__module__)]


def _title(holder: Holder) -> str:
    return "self" if isinstance(holder, Task) else str(getattr(holder, "__qualname__", holder.__name__))


def _named(task: Task, at: Place) -> str:
    """A place, as a person would write it."""
    key, (name, *way) = at
    inside = "".join("" if one is _ENTRIES else f"[{one!r}]" if not isinstance(one, str) else f".{one}" for one in way)
    return f"{_title(_holders(task)[key])}.{name}{inside}"


def _write(task: Task, values: Values) -> None:
    holders = _holders(task)
    for (key, way), value in sorted(values.items(), key=lambda item: len(item[0][1])):  # outer values come first
        holder = holders.get(key, ABSENT)
        for one in way[:-1]:
            inside = vars(holder) if holder in holders.values() else _inside(holder)
            holder = (inside or {}).get(one, ABSENT)
        if holder is not ABSENT:
            _set(holder, way[-1], value)


def _set(holder: Holder, name: Any, value: Any) -> None:
    if isinstance(holder, list):
        holder[:] = () if value is ABSENT else value
    elif isinstance(holder, deque):
        holder.clear()
        holder.extend(() if value is ABSENT else value)
    elif isinstance(holder, dict):
        if value is ABSENT:
            holder.pop(name, None)
        else:
            holder[name] = value
    elif value is not ABSENT:
        plain = isinstance(holder, type | types.ModuleType | Task)
        (setattr if plain else object.__setattr__)(holder, name, value)  # an object of the user's may be frozen
    elif name in vars(holder):
        delattr(holder, name)


def _names(task: Task) -> frozenset[str]:
    """The names that the steps of a trial may read: in the methods of the task and of the models' own classes.

    A name that code gives as text counts too, as in ``getattr(self, "weight")``.
    """
    kinds = [*_kinds(task), *_classes.get(type(task), ())]
    return frozenset().union(*(_names_in(kind) for kind in kinds))


def _set_by_model(task: Task) -> set[str]:
    """The names that ``model`` and the functions of its module that it calls assign somewhere."""
    home = vars(sys.modules.get(type(task).__module__, types))
    codes = [code for code in [_code(type(task).model)] if code is not None]
    every = _codes(codes, home)
    return {str(one.argval) for code in every for one in dis.get_instructions(code) if one.opname in STORES}


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
