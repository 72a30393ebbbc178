"""One writer a study: the lock on its folder, and the process that holds it.

The lock is a POSIX lock on the file ``lock``. The system lets it go with its process, however that process ends, so a
number that another process has by now never counts as a driver.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from pathlib import Path
from weakref import WeakValueDictionary

from penstock.errors import LogError

# The C structure ``flock``, as <fcntl.h> has it: on Linux type, whence, start, length, process.
_FLOCK = "qqihh" if sys.platform == "darwin" else "hhqqi"
_TYPE, _PROCESS = (3, 2) if sys.platform == "darwin" else (0, 4)


class Lock:
    """The lock on a study's folder, held until ``release``, or until nobody refers to this object any more."""

    def __init__(self, dir: Path) -> None:
        self.dir, self._key = dir, dir.resolve()
        # A link is not followed: the file is written, and a folder from elsewhere may hold a link to anything.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        self._file = open(os.open(dir / "lock", flags, 0o644), "a+b", buffering=0)  # noqa: SIM115  held with the lock

    @classmethod
    def take(cls, dir: Path) -> Lock:
        """Take the lock; a LogError where a process has it, an OSError where the folder cannot be written."""
        if _is_ours(dir):
            raise LogError(f"The study in {dir} is already being run by this process: let that run end first.")
        while True:
            lock = cls(dir)
            try:
                fcntl.lockf(lock._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                process = os.pread(lock._file.fileno(), 32, 0).decode(errors="replace").strip() or "?"
                raise LogError(
                    f"The study in {dir} is being run by process {process}: wait for it, stop it, or choose another "
                    "name."
                ) from None
            if lock.current():  # else a study that never began has removed this file since it was opened
                break
        lock._file.truncate(0)
        lock._file.write(f"{os.getpid()}\n".encode())
        _OURS[lock._key] = lock
        return lock

    def current(self) -> bool:
        """Whether the lock's file is still the one that other drivers look at."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.dir / "lock"))
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Remove the lock's file while the lock is still held."""
        if self.current():
            os.unlink(self.dir / "lock")

    @property
    def held(self) -> bool:
        return not self._file.closed

    def release(self) -> None:
        """Let the lock go; a second time does nothing."""
        self._file.close()


# The locks of this process. A POSIX lock does not exclude its own process, and goes when that process closes the file.
_OURS: WeakValueDictionary[Path, Lock] = WeakValueDictionary()


def _is_ours(dir: Path) -> bool:
    return (lock := _OURS.get(dir.resolve())) is not None and lock.held


def holder(dir: Path) -> int | None:
    """The process that holds the lock of a folder, None where none does. The lock is only asked about, never taken."""
    if _is_ours(dir):
        return os.getpid()
    try:
        fd = os.open(dir / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        wanted: list[int] = [0] * 5
        wanted[_TYPE] = fcntl.F_WRLCK
        found = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack(_FLOCK, *wanted)))
        if found[_TYPE] == fcntl.F_UNLCK:
            return None
        # The system has no number for a process of another container, or of another machine; the file has one.
        return int(found[_PROCESS]) if found[_PROCESS] > 0 else int(os.pread(fd, 32, 0))
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
