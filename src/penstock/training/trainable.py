"""The contract between a worker and whatever it trains alone."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Protocol

from penstock.trial import Metrics

if TYPE_CHECKING:
    from penstock.training.checkpoint import State


class Trainable(Protocol):
    """One trial in training, be it a task's loop, a function, or the loop of another framework.

    It is made at the beginning of its training, or brought to a state by ``restore``. ``steps`` then trains it. Between
    two steps the worker may ask for its ``state``, and may close ``steps`` for good.
    """

    @property
    def unit(self) -> int:
        """How many units were reported."""

    @property
    def step(self) -> int:
        """How many steps were trained."""

    @property
    def can_stop(self) -> bool:
        """Whether a state can be had at every step; otherwise only where metrics are reported."""

    @property
    def can_divide(self) -> bool:
        """Whether ``divide`` may help where memory has run out."""

    @property
    def urgent(self) -> bool:
        """Whether the state must be written with this report, as the next one may bring none."""

    def steps(self) -> Generator[Metrics | None, None, None]:
        """Train: None after a step, the metrics after a unit."""

    def state(self) -> State | None:
        """All that it needs to go on from here; None where there is nothing to go on from."""

    def restore(self, state: State, *, inherited: bool) -> None:
        """Go on from a state; an ``inherited`` one is a donor's, or that of another config."""

    def take_up(self, random: State | None) -> None:
        """Set the global generators to where this trial left them; None where it has drawn nothing from them."""

    def divide(self, parts: int) -> str:
        """Take every batch in so many parts from now on, as memory is short; gives why not, where that would differ."""
