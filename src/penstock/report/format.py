"""Values as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

# Characters that a terminal obeys instead of showing them, or that change the order of others; newlines and tabs stay.
OBEYED = {*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {ord("\n"), ord("\t")}
TO_NONE = dict.fromkeys(OBEYED) | dict.fromkeys(range(0xD800, 0xE000), "\ufffd")  # half a pair cannot be written


def clock(seconds: float) -> str:
    """Seconds as a person reads them.

    >>> clock(4.2), clock(3725)
    ('4.2 s', '1:02:05')
    """
    if not isfinite(seconds) or round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def value(one: Any) -> str:
    """A config's or a metric's value, short.

    >>> value(0.123456), value([64, 32])
    ('0.1235', '[64, 32]')
    """
    return f"{one:.4g}" if isinstance(one, float) else str(one)


def short(config: Mapping[str, Any]) -> str:
    """A config on one line.

    >>> short({"lr": 0.123456, "width": 64})
    'lr=0.1235 width=64'
    """
    return " ".join(f"{k}={value(v)}" for k, v in config.items())


def size(bytes: int) -> str:
    """Bytes as a person reads them.

    >>> size(512), size(1_500_000)
    ('512 B', '1.5 MB')
    """
    amount, units = float(bytes), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 999.5 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.3g} {units[0]}"


def spent(cost: Mapping[str, Any]) -> str:
    """The cost of a study so far, and the cost that its plan expects in all.

    >>> spent({"so_far": 1.5, "expected": 4.25, "currency": "USD"}), spent({"so_far": 1.5})
    ('1.50 of about 4.25 USD', '1.50')
    """
    so_far, expected = cost.get("so_far"), cost.get("expected")
    parts = ["unknown" if so_far is None else f"{so_far:.2f}"]
    if expected is not None:
        parts.append(f"of about {expected:.2f} {cost.get('currency', '')}".strip())
    return " ".join(parts)


def width(scale: int) -> str:
    """The width of a trial's model, by the scale of its twin.

    >>> width(1), width(8)
    ('full', '1/8')
    """
    return "full" if scale == 1 else f"1/{scale}"


def visible(text: str) -> str:
    """A text without the characters that a terminal obeys: names, configs and errors are of other people's making.

    >>> visible("\\x1b[2Jcleared"), visible("two\\nlines")
    ('[2Jcleared', 'two\\nlines')
    """
    return text.translate(TO_NONE)
