"""A Python file and its study, for the command line."""

from __future__ import annotations

import re
import sys
import traceback
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import typer

from penstock.errors import PenstockError, StudyError
from penstock.report.format import visible

if TYPE_CHECKING:
    from penstock.study import Study


def load(file: Path) -> Study:
    """The ``study`` of a Python file; its folder comes first on the path, as when Python runs it."""
    if not file.is_file():
        kind = "a folder" if file.is_dir() else "nothing"
        raise StudyError(f"Expected a Python file with a `study`, found {kind} at {file}: check the path.")
    file = file.resolve()
    study = _study_of(_import(file), file)
    if study.ran is not None and study.name is None:
        raise StudyError(
            f"Expected {file.name} to define its study, and it ran it too, as {study.ran.name}: put study.run() under "
            f'`if __name__ == "__main__":`. That run is kept: see `penstock show {study.ran.name}`.'
        )
    study.file = str(file)
    return study


class _Uncached(SourceFileLoader):
    """Runs a file as it is, like ``python file.py``: compiled code of the same second and length may be of another."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _import(file: Path) -> ModuleType:
    import cloudpickle

    name = "penstock_file_" + re.sub(r"\W", "_", file.stem)  # no other code imports a module of this name
    loader = _Uncached(name, str(file))
    spec = spec_from_file_location(name, file, loader=loader)
    if spec is None or file.suffix != ".py":
        raise StudyError(f"Expected a Python file, whose name ends in .py, got {file.name}.")
    module = module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    try:
        loader.exec_module(module)
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


def origin(name: str, settings: dict[str, Any], dir: Path, trust: bool = False) -> Path:
    """The file that a study in ``dir`` was begun by, from its log. To import a file is to run it, and any log may name
    any file.

    So a file outside of the current folder is asked for, on a terminal; elsewhere it needs ``trust``. A file among the
    studies is asked for too, as it may have come with the log.
    """
    file, otherwise = settings["file"], f"run its Study with name={name!r} from Python, which goes on as well."
    if file is None:
        raise StudyError(
            f"The study {name!r} was begun without a file, so there is none to resume it from: {otherwise}"
        )
    if not Path(file).is_file():
        raise StudyError(f"The study {name!r} was begun by {file}, which is gone: put it back, or {otherwise}")
    path, here, studies = Path(file).resolve(), Path.cwd().resolve(), dir.resolve()
    among = path.is_relative_to(studies / name if here.is_relative_to(studies) else studies)
    if not trust and (among or not path.is_relative_to(here)):
        _ask(name, file, "among the studies" if among else "outside of this folder")
    return Path(file)


def _ask(name: str, file: str, where: str) -> None:
    told = f"The log of {name!r} names the file {file}, which lies {where}; to resume is to run it."
    if sys.stdin.isatty() and typer.confirm(f"{visible(told)} Run it?", err=True):
        return
    raise StudyError(
        f"{told} Expected a file of your own in {Path.cwd()}: give --trust if you know that file, or resume from its "
        "folder, with --dir for the folder of the studies."
    )
