"""Values that a user could give by mistake, as Python expressions."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

import penstock as ps

NUMBERS = (
    *("0", "1", "2", "3", "8", "-1", "1.5", "0.5", "1e-9", "1e300", "-0.0", "10**30", "10**400", "2**63"),
    *("float('nan')", "float('inf')", "-float('inf')", "1e-320", "1j", "True", "False"),
    *("np.int64(3)", "np.float32(0.5)", "np.array(2)", "np.nan", "np.ones(2)", "np.bool_(True)"),
    *("torch.tensor(3)", "torch.tensor(0.5)", "torch.ones(2)", "Decimal('0.5')", "Decimal('sNaN')", "Fraction(1, 3)"),
)
TEXTS = (
    "''",
    "'x'",
    "'0'",
    "'\\ud800'",
    "'a\\0b'",
    "'../x'",
    "'=1+1'",
    "'\\x1b[31m'",
    "'é'",
    "' '",
    "'" + "x" * 300 + "'",
)
OTHERS = (
    *("None", "[]", "{}", "()", "[1, 2]", "{'a': 1}", "{1: 2}", "{(1, 2): 3}", "object()", "int", "len", "print"),
    *("lambda *a, **k: None", "b'x'", "Path('x')", "{1, 2}", "range(3)", "nn.Linear(2, 2)", "Loud()", "itself()"),
)


class Loud:
    """Refuses to be shown, compared or hashed."""

    def __repr__(self) -> str:
        raise ValueError("no repr")

    def __eq__(self, other: object) -> bool:
        raise ValueError("no comparison")

    __hash__ = None  # type: ignore[assignment]


def itself() -> list[Any]:
    """A list that contains itself."""
    made: list[Any] = []
    made.append(made)
    return made


NAMES: dict[str, Any] = {
    **{"np": np, "torch": torch, "nn": nn, "ps": ps, "Decimal": Decimal, "Fraction": Fraction, "Path": Path},
    **{"Loud": Loud, "itself": itself},
}


def value(expression: str) -> Any:
    """The value of an expression."""
    return eval(expression, dict(NAMES))


def number(random: Random) -> str:
    """An expression for a number, more or less."""
    if random.random() < 0.3:
        return repr(random.choice([random.randint(-5, 50), random.uniform(-2, 20), 10.0 ** random.randint(-12, 12)]))
    return random.choice(NUMBERS)


def anything(random: Random) -> str:
    """An expression for any value."""
    return random.choice([number(random), random.choice(TEXTS), random.choice(OTHERS)])
