"""How a command ends: with one message and an exit code, and with nothing but its answer on stdout.

Exit codes: 0 done, 1 the study failed, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import BufferedRandom, BufferedWriter, TextIOWrapper

import typer

from penstock.errors import PenstockError
from penstock.report.format import visible

FAILED, BAD_USAGE = 1, 2  # typer makes a KeyboardInterrupt 130

_WRITTEN = (TextIOWrapper, BufferedWriter, BufferedRandom)


def steady_streams() -> None:
    """Let nothing that a command prints break it off.

    A standard stream that is closed becomes the null device: otherwise the next file that is opened, such as a log,
    has its number, and text printed by a library goes there. Characters that a stream cannot hold are escaped.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream.closed:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it stays open
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def end_at_once() -> None:
    """Let the process end without Python's last search for cycles, which takes a second among torch's objects.

    That search would also write what is left in files that nobody closed, so they are flushed.
    """
    atexit.register(_freeze)  # what is registered first runs last


def _freeze() -> None:
    for one in gc.get_objects():
        if type(one) in _WRITTEN:
            with suppress(OSError, ValueError):
                one.flush()
    gc.freeze()


@contextmanager
def refused(code: int) -> Iterator[None]:
    """Turn an error that a user can mend, or a path that cannot be used, into one message and an exit code."""
    try:
        yield
    except PenstockError as error:
        typer.echo(visible(f"penstock: {error}"), err=True)
        raise typer.Exit(code) from None
    except OSError as error:
        if not isinstance(error.filename, str):
            raise
        where = f"{error.filename} ({error.strerror})"
        typer.echo(visible(f"penstock: Cannot use {where}: check the path and your permissions."), err=True)
        raise typer.Exit(code) from None


@contextmanager
def apart(json: bool) -> Iterator[None]:
    """With --json keep stdout for the one object: text that a task prints, in worker processes too, goes to stderr."""
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
