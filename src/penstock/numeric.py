"""Numbers and text as users give them, made plain: Python's own numbers, and text that every file can hold.

A number may come from numpy, torch, ``decimal`` or ``fractions``. A value that is no such number gives None, and the
caller says what it expected.
"""

from __future__ import annotations

import math
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

DIGITS = 300  # a whole number beyond 10**300 is no float, and Python writes none beyond 10**4300 as text
SHOWN = 200  # characters of a value that a message shows


def whole(value: object) -> int | None:
    """A whole number as an int; None for anything else, booleans and 3.0 included.

    >>> import numpy
    >>> whole(numpy.int64(3)), whole(3.0), whole(True)
    (3, None, None)
    """
    value = scalar(value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    made = int(value)
    return made if abs(made) < 10**DIGITS else None


def finite(value: object) -> float | None:
    """A finite real number as an int or a float; None for anything else.

    >>> import numpy
    >>> finite(numpy.float32(0.5)), finite(2), finite(float("nan")), finite("2")
    (0.5, 2, None, None)
    """
    value = scalar(value)
    if isinstance(value, Integral):
        return whole(value)
    if not isinstance(value, Real | Decimal):
        return None
    try:
        made = float(value)
    except (ValueError, OverflowError):  # a signalling NaN; a fraction that no float can hold
        return None
    return made if math.isfinite(made) else None


def shown(value: object) -> str:
    """A value as a message shows it: short, and whatever its ``repr`` does.

    >>> shown("x"), len(shown("x" * 1000))
    ("'x'", 200)
    """
    if isinstance(value, int) and abs(value) >= 10**DIGITS:
        return f"a number of over {DIGITS} digits, which is too great for a finite number"
    try:
        text = repr(value)
    except Exception:
        text = f"a value of type {type(value).__name__} that cannot be shown"
    return legible(text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…")


def legible(text: str) -> str:
    r"""A text that files and terminals take: half of a surrogate pair is written as its escape.

    >>> legible("caf\udce9"), legible("café")
    ('caf\\udce9', 'café')
    """
    return text.encode(errors="backslashreplace").decode()


def sort(value: object) -> str:
    """The sort of a value, as a message says it: its type, with the shape of an array or a tensor.

    >>> import numpy
    >>> sort(None), sort(0.5), sort(numpy.ones((2, 3)))
    ('None', 'a float', 'a ndarray of shape (2, 3)')
    """
    if value is None:
        return "None"
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}{f' of shape {tuple(shape)}' if isinstance(shape, tuple) else ''}"


def scalars(value: Any) -> Any:
    """A value with Python's own numbers in place of numpy's and torch's, also inside lists, tuples and dicts.

    >>> import numpy
    >>> scalars({"widths": (numpy.int64(64), 32), "lr": numpy.float32(0.5)})
    {'widths': (64, 32), 'lr': 0.5}
    """
    if type(value) in (list, tuple):
        return type(value)(map(scalars, value))
    if type(value) is dict:
        return {scalars(key): scalars(inner) for key, inner in value.items()}
    made = scalar(value)
    return made if isinstance(made, bool | int | float | str) else value


def scalar(value: Any) -> Any:
    """The number in an array or a tensor without dimensions; any other value as it is."""
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return value.item()
    return value
