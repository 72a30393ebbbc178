"""The one writer of a study's log: append-only JSON lines, the truth about a study.

Every decision, report, placement and failure is a line here before it takes effect. A line reaches the operating
system in one ``write`` before ``append`` returns, so SIGKILL loses none; ``fsync`` follows at least each second, so a
power loss takes at most a second.

Ctrl-C may cut a method off between any two of its steps, and so may a full disk. The count of lines is then doubtful,
and the next method reads it from the file again: whole lines stay, and half a line goes.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

from penstock.errors import LogError
from penstock.log.events import Event, encode
from penstock.log.lock import Lock
from penstock.log.reader import LogReader
from penstock.log.rescue import how_to_go_on, rescue

LOOK = 1.0  # seconds between two looks at whether the log is still there


class Mark(NamedTuple):
    """A place in the log up to which it holds whole lines."""

    lines: int
    bytes: int


BEGINNING = Mark(0, 0)


@dataclass
class Log:
    """A study's log, opened to be written; holds the study's lock until ``close``."""

    dir: Path
    past: list[Event] = field(default_factory=list)
    _fd: int = -1
    _lock: Lock | None = None
    _mark: Mark = BEGINNING
    _sure: bool = True  # the file ends at the mark
    _synced: tuple[float, int] = 0.0, 0  # when the log was last synced, and how many lines it had
    _looked: float = 0.0
    _rescued: Path | None = None  # where the log is now, once its own place was taken away
    _lost: str | None = None  # why nothing more can be written

    @property
    def path(self) -> Path:
        return self._rescued or self.dir / "log.jsonl"

    @property
    def begun(self) -> bool:
        """Whether there is a line, or may be one: a study without any leaves no trace."""
        return self._mark.lines > 0 or not self._sure

    @classmethod
    def open(cls, dir: Path) -> Log:
        """Take the lock, cut a torn last line and read the events so far into ``past``."""
        log = cls(dir)
        try:
            dir.mkdir(parents=True, exist_ok=True)
            log._lock = Lock.take(dir)
            log._fd = os.open(log.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
            reader = LogReader(log.path)
            log.past = list(reader.new())
            os.ftruncate(log._fd, reader.offset)
            os.fsync(log._fd)
            log._mark = Mark(reader.lines, reader.offset)
            log._looked = time.monotonic()
        except OSError as error:
            log._leave()
            raise LogError(
                f"Cannot write the study's folder {dir} ({error.strerror}): choose another with dir= or --dir."
            ) from None
        except BaseException:
            log._leave()
            raise
        return log

    def append(self, event: Event) -> None:
        """Make an event durable before it takes effect."""
        if not self._sure:
            self._settle()
        line = (encode(event, self._mark.lines) + "\n").encode()
        try:
            if os.lseek(self._fd, 0, os.SEEK_END) != self._mark.bytes:
                self._look()
            self._sure = False
            if os.write(self._fd, line) < len(line):
                self._settle()
                raise OSError(errno.ENOSPC, "only part of a line could be written")
            self._mark = Mark(self._mark.lines + 1, self._mark.bytes + len(line))
            self._sure = True
        except OSError as error:
            raise self._unwritten(error) from None
        self.tick()

    def _settle(self) -> None:
        """Find the mark after a write that was cut off; a later line must not follow half a line."""
        if self._lost is not None:
            raise LogError(self._lost)
        try:
            written = os.pread(self._fd, max(0, os.fstat(self._fd).st_size - self._mark.bytes), self._mark.bytes)
            whole = written[: written.rfind(b"\n") + 1]
            self._mark = Mark(self._mark.lines + whole.count(b"\n"), self._mark.bytes + len(whole))
            os.ftruncate(self._fd, self._mark.bytes)
            self._sure = True
        except OSError as error:
            raise self._unwritten(error) from None

    def tick(self) -> float | None:
        """Sync where a line has waited for a second; gives the seconds until then, or None where no line waits."""
        at, lines = self._synced
        if lines == self._mark.lines:
            return None
        left = at + 1.0 - time.monotonic()  # the machine's clock serves durability only, never a decision
        if left > 0:
            return left
        self._sync()
        return None

    def sync(self) -> None:
        """Make every line so far survive a power loss, and see that the log is still there."""
        self._sync()
        self._look()

    def _sync(self) -> None:
        lines = self._mark.lines
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._unwritten(error) from None
        self._synced = time.monotonic(), lines

    def look(self) -> float:
        """See once a second that the log and its lock are still there; gives the seconds until the next look.

        A log that was removed or replaced would take a study's further lines with it unseen. Its events are written
        beside it, and a LogError says where they are. A log that another program has written to is left as it is.
        """
        left = self._looked + LOOK - time.monotonic()
        if left > 0:
            return left
        self._look()
        return LOOK

    def _look(self) -> None:
        if self._lost is not None:
            raise LogError(self._lost)
        self._looked = time.monotonic()
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            found = None
        except OSError:  # the folder cannot be looked at now, which does not stop the open file from being written
            return
        if found is None or not os.path.samestat(found, os.fstat(self._fd)):
            self._rescue()
        elif found.st_size < self._mark.bytes or (self._sure and found.st_size > self._mark.bytes):
            self._lose(
                f"Another program wrote {self.path} while the study ran, which has {found.st_size} bytes and not "
                f"{self._mark.bytes}, so the study ended: restore the file from a copy, or cut it, then resume."
            )
        elif self._rescued is None and self._lock is not None and not self._lock.current():
            self._lose(
                f"The file {self.dir / 'lock'} was removed while the study ran, so another driver may have started and "
                "this one ended: see that no other runs, then resume."
            )

    def _rescue(self) -> None:
        """Copy the events to another place, which later lines go to as well, and say where that is."""
        gone, before = self.path, self._fd
        if (copied := rescue(gone, before)) is None:
            self._lose(
                f"The log {gone} was removed, moved or replaced while the study ran, and its events can be written to "
                "no folder above it: the study ended, and is lost."
            )
        self._fd, self._rescued = copied
        os.close(before)
        raise LogError(how_to_go_on(gone, self._rescued))

    def _lose(self, why: str) -> NoReturn:
        self._lost, self._sure = why, False
        raise LogError(why)

    def close(self) -> None:
        """Make everything durable and let the lock go."""
        try:
            if self._fd >= 0:
                if not self._sure:
                    self._settle()
                self._sync()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Let the file and the lock go; a study that never began leaves no trace."""
        fd, self._fd = self._fd, -1
        lock, self._lock = self._lock, None
        try:
            if lock is not None and (fd < 0 or os.fstat(fd).st_size == 0):
                with suppress(OSError):
                    if fd >= 0 and os.path.samestat(os.stat(self.path), os.fstat(fd)):
                        self.path.unlink()
                    lock.remove()
                    self.dir.rmdir()
        finally:
            if fd >= 0:
                os.close(fd)
            if lock is not None:
                lock.release()

    def _unwritten(self, error: OSError) -> LogError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            then = "Everything before is safe: make room, then resume."
        else:
            then = "All but the last second is safe: see that the disk is well, then resume."
        return LogError(f"Cannot write {self.path} ({error.strerror}). {then}")
