"""A log is read: its events in order, each of which must be able to follow the events before it.

So code that takes events from a reader can rely on them. A torn last line is passed over, and a damaged line inside is
one clear error.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import LogError
from penstock.log.events import (
    VERSION,
    Asked,
    Charged,
    Devices,
    Dropped,
    Event,
    Failed,
    Opened,
    Placed,
    Reported,
    Saved,
    Stopped,
    decode_summed,
    newer,
)
from penstock.log.states import NAME
from penstock.numeric import finite


def read(path: Path) -> Iterator[Event]:
    """The events of a log, without a torn last line; a damaged line inside is an error."""
    yield from LogReader(path).new()


@dataclass
class LogReader:
    """Reads a log that another process may still be writing: ``new`` gives the events since its last call."""

    path: Path
    offset: int = 0
    lines: int = 0
    _summed: bool = False  # a line with a sum has come, so every later line has one
    _reported: list[int] = field(default_factory=list)  # the last unit that each trial reported

    def new(self) -> Iterator[Event]:
        *lines, tail = self._read().split(b"\n")
        for line in lines:
            yield self._take(line)
            self.offset += len(line) + 1
            self.lines += 1
        if not _torn(tail, self.lines):
            raise self._damaged("it ends without a line's end, and not as a line that was cut off while it was written")

    def _read(self) -> bytes:
        """The bytes since the last call. Bytes after the last newline are torn, or still being written."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block the reader for ever
            with open(fd, "rb") as file:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(0, "it is no file")
                file.seek(self.offset)
                return file.read()
        except FileNotFoundError:
            raise LogError(f"Expected a study's log at {self.path}, found none: check the name and --dir.") from None
        except OSError as error:
            raise LogError(
                f"Cannot read the study's log {self.path} ({error.strerror}): check the file and your permissions."
            ) from None

    def _take(self, line: bytes) -> Event:
        try:
            # An editor, or git, may have made the line's end CR LF.
            event, summed = decode_summed(line.removesuffix(b"\r").decode(), self.lines)
            if self._summed and not summed:
                raise ValueError("its sum is missing")
            self._summed = summed
            if isinstance(event, Opened) and newer(event):
                raise LogError(
                    f"{self.path} was written by a newer Penstock (log version {event.settings['log']}; this one reads "
                    f"up to {VERSION}): upgrade Penstock to go on with this study."
                )
            self._follow(event)
        except (ValueError, RecursionError) as error:
            raise self._damaged(str(error)) from None
        return event

    def _damaged(self, why: str) -> LogError:
        return LogError(
            f"Line {self.lines + 1} of {self.path} is damaged ({why}). Expected one whole JSON event a line; restore "
            "the file from a copy, cut it before that line, which gives up all that follows, or start the study under "
            "another name."
        )

    def _follow(self, event: Event) -> None:
        """Refuse an event that cannot follow the events before it."""
        if not self.lines and not isinstance(event, Opened):
            raise ValueError("a log begins with an opened event")
        known = len(self._reported)
        if isinstance(event, Opened):
            for name in ("name", "home"):  # each is the name of a folder, inside of another
                if (folder := event.settings.get(name)) in ("", ".", "..") or "/" in str(folder):
                    raise ValueError(f"{name}: expected the name of one folder, got {folder!r}")
        elif isinstance(event, Asked):
            origin = event.trial if event.start_from is None else event.start_from[0]
            if not 0 <= event.trial <= known or not (0 <= origin < known or origin == event.trial):
                raise ValueError(f"it asks for trial {event.trial} from trial {origin}, and {known} trials are known")
            if event.trial == known:
                self._reported.append(0)
            if event.start_from is not None and origin != event.trial:
                self._reported[event.trial] = event.start_from[1]
        elif isinstance(event, Placed | Reported | Saved | Failed | Stopped | Charged | Dropped):
            for trial in event.trials if isinstance(event, Dropped) else (event.trial,):
                if not 0 <= trial < known:
                    raise ValueError(f"it is about trial {trial}, and {known} trials are known")
            state = getattr(event, "state", None)
            if state is not None and (not NAME.fullmatch(state.file) or state.trial >= known):
                raise ValueError(f"{state.file!r} is no state of a trial that is known")
            if isinstance(event, Placed) and event.share <= 0:
                raise ValueError(f"its share is {event.share}")
            if isinstance(event, Reported):
                if event.unit <= self._reported[event.trial] or "budget" in event.metrics:
                    raise ValueError(f"it reports unit {event.unit} after unit {self._reported[event.trial]}")
                self._reported[event.trial] = event.unit
        elif isinstance(event, Devices):
            for device in event.devices:
                if not isinstance(device.get("name"), str) or not isinstance(device.get("type"), str):
                    raise ValueError("a device has no name or no type")
            for node in event.nodes:
                if not isinstance(node.get("name"), str) or finite(node.get("since")) is None:
                    raise ValueError("a node has no name, or no time from which on it is paid")


def _torn(tail: bytes, number: int) -> bool:
    """Whether bytes may be the beginning of a line, or zeros, which some file systems leave after a power loss."""
    begins = b'{"n":%d,' % number
    zeros = not tail.strip(b"\0")
    return zeros or (tail[: len(begins)] == begins[: len(tail)] and b"\r" not in tail[:-1])
