"""Why two trials have different signatures: the first part of their models, optimizers or reads that differs."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import replace

from penstock.training.differing import Difference, difference, legible

KEPT = 16  # signatures whose parts are kept, to compare the next one with
_KEY = re.compile(r"\[('(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\")\]")  # in front of a path: a place that a person knows
_SETTINGS = ("batch_size", "precision", "clip_grad_norm", "unit_steps")


class Signature(str):
    """A signature that still has the parts which it was made of."""

    __slots__ = ("parts",)
    parts: tuple[str, ...]

    @classmethod
    def of(cls, digest: str, parts: Sequence[str]) -> Signature:
        """A signature with its parts."""
        made = cls(digest)
        made.parts = tuple(parts)
        return made


class Signatures:
    """The signatures that a worker has seen, and why each is unlike the one before that is nearest to it."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[str, str]] = {}
        self._told: dict[str, tuple[str, str]] = {}

    def unlike(self, made: str) -> tuple[str, str]:
        """The name of the part that differs from the nearest signature, and a clause; empty for the first one."""
        if not isinstance(made, Signature):
            return "", ""
        if (known := self._told.get(made)) is not None:
            return known
        named = labelled(made.parts)
        others = [found for other in self._parts.values() if (found := unequal(other, named))]
        told = said(min(others, key=len)[0]) if others else ("", "")
        self._told[str(made)], self._parts[str(made)] = told, named
        if len(self._parts) > KEPT:
            self._parts.pop(next(iter(self._parts)))
        return told


def labelled(parts: Sequence[str]) -> dict[str, str]:
    """The parts of a signature by names that a user knows.

    >>> labelled(["module 1 LeakyReLU", " slope 0.1", "reads {'heat': 2}"])
    {'module 1': 'LeakyReLU', '1.slope': '0.1', 'config': "{'heat': 2}"}
    """
    named: dict[str, str] = {}
    path, groups = "", 0
    for part in parts:
        first, _, text = part.lstrip().partition(" ")
        if part.startswith(" group "):
            groups += 1
            named[f"group {groups} of the optimizer"] = text
        elif part.startswith((" parameter ", " buffer ")):
            name, _, shape = text.partition(" ")
            named[f"{first} {path}.{name}".replace(" .", " ")] = shape
        elif part.startswith(" "):
            named[f"{path}.{first}".lstrip(".")] = text
        elif first == "module":
            path, _, text = text.partition(" ")
            named[f"module {path}" if path else "the model"] = text
        elif first == "batch":
            named.update(zip(_SETTINGS, text.split(" ", len(_SETTINGS) - 1), strict=False))
        else:
            named[{"reads": "config", "optimizer": "the optimizer"}.get(first, first)] = text
    return named


def unequal(one: dict[str, str], other: dict[str, str]) -> list[tuple[str, str | None, str | None]]:
    """The names of parts that differ, with their texts, or None where one has no such part."""
    names = [*one, *(name for name in other if name not in one)]
    return [(name, one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)]


def said(part: tuple[str, str | None, str | None]) -> tuple[str, str]:
    """The name of a part that differs between two trials, and a clause that has both of its values."""
    name, one, other = part
    if name == "besides" and (one is None or other is None):
        first = re.match(r"{('(?:\\.|[^'\\])*')", one or other or "")
        name = literal_eval(first[1]) if first else name
        return name, f"making some trials changes {name}, and making others does not"
    if one is None or other is None:
        return name, f"some trials have {name}, others do not"
    found = difference(one, other)
    if name.startswith(("parameter ", "buffer ")):  # of which the whole shape is told
        found = Difference("", _whole(one), _whole(other))
    if name.startswith(("module ", "the model")) and not found.path:
        found = Difference("", legible(one), legible(other))
    if name == "besides" and (key := _KEY.match(found.path)):
        name, found = literal_eval(key[1]), replace(found, path=found.path[key.end() :])
    clause = found.said(name, one="in one trial", other="in another")
    if name == "config":
        clause = clause.replace(" is ", ", which loss, metrics or data read, is ", 1)
    return f"{name}{found.path}", clause


def _whole(text: str) -> str:
    """The shape, type and so on of a parameter or buffer."""
    return text.replace("torch.", "")[1:-1] if text.startswith("(") else text
