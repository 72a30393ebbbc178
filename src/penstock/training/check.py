"""A look at a config's trial before any training: whether it can train, and which trials it can be fused with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import ReduceLROnPlateau

from penstock import seeds
from penstock.bundle import Description
from penstock.errors import TaskError
from penstock.numeric import legible, shown, sort
from penstock.surrogate.task import own_data
from penstock.task import task_name
from penstock.training.checkpoint import check_loadable
from penstock.training.comparing import compared
from penstock.training.copying import uncopied
from penstock.training.data import handed_out
from penstock.training.differing import difference
from penstock.training.fused.held import attribute, configs_of, hold, set_attribute
from penstock.training.fused.numbers import Plain, is_number
from penstock.training.fused.own_numbers import label
from penstock.training.fused.probing import Probed, masked, numbers_of, probe
from penstock.training.fused.stacked import Unfusable
from penstock.training.keeping import look, untouched, written, written_by
from penstock.training.loop import Training
from penstock.training.random.generators import position, seed_everything
from penstock.training.random.keyed import unshared
from penstock.training.reads import ABSENT, ReadConfig
from penstock.training.returned import made_model
from penstock.training.runs.base import out_of_memory
from penstock.training.schedulers import reads_gradients, writes
from penstock.training.signature import attributes, signature
from penstock.training.spread.parts import Part
from penstock.training.unlike import Signatures
from penstock.trial import Config

Result = TypeVar("Result")

HELD = 0.4  # of a device's memory may be the states of trials that share it; the rest is for what a step computes


def describe(training: Training, known: list[Reads], *, train: bool, seen: Signatures | None = None) -> Description:
    """Describe a trial that is then thrown away; with ``train``, by a dry batch, which raises TaskError.

    ``known`` keeps the values that loss and metrics were seen to read from configs: they run once for many alike.
    ``seen`` keeps signatures, so that it can be said why another one is unlike them.
    """
    model, bytes = _attributes(training), _state_bytes(training)
    description = Description(bytes=bytes, beside=int(bytes / HELD))
    numbers = numbers_of(training.config, training.model)
    alike = model if isinstance(model, str) else masked(model, frozenset(numbers))
    reads = next((reads for reads in known if reads.of(training.config, alike, numbers)), None)
    if train:
        description, found = _watched(training, dry_batch)
    elif reads is None:
        _, found = _watched(training, _forward)
    if train or reads is None:
        another = _another(training)  # which is refused where the task returns one module for all trials
    if reads is None:
        refusal = found.refusal or _other_each_time(training.filled(another.to(training.device)), model)
        refusal = refusal or uncopied(another)
        probed = Probed() if refusal else probe(training, found.values)
        reads = replace(found, model=alike, refusal=refusal, probed=probed, numbers=numbers)
        known.append(reads)
    try:
        if reads.refusal or isinstance(model, str):
            raise Unfusable(model if isinstance(model, str) else reads.refusal)
        refuse_scheduler(training)
        values = {**reads.fixed, **training.data.read, **_narrowed(training)}
        besides = {**reads.outcomes, **training.kept.compared()}
        looks = masked(model, reads.probed.free)
        made = signature(training.task, looks, training.model, training.optimizer, training.batch_size, values, besides)
    except Unfusable as error:
        return replace(description, reason=str(error))
    unlike = ("", "") if seen is None else seen.unlike(made)
    for name, line in reads.probed.lines.items():
        if name.replace('"', "'").removeprefix("config") in unlike[0]:
            unlike = unlike[0], f"{unlike[1]} (a plain number is needed at {line})"
    return replace(description, signature=str(made), batch_size=training.batch_size, unlike=unlike)


def refuse_scheduler(training: Training) -> None:
    """Refuse a scheduler that reads or writes what trials in a bundle do not have of their own."""
    scheduler = training.scheduler
    if scheduler is None:
        return
    if reads_gradients(scheduler):
        raise Unfusable(
            f"{type(scheduler).__name__} reads gradients, which trials do not keep while they are trained together: "
            "compute what it needs in the loss, as a buffer of the model"
        )
    if wrote := written_by(training.task, writes(scheduler)):
        raise Unfusable(
            f"{type(scheduler).__name__} writes {wrote}, which the steps of all trials would share: keep it in a "
            "buffer of the model"
        )


def _narrowed(training: Training) -> dict[str, Any]:
    """What the trials of a surrogate's bundle share: the factors of learning rates, and data of their own."""
    rates = {"learning rates": sorted(training.rates.items())} if training.rates else {}
    parts = own_data(training.task)
    return rates if parts is None else {**rates, "rows and pixels": parts}


