"""The running trials as a scheduler sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from penstock.scheduling.base import Holding

if TYPE_CHECKING:
    from penstock.engine.placing import Placing


class Holdings(Mapping[int, Holding]):
    """The running trials with the units that they have left, at one instant.

    A holding is made when it is first looked at: schedulers look at few holdings, or at all of them several times.
    """

    def __init__(self, placing: Placing) -> None:
        self._placing, self._bundling = placing, placing.bundling
        self._clock = placing.clock()
        self._made: dict[int, Holding] = {}

    def __getitem__(self, trial: int) -> Holding:
        if trial not in self._made:
            self._made[trial] = self._make(trial)
        return self._made[trial]

    def _make(self, trial: int) -> Holding:
        placing, bundling = self._placing, self._bundling
        record, place = placing.history.trials[trial], bundling.running[trial]
        units = record.granted - record.reported
        done = placing.pace.done(trial, place.share, self._clock)
        if units < 1:  # the trial has reported its budget, and is about to leave
            units, done = 1, 0.99
        return Holding(bundling.demand(trial, units), bundling.assigned[trial], done, place.share)

    def __iter__(self) -> Iterator[int]:
        return iter(self._bundling.assigned)

    def __len__(self) -> int:
        return len(self._bundling.assigned)
