"""MIG slices: parts of an NVIDIA GPU that are divided by the hardware, and each of which is a device of its own.

CUDA shows a process only one slice, the first of its environment. So the driver reads from ``nvidia-smi -L`` which
there are, and each worker process is shown its own.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable

from penstock.bundle import Device

GPU = re.compile(r"GPU (\d+): (.+) \(UUID: (.+)\)")
SLICE = re.compile(r"\s+MIG (\S+?(\d+)gb\S*)\s+Device\s+\d+: \(UUID: (.+)\)")
KEPT = 7 / 8  # of the memory that a slice's name says: the driver keeps a part of it


def slices(listed: str, visible: str | None) -> list[Device]:
    """The slices that ``nvidia-smi -L`` lists, of the GPUs and slices that CUDA_VISIBLE_DEVICES names, in its order.

    >>> listed = '''GPU 0: NVIDIA H200 (UUID: GPU-1)
    ...   MIG 1g.18gb     Device  0: (UUID: MIG-2)
    ...   MIG 3g.71gb     Device  1: (UUID: MIG-3)'''
    >>> [(one.name, one.type) for one in slices(listed, None)]
    [('MIG-2', 'NVIDIA H200 MIG 1g.18gb'), ('MIG-3', 'NVIDIA H200 MIG 3g.71gb')]
    >>> [one.name for one in slices(listed, "MIG-3")]
    ['MIG-3']
    """
    found: list[tuple[tuple[str, str, str], Device]] = []
    index = gpu = uuid = ""
    for line in listed.splitlines():
        if whole := GPU.match(line):
            index, gpu, uuid = whole.groups()
        elif part := SLICE.match(line):
            profile, gigabytes, own = part.groups()
            device = Device(own, f"{gpu} MIG {profile}", int(int(gigabytes) * 2**30 * KEPT))
            found.append(((index, uuid, own), device))
    if visible is None:
        return [device for _, device in found]
    return [device for name in _names(visible) for names, device in found if name in names]


def _names(visible: str) -> Iterable[str]:
    return dict.fromkeys(name.strip() for name in visible.split(",") if name.strip())


def find_slices() -> list[Device]:
    """The MIG slices of this machine that the environment lets this process use; none where CUDA shows a whole GPU."""
    import torch

    if not torch.cuda.is_available() or "MIG" not in torch.cuda.get_device_name(0):
        return []
    try:
        ran = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []  # the one slice that CUDA shows is there all the same
    return slices(ran.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))
