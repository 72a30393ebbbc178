"""Where a trial begins: with its last state, or with the best that is left where that state is lost.

Whatever it begins with, it trains to the same bits, and the engine does not log a report twice. So a lost state costs
time and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.log.history import TrialRecord
from penstock.trial import Leg, StateRef


class Origin(NamedTuple):
    """A trial begins with ``state``, or by training ``legs`` first, or anew; ``lost`` is the state that it should have.

    >>> Origin(None, (), None).said
    'is trained again from its beginning'
    """

    state: StateRef | None
    legs: tuple[Leg, ...]
    lost: StateRef | None

    @property
    def said(self) -> str:
        """How a trial without its state goes on, for messages."""
        if self.state is not None:
            return f"goes on from its state after {self.state.unit} units"
        if not self.legs:
            return "is trained again from its beginning"
        others = ", then ".join(f"trial {leg.trial} to unit {leg.unit}" for leg in self.legs)
        return f"had taken over another trial's state: first {others} is trained again, then it goes on from there"


def origin(record: TrialRecord, intact: Callable[[StateRef], bool]) -> Origin:
    """The origin of a trial that is about to begin.

    The state of its best report is a whole state too, and may be left where the last state is lost; not so where the
    trial has taken over a donor's weights since.
    """
    last = record.state or record.start
    if last is None or intact(last):
        return Origin(last, (), None)
    best = record.best_state
    if best is not None and best.unit > record.copied_at and intact(best):
        return Origin(best, (), last)
    return Origin(None, record.legs, last)
