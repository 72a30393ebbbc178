"""The order in which trials wait and train together: folded from the log, so that a resumed study goes on in it.

Decisions are a function of the order of reports (invariant 4). On one worker that order follows from the order in which
trials wait, and from the bundle that trains: its members, their order, and how far each is. The log has all of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock.log.events import Asked, Event, Failed, Opened, Placed, Reported, Stopped


class Units(Protocol):
    """How far a trial may train, and how far it has come, before the event that is taken next."""

    granted: int
    reported: int


@dataclass(frozen=True)
class Turn:
    """A trial's turn on its devices.

    ``asked`` is its place in the order of asking, and ``entered`` its place in the order of entering bundles. The
    trials of a bundle train in rounds, one unit of each trial in a round. ``since`` is the round in which the trial's
    first unit would have been: a trial that has trained ``u`` units is in round ``since + u``.
    """

    asked: int
    entered: int
    devices: tuple[str, ...] = ()
    share: float = 1.0
    since: int = 0


class Turns:
    """The trials that wait, in the order of asking, and the trials that run, in the order in which they entered."""

    def __init__(self, trials: Sequence[Units]) -> None:
        self._trials = trials
        self.asked = 0  # how often a trial was queued
        self.waiting: dict[int, int] = {}  # by trial: its place in the order of asking
        self.running: dict[int, Turn] = {}
        self.leaving: dict[int, None] = {}  # running trials that have reported their budgets
        self._entered = 0
        self._again: dict[int, None] = {}  # running trials that were asked for again
        self._stopped: dict[int, Turn] = {}  # trials that were stopped since a trial was placed
        self._there: Counter[tuple[str, ...]] = Counter()  # by devices: how many trials run there
        self._rounds: dict[tuple[str, ...], int] = {}  # by devices: the last round that a trial there has reported
        self._how: Any = None  # the settings of the last run

    def apply(self, event: Event) -> None:
        """Take the next event of the log."""
        if isinstance(event, Asked):
            if event.trial in self.running:
                self._again[event.trial] = None
            else:
                self._queue(event.trial)
        elif isinstance(event, Opened):
            self._open(event)
        elif isinstance(event, Placed | Reported | Stopped | Failed):
            self.settle()
            self._follow(event)

    def _follow(self, event: Placed | Reported | Stopped | Failed) -> None:
        if isinstance(event, Placed):
            self._place(event)
        elif isinstance(event, Reported):
            self._report(event)
        elif isinstance(event, Stopped):
            if (turn := self._left(event.trial)) is not None:
                self._stopped[event.trial] = turn
            self._queue(event.trial)
        else:
            self._left(event.trial)
            if not event.final:
                self._queue(event.trial)

    def settle(self) -> None:
        """Let trials that have reported their budgets leave: they do so once the decisions about that are made."""
        for trial in self.leaving:
            again = trial in self._again
            self._left(trial)
            if again:
                self._queue(trial)
        self.leaving = {}

    def since(self, trial: int) -> int:
        """The round of its bundle in which a running trial's first unit would have been."""
        turn = self.running.get(trial)
        return 0 if turn is None else turn.since

    def _place(self, event: Placed) -> None:
        self._stopped.clear()
        before = self.running.get(event.trial)
        asked = self.waiting.pop(event.trial, 0 if before is None else before.asked)
        if before is not None and before.devices == event.devices:  # its bundle is formed again
            self.running[event.trial] = replace(before, share=event.share)
            return
        self._left(event.trial)
        if not self._there[event.devices]:  # a new bundle begins with round 0
            self._rounds[event.devices] = 0
        since = self._rounds[event.devices] - self._trials[event.trial].reported
        self._entered += 1
        self._enter(event.trial, Turn(asked, self._entered, event.devices, event.share, since))

    def _report(self, event: Reported) -> None:
        turn = self.running.get(event.trial)
        if turn is None:
            return
        self._rounds[turn.devices] = max(self._rounds[turn.devices], turn.since + event.unit)
        if event.unit >= self._trials[event.trial].granted:
            self.leaving[event.trial] = None

    def _open(self, event: Opened) -> None:
        """A driver ended: trials that it made leave at its end are taken for running, as they are when it was killed.

        Under other settings nothing is formed again, and every trial waits.
        """
        for trial, turn in self._stopped.items():
            self.waiting.pop(trial, None)
            self._enter(trial, turn)
        self._stopped = {}
        self.running = dict(sorted(self.running.items(), key=lambda one: one[1].entered))
        how = event.settings.get("run")
        if how != self._how:
            self.settle()
            self.waiting |= {trial: turn.asked for trial, turn in self.running.items()}
            for trial in list(self.running):
                self._left(trial)
        self._how = how

    def _queue(self, trial: int) -> None:
        self.asked += 1
        self.waiting[trial] = self.asked

    def _enter(self, trial: int, turn: Turn) -> None:
        self.running[trial] = turn
        self._there[turn.devices] += 1

    def _left(self, trial: int) -> Turn | None:
        self._again.pop(trial, None)
        turn = self.running.pop(trial, None)
        if turn is not None:
            self._there[turn.devices] -= 1
        return turn
