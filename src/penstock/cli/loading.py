"""A Python file and its study, for the command line."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError, StudyError

if TYPE_CHECKING:
    from penstock.study import Study


def load(file: Path) -> Study:
    """The ``study`` of a Python file; its folder comes first on the path, as when Python runs it."""
    if not file.is_file():
        kind = "a folder" if file.is_dir() else "nothing"
        raise StudyError(f"Expected a Python file with a `study`, found {kind} at {file}: check the path.")
    file = file.resolve()
    study = _study_of(_import(file), file)
    study.file = str(file)
    return study


def _import(file: Path) -> ModuleType:
    import cloudpickle

    name = "penstock_file_" + re.sub(r"\W", "_", file.stem)  # never the name of a module that something else imports
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise StudyError(f"Expected a Python file, whose name ends in .py, got {file.name}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise StudyError(f"{file.name} could not be imported.\n{_last_frame(error, file)}") from None
    cloudpickle.register_pickle_by_value(module)  # worker processes have no such module to import
    return module


def _last_frame(error: BaseException, file: Path) -> str:
    """The file's own line that failed, and the last line if that is in another file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == file][-1:]
    shown = own if own and own[0] is frames[-1] else [*own, *frames[-1:]]
    if isinstance(error, PenstockError | SyntaxError):
        shown = own
    return "".join([*traceback.format_list(shown), *traceback.format_exception_only(error)]).rstrip()


def _study_of(module: ModuleType, file: Path) -> Study:
    from penstock.study import Study
    from penstock.task import Task

    found = getattr(module, "study", None)
    if isinstance(found, Study):
        return found
    names = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    if studies := [name for name, value in names.items() if isinstance(value, Study)]:
        raise StudyError(f"{file.name} has no `study`, but {', '.join(studies)}: write `study = {studies[0]}`.")
    if found is not None:
        what = f"its `study` is of type {type(found).__name__}"
    else:
        own = [name for name, value in names.items() if getattr(value, "__module__", None) == module.__name__]
        what = f"it has {', '.join(own) if own else 'no class or function of its own'}"
    kinds = [name for name, value in names.items() if isinstance(value, type) and issubclass(value, Task)]
    task = next((f"{name}()" for name in kinds if names[name] is not Task), "task")
    raise StudyError(
        f"Expected {file.name} to have a `study`, and {what}. Write at the end of it:\n    "
        f'study = ps.Study({task}, space, metric="accuracy", algorithm=ps.ASHA(max_budget=27), trials=64)'
    )


def origin(name: str, settings: dict[str, Any]) -> Path:
    """The file that a study was begun by, as its log has it."""
    file, otherwise = settings["file"], f"run its Study with name={name!r} from Python, which goes on as well."
    if file is None:
        raise StudyError(
            f"The study {name!r} was begun without a file, so there is none to resume it from: {otherwise}"
        )
    if not Path(file).is_file():
        raise StudyError(f"The study {name!r} was begun by {file}, which is gone: put it back, or {otherwise}")
    return Path(file)
