"""Whose states lie in a place: a study that was copied must not delete the states of the original.

The log of a copy equals the log of its original, so the place itself says whose it is: a file beside the states names
the log that they belong to. On the same machine a study is the owner if its log has that path or that inode, or if the
log at that path is gone: then the study was moved. On another machine both the path and the inode must be the same, as
they are on a shared disk. Any other study is a copy. It brings the states that it needs into a folder of its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.errors import StateError, StudyError
from penstock.log.events import Opened
from penstock.log.history import History
from penstock.log.reading import content
from penstock.log.states import States, needed
from penstock.log.writer import Log

FILE = "owner.json"  # no name of a state, so it is never deleted as one

logger = logging.getLogger("penstock")


@dataclass(frozen=True)
class Owner:
    """The study that states belong to, by its log."""

    machine: str
    log: str
    device: int
    inode: int

    @classmethod
    def of(cls, log: Path) -> Owner:
        """The owner that a log makes."""
        path = log.resolve()
        found = path.stat()
        return cls(platform.node(), str(path), found.st_dev, found.st_ino)

    @classmethod
    def read(cls, states: States) -> Owner | None:
        """The owner of the states in a place; None where nobody has said so."""
        try:
            with states.read(FILE) as file:
                return cls(**json.loads(file.read()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            return None  # damaged, or of another version
        except OSError as error:
            raise StudyError(
                f"Cannot read {states.where(FILE)} ({error}), which says whose states these are: check your "
                "permissions, or choose another place with states= or --states."
            ) from None

    def is_same(self, other: Owner) -> bool:
        """Whether two owners are one study."""
        if self.machine != other.machine:
            return (self.log, self.inode) == (other.log, other.inode)
        moved = (self.device, self.inode) == (other.device, other.inode) or not Path(self.log).exists()
        return self.log == other.log or moved

    @property
    def digest(self) -> str:
        """A few letters that differ from study to study."""
        return hashlib.sha256(f"{self.machine} {self.log}".encode()).hexdigest()[:8]


def home(log: Log, history: History, place: str | None) -> str | None:
    """The folder of a study's states in ``place``, None for the folder of its name.

    A study that turns out to be a copy gets a folder of its own, with the states that it needs.
    """
    before = next((event.settings for event in reversed(log.past) if isinstance(event, Opened)), None)
    if place is None or before is None:
        return None
    there = str(before.get("home") or before.get("name") or log.dir.name)
    states, ours = States.of(place).under(there), Owner.of(log.path)
    owner = Owner.read(states)
    if owner is None or owner.is_same(ours):
        return None if there == log.dir.name else there
    own = f"{log.dir.name}-{ours.digest}"
    _bring(history, states, States.of(place).under(own))
    logger.warning(
        "%s is a copy of %s, which owns the states in %s: this study keeps its own states in %s.",
        *(log.path, owner.log, states, States.of(place).under(own)),
    )
    return own


def _bring(history: History, states: States, own: States) -> None:
    """Copy the states that a study needs; the trials of states that are lost are trained again."""
    for record in history.trials:
        for ref in [*needed(record, history), *([] if record.start is None else [record.start])]:
            if own.size(ref.file) != ref.bytes:
                try:
                    own.write(ref.file, content(states, ref))
                except StateError:
                    continue


def claim(states: States, log: Log) -> None:
    """Say whose states these are; the study's own folder needs no such word."""
    if str(states) == str(log.dir.absolute() / "states"):
        return
    ours = Owner.of(log.path)
    if Owner.read(states) != ours:
        states.write(FILE, json.dumps(asdict(ours)).encode())
