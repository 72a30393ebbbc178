"""A log that was removed or replaced while it was written: its events are copied beside it.

The file lives on as long as its writer has it open, so all events can still be read there.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

CHUNK = 1 << 20  # bytes that are copied at once


def rescue(gone: Path, fd: int) -> tuple[int, Path] | None:
    """Copy the open file that ``gone`` named; gives the copy, open to be appended to, or None where none can be made.

    The copy lies in the study's folder, beside its states. Where that folder is gone too, it is a study of its own in
    the nearest folder above that is still there, or else in the machine's folder for temporary files.
    """
    for folder in (*gone.parents, Path(tempfile.gettempdir())):
        try:
            for path in _names(gone, folder):
                try:
                    if path.parent != folder:
                        path.parent.mkdir()
                    copy = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
                except FileExistsError:
                    continue
                _copy(fd, copy)
                return copy, path
        except OSError:  # this folder is gone, or cannot be written
            continue
    return None


def _names(gone: Path, folder: Path) -> Iterator[Path]:
    """The names that a copy may have in a folder; one that exists is left alone."""
    for number in count(1):
        mark = "rescued" if number == 1 else f"rescued-{number}"
        if folder == gone.parent:
            yield folder / f"log.{mark}.jsonl"
        else:
            yield folder / f"{gone.parent.name[:60]}-{mark}" / gone.name


def _copy(fd: int, copy: int) -> None:
    at = 0
    while part := os.pread(fd, CHUNK, at):
        at += len(part)
        while part:
            part = part[os.write(copy, part) :]
    os.fsync(copy)


def how_to_go_on(gone: Path, rescued: Path) -> str:
    """The message of a study whose log is gone: where its events are now, and the commands that go on with it."""
    commands, study = [], rescued.parent
    if rescued.name != gone.name:
        commands, study = [f"mv {shlex.quote(str(rescued))} {shlex.quote(str(gone))}"], gone.parent
    commands.append(f"penstock resume {shlex.quote(study.name)} --dir {shlex.quote(str(study.parent))}")
    return (
        f"The log {gone} was removed, moved or replaced while the study ran, so the study ended. All its events are in "
        f"{rescued}; go on with: {' && '.join(commands)}"
    )
