"""What was measured, kept for the next study on the same task and kind of device.

One file of JSON lines that several studies may write at once: a line is appended in one ``write``, and of two for the
same thing the last counts. It is only a cache. A line that is torn, damaged or unlike a profile is passed over, and a
file that cannot be read or written costs a study nothing but measuring again.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LINES = 1000  # a longer file is rewritten when it is opened, with the newest half of that at most


@dataclass(frozen=True)
class Profile:
    """What training a signature's trials together on a kind of device was measured to cost.

    ``device`` names all that the times depend on besides the task, such as the accelerator and torch's version; whoever
    measures makes it up, and here it is only compared.
    """

    task: str
    device: str
    signature: str
    way: str  # "native", "general" or "solo"
    size: int  # the bundle size chosen
    seconds: dict[int, float]  # of one training step of the whole bundle, by bundle size; 1 is a trial that runs solo
    bytes: tuple[int, int] | None  # memory at size F is about first + second × F
    reason: str  # why this size and way, in a sentence that a user understands
    scaling: dict[int, float] = field(default_factory=dict)  # of one step of one trial, by the number of its devices
    moving: float | None = None  # seconds that it takes to stop a trial and start it elsewhere


Key = tuple[str, str, str]


@dataclass
class Profiles:
    """The profiles in one file: those that were there when it was opened, and those put since."""

    path: Path
    _known: dict[Key, Profile] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | str) -> Profiles:
        """Read the file, where there is one, and rewrite it where it has grown long.

        What another study appends while it is rewritten is lost: that study has it, and the next measures again.
        """
        profiles = cls(Path(path))
        with suppress(OSError):
            lines = profiles.path.read_bytes().splitlines()
            for line in lines:
                if (profile := _decode(line)) is not None:
                    profiles._take(profile)
            if len(lines) > LINES:
                profiles._rewrite()
        return profiles

    def get(self, task: str, device: str, signature: str) -> Profile | None:
        """What was measured last, if anything was."""
        return self._known.get((task, device, signature))

    def of(self, task: str, device: str) -> list[Profile]:
        """What was measured last of each of a task's signatures on a kind of device."""
        return [one for one in self._known.values() if (one.task, one.device) == (task, device)]

    def put(self, profile: Profile) -> None:
        """Keep a profile: for this study in any case, and for the next where the file can be written."""
        self._take(profile)
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                end = os.fstat(file).st_size
                torn = end > 0 and os.pread(file, 1, end - 1) != b"\n"  # or being written: an empty line harms nobody
                os.write(file, b"\n" * torn + _encode(profile))
            finally:
                os.close(file)

    def _take(self, profile: Profile) -> None:
        key = (profile.task, profile.device, profile.signature)
        self._known.pop(key, None)  # so that the dict goes from old to new
        self._known[key] = profile

    def _rewrite(self) -> None:
        new = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            new.write_bytes(b"".join(map(_encode, list(self._known.values())[-LINES // 2 :])))
            new.replace(self.path)
        finally:
            new.unlink(missing_ok=True)


def _encode(profile: Profile) -> bytes:
    body = asdict(profile)
    for name in ("seconds", "scaling"):
        body[name] = {str(count): float(t) for count, t in body[name].items()}
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def _decode(line: bytes) -> Profile | None:
    try:
        body: Any = json.loads(line)
        seconds = {int(size): float(t) for size, t in body.pop("seconds").items()}
        scaling = {int(count): float(t) for count, t in body.pop("scaling", {}).items()}
        memory = body.pop("bytes")
        if memory is not None:
            first, second = map(int, memory)
            memory = (first, second)
        profile = Profile(**body, seconds=seconds, bytes=memory, scaling=scaling)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    texts = (profile.task, profile.device, profile.signature, profile.way, profile.reason)
    whole = type(profile.size) is int and profile.size >= 1 and all(isinstance(text, str) for text in texts)
    moving = profile.moving is None or (isinstance(profile.moving, int | float) and 0 <= profile.moving < math.inf)
    return profile if whole and moving else None
