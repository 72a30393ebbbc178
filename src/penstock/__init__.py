"""Penstock: resource-efficient hyperparameter tuning for PyTorch.

Every public name is resolved on use: importing penstock imports none of torch, optuna and rich.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.algorithms.asha import ASHA as ASHA
    from penstock.algorithms.bohb import BOHB as BOHB
    from penstock.algorithms.bohb import SyncBOHB as SyncBOHB
    from penstock.algorithms.grid import Grid as Grid
    from penstock.algorithms.hyperband import Hyperband as Hyperband
    from penstock.algorithms.pbt import PBT as PBT
    from penstock.algorithms.random import Random as Random
    from penstock.algorithms.successive_halving import SuccessiveHalving as SuccessiveHalving
    from penstock.domains import choice as choice
    from penstock.domains import grid as grid
    from penstock.domains import loguniform as loguniform
    from penstock.domains import qloguniform as qloguniform
    from penstock.domains import quniform as quniform
    from penstock.domains import randint as randint
    from penstock.domains import uniform as uniform
    from penstock.errors import LogError as LogError
    from penstock.errors import Paused as Paused
    from penstock.errors import PenstockError as PenstockError
    from penstock.errors import SoloWarning as SoloWarning
    from penstock.errors import SpaceError as SpaceError
    from penstock.errors import StudyError as StudyError
    from penstock.errors import TaskError as TaskError
    from penstock.executors.simulated.settings import Simulated as Simulated
    from penstock.reading import load as load
    from penstock.recurring import Recurrence as Recurrence
    from penstock.recurring import Recurring as Recurring
    from penstock.result import Result as Result
    from penstock.result import Trial as Trial
    from penstock.speed.curve import Curve as Curve
    from penstock.study import Study as Study
    from penstock.study import tune as tune
    from penstock.surrogate.settings import Surrogate as Surrogate
    from penstock.tabulated import Tabulated as Tabulated
    from penstock.tabulated import TabulatedTask as TabulatedTask
    from penstock.task import Task as Task
    from penstock.training.function import FunctionTrial as FunctionTrial

_HOMES = {
    "penstock.algorithms.asha": "ASHA",
    "penstock.algorithms.bohb": "BOHB SyncBOHB",
    "penstock.algorithms.grid": "Grid",
    "penstock.algorithms.hyperband": "Hyperband",
    "penstock.algorithms.pbt": "PBT",
    "penstock.algorithms.random": "Random",
    "penstock.algorithms.successive_halving": "SuccessiveHalving",
    "penstock.speed.curve": "Curve",
    "penstock.domains": "choice grid loguniform qloguniform quniform randint uniform",
    "penstock.errors": "LogError Paused PenstockError SoloWarning SpaceError StudyError TaskError",
    "penstock.executors.simulated.settings": "Simulated",
    "penstock.reading": "load",
    "penstock.recurring": "Recurrence Recurring",
    "penstock.result": "Result Trial",
    "penstock.study": "Study tune",
    "penstock.surrogate.settings": "Surrogate",
    "penstock.tabulated": "Tabulated TabulatedTask",
    "penstock.task": "Task",
    "penstock.training.function": "FunctionTrial",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}; it has {', '.join(__all__)}.")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
