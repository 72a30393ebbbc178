"""The errors that Penstock raises: each message names what was expected, what came and what to do."""

from __future__ import annotations


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


class LogError(PenstockError):
    """The event log cannot be read or written."""


class SoloWarning(UserWarning):
    """Warns that trials train solo because they cannot be fused, and says why."""


class Paused(BaseException):
    """Raised by ``trial.report`` in a function task when the engine wants the device; let it pass through.

    It is not an ``Exception``, so that a broad ``except Exception`` in the function does not catch it.
    """
