"""Which Ray cluster ``on=`` names, and with which settings."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl

from penstock.errors import StudyError


def is_ray(on: object) -> bool:
    """Whether a study is to run on a Ray cluster, with or without settings.

    >>> is_ray("ray"), is_ray("ray://10.0.0.1:6379"), is_ray("ray?idle=30"), is_ray("rays"), is_ray("local")
    (True, True, True, False, False)
    """
    return isinstance(on, str) and (on == "ray" or on.startswith(("ray:", "ray?")))


def parse(on: str) -> str | None:
    """The address in "ray://host:port", or None where any cluster will do.

    >>> parse("ray"), parse("ray://10.0.0.1:6379")
    (None, '10.0.0.1:6379')
    """
    if on == "ray":
        return None
    match = re.fullmatch(r"ray://([^\s:/]+|\[[0-9a-fA-F:]+\]):(\d+)/?", on)
    if match is None or not 0 < int(match[2]) < 2**16:
        raise StudyError(f'Expected on="ray" or "ray://host:port", as in "ray://10.0.0.1:6379", got {on!r}.')
    return f"{match[1]}:{match[2]}"


def settings(on: str) -> tuple[str, dict[str, Any]]:
    """An address without the settings behind it, and these settings: the market of nodes, and when idle ones go.

    >>> settings("ray://10.0.0.1:6379?market=spot&idle=30"), settings("ray")
    (('ray://10.0.0.1:6379', {'market': 'spot', 'idle': 30.0}), ('ray', {}))
    """
    address, _, query = on.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    try:
        if given.keys() - {"market", "idle"}:
            raise ValueError
        return address, {name: float(value) if name == "idle" else value for name, value in given.items()}
    except ValueError:
        raise StudyError(
            f'Expected settings such as "{address}?market=spot&idle=30", a market of "spot" or "on-demand" and the '
            f"seconds after which idle nodes go, got {on!r}."
        ) from None
