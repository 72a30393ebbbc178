"""What an earlier study would have measured, for tests of what follows from it."""

from __future__ import annotations

from pathlib import Path

from penstock.bundle import Device
from penstock.engine.clocking import Shelf
from penstock.log.events import Measured
from penstock.speed.curve import Curve, doublings
from penstock.speed.profiles import Profiles
from penstock.task import as_task, fingerprint


def know(task: object, curve: Curve, *devices: Device, signature: str = "tabulated", dir: str = ".penstock") -> None:
    """Keep a curve, of units of a second, as measured for a task's trials on the types of these devices."""
    shelf = Shelf(Profiles.open(Path(dir) / "profiles.jsonl"), fingerprint(as_task(task)))
    sharing = {count: curve.at(1 / count) for count in doublings(curve.most)}
    scaling = {count: curve.at(count) for count in range(1, curve.widest + 1)}
    for device in {device.type: device for device in devices}.values():
        shelf.measured(Measured(signature, device.name, "sharing", sharing, curve.most, "known", "native"), device)
        shelf.measured(Measured(signature, device.name, "scaling", scaling, curve.widest, "known"), device)
