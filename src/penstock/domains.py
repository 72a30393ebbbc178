"""The domain of one parameter: a ``Range`` of numbers or a ``Choice`` among values, by Ray Tune's names or Optuna's.

A domain turns a random number into one of its values (``at``). It recognizes a value that comes back from the log
(``holds``, ``real``) or from Optuna, which sees each value by its ``label``.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import cached_property, partial
from inspect import signature
from math import copysign, exp, log
from types import FunctionType
from typing import TYPE_CHECKING, Any

from penstock.errors import SpaceError
from penstock.numeric import finite, scalars, shown, whole
from penstock.trial import plain

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

FACTORS = (0.8, 1.2)  # PBT's explore multiplies a number by one of these (Jaderberg et al., 2017, §4.1.1)


@dataclass(frozen=True, repr=False)
class Range:
    """Numbers from ``low`` to ``high``, both included; with a ``step``, only the numbers low + k·step.

    >>> uniform(0, 1).at(0.25)
    0.25
    """

    low: float
    high: float
    step: float | None = None
    log: bool = False
    whole: bool = False
    text: str = field(default="", compare=False)  # the range as the user wrote it

    def __repr__(self) -> str:
        return self.text

    @property
    def size(self) -> int | None:
        """How many values there are, or None where they cannot be counted."""
        if self.low == self.high:
            return 1
        if self.step is None:
            return None
        if self.whole:
            return (int(self.high) - int(self.low)) // int(self.step) + 1
        return round((_decimal(self.high) - _decimal(self.low)) / _decimal(self.step)) + 1

    def point(self, k: int) -> float:
        """The value number ``k``."""
        if self.whole:
            return int(self.low) + k * int(self.step or 1)
        return min(float(_decimal(self.low) + k * _decimal(self.step or 0)), self.high)  # in floats, 3·0.1 is not 0.3

    def at(self, u: float) -> float:
        """The value that a random number ``u`` of [0, 1) stands for."""
        if self.log:
            half = 0.5 if self.whole else 0.0  # makes whole end points as likely as their neighbours
            return self.real(exp(log(self.low - half) * (1 - u) + log(self.high + half) * u))
        if (size := self.size) is None:
            return self.real(self.low * (1 - u) + self.high * u)
        return self.point(min(int(u * size), size - 1))  # u·size may round up to size

    def holds(self, value: Any) -> bool:
        """Whether a value, which may come from JSON, lies in the range."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return self.low <= value <= self.high and abs(value - self.real(value)) <= 1e-9 * (self.step or 1)

    def real(self, value: Any) -> float:
        """The value of the range that is nearest to the one given."""
        value = min(max(value, self.low), self.high)
        if self.step is None:
            return float(value)
        if self.whole and isinstance(value, int):  # exactly, however large
            return self.point((2 * (value - int(self.low)) + int(self.step)) // (2 * int(self.step)))
        return self.point(min(round((value - self.low) / self.step), (self.size or 1) - 1))

    def nudge(self, value: Any, u: float) -> float:
        """The value times one of ``FACTORS``; one step away where that product rounds back to the value."""
        target = value * FACTORS[int(u * len(FACTORS))]
        nudged = self.real(target)
        if self.step is not None and nudged == value != target:
            return self.real(value + copysign(self.step, target - value))
        return nudged

    def label(self, value: Any) -> Any:
        """The value as Optuna sees it."""
        return value

    def distribution(self) -> BaseDistribution:
        """The range as Optuna sees it; where Optuna cannot take the step, ``real`` rounds its values."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=self.log, step=int(self.step or 1))
        if self.step is None or self.log or (_decimal(self.high) - _decimal(self.low)) % _decimal(self.step):
            return FloatDistribution(self.low, self.high, log=self.log)
        return FloatDistribution(self.low, self.high, step=self.step)


@dataclass(frozen=True, repr=False)
class Choice:
    """One of several values, which need not be numbers or JSON.

    >>> choice([16, 32]).at(0.75)
    32
    """

    values: tuple[Any, ...]
    kind: str = field(default="choice", compare=False)

    def __repr__(self) -> str:
        return f"{self.kind}({plain(self.values)!r})"

    @property
    def size(self) -> int:
        return len(self.values)

    @cached_property
    def marks(self) -> list[str]:
        return [mark(value) for value in self.values]

    def point(self, k: int) -> Any:
        return self.values[k]

    def at(self, u: float) -> Any:
        return self.values[int(u * self.size)]

    def holds(self, value: Any) -> bool:
        return mark(value) in self.marks

    def real(self, value: Any) -> Any:
        """The value with that text in the log, or with that label in Optuna."""
        marks = self.marks
        return self.values[marks.index(mark(value) if mark(value) in marks else value)]

    def nudge(self, value: Any, u: float) -> Any:
        """The neighbour before or after the value, as in Ray Tune's PBT."""
        k = self.marks.index(mark(value)) + (1 if u >= 0.5 else -1)
        return self.values[min(max(k, 0), self.size - 1)]

    def label(self, value: Any) -> Any:
        kept = plain(value)  # the value itself where JSON can hold it
        return mark(value) if isinstance(kept, list | dict) else kept  # Optuna's samplers do not take lists

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution([self.label(value) for value in self.values])


Domain = Range | Choice


def uniform(low: float, high: float) -> Range:
    """A number between ``low`` and ``high``, both included.

    >>> uniform(0, 0.99)
    uniform(0, 0.99)
    """
    return floats("uniform", low, high)


def loguniform(low: float, high: float) -> Range:
    """A number whose logarithm is uniform.

    >>> loguniform(1e-4, 1)
    loguniform(0.0001, 1)
    """
    return floats("loguniform", low, high, log=True)


def quniform(low: float, high: float, q: float) -> Range:
    """A multiple of ``q`` between ``low`` and ``high``, both included.

    >>> quniform(0, 1, 0.1).at(0.3)
    0.3
    """
    return floats("quniform", low, high, q)


def qloguniform(low: float, high: float, q: float) -> Range:
    """A number whose logarithm is uniform, rounded to a multiple of ``q``.

    >>> qloguniform(50, 1000, 50).at(0.5)
    200.0
    """
    return floats("qloguniform", low, high, q, log=True)


def randint(low: int, high: int) -> Range:
    """A whole number from ``low`` up to, but not including, ``high``.

    >>> randint(1, 5).at(0.99)
    4
    """
    low, high = _whole("randint", "low", low), _whole("randint", "high", high)
    if low >= high:
        raise SpaceError(f"randint needs low below high, which is never drawn, got {low} and {high}: raise high?")
    return Range(low, high - 1, 1, whole=True, text=f"randint({low}, {high})")


def choice(values: Iterable[Any]) -> Choice:
    """One of ``values``.

    >>> choice(["relu", "gelu"])
    choice(['relu', 'gelu'])
    """
    return one_of("choice", values)


def grid(values: Iterable[Any]) -> Choice:
    """Each of ``values`` in turn under ``Grid``; one of them under any other algorithm.

    >>> grid([1, 2])
    grid([1, 2])
    """
    return one_of("grid", values)


def mark(value: Any) -> str:
    """A text that differs between values. It is the same before and after the log, and in the next process.

    >>> mark((64, 32)) == mark([64, 32]) != mark(64)
    True
    """
    return json.dumps(plain(value), sort_keys=True)


def kept(value: Any) -> str:
    """The JSON by which the log keeps a value; an error where it cannot, or where a file cannot hold the text.

    >>> kept((64, "relu"))
    '[64, "relu"]'
    """
    mark(value)
    text = json.dumps(value, default=plain, ensure_ascii=False)
    text.encode()
    return text


def parse(text: str) -> Domain | None:
    """The domain with this repr; None for the repr of a constant, and an error for any other text.

    >>> parse("uniform(0, 1)")
    uniform(0, 1)
    """
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call):
        return None
    return _NAMED[ast.unparse(call.func)](*(ast.literal_eval(argument) for argument in call.args))


