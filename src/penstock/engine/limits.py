"""When a study stops before its algorithm is done: each limit is a predicate of the history and the study's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from penstock.log.history import History
from penstock.trial import score


class Limit(Protocol):
    """One reason to stop. The engine asks its limits in order at every boundary, and the first that is reached counts.

    ``reason`` is what the log says of a study that ended by this limit.
    """

    @property
    def reason(self) -> str: ...

    def reached(self, history: History, clock: float) -> bool:
        """Whether the study is to stop now."""

    def left(self, clock: float) -> float | None:
        """Seconds until the limit is reached, None where that is no matter of time."""


@dataclass(frozen=True)
class Target:
    """A value of the metric that is good enough."""

    value: float
    reason: ClassVar[str] = "target"

    def reached(self, history: History, clock: float) -> bool:
        best = history.best
        return best is not None and best.best_score >= score({"": self.value}, "", history.mode)

    def left(self, clock: float) -> float | None:
        return None


@dataclass(frozen=True)
class Deadline:
    """Seconds that a study may use, over all its drivers.

    >>> deadline = Deadline(600.0)
    >>> deadline.left(540.0), deadline.reached(History(), 600.0)
    (60.0, True)
    """

    seconds: float
    reason: ClassVar[str] = "deadline"

    def reached(self, history: History, clock: float) -> bool:
        return clock >= self.seconds

    def left(self, clock: float) -> float | None:
        return self.seconds - clock


@dataclass(frozen=True)
class Energy:
    """Joules that a study's devices may use, idle ones included, over all its drivers.

    >>> Energy(3.6e6).reached(History(), 0.0)
    False
    """

    joules: float
    reason: ClassVar[str] = "energy"

    def reached(self, history: History, clock: float) -> bool:
        return (history.joules or 0.0) >= self.joules

    def left(self, clock: float) -> float | None:
        return None


@dataclass(frozen=True)
class Failures:
    """The most trials that may fail, over all drivers of a study."""

    most: int
    reason: ClassVar[str] = "failed"

    def reached(self, history: History, clock: float) -> bool:
        return history.counts["failed"] > self.most

    def left(self, clock: float) -> float | None:
        return None


def soonest(limits: Sequence[Limit], clock: float) -> float | None:
    """Seconds until the first limit that is a matter of time, None where there is none.

    >>> soonest([Target(0.9), Deadline(600.0)], 540.0), soonest([Target(0.9)], 540.0)
    (60.0, None)
    """
    return min((left for limit in limits if (left := limit.left(clock)) is not None), default=None)
