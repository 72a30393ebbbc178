"""Sizes as expressions of symbols: which of these shrink in a narrower model, and what equations between sizes need."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sympy

if TYPE_CHECKING:
    from penstock.surrogate.trace import Traced

Size = Any  # a whole number, or an expression of sympy's
TRIES = 4  # rounds in which violated equations may bring further symbols to grow


def value_of(size: Any, values: Mapping[Any, int]) -> Any:
    """An expression with numbers for its symbols; ``subs`` takes many times as long."""
    return size.xreplace({symbol: sympy.Integer(values[symbol]) for symbol in size.free_symbols})


def symbols_of(size: Size) -> set[Any]:
    return set(size.free_symbols) if isinstance(size, sympy.Basic) else set()


def chosen(size: Size, alone: set[Any], of_tensors: set[Any]) -> set[Any]:
    """The symbols of a size that are to shrink: of a product one factor, of a sum one of each part.

    Of heads times head size it is the head size, which products of activations sum over; of groups times the channels
    of a group it is the channels.
    """
    free = symbols_of(size)
    if len(free) < 2:
        return free
    if isinstance(size, sympy.Add):
        return set().union(*(chosen(part, alone, of_tensors) for part in size.args))
    return (free & alone) or (free & of_tensors) or {max(free, key=str)}


def _added(size: Size) -> tuple[Any, float] | None:
    """The symbol that a size is made of by taking away a number, and that number by its own measure.

    Of 2·s − 2 it is s and 1: then s is not a width, but half of a width and of two channels more.
    """
    if not isinstance(size, sympy.Add) or size.has(sympy.Mod) or len(size.free_symbols) != 1:
        return None
    (symbol,) = size.free_symbols
    by, rest = size.coeff(symbol), size.subs(symbol, 0)
    if not (by.is_number and rest.is_number and by > 0 > rest):
        return None
    return symbol, float(-rest / by)


def _without(size: Any, found: Traced) -> Any:
    """An expression with numbers for the symbols that do not grow; ``subs`` takes many times as long."""
    fixed = symbols_of(size) - found.growing
    return size.xreplace({symbol: sympy.Integer(found.known[symbol]) for symbol in fixed if symbol in found.known})


def settled(found: Traced, guards: list[Any], heads: set[Size], own: set[Any]) -> Traced:
    """With further symbols that grow, where equations between sizes would not hold in a narrower model without them.

    Heads keep their number where that is possible, and shrink in size.
    """
    equations = [guard for guard in guards if isinstance(guard, sympy.Eq)]
    sides = [*found.sizes.values(), *(side for one in equations for side in one.args)]
    free = [_without(one, found) for one in sides if symbols_of(one) & found.growing]
    found = replace(found, added=dict(filter(None, map(_added, free))))
    scale = 2.0

    def holds(equation: Any, growing: frozenset[Any]) -> bool:
        with suppress(Exception):
            return bool(value_of(equation, found.values(scale, growing)))
        return True

    def settle(growing: frozenset[Any]) -> tuple[frozenset[Any], int]:
        """Symbols that grow, and how many equations do not hold then."""
        violated: list[Any] = []
        for _ in range(TRIES):
            violated = [one for one in equations if not holds(one, growing)]
            for equation in violated:
                others = sorted(equation.free_symbols - growing, key=lambda s: (s not in own, str(s)))
                for symbol in others:
                    if not holds(equation, growing) and holds(equation, growing | {symbol}):
                        growing = growing | {symbol}
                together = growing.union(symbol for symbol in others if symbol in own)
                if not holds(equation, growing) and holds(equation, together):  # halves of a sum, as ShuffleNet has
                    growing = together
            if not violated:
                break
        return growing, len(violated)

    growing, left = settle(found.growing)
    values = found.values(scale, growing)
    about = [one.free_symbols for one in equations if one.free_symbols & growing]
    near = growing.union(*about)  # symbols that stand in an equation with one that grows
    fewer = [one for one in heads if symbols_of(one) & near and value_of(one, values) == value_of(one, found.known)]
    if sizes := frozenset(symbol for one in fewer for symbol in symbols_of(one)):
        other, more = settle(found.growing | sizes)
        growing = other if more <= left else growing
    return replace(found, growing=growing, _found={})