def floats(kind: str, low: Any, high: Any, q: Any = None, *, log: bool = False, from_low: bool = False) -> Range:
    """A range of floats. With ``q`` they are multiples of it, counted from zero or from ``low``. Errors name ``kind``.

    >>> floats("lr", 0.05, 0.5, 0.1, from_low=True).high
    0.45
    """
    low, high = _number(kind, "low", low), _number(kind, "high", high)
    if low > high:
        raise SpaceError(f"{kind} needs low at most high, got {low} and {high}: swap them?")
    if log and low <= 0:
        raise SpaceError(f"{kind} needs low above 0, got {low}: there is no logarithm of it; use uniform?")
    given = [low, high] if q is None else [low, high, _number(kind, "q", q)]
    text = f"{kind}({', '.join(repr(number).removesuffix('.0') for number in given)})"
    if q is None:
        return Range(low, high, None, log, text=text)
    if q <= 0:
        raise SpaceError(f"{kind} needs q above 0, got {q}: it is the distance between two values.")
    step, base = _decimal(given[2]), _decimal(low if from_low else 0)
    first = ((_decimal(low) - base) / step).to_integral_value(ROUND_CEILING)
    last = ((_decimal(high) - base) / step).to_integral_value(ROUND_FLOOR)
    if last - first >= 2**53:
        raise SpaceError(f"{kind} needs fewer values between low and high than floats can count, {text}: raise q?")
    if first > last:
        raise SpaceError(f"{kind} needs a multiple of q between low and high, {text} has none: lower q?")
    return Range(float(base + first * step), float(base + last * step), float(q), log, text=text)


