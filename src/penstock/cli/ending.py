"""How a command ends: with one message and an exit code, and with nothing but its answer on stdout.

Exit codes: 0 done, 1 the study failed, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import typer

from penstock.errors import PenstockError

FAILED, BAD_USAGE = 1, 2  # typer makes a KeyboardInterrupt 130


@contextmanager
def refused(code: int) -> Iterator[None]:
    """Make an error that a user can mend one message and an exit code."""
    try:
        yield
    except PenstockError as error:
        typer.echo(f"penstock: {error}", err=True)
        raise typer.Exit(code) from None


@contextmanager
def apart(json: bool) -> Iterator[None]:
    """With --json stdout is for the one object: what a task prints, in worker processes too, goes to stderr."""
    if not json:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
