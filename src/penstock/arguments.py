"""The arguments of a study, each checked when the study is made and given back as a plain Python value."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from penstock.algorithms.base import Algorithm
from penstock.algorithms.pbt import PBT
from penstock.energy.cost import fraction
from penstock.errors import StudyError
from penstock.numeric import finite, shown, whole
from penstock.surrogate.settings import Surrogate
from penstock.task import AnyTask, Task, task_name

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def as_seed(seed: object) -> int:
    """The seed.

    >>> as_seed(7)
    7
    """
    made = whole(seed)
    if made is None:
        raise StudyError(f"seed must be a whole number, got {shown(seed)}.")
    return made


def as_trials(trials: object) -> int | None:
    """The number of trials in all; None where the algorithm is to say.

    >>> as_trials(64)
    64
    """
    made = whole(trials)
    if trials is not None and (made is None or made < 1):
        raise StudyError(f"trials must be a whole number above 0, got {shown(trials)}.")
    return made


def as_keep(keep: object) -> int:
    """How many of the best trials keep their best states.

    >>> as_keep(3)
    3
    """
    made = whole(keep)
    if made is None or made < 1:
        raise StudyError(f"keep must be a whole number of trials above 0, got {shown(keep)}.")
    return made


def as_max_failures(most: object) -> int | None:
    """The most trials that may fail, or None for no limit.

    >>> as_max_failures(0)
    0
    """
    made = whole(most)
    if most is not None and (made is None or made < 0):
        raise StudyError(f"max_failures must be a whole number of trials, 0 or more, got {shown(most)}.")
    return made


def as_target(target: object, metric: str) -> float | None:
    """The value of the metric at which to stop, or None.

    >>> as_target(0.9, "accuracy")
    0.9
    """
    made = finite(target)
    if target is not None and made is None:
        raise StudyError(f"target must be a finite value of {metric!r}, got {shown(target)}.")
    return made


def as_objective(objective: object) -> float:
    """The weight of energy against time, eta of Zeus's eq. 2, from "time", "energy" or a number between 0 and 1.

    >>> as_objective("time"), as_objective("energy"), as_objective(0.5)
    (0.0, 1.0, 0.5)
    """
    named = {"time": 0.0, "energy": 1.0}
    if isinstance(objective, str):
        if objective not in named:
            raise StudyError(
                f'objective must be "time", "energy" or a number from 0 to 1 between them, got {shown(objective)}.'
            )
        return named[objective]
    return fraction("objective", objective)


def as_surrogate(surrogate: object, task: AnyTask, algorithm: Algorithm) -> Surrogate | None:
    """The settings of surrogates, or None; refused where the study's trials cannot have them.

    >>> as_surrogate(None, Task(), PBT(population=2, max_budget=4, interval=1)) is None
    True
    """
    if surrogate is None:
        return None
    if not isinstance(surrogate, Surrogate):
        raise StudyError(f"surrogate must be None or settings such as ps.Surrogate(scale=8), got {shown(surrogate)}.")
    if not isinstance(task, Task):
        raise StudyError(
            f"{task_name(task)} has no model of its own, so it has no narrower twin: only a penstock.Task does. Leave "
            "surrogate= out."
        )
    if isinstance(algorithm, PBT):
        raise StudyError(
            "PBT changes configs while trials train, and a config is tuned on twins whole: leave surrogate= out."
        )
    return surrogate


def as_name(name: object) -> str | None:
    """The name of the study's folder, or None where Penstock is to choose one.

    >>> as_name("digits-1")
    'digits-1'
    """
    if name == "profiles.jsonl":
        raise StudyError(
            "name must not be 'profiles.jsonl', the file of measurements beside the studies: choose another."
        )
    if name is None or (isinstance(name, str) and re.fullmatch(r"[\w+=@ ][\w.\-+=@ ]*", name)):
        return name
    if isinstance(name, str) and name.startswith("-"):
        raise StudyError(f"name must not begin with -, which the command line takes for an option, got {shown(name)}.")
    raise StudyError(
        f"name must be one folder's name of letters, digits, spaces and . - _ + = @, got {shown(name)}: "
        "choose the folder above it with dir=."
    )


def as_folder(dir: object) -> Path:
    """The folder that holds the studies.

    >>> as_folder("runs").name
    'runs'
    """
    if isinstance(dir, str | os.PathLike) and isinstance(path := os.fspath(dir), str) and path and "\0" not in path:
        with suppress(UnicodeEncodeError):  # half of a surrogate pair may stand for a byte of a file's name, or not
            os.fsencode(path)
            return Path(path)
    raise StudyError(f"dir must be the path of a folder, such as '.penstock', got {shown(dir)}.")


def seconds(time: object) -> float | None:
    """Seconds from a number or from text such as "90s", "10m", "2h".

    >>> seconds("10m"), seconds(1e16), seconds("1e3s")
    (600.0, 1e+16, 1000.0)
    """
    if time is None:
        return None
    made = finite(time)
    if isinstance(time, str) and (match := re.fullmatch(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*([smhd]?)\s*", time)):
        made = finite(float(match[1]) * UNITS[match[2]])
    if made is None or made <= 0:
        raise StudyError(
            'deadline must be a finite number of seconds above 0, or text such as "90s", "10m", "2h", got '
            f"{shown(time)}."
        )
    return float(made)


def check_flags(**flags: object) -> None:
    """Refuse a flag that is neither True nor False.

    >>> check_flags(progress=True)
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise StudyError(f"{name} must be True or False, got {shown(value)}.")
