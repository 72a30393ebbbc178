"""A look at a study's surrogates before anything is spent: whether its model has them, and what they save.

Each way in which a model can be wrong for them is one message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import nn

from penstock.errors import PenstockError, StudyError, TaskError, told, trace
from penstock.seeds import key
from penstock.space import Space
from penstock.surrogate.check import STEEPEST, Slope, coordinates, scales
from penstock.surrogate.internals import tree_leaves
from penstock.surrogate.parametrize import Family, Part, compared, family, parts
from penstock.surrogate.reduce import shallower
from penstock.surrogate.settings import NARROWEST, Surrogate
from penstock.surrogate.task import Narrowed, narrowed, parts_of
from penstock.surrogate.trace import Place, Traced, where
from penstock.surrogate.twin import first_batch, known, refuse_lazy
from penstock.task import Task, shards, task_name
from penstock.training.data import DataCache
from penstock.training.loop import Training
from penstock.training.random.generators import own_randomness, seed_everything
from penstock.trial import Config

OTHERS = 3  # configs that are tried where the middle one does not train
TIMED = 5  # steps, after as many that are not timed


@dataclass(frozen=True)
class Examined:
    """The surrogates of a study: their parameters by name, the check's slopes, bytes, and seconds of a step.

    ``task`` is the surrogates' task, which has kept what was traced. A target that no single device holds has no
    seconds there.
    """

    task: Narrowed
    config: Config
    scale: int
    family: Family
    parts: Mapping[str, Part]
    slopes: tuple[Slope, ...]
    bytes: tuple[int, int]
    seconds: tuple[float | None, float]
    reduced: Mapping[str, str] = field(default_factory=dict)  # by setting: what it leaves, in words

    def cost(self, scale: int) -> float:
        """About what a step costs at a scale, of the target's: its matrices shrink along two dimensions."""
        numbers = [(part.numbers, part.role == "hidden") for part in self.parts.values()]
        return sum(n / scale**2 if hidden else n / scale for n, hidden in numbers) / sum(n for n, _ in numbers)

    @property
    def wrong(self) -> list[Slope]:
        """The activations whose change is not the same at every width, the steepest first."""
        return sorted((one for one in self.slopes if not one.right), key=lambda one: -abs(one.slope))


def examine(task: Task, space: Space, surrogate: Surrogate, *, seed: int = 0, device: str = "cpu") -> Examined:
    """Find the surrogates of a task, and check them; raises a TaskError or a StudyError where there can be none."""
    narrow = narrowed(task, surrogate.plain)
    with own_randomness():
        config, timed = _able(task, space, seed, device)
        seed_everything(key(seed, "surrogate"))
        target = task.model(dict(config))
        refuse_lazy(target)
        _refuse_pretrained(task, target, config)
        traced = known(narrow, target, config)
        if own := getattr(task, "narrow", None):
            found = compared(target, own(dict(config), surrogate.scale), traced)
        else:
            found = parts(target, traced, surrogate.scale)
        _refuse_fixed(task, found, traced)
        _refuse_narrow(found, surrogate.scale)
        _refuse_width_in_space(task, space, config, target, traced)
        one, held, seconds = _train(narrow, config, seed, device)
        bytes = held
        found = dict(parts_of(one.model))
        of = family(one.optimizer)
        fewer = _reduced(task, config, surrogate, narrow._traced, seed, device)
        if fewer:
            _, bytes, seconds = _train(narrowed(task, surrogate, narrow._traced), config, seed, device)
        widths, on = scales(surrogate.scale), device
        whole, slow = timed or (0, None)
        if timed is None:  # no device holds the target: four widths or more are compared without it
            whole = round(held * _numbers(target) / _numbers(one.model))
            widths, on = (widths[1:], device) if len(widths) > 3 else (widths, "cpu")
    slopes = coordinates(task, config, widths, narrow._traced, device=on, seed=seed, zeros=surrogate.zeros)
    return Examined(narrow, config, surrogate.scale, of, found, tuple(slopes), (whole, bytes), (slow, seconds), fewer)


