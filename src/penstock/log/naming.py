"""Names of studies, each the name of a folder; a study without one gets the first that is free."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from penstock.errors import LogError, StudyError
from penstock.log.writer import Log

LONGEST = 255  # bytes that file systems take for the name of one folder
STEM = 40  # characters of a task's name in the name of its study, each of at most four bytes


def check_length(name: str) -> None:
    """Refuse a name that no file system takes."""
    if (bytes := len(os.fsencode(name))) > LONGEST:
        raise StudyError(f"name must have at most {LONGEST} bytes, got {bytes} ({name[:20]}…): choose a shorter one.")


def open_new(dir: Path, task: str, taken: Callable[[Path], bool]) -> Log:
    """The log of a new study in ``dir``, named after its task: ``digits-1``, or the next number that is free.

    Making the folder is the one step that takes a name, so studies that start together get a name each. Folders for
    which ``taken`` holds are passed over.
    """
    stem = re.sub(r"\W+", "-", task.lower())[:STEM].strip("-") or "study"
    try:
        dir.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            folder = dir / f"{stem}-{number}"
            if folder.exists() or taken(folder):  # to ask is cheaper than to make a folder in vain
                continue
            with suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        raise LogError(
            f"Cannot write the folder {dir} ({error.strerror}): choose another with dir= or --dir."
        ) from None
    try:
        return Log.open(folder)
    except BaseException:
        with suppress(OSError):
            folder.rmdir()
        raise
