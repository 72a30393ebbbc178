"""The events of a study, their lines in the log, and how a log is read.

Every line carries its number, so a line that is missing inside is noticed; and a sum of its text, so a changed byte is.
A line of versions 1 and 2 has no sum. There, as everywhere, each value must have its field's type, and each event must
fit the events before it: code that takes events from a reader can rely on that.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args
from zlib import crc32

from penstock.errors import LogError
from penstock.log import fields
from penstock.log.states import NAME
from penstock.numeric import finite
from penstock.trial import Mode, StateRef, Usage, plain

VERSION = 5
PLAIN = 4  # the version of a log without surrogates, which earlier readers understand
SUMMED = 3  # the first version whose lines have sums


class _FirstSettings(TypedDict):
    name: str
    file: str | None
    task: str
    source: str
    space: Any
    metric: str
    mode: Mode
    algorithm: str
    max_budget: int
    sampler: str | None
    seed: int
    trials: int | None
    deadline: float | None
    target: float | None


class Settings(_FirstSettings, total=False):
    """The settings that every log has, and settings that came later; a driver may log further ones."""

    log: int
    began: float | None
    kind: str | None
    keep: int | None
    mode_from: str | None
    max_failures: int | None
    states: str | None
    home: str | None
    run: dict[str, Any]
    surrogate: dict[str, Any] | None


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
    """A trial was given devices, in a bundle or in a part of a pack; each placement is a new attempt."""

    trial: int
    attempt: int
    devices: tuple[str, ...]
    mode: str
    state: StateRef | None
    clock: float
    share: float = 1.0
    variant: str = ""
    bundle: str = ""


@dataclass(frozen=True)
class Devices:
    """The devices that exist from now on, each with the known fields of ``bundle.Device``.

    ``nodes`` are the nodes that are paid for from now on, each with the fields of ``bundle.Node``; ``since`` is by the
    study's clock here.
    """

    devices: tuple[dict[str, Any], ...]
    clock: float
    nodes: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Planned:
    """The plan that the study follows from now on, as ``planning.plan`` writes it, and why it is followed.

    ``prices`` has the price of a node for an hour by its instance and market, as in "p3.8xlarge spot", and that of the
    "head" node. "data" is what the data of a new node costs, and "minimum" the least seconds that a node is paid for.
    With "function", devices are paid for while they train. ``given`` says that the user gave the plan; otherwise the
    study made it of the one before.
    """

    plan: dict[str, Any]
    prices: dict[str, float]
    reason: str
    clock: float
    given: bool = False


Kind = Literal["sharing", "scaling", "trying", "refusing", "packing", "threads"]


SOLO = "solo"


@dataclass(frozen=True)
class Measured:
    """A worker's measurement of a signature's trials on its device: seconds by count, and the best count.

    For "sharing" the ``table`` has the seconds of one step of a whole bundle by the number of its trials. For "scaling"
    it has the seconds of one step of one trial by the number of its devices. It is empty where nothing was timed. For
    "trying", which is not logged, it has the seconds of the check before a first step together, at 0, and of a step
    alone, at 1. For "refusing", which is not logged either, there is a reason alone: why trials of the signature cannot
    be fused, for later studies. For "packing" it has the throughput of a pack over that of its bundles in turn, by
    their number. For "threads" it has the seconds of a step of a trial alone on a CPU by the number of torch's threads.
    ``way`` says how the step is computed, such as "native". The engine sets ``clock``, the study's time: a worker does
    not know it. With ``SOLO`` for a signature, it is the engine's line on how many trials train solo and why.
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
    """A trial reported metrics; ``state`` names the state that was saved at that unit, if one was."""

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


Event = (
    Opened
    | Asked
    | Wrote
    | Placed
    | Devices
    | Planned
    | Measured
    | Reported
    | Saved
    | Failed
    | Stopped
    | Dropped
    | Ended
)
_KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Event)}


def encode(event: Event, number: int) -> str:
    """One line of the log, without its newline."""
    body = {"n": number, "event": type(event).__name__.lower(), **vars(event)}
    return _summed(_ENCODER.encode(body)[:-1])


def _default(value: Any) -> Any:
    return vars(value) if isinstance(value, StateRef | Usage) else plain(value)


_ENCODER = json.JSONEncoder(default=_default, separators=(",", ":"))


def _summed(text: str) -> str:
    """A line from its text without the last brace: the sum is its last field."""
    return f'{text},"sum":"{crc32(text.encode()):08x}"}}'


_SUM = len(_summed(""))


def decode(line: str, number: int) -> Event:
    """The event of line ``number`` (from 0); raises ValueError where the line is not whole."""
    return _decode(line, number)[0]


def _decode(line: str, number: int) -> tuple[Event, bool]:
    """The event of a line, and whether the line has a sum."""
    body = json.loads(line)
    if not isinstance(body, dict):
        raise ValueError("it is no object")
    summed = body.pop("sum", None) is not None
    if summed and line != _summed(line[:-_SUM]):
        raise ValueError("its text does not fit its sum")
    if body.pop("n", None) != number:
        raise ValueError("its number is out of order")
    name = body.pop("event", None)
    if not isinstance(name, str) or name not in _KINDS:
        raise ValueError(f"there is no event {name!r}")
    kind = _KINDS[name]
    _from_version_1(body, kind)
    event: Event = fields.build(kind, body)
    if isinstance(event, Opened) and not _newer(event):
        fields.check(Settings, event.settings)
        if event.settings.get("log", 0) >= SUMMED and not summed:
            raise ValueError("its sum is missing")
    return event, summed


def _newer(event: Opened) -> bool:
    version = event.settings.get("log")
    return isinstance(version, int) and version > VERSION


def _from_version_1(body: dict[str, Any], kind: type) -> None:
    """Change a line of the log's first version into the line that the present version would have written."""
    if kind is Devices and isinstance(body.get("types"), dict):
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
            event, summed = _decode(line.removesuffix(b"\r").decode(), self.lines)
            if self._summed and not summed:
                raise ValueError("its sum is missing")
            self._summed = summed
            if isinstance(event, Opened) and _newer(event):
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
        elif isinstance(event, Placed | Reported | Saved | Failed | Stopped | Dropped):
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
