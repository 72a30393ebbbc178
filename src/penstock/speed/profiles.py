"""Measurements, kept for the next study of the same task on the same kind of device.

They lie in one file of JSON lines, to which several processes may append at once: a line is one measurement, appended
in one ``write``. Measurements of several kinds lie side by side; of two measurements of one kind the last counts. The
file is only a cache: a line that is torn, damaged or unlike a profile is passed over. Where the file cannot be read or
written, the next study measures again.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

LINES = 1000  # a longer file is rewritten when it is opened: the newest 500 profiles stay

Kind = Literal[
    "sharing",
    "scaling",
    "trying",
    "refusing",
    "unit",
    "spread",
    "moving",
    "joules",
    "watts",
    "limit seconds",
    "limit watts",
    "opening",
]
"""The kind of a measurement, which says what its table holds.

- "sharing": seconds of one step of a whole bundle, by the number of its trials; 1 is a trial that runs solo.
- "scaling": seconds of one step of one trial, by the number of its devices.
- "trying": seconds that the check before a signature's first step together takes, at 0, and a step alone, at 1.
- "refusing": nothing, as trials of the signature cannot be fused: ``reason`` says why.
- "unit": seconds of a unit of a trial alone on a device, by the count 1.
- "spread": how units vary: the deviation of a trial's units in seconds, at 0, that of the trials' means, at 1, and the
  number of trials that were seen, at 2.
- "moving": seconds that a trial takes to start, at 0, and to stop, at 1.
- "joules": joules of a unit of one trial, by the number of trials in its bundle.
- "watts": what a device draws, by the number of trials in a bundle, and at 0 the greatest power that it can have.
- "limit seconds", "limit watts": seconds of a step, and what the device draws, by power limit in watts. The signature
  is followed by the number of trials in the bundle, as in "64.0f3a x8".
- "opening": seconds from a study's start to its first placement, by the count 0.
"""


@dataclass(frozen=True)
class Profile:
    """One measurement of a signature's trials on a kind of device: numbers by count.

    ``device`` names everything besides the task that the times depend on, such as the accelerator and torch's version.
    The worker that measures writes it; here it is only compared. ``size`` is the count that was chosen, 0 where none
    was. ``reason`` explains the choice in a sentence for the user, and ``way`` says how the step was computed.
    """

    task: str
    device: str
    signature: str
    kind: Kind
    table: dict[int, float]
    size: int = 0
    way: str = ""
    reason: str = ""


Key = tuple[str, str, str, str]


@dataclass
class Profiles:
    """The profiles in one file: the ones it had when it was opened, and the ones put since.

    ``kept`` says whether new profiles are written to the file. A rehearsal measures nothing, so its profiles are not.
    """

    path: Path
    kept: bool = True
    _known: dict[Key, Profile] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | str, *, kept: bool = True) -> Profiles:
        """Read the file, where there is one, and rewrite it where it has grown long.

        A line that another study appends during the rewrite is lost to later studies: they measure again.
        """
        profiles = cls(Path(path), kept)
        with suppress(OSError):
            lines = profiles.path.read_bytes().splitlines()
            for line in lines:
                if (profile := _decode(line)) is not None:
                    profiles._take(profile)
            if kept and len(lines) > LINES:
                profiles._rewrite()
        return profiles

    def get(self, task: str, device: str, signature: str, kind: Kind) -> Profile | None:
        """The last profile of that kind; None where there is none."""
        return self._known.get((task, device, signature, kind))

    def of(self, task: str, device: str) -> list[Profile]:
        """The last profile of each signature and kind, for a task on a kind of device."""
        return [one for one in self._known.values() if (one.task, one.device) == (task, device)]

    def beside(self, task: str, device: str, signature: str) -> Profile | None:
        """The last profile of sharing that paid for trials which differ from these in their batch size alone."""
        alike = [
            one
            for one in self.of(task, device)
            if one.kind == "sharing" and one.size > 1 and family(one.signature) == family(signature)
            and one.signature != signature and batch_size(one.signature)
        ]  # fmt: skip
        return alike[-1] if alike else None

    def kinds(self, task: str) -> dict[str, list[Profile]]:
        """The last profiles of a task by the kind of device, the kind that was measured last at the end."""
        found: dict[str, list[Profile]] = {}
        for one in self._known.values():
            if one.task == task:
                found.setdefault(one.device, []).append(one)
        return found

    def put(self, profile: Profile) -> None:
        """Keep a profile: for this study in any case, and for the next where the file can be written."""
        if self._known.get(_key(profile)) == profile:
            return
        self._take(profile)
        if not self.kept:
            return
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                end = os.fstat(file).st_size
                # The last line is torn or still being written. In the latter case an empty line follows: it is ignored.
                torn = end > 0 and os.pread(file, 1, end - 1) != b"\n"
                os.write(file, b"\n" * torn + _encode(profile))
            finally:
                os.close(file)

    def _take(self, profile: Profile) -> None:
        self._known.pop(_key(profile), None)  # keeps the dict in order from old to new
        self._known[_key(profile)] = profile

    def _rewrite(self) -> None:
        new = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            new.write_bytes(b"".join(map(_encode, list(self._known.values())[-LINES // 2 :])))
            new.replace(self.path)
        finally:
            new.unlink(missing_ok=True)


def family(signature: str) -> str:
    """The part of a signature that trials of other batch sizes have in common with it.

    >>> family("64.0f3a") == family("128.0f3a")
    True
    """
    return signature.rpartition(".")[2]


def batch_size(signature: str) -> int:
    """The batch size of a signature's trials; 0 where the signature has none.

    >>> batch_size("64.0f3a"), batch_size("other")
    (64, 0)
    """
    first = signature.partition(".")[0]
    return int(first) if first.isdecimal() else 0


def _key(profile: Profile) -> Key:
    return profile.task, profile.device, profile.signature, profile.kind


def _encode(profile: Profile) -> bytes:
    body = asdict(profile)
    body["table"] = {str(count): float(number) for count, number in profile.table.items()}
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def _decode(line: bytes) -> Profile | None:
    try:
        body: Any = json.loads(line)
        table = {int(count): float(number) for count, number in body.pop("table").items()}
        profile = Profile(**body, table=table)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    texts = (profile.task, profile.device, profile.signature, profile.way, profile.reason)
    whole = type(profile.size) is int and profile.size >= 0 and all(isinstance(text, str) for text in texts)
    known = profile.kind in get_args(Kind) and all(0 <= number < math.inf for number in table.values())
    whole = whole and (profile.size > 0 or profile.kind != "sharing")
    return profile if whole and known and (table or profile.kind == "refusing") else None
