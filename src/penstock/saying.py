"""Standard error, which a program may lack: a daemon has none, and a terminal may go away."""

from __future__ import annotations

import sys
from contextlib import suppress


def say(text: str) -> None:
    """Print a line to standard error, if it is there."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # the terminal may be gone, or the file closed
            print(text, file=sys.stderr)


def seen() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