def _state_bytes(training: Training) -> int:
    """About the bytes that a trial holds between two steps: its weights and the best ones, gradients, two moments."""
    weights = sum(p.nbytes for p in training.model.parameters() if not is_lazy(p))
    return 5 * weights + 2 * sum(_bytes(b) for b in training.model.buffers())


def _bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements; of a sparse one, those that it would have if it were dense."""
    return tensor.numel() * tensor.element_size()


def _attributes(training: Training) -> list[str] | str:
    """The attributes of the model before its first forward, which may change some; or why it cannot be fused."""
    try:
        return attributes(training.model)
    except Unfusable as error:
        return str(error)


def _another(training: Training) -> nn.Module:
    """Another trial's model, of the same config and with other weights."""
    seed_everything(seeds.key("another trial"))
    return made_model(training.task, dict.copy(training.config))


def _other_each_time(another: nn.Module, looks: list[str] | str) -> str:
    """The part of the model that cannot be compared or is drawn at random, as a refusal.

    In a bundle, one trial's module runs for all. So ``looks`` is compared with another trial's model.
    """
    if isinstance(looks, str):
        return ""
    again = attributes(another)
    if again == looks:
        return ""
    path = ""
    for old, new in zip(looks, again, strict=False):
        name, is_module = new.split()[0], new.startswith("module")
        path = new.split(" ")[1] if is_module else path
        if old != new:
            kept = 2 if is_module else 1
            found = difference(old.lstrip().split(" ", kept)[-1], new.lstrip().split(" ", kept)[-1])
            what = f"module {path}".rstrip() if is_module else f"{path}.{name}".lstrip(".")
            said = found.said(what, one="in one model", other="in another of the same config")
            return f"the model's {said}: {found.advice}"
    return "the model has more modules each time that it is made"


@dataclass(frozen=True)
class Reads:
    """The values that loss and metrics read from a config, and why they cannot be fused, if so.

    ``numbers`` are those of the trial that was looked at, and ``model`` its attributes without the values of these.
    """

    values: Config
    refusal: str = ""
    model: list[str] | str = ""
    probed: Probed = field(default_factory=Probed)
    numbers: Mapping[str, Plain] = field(default_factory=dict)

    def of(self, config: Config, model: list[str] | str, numbers: Mapping[str, Plain]) -> bool:
        """Whether loss and metrics would read the same from another config with such a model, and so do the same."""
        free = self.probed.free - self.probed.compared
        fixed = [name for name in self.numbers if name not in free]
        return (
            model == self.model
            and all(
                compared(config.get(name, ABSENT)) == compared(value)
                for name, value in self.values.items()
                if label(name) not in free or not is_number(config.get(name))
            )
            and all(numbers.get(name) == self.numbers[name] for name in fixed if not name.startswith("config["))
        )

    @property
    def fixed(self) -> Config:
        """The values that must be equal to fuse."""
        read = {name: value for name, value in self.values.items() if label(name) not in self.probed.free}
        free = {name: type(self.values[name]).__name__ for name in self.values if name not in read}
        return {
            **read,
            **({"numbers": sorted(free.items())} if free else {}),
        }

    @property
    def outcomes(self) -> dict[str, str]:
        """The outcomes of comparisons, which must be equal to fuse."""
        return {compared_at: outcome for compared_at, _, outcome in (o.rpartition(": ") for o in self.probed.outcomes)}


def _watched(training: Training, run: Callable[[Training], Result]) -> tuple[Result, Reads]:
    """The result of a run of loss and metrics, and the values that it reads and draws meanwhile.

    The values that are read from the config must be equal for all trials of a bundle.
    """
    own, config = training.config, ReadConfig(training.config)
    held = {one: attribute(training.model, one) for one in configs_of(training.model, own)}
    for one in held:  # self.config = config, which is read as any other
        hold(training.model, one, config)
    training.read_from(config)
    drawn, before = position(), look(training.task)
    with untouched(training.task):
        result = run(training)
        wrote = written(training.task, before)
    for one, before_it in held.items():
        set_attribute(training.model, one, before_it)
    refusal = ""
    if wrote:
        refusal = f"the loss or the metrics write {wrote}, which trials would share: keep it in a buffer of the model"
    elif unkeyed := training.randomness.unkeyed:
        refusal = unshared(unkeyed)
    elif position() != drawn:
        refusal = "the loss draws from Python's or numpy's random generator, which trials cannot share"
    return result, Reads(dict(config.read), refusal)


def _forward(training: Training) -> None:
    training.model.train()
    training.loss(next(iter(training.data.train.batches(0, 0, training.batch_size))))
    training.model.eval()
    with torch.no_grad(), training.autocast():
        batch, _ = next(iter(training.data.valid.all(training.task.eval_batch_size)))
        training.task.metrics(training.model, batch, training.config)


