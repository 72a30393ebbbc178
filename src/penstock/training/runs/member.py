"""A trial inside a fused bundle: its placement, its training, and the state that was written last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.bundle import Placement, TrialStopped
from penstock.training.account import Entry
from penstock.trial import StateRef, Usage

if TYPE_CHECKING:
    from penstock.training.loop import Training


@dataclass
class FusedMember:
    """A trial inside a fused bundle."""

    placement: Placement
    training: Training
    entry: Entry
    state: StateRef | None  # the last one written
    reported: bool = False  # since it came

    def grant(self, placement: Placement) -> None:
        """Train to another budget."""
        self.placement = placement

    def saved(self, state: StateRef) -> None:
        """Note the state that was written last."""
        self.state = state

    def has_reported(self) -> None:
        """Note a report."""
        self.reported = True

    def used(self) -> Usage:
        """What it used since its last report."""
        return self.entry.close(self.training.step, None)

    @property
    def moved(self) -> bool:
        """Whether it has trained since its last state."""
        return self.training.step != (0 if self.state is None else self.state.step)

    def certain(self, ended: int = 0) -> int:
        """How many steps are left in its grant, after so many more units."""
        return (self.placement.budget - self.training.unit - ended) * self.training.unit_length

    @property
    def position(self) -> int | None:
        """How many steps its bundle has taken, by the rounds that its placement tells, if any, and its own steps."""
        since = self.placement.since
        return None if since is None else since * self.training.unit_length + self.training.step

    def stopped(self) -> TrialStopped:
        """The event of its leaving."""
        return TrialStopped(self.placement.trial, self.placement.attempt, self.state, usage=self.used())
