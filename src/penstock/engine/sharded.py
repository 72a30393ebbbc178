"""Trials whose model no single device holds: whether there are enough devices for them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping

from penstock.bundle import Device
from penstock.errors import StudyError
from penstock.executors.base import Executor


class Shards:
    """Each trial has ``count`` devices of one type."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._said = False

    def enough(self, devices: Mapping[str, Device], executor: Executor, *, waits: bool) -> bool:
        """Whether there are enough devices; raises where no more can come, else warns once if a trial ``waits``."""
        types = Counter(device.type for device in devices.values())
        if "distributed" in executor.modes and max(types.values(), default=0) >= self.count:
            return True
        there = " and ".join(f"{count} of type {type}" for type, count in types.items()) or "none"
        coming = executor.flexible and (executor.scales or len(devices) < self.count)
        if "distributed" not in executor.modes or not coming:
            raise StudyError(
                f"The task's shards = {self.count} need as many devices of one type, each with a worker of its own, "
                f"and there are {there}: run it with workers={self.count} or more on a machine that has so many, or "
                "on a Ray cluster that does."
            )
        if waits and not self._said:
            self._said = True
            warnings.warn(f"Trials wait for {self.count} devices of one type, and there are {there}.", stacklevel=2)
        return False
