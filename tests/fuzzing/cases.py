"""A case of fuzzing: input that a user could give by mistake, and the rule that its outcome must keep.

A case is JSON: command line words, Python expressions, or edits of a file. So a case that was once found wrong is kept
as a small file in ``tests/corpus`` and tried again by a test.
"""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from types import FrameType
from typing import Any

import penstock as ps

What = dict[str, Any]
LIMIT = 60  # seconds after which a case hangs: each takes under one on an idle machine


class Wrong(Exception):
    """An outcome that breaks a rule: its text says which."""


class Hang(BaseException):
    """A case took longer than ``LIMIT``. It is no Exception, so that no code takes it for an error of a trial."""


@dataclass(frozen=True)
class Kind:
    """One kind of case: ``make`` draws one, and ``check`` tries it and gives its outcome, or raises ``Wrong``."""

    name: str
    make: Callable[[Random], What]
    check: Callable[[What], str]


def tried(kind: Kind, what: What) -> str:
    """The outcome of a case: "done" or "refused"; or a violation, which begins with its rule and a colon."""
    with _folder(), _alarm(), _quietly():
        try:
            return kind.check(what)
        except Wrong as error:
            return str(error)
        except Hang:
            return f"hang: it took more than {LIMIT} seconds"
        except BaseException as error:
            return f"traceback: {ps.errors.told(error)}"


def refused(error: ps.PenstockError) -> str:
    """The outcome of an error that a user can mend; its message is not empty."""
    if not str(error).strip():
        raise Wrong(f"no message: {type(error).__name__} without text")
    return "refused"


@contextmanager
def _folder() -> Iterator[None]:
    """A new working directory for a case."""
    before, here = Path.cwd(), Path(mkdtemp(prefix="fuzz-"))
    os.chdir(here)
    try:
        yield
    finally:
        os.chdir(before)
        shutil.rmtree(here, ignore_errors=True)


@contextmanager
def _alarm() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        yield
