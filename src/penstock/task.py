"""The task that one trial trains: a ``Task`` with a model, or a function with a loop of its own."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from penstock.errors import TaskError
from penstock.tabulated import TabulatedTask
from penstock.trial import Config

if TYPE_CHECKING:
    import torch
    from torch import nn


class Task:
    """One trial's model, data, loss, metrics and optimizer, written for one trial alone.

    Subclass it and define ``data``, ``model``, ``optimizer`` and ``loss``; the class attributes are its settings.

    >>> class Small(Task):
    ...     batch_size = 32
    >>> Small().batch_size
    32
    """

    batch_size: int = 64
    """Rows in a training batch; ``config["batch_size"]`` overrides it."""
    eval_batch_size: int = 256
    """Rows in a validation batch, the same for every trial."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Mixed precision of the forward: "bf16" and "fp16" run it under autocast, "fp16" with a gradient scaler."""
    clip_grad_norm: float | None = None
    """The greatest norm of a step's gradient, or None for no clipping."""
    unit_steps: int | None = None
    """Training steps in a unit; with None, a unit is an epoch."""
    shards: int = 1
    """The number of devices that hold a trial's parameters and optimizer state together, where one device cannot.

    1 is for models that fit one device. With more, every trial trains on exactly so many devices of one type.
    """
    accumulate: bool = False
    """Whether BatchNorm may see parts of a batch where memory is too small for all of it. Nothing else changes."""
    loader: ClassVar[Mapping[str, Any]] = {}
    """Arguments for the DataLoader of map-style datasets, such as ``{"num_workers": 4}``."""

    def data(self, config: Config) -> tuple[Any, Any]:
        """Training and validation data: each a tuple of tensors or a map-style dataset."""
        raise TaskError(f"{type(self).__name__} must define data(self, config): return (training, validation) data.")

    def model(self, config: Config) -> nn.Module:
        """One plain module, made anew for each trial."""
        raise TaskError(f"{type(self).__name__} must define model(self, config): return one plain nn.Module.")

    def optimizer(self, params: Iterable[nn.Parameter], config: Config) -> torch.optim.Optimizer:
        """Any torch optimizer over ``params``, the model's parameters."""
        raise TaskError(f"{type(self).__name__} must define optimizer(self, params, config): return an optimizer.")

    def scheduler(self, optimizer: torch.optim.Optimizer, config: Config) -> Any:
        """Any torch scheduler, stepped once a unit; ``(scheduler, "step")`` to step it once a step; None for none."""
        return None

    def loss(self, model: nn.Module, batch: Any, config: Config) -> torch.Tensor:
        """A scalar for one batch."""
        raise TaskError(f"{type(self).__name__} must define loss(self, model, batch, config): return a scalar tensor.")

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> Mapping[str, Any]:
        """Scalars for one validation batch; each is averaged over the batches that have it, weighted by their length.

        The default is the loss.
        """
        return {"loss": self.loss(model, batch, config)}


class FunctionTask:
    """A function with a loop of its own: ``def train(trial): ...``. Made by ``Study`` from any function."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self.function = function

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


AnyTask = Task | FunctionTask | TabulatedTask


def as_task(task: object) -> AnyTask:
    """The task that a study was given; raises a TaskError for anything else."""
    if isinstance(task, Task):
        _check_shards(task)
    if isinstance(task, Task | FunctionTask | TabulatedTask):
        return task
    if isinstance(task, type) and issubclass(task, Task):
        raise TaskError(f"Expected a task, got the class {task.__name__}: call it, as in Study({task.__name__}(), …).")
    if callable(task):
        return FunctionTask(task)
    raise TaskError(f"Expected a penstock.Task or a function of one trial, got {type(task).__name__}.")


def _check_shards(task: Task) -> None:
    shards, name = task.shards, type(task).__name__
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise TaskError(f"{name}.shards must be a whole number of devices, 1 or more, got {shards!r}.")
    if shards > 1 and task.precision == "fp16":
        raise TaskError(
            f'{name}.precision is "fp16", whose gradient scaler does not work with shards = {shards}: use "bf16" or '
            '"fp32".'
        )


def shards(task: AnyTask) -> int:
    """How many devices hold one trial of a task together."""
    return task.shards if isinstance(task, Task) else 1


def cannot_share(task: AnyTask, why: str) -> str:
    """The message for a trial that cannot train with its task's shards."""
    return (
        f"A trial of {task_name(task)} cannot be trained with shards = {shards(task)}, and is on no single "
        f"device: {why}."
    )


def task_name(task: AnyTask) -> str:
    """The name of a task in messages and in the log."""
    return task.name if isinstance(task, FunctionTask | TabulatedTask) else type(task).__name__


def fingerprint(task: AnyTask) -> str:
    """A short hash of the task's own source, by which a resumed study notices a change."""
    code: list[object]
    if isinstance(task, FunctionTask):
        code = [task.function]
    elif isinstance(task, TabulatedTask):
        code = [task.identity or task.function]
    else:
        code = [kind for kind in type(task).__mro__ if issubclass(kind, Task) and kind is not Task]
    return hashlib.blake2b("\n".join(map(_source, code)).encode(), digest_size=6).hexdigest()


def _source(thing: Any) -> str:
    if isinstance(thing, str):
        return thing
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):  # typed at a prompt: there is no source, so only names can be compared
        return (
            repr(sorted(vars(thing))) if isinstance(thing, type) else getattr(thing, "__qualname__", repr(type(thing)))
        )
