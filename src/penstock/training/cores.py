"""How many cores this process may use: by its affinity, and by the quotas of its control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath


def cores(root: Path = Path("/")) -> int:
    """The cores that there is time for; ``root`` is where the system's files lie.

    >>> cores() >= 1
    True
    """
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([there, *(math.ceil(quota) for quota in _quotas(root) if quota < math.inf)]))


def _quotas(root: Path) -> Iterator[float]:
    """The quotas, in cores, of the groups that hold this process.

    A group's quota holds for all groups inside of it. In a container, the groups that the process is said to be in may
    lie outside of what can be seen there: then the container's own group is at the top.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            groups = [PurePosixPath(path.lstrip("/")), *PurePosixPath(path.lstrip("/")).parents]
            if not controllers:  # version 2
                for home in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                    yield from (_quota(*_words(root / home / group / "cpu.max", 2)) for group in groups)
            elif "cpu" in controllers.split(","):
                for home in ("sys/fs/cgroup/cpu", f"sys/fs/cgroup/{controllers}"):
                    for group in groups:
                        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                        yield _quota(*(_words(root / home / group / name, 1)[0] for name in names))


def _words(file: Path, count: int) -> list[str]:
    with suppress(OSError):
        if len(words := file.read_text().split()) == count:
            return words
    return [""] * count


def _quota(time: str, period: str) -> float:
    """The cores of a quota of so much time each period; without end where there is none."""
    if not time.isdigit() or not period.isdigit() or not int(time) or not int(period):  # "max", or -1
        return math.inf
    return int(time) / int(period)
