"""The joules of a study's devices so far, folded from its log over all drivers, and their power limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.log.events import Limited, Metered


@dataclass
class DeviceMeter:
    """What was told of one device: its joules, those of them that no trial used, and its power."""

    joules: float = 0.0
    idle: float = 0.0
    watts: float = 0.0  # on the average
    most: float = 0.0  # watts
    limit: float | None = None
    range: tuple[float, float] | None = None  # of limits
    meter: str = ""
    reason: str = ""  # why it was not metered any more
    seconds: float = 0.0


@dataclass
class Meters:
    """Takes the lines of devices.

    >>> meters = Meters()
    >>> meters.apply(Metered("cuda:0", 900.0, 100.0, watts=300.0, most=400.0, limit=700.0))
    >>> meters.joules, meters.idle
    (900.0, 100.0)
    """

    devices: dict[str, DeviceMeter] = field(default_factory=dict)
    limits: dict[tuple[str, str, int], Limited] = field(default_factory=dict)  # by device, signature and bundle size

    def apply(self, event: Metered | Limited) -> None:
        """Take the next event of devices."""
        if isinstance(event, Limited):
            self.limits[event.device, event.signature, event.size] = event
            return
        there = self.devices.setdefault(event.device, DeviceMeter())
        there.joules, there.idle = there.joules + (event.joules or 0.0), there.idle + event.idle
        if event.watts > 0:
            there.seconds += (event.joules or 0.0) / event.watts
            there.watts = there.joules / there.seconds
        there.most = max(there.most, event.most)
        there.limit = there.limit if event.limit is None else event.limit
        there.range = event.range or there.range
        there.meter, there.reason = event.meter or there.meter, event.reason

    @property
    def joules(self) -> float | None:
        """The joules of all devices; None where no device told any."""
        return sum(one.joules for one in self.devices.values()) if self.devices else None

    @property
    def idle(self) -> float:
        """The joules that no trial used."""
        return sum(one.idle for one in self.devices.values())
