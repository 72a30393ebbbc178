"""Refusals: what cannot be done for several trials at once, with the line of the user's or a library's code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.errors import PenstockError

_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_TORCH_MODULES = tuple(str(Path(torch.__file__).parent / room) for room in ("nn/modules", "nn/utils", "distributions"))


class Unfusable(PenstockError):
    """Trials that cannot be trained as one model; the message names the operator and the line."""


class Parted(Unfusable):
    """Trials of a bundle that go on in ways of their own: ``groups`` has the rows of those that go on together."""

    def __init__(self, message: str, groups: Sequence[Sequence[int]]) -> None:
        super().__init__(message)
        self.groups = groups


def name_of(func: Any) -> str:
    """The name of a torch function in messages."""
    return str(getattr(func, "__name__", func))


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def refusal(operator: str, why: str) -> Unfusable:
    """The error for an operator that cannot be done for several trials at once, with the line that called it."""
    return Unfusable(f"{operator} at {_line()}: {why}")


def parted(operator: str, why: str, kinds: Sequence[Any]) -> Parted:
    """The error for an operator whose result decides how each trial goes on; trials of equal ``kinds`` go together."""
    seen: list[Any] = []
    groups: list[list[int]] = []
    for row, kind in enumerate(kinds):
        place = next((i for i, other in enumerate(seen) if other == kind), len(seen))
        if place == len(seen):
            seen.append(kind)
            groups.append([])
        groups[place].append(row)
    return Parted(f"{operator} at {_line()}: {why}", groups)


def where_called() -> str:
    """The innermost line outside of torch and Penstock."""
    return _line()


def _line() -> str:
    """The innermost line outside of torch and Penstock; and torch's own, where a module of torch's has called."""
    frame, inside = sys._getframe(2), ""
    while frame is not None and frame.f_code.co_filename.startswith((*_OWN, "<")):
        if not inside and frame.f_code.co_filename.startswith(_TORCH_MODULES):
            inside = f" (in {frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return (f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "an unknown line") + inside