def _able(task: Task, space: Space, seed: int, device: str) -> tuple[Config, tuple[int, float] | None]:
    """The first config that trains at full width, the middle one before others, and its bytes and seconds of a step.

    A target that no single device holds is not tried.
    """
    if shards(task) > 1:
        return middle(space), None
    errors: list[Exception] = []
    configs = [middle(space), *(space.draw(seed, number) for number in range(OTHERS))]
    for config in configs:
        try:
            return config, _train(task, config, seed, device)[1:]
        except Exception as error:
            errors.append(error)
    if isinstance(errors[0], PenstockError):
        raise errors[0]
    said = f"The task failed in a dry batch of each of {len(configs)} configs"
    raise TaskError(f"{said}. With {configs[0]}:\n{trace(errors[0])}")


def _numbers(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def refuse_wrong(examined: Examined) -> None:
    """Refuse surrogates that the check has found wrong, or could not look at."""
    if not examined.slopes:
        raise StudyError(
            "The coordinate check finds no activation of the model: its innermost modules give no tensors of floats. "
            "Compute its layers by modules such as nn.Linear, or leave surrogate= out."
        )
    if examined.wrong:
        worst = examined.wrong[0]
        raise StudyError(
            f"The surrogates fail the coordinate check: the change of {worst.layer or 'the model'} goes with width to "
            f"the power of {worst.slope:.2f}, and of {len(examined.wrong)} of {len(examined.slopes)} activations by "
            f"more than {STEEPEST}. Their best hyperparameters would mislead: leave surrogate= out, or define narrow()."
        )


def middle(space: Space) -> Config:
    """The config in the middle of a space."""
    if space.function is not None:
        return space.draw(0, 0)
    return {**{name: domain.at(0.5) for name, domain in space.domains.items()}, **space.constants}


def _reduced(
    task: Task, config: Config, surrogate: Surrogate, traced: dict[str, Any], seed: int, device: str
) -> dict[str, str]:
    """What fewer blocks, rows and pixels leave, each tried alone; refused where the task does not take it."""
    name, found = task_name(task), dict[str, str]()
    plain = narrowed(task, surrogate.plain, traced)

    def tried(setting: str) -> Narrowed:
        own = narrowed(task, replace(surrogate.plain, **{setting: getattr(surrogate, setting)}), traced)
        try:
            _train(own, config, seed, device)
        except Exception as error:
            why = str(error) if isinstance(error, TaskError) else f"{told(error)}."
            raise StudyError(
                f"Surrogate({setting}={getattr(surrogate, setting)}) does not go with {name}: {why} Leave {setting}= "
                "out."
            ) from error
        return own

    if surrogate.depth > 1:
        before, after = shallower(task.model(dict(config)), surrogate.depth)
        if before == 0:
            raise StudyError(
                f"Surrogate(depth={surrogate.depth}) needs equal blocks in an nn.Sequential or nn.ModuleList, and the "
                f"model of {name} has no two that follow each other: leave depth= out."
            )
        tried("depth")
        found["depth"] = f"{after} of {before} equal blocks"
    cpu = torch.device("cpu")
    if surrogate.data < 1:
        whole, fewer = (DataCache(one, seed, cpu).get(config).train.length for one in (plain, tried("data")))
        found["data"] = f"{fewer} of {whole} rows"
    if surrogate.resolution < 1:
        small = narrowed(task, replace(surrogate.plain, resolution=surrogate.resolution), traced)
        sizes = [_images(first_batch(one, config)) for one in (plain, small)]
        if sizes[0] == sizes[1]:
            raise StudyError(
                f"Surrogate(resolution={surrogate.resolution}) needs images, tensors of rows, channels, height and "
                f"width, of floats or uint8, with pixels to spare, and {name}.data has none: leave resolution= out."
            )
        tried("resolution")
        found["resolution"] = f"{sizes[1]} of {sizes[0]} pixels"
    return found


def _images(batch: Any) -> str:
    """The sizes of a batch's images."""
    sizes = [one.shape[-2:] for one in tree_leaves(batch) if isinstance(one, torch.Tensor) and one.ndim == 4]
    return " and ".join(f"{height} × {width}" for height, width in sizes)


def _refuse_pretrained(task: Task, target: nn.Module, config: Config) -> None:
    frozen = [name for name, p in target.named_parameters() if not p.requires_grad]
    if frozen:
        raise StudyError(
            f"The model of {task_name(task)} has frozen parameters, such as {frozen[0]}: a narrower twin cannot have "
            "them. Leave surrogate= out."
        )
    other = dict(task.model(dict(config)).named_parameters())
    for name, p in target.named_parameters():
        same = name in other and other[name].shape == p.shape and torch.equal(other[name], p)
        if same and p.numel() > 1 and not _is_regular(p):
            raise StudyError(
                f"The model of {task_name(task)} has pretrained parameters, such as {name}, which are not drawn at "
                "random: fine-tuning has no narrower twin. Leave surrogate= out."
            )


def _is_regular(p: torch.Tensor) -> bool:
    """Whether values are the same all along a dimension: so are constants, and the decays of a state space model."""
    return any(bool((p == p.narrow(dim, 0, 1)).all()) for dim in range(p.ndim))


def _refuse_fixed(task: Task, found: Mapping[str, Part], traced: Traced) -> None:
    if all(part.role == "fixed" for part in found.values()):
        said = f" ({traced.tied})" if traced.tied else ""
        raise StudyError(
            f"No dimension of the model of {task_name(task)} can shrink: each is tied to the data, to the output or to "
            f"a number that is written in the forward{said}. Take sizes from tensors or attributes, as in "
            "x.view(len(x), -1)."
        )


def _refuse_narrow(found: Mapping[str, Part], scale: int) -> None:
    narrow = {name: part for name, part in found.items() if part.width and part.narrow < NARROWEST}
    if narrow:
        largest = min(part.width for part in found.values() if part.width) // NARROWEST
        name, part = next(iter(narrow.items()))
        most = f"the largest scale that works is {largest}" if largest > 1 else "no scale works"
        raise StudyError(
            f"Surrogate(scale={scale}) makes {name} {part.narrow} units wide, and {len(narrow)} parameters narrower "
            f"than {NARROWEST}: {most}."
        )


def _refuse_width_in_space(task: Task, space: Space, config: Config, target: nn.Module, traced: Traced) -> None:
    """Refuse a parameter of the space that decides a size which grows with width."""
    if space.function is not None:
        others = [("The space's function", space.draw(0, number)) for number in range(1, 4)]
    else:
        ends = [(name, domain.at(u)) for name, domain in space.domains.items() for u in (0, 0.999)]
        others = [(f"{name} of the space", {**config, name: value}) for name, value in ends]
    sizes = {name: p.shape for name, p in target.named_parameters()}
    for what, other in others:
        if other == config:
            continue
        for name, p in task.model(dict(other)).named_parameters():
            if name not in sizes or p.ndim != len(sizes[name]):
                continue
            path, _, own = name.rpartition(".")
            pairs = enumerate(zip(sizes[name], p.shape, strict=True))
            if any(one != new and traced.grows(Place(path, own, part)) for part, (one, new) in pairs):
                raise StudyError(
                    f"{what} decides the size of {name}, {tuple(sizes[name])} or {tuple(p.shape)}: a width cannot be "
                    "tuned on narrower twins. Make it a constant, or leave surrogate= out."
                )


def _train(task: Task, config: Config, seed: int, device: str) -> tuple[Training, int, float]:
    """A trial after a few steps, its bytes, and the seconds of a step."""
    data = DataCache(task, seed, torch.device(device)).get(config)
    narrow = isinstance(task, Narrowed)
    try:
        training = Training(task, 0, config, data, seed=seed, device=torch.device(device), metric="loss", mode="min")
        training.model.train()
        batch = next(iter(data.train.batches(0, 0, training.batch_size)))
        for _ in range(TIMED):
            training.train_step(batch)
    except (TaskError, StudyError):
        raise
    except Exception as error:
        if not narrow:
            raise
        raise StudyError(
            f"A narrower twin of the model of {task_name(task)} does not run{where(error)}: {told(error)}. Expected "
            "sizes that come from tensors or attributes, and no number of the full width written in the forward."
        ) from error
    tensors = [*training.model.parameters(), *(v for s in training.optimizer.state.values() for v in s.values())]
    bytes = sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))
    return training, bytes, _seconds(lambda: training.train_step(batch), device)


def _seconds(step: Callable[[], Any], device: str) -> float:
    taken = []
    for _ in range(TIMED):
        began = time.perf_counter()
        step()
        if device != "cpu":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return median(taken)
