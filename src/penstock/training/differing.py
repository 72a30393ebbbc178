"""Where two values differ, found from their texts alone: a signature's parts outlive the models they describe."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.training.comparing import UNLIKE

LONGEST = 60  # characters of a value that a message shows
_OPENING, _CLOSING = "({[", ")}]"
_KEY = re.compile(r"(\w+)=$")
_ARRAY = re.compile(r"(tensor|array) (\S+) (\(.*?\)) (?:[0-9a-f]{24}|\().*", re.DOTALL)
# The modules of a name, which a message leaves out; a string is matched whole, and left as it is.
_QUALIFIED = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|(?<![\w'"])(?:[A-Za-z_]\w*\.|<locals>\.)+(?=[\w<])""")
_LONG = re.compile(r"(?<![\w.])-?\d*\.\d{7,}(?:e[-+]?\d+)?")
_CLASS = re.compile(r"class ([\w.<>]+)\(")  # that was made inside a function
_NO_VALUE = re.compile(rf"([\w.<>]+) {UNLIKE} \d+")


@dataclass(frozen=True)
class Difference:
    """A part of a value, by the names and keys that lead to it, and its two texts."""

    path: str
    one: str
    other: str

    def said(self, what: str, *, one: str = "in one", other: str = "in another") -> str:
        """The part of ``what``, and its two values, as a clause.

        >>> difference("Config(width=3, lr=0.1)", "Config(width=3, lr=0.2)").said("config")
        'config.lr is 0.1 in one and 0.2 in another'
        """
        where, this, that = f"{what}{self.path}", legible(self.one), legible(self.other)
        if this == that and _LONG.fullmatch(self.one):
            this, that = self.one, self.other
        if self.valueless:
            return f"{where} is {this}, which has no value to compare"
        if this == that:
            return f"{where} is {this}, with other content {one} than {other}"
        return f"{where} is {this} {one} and {that} {other}"

    @property
    def valueless(self) -> bool:
        """Whether the part is of a kind that is never equal to another."""
        return bool(_NO_VALUE.fullmatch(self.one) or _NO_VALUE.fullmatch(self.other))

    @property
    def advice(self) -> str:
        """What a user may do about a value that is another in each model of one config."""
        if self.valueless:
            return "make it inside the forward, or keep it outside of the model"
        if _ARRAY.fullmatch(self.one):
            return "register it as a buffer or a parameter, or make it from the config alone"
        return "make it from the config alone"


def difference(one: str, other: str) -> Difference:
    """The innermost part in which two texts of ``compared`` differ first.

    >>> difference("{'a': list(1, 2)}", "{'a': list(1, 2, 3)}")
    Difference(path="['a']", one='list(1, 2)', other='list(1, 2, 3)')
    """
    start = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    for path, begin in reversed(_around(one, start)):
        found = Difference(path, one[begin : _end(one, begin)], other[begin : _end(other, begin)])
        if found.one != found.other:
            return found
    return Difference("", one, other)


def legible(text: str) -> str:
    """A compared text as a message shows it: short, and without what only serves to compare."""
    if found := _NO_VALUE.fullmatch(text):
        name = found[1].split(".")[-1]
        return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
    if found := _ARRAY.fullmatch(text):
        return f"{'an' if found[1] == 'array' else 'a'} {found[1]} of {found[2].removeprefix('torch.')} {found[3]}"
    if found := _CLASS.match(text):
        return found[1].split(".")[-1]
    text = _QUALIFIED.sub(lambda found: found[1] or "", text)
    text = _LONG.sub(lambda number: f"{float(number[0]):.6g}", text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


@dataclass
class _Level:
    """A bracket that is open at some place of a text, and the item there."""

    base: str  # the path of what has the bracket
    bracket: str
    path: str  # of the item
    begin: int
    count: int = 0  # items before it

    @property
    def named(self) -> bool:
        return self.bracket != "{" or self.path != self.base  # an item of a dict goes by its key, once that is read


def _around(text: str, start: int) -> list[tuple[str, int]]:
    """The parts that hold a place of a text, the outermost first: the path of each, and where it begins."""
    levels = [_Level("", "", "", 0)]
    place = 0
    while place < start:
        char, level = text[place], levels[-1]
        if char in "'\"":
            place = _after_string(text, place)
            continue
        if char in _OPENING:
            levels.append(_Level(level.path, char, level.path if char == "{" else f"{level.path}[0]", place + 1))
        elif char in _CLOSING and len(levels) > 1:
            levels.pop()
        elif char == "," and level.bracket:
            level.count += 1
            level.path = level.base if level.bracket == "{" else f"{level.base}[{level.count}]"
            level.begin = place + 2
        elif char == "=" and level.bracket == "(" and (found := _KEY.search(text[level.begin : place + 1])):
            level.path, level.begin = f"{level.base}.{found[1]}", place + 1
        elif char == ":" and level.bracket == "{":
            level.path, level.begin = f"{level.base}[{text[level.begin : place]}]", place + 2
        place += 1
    return [(level.path, level.begin) for level in levels if level.named]


def _end(text: str, begin: int) -> int:
    """Where the part of a text that begins at a place ends."""
    depth, place = 0, begin
    while place < len(text):
        char = text[place]
        if char in "'\"":
            place = _after_string(text, place)
            continue
        if depth == 0 and (char in _CLOSING or char == ","):
            break
        depth += (char in _OPENING) - (char in _CLOSING)
        place += 1
    return place


def _after_string(text: str, place: int) -> int:
    quote, place = text[place], place + 1
    while place < len(text) and text[place] != quote:
        place += 2 if text[place] == "\\" else 1
    return place + 1