def ints(kind: str, low: Any, high: Any, step: Any, *, log: bool) -> Range:
    """A range of whole numbers; ``high`` is included where a step falls on it. Errors name ``kind``.

    >>> ints("width", 16, 70, 16, log=False).high
    64
    """
    low, high, step = _whole(kind, "low", low), _whole(kind, "high", high), _whole(kind, "step", step)
    if low > high:
        raise SpaceError(f"{kind} needs low at most high, got {low} and {high}: swap them?")
    if log and low < 1:
        raise SpaceError(f"{kind} needs low of at least 1 with log, got {low}: there is no logarithm of it.")
    if step < 1 or (log and step != 1):
        raise SpaceError(f"{kind} needs step of at least 1, and 1 with log, got {step}.")
    return Range(low, low + (high - low) // step * step, step, log, whole=True, text=kind)


def optunas(kind: str, low: float, high: float, log: bool, step: float | None) -> Range:
    """The range of an Optuna distribution, by the name of its class.

    >>> optunas("IntDistribution", 1, 9, False, 4).at(0.5)
    5
    """
    return Range(low, high, step, log, kind == "IntDistribution", f"{kind}({low}, {high}, {log}, {step})")


def one_of(kind: str, values: Any) -> Choice:
    """A choice of values that the log can tell apart. Errors name ``kind``.

    >>> one_of("choice", range(2))
    choice([0, 1])
    """
    if isinstance(values, str | bytes | Mapping | AbstractSet) or not isinstance(values, Iterable):
        raise SpaceError(f"{kind} must be a list or tuple of values, got {shown(values)}: {_listed(values)}.")
    given = tuple(values.tolist() if hasattr(values, "tolist") else values)
    if not given:
        raise SpaceError(f"{kind} needs at least one value, got none: is the list filled where you make it?")
    for value in given:
        try:
            kept(scalars(value))
        except Exception as error:
            raise SpaceError(f"{kind} has a value that the log cannot keep, {shown(value)} ({error}).") from None
    made = Choice(tuple(map(scalars, given)), kind)
    labels = [made.label(value) for value in made.values]
    for value, label in zip(made.values, labels, strict=True):
        if isinstance(value, Domain):
            raise SpaceError(f"{kind} has the range {value!r} among its values, where it would not be tuned.")
        if called := uncalled(value):
            raise SpaceError(f"{kind} has {called}, among its values: call it, under a name of its own.")
        if label is not value and labels.count(label) > 1:
            raise SpaceError(f"{kind} has two values that the log cannot tell apart, {label}: name them by strings.")
    return made


def _listed(values: object) -> str:
    """What to write instead of a value that is no list."""
    if isinstance(values, Mapping):
        return "give the list of its keys or of its values"
    if isinstance(values, AbstractSet):
        return "give a list, as the order of a set changes from run to run"
    return f"write [{shown(values)}]"


def uncalled(value: Any) -> str:
    """What makes a range and was left uncalled, as a message says it; nothing for any other value.

    >>> uncalled(uniform), uncalled(uniform(0, 1))
    ('the function uniform(low, high), uncalled', '')
    """
    if isinstance(value, FunctionType) and value in _NAMED.values():
        return f"the function {value.__name__}({', '.join(signature(value).parameters)}), uncalled"
    if isinstance(value, type) and value.__module__ == "optuna.distributions":
        return f"the class {value.__name__}, uncalled"
    return ""


def _number(kind: str, name: str, value: Any) -> float:
    made = finite(value)
    if made is None:
        raise SpaceError(f"{kind} needs a finite number as {name}, got {shown(value)}: a range ends at numbers.")
    return float(made)


def _whole(kind: str, name: str, value: Any) -> int:
    made = whole(value)
    if made is None:
        raise SpaceError(f"{kind} needs a whole number as {name}, got {shown(value)}: for others there is uniform.")
    return made


def _decimal(number: float) -> Decimal:
    return Decimal(str(number))


_NAMED: dict[str, Callable[..., Domain]] = {
    **{make.__name__: make for make in (uniform, loguniform, quniform, qloguniform, randint, choice, grid)},
    **{kind: partial(optunas, kind) for kind in ("FloatDistribution", "IntDistribution")},
}
