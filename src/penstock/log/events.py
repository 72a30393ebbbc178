"""The event log: append-only JSON lines, the truth about a study.

Every decision, report, placement and failure is a line here before it takes effect. A line reaches the operating
system in one ``write`` before ``append`` returns, so SIGKILL loses none; ``fsync`` follows at least each second, so a
power loss takes at most a second. Every line carries its number, so a line that is missing inside is noticed.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.errors import LogError
from penstock.trial import StateRef, Usage, plain

VERSION = 2


@dataclass(frozen=True)
class Opened:
    """A driver took up the study: a first time, after an interruption, or with changed settings."""

    settings: dict[str, Any]
    clock: float = 0.0


@dataclass(frozen=True)
class Asked:
    """The algorithm wants a trial run to a budget; a config unlike the trial's last one is a change (PBT)."""

    trial: int
    config: dict[str, Any]
    budget: int
    group: str
    start_from: tuple[int, int] | None = None
    priority: float = 0.0
    weight: float = 1.0
    open: bool = False
    variant: str = ""


@dataclass(frozen=True)
class Wrote:
    """A sampler wrote an attribute of a trial, or of the study where ``trial`` is None."""

    trial: int | None
    key: str
    value: Any


@dataclass(frozen=True)
class Placed:
    """A trial was given devices; each placement is a new attempt."""

    trial: int
    attempt: int
    devices: tuple[str, ...]
    mode: str
    state: StateRef | None
    clock: float
    share: float = 1.0
    variant: str = ""


@dataclass(frozen=True)
class Devices:
    """The devices that exist from now on, each with the known fields of ``bundle.Device``."""

    devices: tuple[dict[str, Any], ...]
    clock: float


Kind = Literal["sharing", "scaling"]


@dataclass(frozen=True)
class Measured:
    """A worker's measurement of a signature's trials on its device: seconds by count, and the best count.

    For "sharing" the ``table`` has the seconds of one step of a whole bundle by the number of its trials. For "scaling"
    it has the seconds of one step of one trial by the number of its devices. It is empty where nothing was timed.
    ``way`` says how the step is computed, such as "native". The engine sets ``clock``, the study's time: a worker does
    not know it.
    """

    signature: str
    device: str
    kind: Kind
    table: dict[int, float]
    size: int
    reason: str
    way: str = ""
    clock: float = 0.0


@dataclass(frozen=True)
class Reported:
    """A trial reported metrics; ``state`` is set where one was saved at that unit."""

    trial: int
    attempt: int
    unit: int
    metrics: dict[str, float]
    state: StateRef | None
    usage: Usage
    clock: float


@dataclass(frozen=True)
class Saved:
    """A state was written between reports, or when the trial was stopped."""

    trial: int
    attempt: int
    state: StateRef
    clock: float


@dataclass(frozen=True)
class Failed:
    """An attempt ended with an error. ``final`` says that the trial is given up.

    ``own`` says that the error counts against the trial. It does not where the trial's device was lost, nor where
    other trials died with it.
    """

    trial: int
    attempt: int
    error: str
    final: bool
    clock: float
    own: bool = True


@dataclass(frozen=True)
class Stopped:
    """A trial was made to leave its devices before its budget; it goes on from its last state."""

    trial: int
    attempt: int
    clock: float


@dataclass(frozen=True)
class Dropped:
    """The algorithm will not ask for these trials again."""

    trials: tuple[int, ...]


@dataclass(frozen=True)
class Ended:
    """The driver ended its run of the study. The reason is done, deadline, target, interrupted or failed."""

    reason: str
    clock: float


Event = Opened | Asked | Wrote | Placed | Devices | Measured | Reported | Saved | Failed | Stopped | Dropped | Ended
_KINDS: dict[str, type] = {
    kind.__name__.lower(): kind
    for kind in (Opened, Asked, Wrote, Placed, Devices, Measured, Reported, Saved, Failed, Stopped, Dropped, Ended)
}


def encode(event: Event, number: int) -> str:
    """One line of the log, without its newline."""
    body = {"n": number, "event": type(event).__name__.lower(), **vars(event)}
    return json.dumps(body, default=_default, separators=(",", ":"))


def _default(value: Any) -> Any:
    return vars(value) if isinstance(value, StateRef | Usage) else plain(value)


def decode(line: str, number: int) -> Event:
    """The event of line ``number`` (from 0); raises ValueError where the line is not whole."""
    body = json.loads(line)
    if body.pop("n") != number:
        raise ValueError("its number is out of order")
    kind = _KINDS[body.pop("event")]
    if body.get("state") is not None:
        body["state"] = StateRef(**body["state"])
    if "usage" in body:
        body["usage"] = Usage(**body["usage"])
    _from_version_1(body, kind)
    if "table" in body:
        body["table"] = {int(count): seconds for count, seconds in body["table"].items()}
    for name in ("devices", "trials", "start_from"):
        if body.get(name) is not None:
            body[name] = tuple(body[name])
    event: Event = kind(**body)
    return event


