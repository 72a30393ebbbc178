"""The states of a worker's trials: in the driver's own place, or held in the worker's memory.

A worker that sees the driver's folder of states, or a URL, writes there. To any other worker the driver sends the
states that its trials begin with; the worker sends new states along with its events.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from penstock.errors import StateError
from penstock.log.reading import content
from penstock.log.states import Folder, States
from penstock.trial import StateRef


def leave_token(states: States) -> Path | None:
    """Leave a file beside the states, by which a worker sees whether its folder of that name is the driver's."""
    if not isinstance(states, Folder):
        return None
    path = states.dir.parent / f".driver-{uuid.uuid4().hex}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def take_token(token: Path | None) -> None:
    """Take it away again."""
    if token is not None:
        with suppress(OSError):
            token.unlink()


def sees(states: States, token: str) -> bool:
    """Whether a worker sees the driver's states: always at a URL, in a folder if the driver's token lies beside it."""
    if not isinstance(states, Folder):
        return True
    try:
        return token in os.listdir(states.dir.parent)
    except OSError:
        return False


def contents(states: States, some: Iterable[StateRef]) -> dict[str, bytes]:
    """The contents of states, for a worker that cannot read them; it misses lost ones, and says that they are lost."""
    found = {}
    for one in set(some):
        with suppress(StateError):
            found[one.file] = content(states, one)
    return found


class HeldStates(States):
    """States in a worker's memory: the ones it was sent, and the ones it wrote."""

    def __init__(self) -> None:
        self.sent: dict[str, bytes] = {}
        self.written: dict[str, bytes] = {}

    def __str__(self) -> str:
        return f"the memory of worker {os.getpid()}"

    def under(self, name: str) -> States:
        return self

    def where(self, name: str) -> str:
        return f"{name} in {self}"

    def write(self, name: str, content: bytes | memoryview) -> None:
        self.written[name] = bytes(content)

    def read(self, name: str) -> BinaryIO:
        content = self._content(name)
        if content is None:
            raise FileNotFoundError(self.where(name))
        return io.BytesIO(content)

    def size(self, name: str) -> int | None:
        content = self._content(name)
        return None if content is None else len(content)

    def _content(self, name: str) -> bytes | None:
        return self.written.get(name, self.sent.get(name))

    def names(self) -> list[str]:
        return [*self.sent, *self.written]

    def delete(self, *names: str) -> None:
        for name in names:
            self.sent.pop(name, None)
            self.written.pop(name, None)

    def sync(self, name: str) -> None:
        """Nothing to do: a state in memory does not survive its process."""
