"""The task that one trial trains: a ``Task`` with a model, or a function with a loop of its own."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from penstock.errors import TaskError
from penstock.numeric import finite, shown, whole
from penstock.tabulated import TabulatedTask
from penstock.trial import Config

if TYPE_CHECKING:
    import torch
    from torch import nn

METHODS = ("data", "features", "model", "optimizer", "scheduler", "loss", "metrics")
OWN = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")  # DataLoader arguments not to give


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

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in METHODS:
            if isinstance(method := cls.__dict__.get(name), FunctionType):
                setattr(cls, name, _staying(name, method))

    def data(self, config: Config) -> tuple[Any, Any]:
        """Training and validation data: each a tuple or a dict of tensors, or a map-style dataset."""
        raise TaskError(f"{type(self).__name__} must define data(self, config): return (training, validation) data.")

    def features(self, config: Config) -> nn.Module | None:
        """A frozen module, or None for none.

        ``loss`` and ``metrics`` get its outputs in place of a batch's first input. It computes each sample once for all
        trials whose module has the same values. It runs in evaluation, without gradients. Its parameters must not
        require any, and a sample's output must not depend on the rest of its batch.

        >>> Task().features({}) is None
        True
        """
        return None

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
Kind = Literal["task", "function", "table"]


def as_task(task: object) -> AnyTask:
    """The task that a study was given; raises a TaskError for anything else."""
    if isinstance(task, Task):
        _check(task)
    if isinstance(task, Task | FunctionTask | TabulatedTask):
        return task
    expected = "Expected a penstock.Task or a function of one trial"
    if isinstance(task, type):
        raise TaskError(
            f"{expected}, got the class {task.__name__}: make an instance, as in Study({task.__name__}(), …)."
        )
    if any(kind.__module__ == "torch.nn.modules.module" for kind in type(task).__mro__):
        raise TaskError(
            f"{expected}, got the module {type(task).__name__}: make it in model(self, config) of a penstock.Task."
        )
    if not callable(task):
        raise TaskError(f"{expected}, got {type(task).__name__}.")
    if wrong := _uncallable(task):
        raise TaskError(f"{expected}, got {wrong}.")
    return FunctionTask(task)


def _uncallable(function: Callable[..., object]) -> str:
    """Why a function cannot be called with a trial, and what to do; nothing where it can."""
    named = FunctionTask(function).name
    plain = function if inspect.isroutine(function) or isinstance(function, partial) else type(function).__call__
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        return f"the generator function {named}: call trial.report where it yields"
    if inspect.iscoroutinefunction(plain):
        return f"the coroutine function {named}: define it by def and not by async def"
    try:
        asked = inspect.signature(function)
    except (TypeError, ValueError):  # a function that is not written in Python may not say its arguments
        return ""
    try:
        asked.bind(None)
    except TypeError:
        return f"the function {named}{asked}: let it take one argument, and bind others by functools.partial"
    return ""


def _staying(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a task that raises a TaskError where it calls ``sys.exit``: that ends its trial, not the driver.

    So does any other exception that is meant to pass through a program, such as asyncio's ``CancelledError``.
    """

    @wraps(method)
    def call(self: Task, *arguments: Any, **named: Any) -> Any:
        try:
            return method(self, *arguments, **named)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise TaskError(left_by_exit(f"{type(self).__name__}.{name}", error)) from None

    return call


def left_by_exit(what: str, error: BaseException) -> str:
    """The message for a user's code that called ``sys.exit``, or raised what is no ``Exception``."""
    how = f"sys.exit({shown(error.code)})" if isinstance(error, SystemExit) else f"raising {type(error).__name__}"
    return f"{what} ended by {how}: return, or raise an exception."


def _check(task: Task) -> None:
    """Refuse a task with a wrong setting, before anything trains."""
    name = type(task).__name__
    for what in ("batch_size", "eval_batch_size"):
        _count(f"{name}.{what}", "a whole number of rows", getattr(task, what))
    _count(f"{name}.shards", "a whole number of devices", task.shards)
    if task.unit_steps is not None:
        _count(f"{name}.unit_steps", "None, for an epoch, or a whole number of steps", task.unit_steps)
    clip = finite(task.clip_grad_norm)
    if task.clip_grad_norm is not None and (clip is None or clip <= 0):
        raise TaskError(f"{name}.clip_grad_norm must be None or a number above 0, got {shown(task.clip_grad_norm)}.")
    if not isinstance(task.precision, str) or task.precision not in ("fp32", "bf16", "fp16"):
        raise TaskError(f'{name}.precision must be "fp32", "bf16" or "fp16", got {shown(task.precision)}.')
    if not isinstance(task.accumulate, bool):
        raise TaskError(f"{name}.accumulate must be True or False, got {shown(task.accumulate)}.")
    if shards(task) > 1 and task.precision == "fp16":
        raise TaskError(
            f'{name}.precision is "fp16", whose gradient scaler does not work with shards = {shards(task)}: use "bf16" '
            'or "fp32".'
        )
    _check_loader(name, task.loader)


def _count(what: str, expected: str, value: object) -> None:
    if (whole(value) or 0) < 1:
        raise TaskError(f"{what} must be {expected}, 1 or more, got {shown(value)}.")


def _check_loader(name: str, loader: object) -> None:
    if not isinstance(loader, Mapping) or not all(isinstance(key, str) for key in loader):
        raise TaskError(f'{name}.loader must be a dict such as {{"num_workers": 4}}, got {shown(loader)}.')
    if wrong := [key for key in loader if key in OWN]:
        raise TaskError(f"{name}.loader has {', '.join(wrong)}, which Penstock gives the DataLoader: leave it out.")
    if (workers := whole(loader.get("num_workers", 0))) is None or workers < 0:
        raise TaskError(
            f'{name}.loader["num_workers"] must be a whole number from 0 on, got {shown(loader["num_workers"])}.'
        )


def shards(task: AnyTask) -> int:
    """How many devices hold one trial of a task together."""
    return int(task.shards) if isinstance(task, Task) else 1


def cannot_share(task: AnyTask, why: str) -> str:
    """The message for a trial that cannot train with its task's shards."""
    return (
        f"A trial of {task_name(task)} cannot be trained with shards = {shards(task)}, and is on no single "
        f"device: {why}."
    )


def kind_of(task: AnyTask) -> Kind:
    """The kind of a task, as the log keeps it: a "task" has a model, and a "function" saves states of its own."""
    return "function" if isinstance(task, FunctionTask) else "table" if isinstance(task, TabulatedTask) else "task"


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
