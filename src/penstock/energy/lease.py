"""Power limits that are lent: the limit that a device had before comes back, whatever ends its holders.

A device's holders are kept in a file, under a lock, so that processes know of each other. Each holder wishes for a
limit; the highest wish holds, so that nobody is slowed down by another. When the last holder leaves, the prior limit
returns. Each holder has a watchdog, a process beside it that ends its lease where the holder was killed. Where both
were killed, the next holder finds the prior limit in the file.

The file says what a device's limit will be, so nobody may write it who may not set that limit, which takes root's
permission. Its folder is in /run, which no program cleans, and belongs to root or to the user who lends; where another
user could write there, nothing is set.

Run as a program, this is the watchdog: ``python -m penstock.energy.lease UUID HOLDER``.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.energy.nvml import Gpu, NvmlError

READY = b"ready "  # and its number
_numbers = count()


FOLDER = "PENSTOCK_LEASES"
"""The environment variable that names another folder for leases, such as one that containers share."""


def folder() -> Path:
    """The folder of the leases of this machine, one for all of its processes."""
    return Path(os.environ.get(FOLDER) or "/run/penstock-limits")


class Lease:
    """A power limit of one device, until ``close``: ``with Lease(gpu) as lease: lease.wish(450.0)``."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._name = f"{os.getpid()} {_started(os.getpid())} {next(_numbers)}"
        self._watchdog: subprocess.Popen[bytes] | None = None
        self.watchdog: int | None = None
        """The process that ends the lease where this one is killed."""
        self.alone = True
        """Whether nobody else held the device when this one wished last."""

    def prior(self) -> float:
        """The limit that comes back at last: another holder's, where there is one, found it."""
        with _locked(self._gpu.uuid) as file:
            there = _read(file)
            return self._gpu.limit() if there is None else float(there["prior"])

    def wish(self, watts: float) -> float:
        """Wish for a limit; gives the one that holds. Raises an NvmlError where it cannot be set."""
        least, most = self._gpu.limits()
        if not least <= watts <= most:
            raise NvmlError(f"expected a power limit from {least:g} to {most:g} W, got {watts:g} W")
        if self._watchdog is None:
            with _locked(self._gpu.uuid):  # where nobody can keep a lease, no watchdog could end it
                pass
            self._watchdog, self.watchdog = _watchdog(self._gpu.uuid, self._name)
        try:
            with _held(self._gpu) as there:
                there["holders"][self._name] = watts
                self.alone = not any(_lives(name) for name in there["holders"] if name != self._name)
        except NvmlError:
            self.close()
            raise
        return self._gpu.limit()

    def close(self) -> None:
        """Leave: the prior limit returns, unless others hold the device."""
        if self._watchdog is None:
            return
        watchdog, self._watchdog, self.watchdog = self._watchdog, None, None
        try:
            end(self._gpu, self._name)
        finally:
            watchdog.communicate()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _watchdog(uuid: str, name: str) -> tuple[subprocess.Popen[bytes], int]:
    """A holder's watchdog and its number, once it is ready: before that nothing is set.

    It finds modules where this process does. It is a child of nobody's: Ray kills the children of a worker that ends.
    """
    command = [sys.executable, "-m", "penstock.energy.lease", uuid, name]
    started = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    assert started.stdout is not None
    said = started.stdout.readline()
    if not said.startswith(READY):
        started.communicate()
        raise NvmlError("the process that would bring the prior limit back could not start")
    return started, int(said.removeprefix(READY))


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
    try:
        place.mkdir(mode=0o755, exist_ok=True)
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            raise NvmlError(
                f"leases of power limits need a folder that root or you alone may write to, and {place} is none: "
                f"remove it, or name another by {FOLDER}",
                permission=True,
            )
        lock = open(place / f"{uuid}.lock", "w")  # noqa: SIM115 (the lock is let go with it, below)
    except OSError as error:
        said = f"leases of power limits cannot be kept in {place} ({error}): name another folder by {FOLDER}"
        raise NvmlError(said, permission=True) from None
    with lock:
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
    if os.fork():
        os._exit(0)
    gpu = Gpu(uuid)
    sys.stdout.buffer.write(READY + b"%d\n" % os.getpid())
    sys.stdout.flush()
    sys.stdin.buffer.read()  # until the holder has left, or is gone
    end(gpu, name)


if __name__ == "__main__":
    _watch(sys.argv[1], sys.argv[2])
