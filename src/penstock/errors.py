"""The errors that Penstock raises: each message names what was expected, what came and what to do."""

from __future__ import annotations

import traceback
from itertools import dropwhile
from pathlib import Path


class PenstockError(Exception):
    """Base of every error that a user can mend.

    >>> issubclass(TaskError, PenstockError)
    True
    """


class SpaceError(PenstockError):
    """The search space, or a config drawn from it, is not usable."""


class StudyError(PenstockError):
    """The study's settings disagree with each other, with the log or with the machine."""


class TaskError(PenstockError):
    """The task's code does not do what the training loop needs."""


class StateError(TaskError):
    """A state that the log names is gone, or is not as it was written."""


class LogError(PenstockError):
    """The event log cannot be read or written."""


class SoloWarning(UserWarning):
    """Warns that trials train solo because they cannot be fused, and says why."""


class Paused(BaseException):
    """Raised by ``trial.report`` in a function task when the engine wants the device; let it pass through.

    It is not an ``Exception``, so that a broad ``except Exception`` in the function does not catch it.
    """


def trace(error: BaseException) -> str:
    """The traceback of an error, from the user's own code on where that is on the stack.

    An error of another process has that process's traceback as its note, which ``executors/serving.py`` adds.
    """
    if noted := [note for note in getattr(error, "__notes__", ()) if note.startswith("Traceback ")]:
        return str(noted[-1])
    whole = traceback.TracebackException.from_exception(error)
    ours = str(Path(__file__).parent)
    below = list(dropwhile(lambda frame: frame.filename.startswith(ours), whole.stack))
    if below and "site-packages" not in below[0].filename:  # else a library that Penstock calls raised the error
        whole.stack = traceback.StackSummary.from_list(below)
    return "".join(whole.format()).strip()


def told(error: BaseException) -> str:
    """An error of a user's code on one line: its class, its message, and the line that raised it.

    >>> try:
    ...     {}["x"]
    ... except KeyError as error:
    ...     told(error).split(" (")[0]
    "KeyError: 'x'"
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    said = "".join(traceback.format_exception_only(error)).strip()
    return f"{said}{where}"