def _from_version_1(body: dict[str, Any], kind: type) -> None:
    """Change a line of the log's first version into the line that the present version would have written."""
    if kind is Devices and "types" in body:
        body["devices"] = [{"name": name, "type": type} for name, type in body.pop("types").items()]
    elif kind is Measured and "seconds" in body:
        sharing, scaling = body.pop("seconds"), body.pop("scaling", {})
        body.pop("bytes", None)
        body |= {"kind": "scaling" if scaling and not sharing else "sharing", "table": sharing or scaling}


def read(path: Path) -> Iterator[Event]:
    """The events of a log, without a torn last line; a damaged line inside is an error."""
    yield from LogReader(path).new()


@dataclass
class LogReader:
    """Reads a log that another process may still be writing: ``new`` gives the events since its last call."""

    path: Path
    offset: int = 0
    lines: int = 0

    def new(self) -> Iterator[Event]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            raise LogError(f"Expected a study's log at {self.path}, found none: check the name and --dir.") from None
        whole = data[: data.rfind(b"\n") + 1]  # bytes after the last newline are torn, or still being written
        for line in whole.splitlines():
            yield self._decode(line)
            self.offset += len(line) + 1
            self.lines += 1

    def _decode(self, line: bytes) -> Event:
        try:
            event = decode(line.decode(), self.lines)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LogError(
                f"Line {self.lines + 1} of {self.path} is damaged ({error}). Expected one whole JSON event a line; "
                "restore the file from a copy, or start the study under another name."
            ) from None
        if isinstance(event, Opened) and event.settings.get("log", 0) > VERSION:
            raise LogError(
                f"{self.path} was written by a newer Penstock (log version {event.settings['log']}; this one reads up "
                f"to {VERSION}): upgrade Penstock to go on with this study."
            )
        return event


@dataclass
class Log:
    """The one writer of a study's log; holds the study's lock until ``close``."""

    dir: Path
    past: list[Event] = field(default_factory=list)
    _fd: int = -1
    _lines: int = 0
    _synced_lines: int = 0
    _synced: float = 0.0

    @property
    def path(self) -> Path:
        return self.dir / "log.jsonl"

    @classmethod
    def open(cls, dir: Path) -> Log:
        """Take the lock, cut a torn last line and read the events so far into ``past``."""
        try:
            dir.mkdir(parents=True, exist_ok=True)
            _take_lock(dir)
        except OSError as error:
            raise LogError(
                f"Cannot write the study's folder {dir} ({error.strerror}): choose another with dir= or --dir."
            ) from None
        log = cls(dir)
        try:
            log._fd = os.open(log.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            reader = LogReader(log.path)
            log.past = list(reader.new())
            log._lines = reader.lines
            os.ftruncate(log._fd, reader.offset)
            os.fsync(log._fd)
        except BaseException:
            log.close()
            raise
        return log

    def append(self, event: Event) -> None:
        """Make an event durable before it takes effect."""
        line = (encode(event, self._lines) + "\n").encode()
        try:
            if (written := os.write(self._fd, line)) < len(line):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)  # a later line must not follow half a line
                raise OSError(0, "only part of a line could be written")
        except OSError as error:
            raise LogError(
                f"Cannot write {self.path} ({error.strerror}). Everything before is safe: make room, then resume."
            ) from None
        self._lines += 1
        self.tick()

    def tick(self) -> float | None:
        """Sync where a line has waited for a second; gives the seconds until then, or None where no line waits."""
        if self._synced_lines == self._lines:
            return None
        left = self._synced + 1.0 - time.monotonic()  # the machine's clock serves durability only, never a decision
        if left > 0:
            return left
        self.sync()
        return None

    def sync(self) -> None:
        """Make every line so far survive a power loss."""
        os.fsync(self._fd)
        self._synced, self._synced_lines = time.monotonic(), self._lines

    def close(self) -> None:
        """Make everything durable and let the lock go."""
        if self._fd >= 0:
            os.fsync(self._fd)
            if os.fstat(self._fd).st_size == 0:  # nothing was begun: leave no trace
                self.path.unlink()
                (self.dir / "lock").unlink()
                with suppress(OSError):
                    self.dir.rmdir()
            os.close(self._fd)
            self._fd = -1
        lock = _LOCKS.pop(self.dir.resolve(), None)
        if lock is not None:
            os.close(lock)


_LOCKS: dict[Path, int] = {}  # locks that this process holds: a POSIX lock does not exclude its own process


def _take_lock(dir: Path) -> None:
    if dir.resolve() in _LOCKS:
        raise LogError(f"The study in {dir} is already being run by this process: let that run end first.")
    lock = os.open(dir / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(lock, 32, 0).decode().strip() or "?"
        os.close(lock)
        raise LogError(
            f"The study in {dir} is being run by process {holder}: wait for it, stop it, or choose another name."
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    _LOCKS[dir.resolve()] = lock
