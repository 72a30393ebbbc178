"""Who waits: trials that were asked for and have no devices, each as the demand that a scheduler is shown."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from penstock.bundle import Device
from penstock.engine.clocking import Pace
from penstock.engine.descriptions import Descriptions
from penstock.engine.suspects import Suspects
from penstock.log.history import History, TrialRecord
from penstock.scheduling.base import Demand
from penstock.trial import Later

AHEAD = 128  # trials a device that are described before there is room for them: describing one makes its model


class Queue:
    """The trials that wait, in the order of asking.

    ``later`` gives the rungs that follow a group, and ``width`` is the number of devices of trials that have no choice.
    """

    def __init__(
        self,
        history: History,
        descriptions: Descriptions,
        pace: Pace,
        suspects: Suspects,
        later: Callable[[str], tuple[Later, ...]],
        width: int = 0,
    ) -> None:
        self.history, self.descriptions, self.pace = history, descriptions, pace
        self.suspects, self.later, self.width = suspects, later, width
        self.waiting: dict[int, Demand] = {}
        self._asked = 0  # how often a trial was queued
        self._new: dict[int, None] = {}  # trials that were not described since they were asked for
        self._largest = 0  # the memory of the largest device

    def add(self, record: TrialRecord, *, moved: bool = False, type: str = "") -> None:
        """A trial waits for devices.

        One that was ``moved`` out of a bundle is to have what suits the trials that are there, whatever may follow, and
        devices of the same ``type``.
        """
        self._asked += 1
        self._new[record.number] = None
        self.waiting[record.number] = Demand(
            record.number,
            record.group,
            record.granted - record.reported,
            self._asked,
            record.priority,
            self.history.weights.get(record.group, 1.0),
            open=record.open and not moved,
            type=type,
            later=self.later(record.group),
            width=self.width,
        )

    def describe(self, devices: Collection[Device]) -> None:
        """Learn what the first trials that wait are like."""
        self.suspects.bisect()
        self._largest = max(device.memory for device in devices)
        first = [trial for trial in self.waiting if trial in self._new][: AHEAD * len(devices)]
        for trial in self.descriptions.learn(self.history.trials[trial] for trial in first):
            self.pace.know(trial, self.descriptions.of(trial).signature or "")
        for trial in first:
            del self._new[trial]
            self.waiting[trial] = self._described(self.waiting[trial])

    def _described(self, demand: Demand) -> Demand:
        description, record = self.descriptions.of(demand.trial), self.history.trials[demand.trial]
        state = record.state or record.start
        half = self.suspects.half(demand.trial)
        return replace(
            demand,
            bytes=max(description.bytes or 0, min(description.beside, self._largest)),
            signature=f"{description.signature or ''}{f' half {half}' if half else ''}",
            position=(0, 0) if state is None else (state.unit, state.step),
            load=description.batch_size,
        )

    def described(self, but: Collection[int]) -> list[Demand]:
        """The demands that a scheduler is shown: those of described trials, without some."""
        return [demand for trial, demand in self.waiting.items() if trial not in self._new and trial not in but]

    def pop(self, trial: int) -> Demand:
        """A trial waits no longer."""
        self._new.pop(trial, None)
        return self.waiting.pop(trial)
