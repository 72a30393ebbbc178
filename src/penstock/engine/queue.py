"""The waiting trials: they were asked for and have no devices; each is a demand that a scheduler sees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from itertools import islice

from penstock.bundle import Device
from penstock.engine.clocking import Pace
from penstock.engine.descriptions import Descriptions
from penstock.engine.suspects import Suspects
from penstock.log.history import History, TrialRecord
from penstock.scheduling.base import Demand
from penstock.trial import Config, Later

AHEAD = 128  # trials for each device that are described at a time: describing a trial makes its model


class Queue:
    """The waiting trials, in the order of asking.

    ``later`` gives the rungs that follow a group. ``width`` is the number of devices that each trial of the study's own
    task must have, 0 where a scheduler chooses it, as it does for other variants. ``features`` says where a config is
    in the space, if trials may be packed.
    """

    def __init__(
        self,
        history: History,
        descriptions: Descriptions,
        pace: Pace,
        suspects: Suspects,
        later: Callable[[str], tuple[Later, ...]],
        width: int = 0,
        features: Callable[[Config], tuple[Hashable, ...]] | None = None,
    ) -> None:
        self.history, self.descriptions, self.pace, self._features = history, descriptions, pace, features
        self.suspects, self.later, self.width = suspects, later, width
        self.waiting: dict[int, Demand] = {}
        self._asked = 0  # how often a trial was queued
        self._new: dict[int, None] = {}  # waiting trials whose demands lack a description, in the order of asking
        self._largest = 0  # the memory of the largest device

    def take_up(self) -> None:
        """Queue the trials that the log leaves waiting or running, in the order of asking."""
        turns = self.history.turns
        self.waiting.clear()
        self._new.clear()
        asked = {**turns.waiting, **{trial: turn.asked for trial, turn in turns.running.items()}}
        for trial, self._asked in sorted(asked.items(), key=lambda one: one[1]):
            self._queue(self.history.trials[trial])
        self._asked = turns.asked

    def add(self, record: TrialRecord, *, moved: bool = False, type: str = "") -> None:
        """Queue a trial for devices.

        A trial that was ``moved`` out of a bundle gets the share that suits the present trials, as if no further trials
        joined its group. It is to get devices of the ``type`` that it had.
        """
        self._asked += 1
        self._queue(record, moved=moved, type=type)

    def _queue(self, record: TrialRecord, *, moved: bool = False, type: str = "") -> None:
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
            width=0 if record.variant else self.width,
        )

    def describe(self, devices: Collection[Device], also: Collection[int] = ()) -> None:
        """Ask for the descriptions of the first waiting trials, and ``also`` of some others; complete their demands."""
        self.suspects.bisect()
        if not self._new:
            return
        self._largest = max(device.memory for device in devices)
        first = list(islice(self._new, AHEAD * len(devices)))
        if also:
            first = list(dict.fromkeys([*(trial for trial in also if trial in self._new), *first]))
        for trial in self.descriptions.learn([self.history.trials[trial] for trial in first]):
            self.pace.know(trial, signature := self.descriptions.of(trial).signature or "")
            if self.descriptions.alike(signature) > 1 and (said := self.pace.refused(signature)):
                self.descriptions.failed(signature, said)
        for trial in first:
            del self._new[trial]
            self.pace.asked(trial, self.history.trials[trial].granted * self.descriptions.of(trial).steps)
            self.waiting[trial] = self._described(self.waiting[trial])

    def _described(self, demand: Demand) -> Demand:
        description, record = self.descriptions.of(demand.trial), self.history.trials[demand.trial]
        state = record.state or record.start
        half = self.suspects.half(demand.trial)
        known = {
            "bytes": max(description.bytes or 0, min(description.beside, self._largest)),
            "signature": f"{description.signature or ''}{f' half {half}' if half else ''}",
            "position": (0, 0) if state is None else (state.unit, state.step),
            "load": description.batch_size,
        }
        if self._features is not None:
            known["features"] = self._features(record.config)
        return Demand(**{**vars(demand), **known})  # `replace` takes twice as long

    def described(self, but: Collection[int]) -> list[Demand]:
        """The demands that a scheduler sees: the demands of all described trials ``but`` some."""
        if not self._new and not but:
            return list(self.waiting.values())
        return [demand for trial, demand in self.waiting.items() if trial not in self._new and trial not in but]

    def pop(self, trial: int) -> Demand:
        """Take a trial out of the queue."""
        self._new.pop(trial, None)
        return self.waiting.pop(trial)
