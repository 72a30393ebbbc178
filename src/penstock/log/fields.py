"""Values of JSON as fields of a dataclass, each checked against its type, so that damage is noticed early."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

Read = Callable[[Any], Any]  # gives the value that a field of one type holds; raises ValueError for any other value


def build(kind: type, body: Mapping[str, Any]) -> Any:
    """A dataclass from an object of JSON; raises ValueError where a field is missing, unknown or of another type.

    >>> from penstock.trial import Usage
    >>> build(Usage, {"device_seconds": 1.5, "steps": 3}).steps
    3
    """
    readers, required = _readers(kind)
    if not isinstance(body, dict) or not readers.keys() >= body.keys() >= required:
        raise ValueError(f"expected the fields {', '.join(readers)}, got {_shown(body)}")
    return kind(**{name: _named(name, readers[name], value) for name, value in body.items()})


def check(kind: type, body: Mapping[str, Any]) -> None:
    """Check an object of JSON against a TypedDict; further keys may hold any value."""
    readers, required = _readers(kind)
    if missing := [name for name in readers if name in required and name not in body]:
        raise ValueError(f"{missing[0]} is missing")
    for name, value in body.items():
        if name in readers:
            _named(name, readers[name], value)


@cache
def _readers(kind: type) -> tuple[dict[str, Read], frozenset[str]]:
    """How each field of a kind is read, and the fields that cannot be left out."""
    readers = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
    if is_typeddict(kind):
        return readers, kind.__required_keys__  # type: ignore[attr-defined]
    return readers, frozenset(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)


def _reader(hint: Any) -> Read:
    origin, of = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin is UnionType:
        (some,) = (_reader(one) for one in of if one is not NoneType)
        return lambda value: None if value is None else some(value)
    if origin is Literal:
        return _only(lambda value: isinstance(value, str) and value in of, f"one of {', '.join(of)}")
    if origin in (dict, Mapping):
        # Numbers by name are metrics, and a trial that diverged reports NaN or infinity.
        key, item = (int if of[0] is int else str), (_metric if of == (str, float) else _reader(of[1]))
        return lambda value: {key(k): item(v) for k, v in _object(value).items()}
    if origin is tuple and of[1] is ...:
        item = _reader(of[0])
        return lambda value: tuple(item(one) for one in _list(value))
    if origin is tuple:
        items = [_reader(one) for one in of]
        return lambda value: tuple(read(one) for read, one in zip(items, _list(value), strict=True))
    if is_dataclass(hint):
        return lambda value: build(hint, value)  # type: ignore[arg-type]
    return _PLAIN[hint]


def _only(fits: Callable[[Any], bool], what: str) -> Read:
    def read(value: Any) -> Any:
        if not fits(value):
            raise ValueError(f"expected {what}, got {_shown(value)}")
        return value

    return read


def _finite(value: Any) -> bool:
    """Whether a value is a number that arithmetic can go on with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2.0**1000


_PLAIN: dict[Any, Read] = {
    bool: _only(lambda value: isinstance(value, bool), "true or false"),
    str: _only(lambda value: isinstance(value, str), "text"),
    int: _only(lambda value: _finite(value) and isinstance(value, int), "a whole number"),
    float: _only(_finite, "a finite number"),
}
_metric = _only(lambda value: isinstance(value, float) or _finite(value), "a number")
_object = _only(lambda value: isinstance(value, dict), "an object")
_list = _only(lambda value: isinstance(value, list), "a list")


def _named(name: str, read: Read, value: Any) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