def describe_whole(training: Training) -> Description:
    """Look at a trial whose model no single device holds, without training it; raises TaskError."""
    _check_made(training)
    _check_scheduler(training, task_name(training.task))
    return Description(bytes=_state_bytes(training), batch_size=training.batch_size)


def dry_batch(training: Training) -> Description:
    """Train and measure one batch of a trial that is then thrown away; raises TaskError."""
    model, name = training.model, task_name(training.task)
    _check_made(training)
    model.train()
    batch, rows = next(iter(training.data.train.batches(0, 0, training.batch_size))), training.batch_size
    while not _dry_step(training, batch, name, last=rows == 1):
        half = Part.of(rows, 0, 2)  # memory is short: the trial will take its batches in parts, if it can
        batch, rows = half.cut(batch), half.rows
    if not isinstance(training.optimizer, torch.optim.LBFGS):
        training.step_optimizer()
    metrics = _dry_metrics(training, name)
    _check_scheduler(training, name)
    check_loadable(training.state(), name)
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for state in training.optimizer.state.values():
        tensors += [v for v in state.values() if isinstance(v, torch.Tensor)]
    return Description(metrics, sum(t.numel() * t.element_size() for t in tensors))


def _check_made(training: Training) -> None:
    """Refuse a task that has nothing to train, or no optimizer for it, or a precision that its device has not."""
    task, model, name = training.task, training.model, task_name(training.task)
    own = {id(p) for p in model.parameters()}
    if not own:
        raise TaskError(f"{name}.model returned a module without parameters: there is nothing to train.")
    if not any(id(p) in own for group in training.optimizer.param_groups for p in group["params"]):
        raise TaskError(
            f"{name}.optimizer holds none of the model's parameters: build it from the params it is given, "
            "not from another model."
        )
    if task.precision == "fp16" and training.device.type == "cpu":
        raise TaskError(f'{name}.precision is "fp16", which a CPU does not train: use "bf16" or "fp32".')


def _dry_step(training: Training, batch: Any, name: str, *, last: bool) -> bool:
    """Compute the gradients of a batch, or refuse it clearly; False where a smaller one may fit into memory."""
    try:
        _dry_gradients(training, batch, name)
    except Exception as error:
        if last or not out_of_memory(error):
            raise
        return False
    return True


def _dry_gradients(training: Training, batch: Any, name: str) -> None:
    task, model = training.task, training.model
    with training.autocast():
        loss = task.loss(model, handed_out(batch), training.config)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.ndim > 0:
        raise TaskError(
            f"{name}.loss must return a scalar tensor that depends on the model's parameters, got {sort(loss)}: take "
            "its mean or sum."
        )
    if reaches := loss.requires_grad:
        del loss
        training.backward(batch)
        reaches = any(p.grad is not None for p in model.parameters())
    if not reaches:
        raise TaskError(
            f"{name}.loss does not depend on the model's parameters: compute it from model(...) without detach(), "
            "no_grad() or a second model."
        )


def _dry_metrics(training: Training, name: str) -> tuple[str, ...]:
    training.model.eval()
    with torch.no_grad(), training.autocast():
        batch, _ = next(iter(training.data.valid.all(training.task.eval_batch_size)))
        metrics = training.task.metrics(training.model, batch, training.config)
    if not isinstance(metrics, Mapping) or not metrics:
        raise TaskError(f"{name}.metrics must return a dict of scalars, got {shown(metrics)}.")
    for key, value in metrics.items():
        if not isinstance(key, str) or key != legible(key):
            raise TaskError(f"{name}.metrics must name its scalars by text that can be printed, got {shown(key)}.")
        try:
            float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TaskError(
                f"{name}.metrics must return scalars, got {sort(value)} for {key!r}: take its mean, or leave it out."
            ) from None
    return tuple(metrics)


def _check_scheduler(training: Training, name: str) -> None:
    scheduler = training.scheduler
    if isinstance(scheduler, ReduceLROnPlateau) and scheduler.mode != training.mode:
        raise TaskError(
            f"{name}.scheduler is a ReduceLROnPlateau with mode={scheduler.mode!r}, but the study's metric "
            f"{training.metric!r}, which it receives, is to be {training.mode}: give it mode={training.mode!r}."
        )
    if scheduler is not None and not (hasattr(scheduler, "step") and hasattr(scheduler, "state_dict")):
        raise TaskError(f"{name}.scheduler must return a torch scheduler or None, got {type(scheduler).__name__}.")
