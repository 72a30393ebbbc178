"""Power limits that are lent: the limit that a device had before comes back, whatever ends its holders.

A device's holders are kept in a file, under a lock, so that processes know of each other. Each holder wishes for a
limit; the highest wish holds, so that nobody is slowed down by another. When the last holder leaves, the prior limit
returns. Each holder has a watchdog, a process beside it that ends its lease where the holder was killed. Where both
were killed, the next holder finds the prior limit in the file.

Run as a program, this is the watchdog: ``python -m penstock.energy.lease UUID HOLDER``.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.energy.nvml import Gpu, NvmlError

READY = b"ready\n"
_numbers = count()


def folder() -> Path:
    """The folder of the leases of this machine, which all of its users share."""
    return Path(tempfile.gettempdir()) / "penstock-limits"


class Lease:
    """A power limit of one device, until ``close``: ``with Lease(gpu) as lease: lease.wish(450.0)``."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._name = f"{os.getpid()} {_started(os.getpid())} {next(_numbers)}"
        self._watchdog: subprocess.Popen[bytes] | None = None

    def wish(self, watts: float) -> float:
        """Wish for a limit; gives the one that holds. Raises an NvmlError where it cannot be set."""
        least, most = self._gpu.limits()
        if not least <= watts <= most:
            raise NvmlError(f"expected a power limit from {least:g} to {most:g} W, got {watts:g} W")
        if self._watchdog is None:
            self._watchdog = _watchdog(self._gpu.uuid, self._name)
        try:
            with _held(self._gpu) as there:
                there["holders"][self._name] = watts
        except NvmlError:
            self.close()
            raise
        return self._gpu.limit()

    @property
    def watchdog(self) -> int | None:
        """The process that ends the lease where this one is killed."""
        return None if self._watchdog is None else self._watchdog.pid

    def close(self) -> None:
        """Leave: the prior limit returns, unless others hold the device."""
        if self._watchdog is None:
            return
        watchdog, self._watchdog = self._watchdog, None
        try:
            end(self._gpu, self._name)
        finally:
            watchdog.communicate()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _watchdog(uuid: str, name: str) -> subprocess.Popen[bytes]:
    """A holder's watchdog, once it is ready: before that nothing is set. It finds modules where this process does."""
    command = [sys.executable, "-m", "penstock.energy.lease", uuid, name]
    started = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    assert started.stdout is not None
    if started.stdout.readline() != READY:
        started.communicate()
        raise NvmlError("the process that would bring the prior limit back could not start")
    return started


def end(gpu: Gpu, name: str) -> None:
    """End a holder's lease."""
    with _held(gpu) as there:
        there["holders"].pop(name, None)


@contextmanager
def _held(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Change a device's holders; the limit that follows from them is set at the end, before others may look."""
    with _locked(gpu.uuid) as file:
        there = _read(file) or {"prior": gpu.limit(), "set": None, "holders": {}}
        holders: dict[str, float] = there["holders"]
        yield there
        for name in [name for name in holders if not _lives(name)]:
            del holders[name]
        limit, now = max(holders.values(), default=there["prior"]), gpu.limit()
        # Whoever set another limit by hand in the meantime is left alone.
        if now != limit and (holders or there["set"] in (None, now)):
            gpu.set_limit(limit)
        if holders:
            _write(file, {**there, "set": gpu.limit()})
        else:
            file.unlink(missing_ok=True)


@contextmanager
def _locked(uuid: str) -> Iterator[Path]:
    place = folder()
    place.mkdir(mode=0o777, exist_ok=True)
    with open(place / f"{uuid}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield place / f"{uuid}.json"


def _read(file: Path) -> dict[str, Any] | None:
    try:
        there = json.loads(file.read_text())
        return there if {"prior", "set", "holders"} <= there.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _write(file: Path, there: dict[str, Any]) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(there))
    partial.replace(file)


def _lives(name: str) -> bool:
    pid, started, _ = name.split()
    return _started(int(pid)) == started


def _started(pid: int) -> str:
    """When a process began, which tells it from a later one of its number; "gone" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "gone"


def _watch(uuid: str, name: str) -> None:
    gpu = Gpu(uuid)
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    sys.stdin.buffer.read()  # until the holder has left, or is gone
    end(gpu, name)


if __name__ == "__main__":
    _watch(sys.argv[1], sys.argv[2])
