"""Trials whose model no single device holds: each has as many devices as its task says, all of one type, to its end.

There is nothing to decide about them but who is next: whoever waited longest goes where enough devices are idle, on as
few nodes as can be.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import TYPE_CHECKING

from penstock.bundle import Device
from penstock.errors import StudyError
from penstock.scheduling.nodes import arrange

if TYPE_CHECKING:
    from penstock.engine.placing import Placing


class Sharding:
    """Gives each trial that waits ``count`` devices, once so many are idle."""

    def __init__(self, placing: Placing, count: int) -> None:
        self.placing, self.count = placing, count
        self._said = False

    def place(self) -> None:
        """Begin those that wait and have room."""
        placing = self.placing
        placing.changed = False
        if not placing.waiting:
            return
        if "distributed" not in placing.executor.modes or not self._enough(placing.devices):
            self._refuse()
        for trial in list(placing.waiting):
            if (devices := self._free()) is None:
                return
            place = placing.make(devices, "distributed", "")
            if placing.begin(place, trial, float(self.count)):
                placing.declare(place)

    def _enough(self, devices: dict[str, Device]) -> bool:
        return max(Counter(one.type for one in devices.values()).values(), default=0) >= self.count

    def _free(self) -> tuple[str, ...] | None:
        """The devices for the next trial; those whose workers did not meet, only where there are no others."""
        placing, chosen = self.placing, None
        idle = {name: device for name, device in placing.devices.items() if not placing.on[name]}
        while self._enough(idle):
            (names,) = arrange(idle, {}, {0: self.count}).values()
            if not placing.spreading.are_apart(names):
                return names
            chosen = chosen or names
            del idle[names[-1]]
        return chosen

    def _refuse(self) -> None:
        """There are too few devices: an error where no more can come; else it is said once that trials wait."""
        placing, executor = self.placing, self.placing.executor
        types = Counter(device.type for device in placing.devices.values())
        there = " and ".join(f"{count} of type {type}" for type, count in types.items()) or "none"
        coming = executor.flexible and (executor.scales or len(placing.devices) < self.count)
        if "distributed" in executor.modes and coming:
            if not self._said:
                self._said = True
                warnings.warn(f"Trials wait for {self.count} devices of one type, and there are {there}.", stacklevel=2)
            return
        raise StudyError(
            f"The task's shards = {self.count} need as many devices of one type, each with a worker of its own, and "
            f"there are {there}: run it with workers={self.count} or more on a machine that has so many, or on a Ray "
            "cluster that does."
        )
