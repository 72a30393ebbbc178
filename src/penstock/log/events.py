"""The events of a study, and the line of each in the log.

Every line carries its number, so a line that is missing inside is noticed; and a sum of its text, so a changed byte is.
A line of versions 1 and 2 has no sum. In every line each value must have its field's type.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, get_args
from zlib import crc32

from penstock.log import fields
from penstock.trial import Mode, StateRef, Usage, plain

VERSION = 6
PLAIN = 4  # the version of a log without surrogates and joules, which earlier readers understand
SURROGATES = 5  # the version of a log with surrogates and without joules
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
    until: float | None


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
    other trials died with it. ``usage`` is what no report told, where devices are metered.
    """

    trial: int
    attempt: int
    error: str
    final: bool
    clock: float
    own: bool = True
    usage: Usage | None = None


@dataclass(frozen=True)
class Stopped:
    """A trial was made to leave its devices before its budget; it goes on from its last state.

    ``usage`` is what no report told, where devices are metered.
    """

    trial: int
    attempt: int
    clock: float
    usage: Usage | None = None


@dataclass(frozen=True)
class Charged:
    """A trial used what no other line tells: it trained units again, or trained on after its last report."""

    trial: int
    attempt: int
    usage: Usage
    clock: float


@dataclass(frozen=True)
class Metered:
    """A device's joules since its last such line by this driver, and those of them that no trial used, ``idle``.

    Joules of trials that have not reported yet are in neither. ``watts`` is the mean power, and ``most`` the greatest
    between two readings. ``limit`` is the device's power limit and ``range`` the least and the greatest that it can
    have, None where it has none. ``meter`` says how it counts.
    Without joules, ``reason`` says why the device cannot be metered any more.
    """

    device: str
    joules: float | None
    idle: float = 0.0
    watts: float = 0.0
    most: float = 0.0
    limit: float | None = None
    range: tuple[float, float] | None = None
    meter: str = ""
    reason: str = ""
    clock: float = 0.0


@dataclass(frozen=True)
class Limited:
    """A power limit of a device, for trials of a signature in bundles of a size.

    ``table`` has the seconds of a step and the watts by limit, as measured; it is empty where nothing was tried.
    ``set`` says whether the limit holds, and not only would. ``seconds`` and ``joules`` are a step's at the limit, as
    parts of those without it; ``error`` is how far they may be off, where a model foresees them.
    """

    device: str
    signature: str
    size: int
    limit: float
    set: bool
    seconds: float
    joules: float
    error: float = 0.0
    table: dict[int, tuple[float, float]] = field(default_factory=dict)
    reason: str = ""
    clock: float = 0.0


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
    | Charged
    | Metered
    | Limited
    | Dropped
    | Ended
)
_KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Event)}


def encode(event: Event, number: int) -> str:
    """One line of the log, without its newline."""
    body = {"n": number, "event": type(event).__name__.lower(), **vars(event)}
    if body.get("usage", ...) is None:  # so a log without joules is one that earlier readers understand
        del body["usage"]
    return _summed(_ENCODER.encode(body)[:-1])


def _default(value: Any) -> Any:
    if isinstance(value, Usage):
        return {name: one for name, one in vars(value).items() if (name, one) not in _UNSAID}
    return vars(value) if isinstance(value, StateRef) else plain(value)


_UNSAID = (("joules", None), ("unmetered", ""))
_ENCODER = json.JSONEncoder(default=_default, separators=(",", ":"))


def _summed(text: str) -> str:
    """A line from its text without the last brace: the sum is its last field."""
    return f'{text},"sum":"{crc32(text.encode()):08x}"}}'


_SUM = len(_summed(""))


def decode(line: str, number: int) -> Event:
    """The event of line ``number`` (from 0); raises ValueError where the line is not whole."""
    return decode_summed(line, number)[0]


def decode_summed(line: str, number: int) -> tuple[Event, bool]:
    """The event of a line, as ``decode`` gives it, and whether the line has a sum."""
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
    if isinstance(event, Opened) and not newer(event):
        fields.check(Settings, event.settings)
        if event.settings.get("log", 0) >= SUMMED and not summed:
            raise ValueError("its sum is missing")
    return event, summed


def newer(event: Opened) -> bool:
    """Whether a newer Penstock than this one opened the study."""
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
