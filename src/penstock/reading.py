"""Looking at a study without taking it up: nothing is written, locked or imported."""

from __future__ import annotations

from pathlib import Path

from penstock.arguments import as_folder
from penstock.errors import StudyError
from penstock.log.states import States
from penstock.report.summary import history_of, study_dir
from penstock.result import Result
from penstock.task import as_task, task_name


def load(name: str, dir: str | Path = ".penstock", *, task: object = None) -> Result:
    """The result of a study so far, read from its folder.

    It changes nothing, imports no file of yours, and works while another process runs the study: load it again to see
    more. Only ``save_best`` of the result writes.

    >>> import penstock as ps
    >>> def train(trial):
    ...     trial.report(1, loss=(trial.config["x"] - 2) ** 2)
    >>> algorithm = ps.Random(budget=1)
    >>> done = ps.tune(train, {"x": ps.uniform(0, 4)}, metric="loss", algorithm=algorithm, trials=9, name="parabola")
    >>> ps.load("parabola").best.config == done.best.config
    True

    Args:
        name: the study's name, as ``penstock list`` shows it.
        dir: the folder that holds the studies.
        task: the study's task, which ``trial.model()`` needs; all else does without it.
    """
    if not isinstance(name, str):
        raise StudyError(f"name must be a study's name, as `penstock list` shows it, got {name!r}.")
    place = study_dir(as_folder(dir), name, option="dir=")
    history = history_of(place)
    settings = history.settings
    made = None if task is None else as_task(task)
    if made is not None and task_name(made) != settings["task"]:
        raise StudyError(f"The study {name!r} trains {settings['task']}, got task={task_name(made)}: give that task.")
    return Result(history, made, place, States.of_study(place, settings.get("states"), settings.get("home")))
