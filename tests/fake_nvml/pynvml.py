"""NVML without a device, in the place of nvidia-ml-py: each device is a file, which several processes may use at once.

The folder is named by ``FAKE_NVML``; without it there is no driver. A device's file is JSON: its ``least``, ``most``
and ``limit`` in watts, its ``draw`` without a limit, ``permission``, how ``busy`` processes keep it by their numbers,
and how its counter goes. The counter follows the machine's clock at min(draw, limit), or ``clock`` where the file has
one; one that ``stands`` does not move.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

FAKE = True


class NVMLError(Exception):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


def make(folder, uuid="GPU-fake", **changes):
    """A device, with the limits of an H200; gives its UUID."""
    device = {"least": 200.0, "most": 700.0, "limit": 700.0, "draw": 500.0, "permission": True, "joules": 0.0}
    device |= {
        "since": time.monotonic(),
        "mig": False,
        "stands": False,
        "counter": True,
        "broken": False,
        "sets": [],
        "busy": {},
    }
    write(Path(folder) / f"{uuid}.json", {**device, **changes})
    return uuid


def write(file, device):
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(device))
    partial.replace(file)


def change(folder, uuid="GPU-fake", **changes):
    """Change a device from now on."""
    file = Path(folder) / f"{uuid}.json"
    device = json.loads(file.read_text())
    device |= {"joules": _joules(device), "since": _now(device)}
    write(file, {**device, **changes})


def look(folder, uuid="GPU-fake"):
    return json.loads((Path(folder) / f"{uuid}.json").read_text())


def _now(device):
    return device.get("clock", time.monotonic())


def _joules(device):
    return device["joules"] + min(device["draw"], device["limit"]) * (_now(device) - device["since"])


def _device(handle):
    device = json.loads(handle.read_text())
    if device["broken"]:
        raise NVMLError("GPU is lost")
    return device


def nvmlInit():
    if "FAKE_NVML" not in os.environ:
        raise NVMLError("Driver Not Loaded")


def nvmlDeviceGetHandleByUUID(uuid):
    file = Path(os.environ["FAKE_NVML"]) / f"{uuid}.json"
    if not file.is_file():
        raise NVMLError("Not Found")
    return file


def nvmlDeviceGetTotalEnergyConsumption(handle):
    device = _device(handle)
    if not device["counter"]:
        raise NVMLError_NotSupported("Not Supported")
    return int(1e3 * (device["joules"] if device["stands"] else _joules(device)))


def nvmlDeviceGetPowerUsage(handle):
    device = _device(handle)
    return int(1e3 * min(device["draw"], device["limit"]))


def nvmlDeviceGetProcessUtilization(handle, since):
    busy = _device(handle)["busy"]
    if not busy:
        raise NVMLError("Not Found")
    return [SimpleNamespace(pid=int(pid), timeStamp=since + 1, smUtil=util) for pid, util in busy.items()]


def nvmlDeviceGetPowerManagementLimit(handle):
    return int(1e3 * _device(handle)["limit"])


def nvmlDeviceGetPowerManagementLimitConstraints(handle):
    device = _device(handle)
    return [int(1e3 * device["least"]), int(1e3 * device["most"])]


def nvmlDeviceGetMigMode(handle):
    return [int(_device(handle)["mig"]), 0]


def nvmlDeviceSetPowerManagementLimit(handle, milliwatts):
    device = _device(handle)
    if not device["permission"]:
        raise NVMLError_NoPermission("Insufficient Permissions")
    if not device["least"] <= milliwatts / 1e3 <= device["most"]:
        raise NVMLError("Invalid Argument")
    folder, uuid = handle.parent, handle.stem
    change(folder, uuid, limit=milliwatts / 1e3, sets=[*device["sets"], milliwatts / 1e3])
