"""Where worker processes sit: on the devices of this machine, one each, or on a part of its CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.bundle import Device
from penstock.errors import StudyError
from penstock.executors.local import find_devices
from penstock.executors.processes.mig import find_slices


@dataclass(frozen=True)
class Seat:
    """The place of a worker process: its device, what torch calls the device there, its threads, its own variables."""

    device: Device
    torch: str
    threads: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def sliced(self) -> bool:
        """Whether its device is a MIG slice."""
        return self.device.name.startswith("MIG-")


def find_seats(workers: int) -> list[Seat]:
    """A seat on each of as many devices of this machine, or on as many equal parts of its CPU."""
    found = find_slices() or find_devices()
    if found[0].type == "cpu":
        threads, memory = max(1, (found[0].threads or 1) // workers), found[0].memory // workers
        devices = [Device(f"cpu:{i}", "cpu", memory, threads=threads) for i in range(workers)]
        return [Seat(device, "cpu", threads) for device in devices]
    if workers > len(found):
        raise StudyError(
            f"workers={workers} needs as many devices, and this machine has {len(found)}: "
            f"use workers={len(found)} or fewer, one device each."
        )
    return [_seat(device) for device in found[:workers]]


def _seat(device: Device) -> Seat:
    whole = Seat(device, device.name)
    return Seat(device, "cuda:0", None, {"CUDA_VISIBLE_DEVICES": device.name}) if whole.sliced else whole
