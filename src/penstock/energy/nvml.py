"""The one door to NVML, NVIDIA's library of its devices' meters and limits, which ``nvidia-ml-py`` brings.

Devices are known by UUID, as numbers differ between NVML and CUDA. Whatever NVML cannot do is one ``NvmlError``, with
the reason in words. A power limit is set by ``lease.py`` alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from penstock.errors import PenstockError

OBSERVE_ONLY = "PENSTOCK_OBSERVE_ONLY"
"""The environment variable with which no process may change a device, whatever a study asks for."""


class NvmlError(PenstockError):
    """NVML cannot do what was asked; ``permission`` says that only the permission is missing."""

    def __init__(self, said: str, *, permission: bool = False) -> None:
        super().__init__(said)
        self.permission = permission


class Gpu:
    """One device, by its UUID, such as "GPU-5a1f…"; watts and joules throughout."""

    def __init__(self, uuid: str) -> None:
        if uuid.startswith("MIG-"):
            raise NvmlError("a MIG slice has no meter and no power limit of its own")
        self.uuid = uuid
        self._library = _library(os.getpid())
        self._handle = self._ask("GetHandleByUUID", uuid)
        if self._mig():
            raise NvmlError("MIG is on: the meter and the power limit are the whole device's, and not a slice's")

    def joules(self) -> float:
        """The energy that the device has used since its driver was loaded."""
        return float(self._ask("GetTotalEnergyConsumption", self._handle)) / 1e3

    def watts(self) -> float:
        """The power that it draws now."""
        return float(self._ask("GetPowerUsage", self._handle)) / 1e3

    def busy(self, since: int) -> tuple[dict[int, int], int]:
        """How busy each process kept it in the samples since a time, by number, and the time of the last sample.

        Processes that did nothing are not among them.
        """
        samples = self._ask("GetProcessUtilization", self._handle, since)
        found: dict[int, int] = {}
        for one in samples:
            found[int(one.pid)] = found.get(int(one.pid), 0) + int(one.smUtil)
        return found, max((int(one.timeStamp) for one in samples), default=since)

    def limit(self) -> float:
        """Its power limit."""
        return float(self._ask("GetPowerManagementLimit", self._handle)) / 1e3

    def limits(self) -> tuple[float, float]:
        """The least and the greatest limit that it can have."""
        least, most = self._ask("GetPowerManagementLimitConstraints", self._handle)
        return float(least) / 1e3, float(most) / 1e3

    def set_limit(self, watts: float) -> None:
        """Set its power limit: for leases alone, which bring the prior limit back."""
        if os.environ.get(OBSERVE_ONLY):
            raise NvmlError(f"{OBSERVE_ONLY} is set, so no power limit may be changed", permission=True)
        self._ask("SetPowerManagementLimit", self._handle, round(watts * 1e3))

    def _mig(self) -> bool:
        try:
            return bool(self._ask("GetMigMode", self._handle)[0])
        except NvmlError:
            return False  # a device without MIG

    def _ask(self, what: str, *arguments: Any) -> Any:
        call: Callable[..., Any] = getattr(self._library, f"nvmlDevice{what}")
        try:
            return call(*arguments)
        except self._library.NVMLError as error:
            permission = isinstance(error, self._library.NVMLError_NoPermission)
            raise NvmlError(f"NVML says: {error}", permission=permission) from None


@cache
def _library(process: int) -> Any:
    """NVML, begun in this process: what a fork takes over of its parent's is of no use."""
    try:
        library = import_module("pynvml")
    except ImportError:
        raise NvmlError("nvidia-ml-py is not installed: pip install 'penstock[gpu]'") from None
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise NvmlError(f"NVML cannot begin: {error}") from None
    return library
