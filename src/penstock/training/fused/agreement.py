"""Before a way to compute is trusted, it is compared on a real batch with one that is trusted already.

A way to fuse is compared with a trial alone. Whatever it might get wrong without an error shows there: a module that
reads what Penstock does not compare, a backward of the user's own that a batched forward does not call, a loss that is
another one at every call. A compiled step is compared with the plain one, and a step with Penstock's own kernels with
one in full float32. None of it leaves a trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from penstock.training.contents import Contents
from penstock.training.copying import copied
from penstock.training.data import handed_out
from penstock.training.fused.held import attribute, attributes_of, configs_of, set_attribute
from penstock.training.fused.per_trial import PER_TRIAL
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.step import Grads, Inputs, Step, unchanged, unhooked
from penstock.training.fused.watching import Drew, Numbered, Reached, Unclear
from penstock.training.fused.writing import carried
from penstock.training.keeping import look, untouched, written
from penstock.training.kernels.choice import kernels
from penstock.training.lazy import unwritten
from penstock.training.loop import Training
from penstock.training.random.generators import position
from penstock.training.random.keyed import Keyed
from penstock.training.random.masks import SoloKeys
from penstock.training.signature import REGISTRIES, attributes

# How far gradients may be from those of a trial alone, in parts of its whole gradient: in float64, and in the task's
# own precision, where bfloat16 and TF32 through many layers leave little but the direction.
EXACT, ABOUT = 1e-6, 0.5
# How far a compiled step may be from the plain one, by precision of the rows and of the task.
COMPILED = {"float64": 1e-9, "fp32": 0.05, "bf16": 0.3}
TIMES, MORE = 3.0, 1e-4  # how much farther off than torch's a gradient with kernels may be, and in parts of its length
ROWS = 8  # that are computed in full float32 at once, which takes more memory
# How far gradients may be where a model takes no float64, by precision, unless rounding puts them off more.
NARROW = {"fp32": 1e-3, "bf16": 0.2}
CONTROLS = 10  # how many times as far as rounding takes them


def distance(right: torch.Tensor, made: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """How far a tensor is from the one that is right, as a norm: in all, or along a dimension.

    >>> distance(torch.tensor([[3.0, 4.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]]), dim=1).tolist()
    [5.0, 0.0]
    """
    wide = torch.promote_types(torch.promote_types(right.dtype, made.dtype), torch.float32)
    far: torch.Tensor = torch.linalg.vector_norm(made.to(wide) - right.to(wide), dim=dim, dtype=torch.float64)
    return far


# A way to fuse, and a trial alone


@dataclass(frozen=True)
class Alone:
    """The trial of one of some rows, with its own batch."""

    trial: Training
    row: int
    batch: Any
    plain: nn.Module  # a copy of a trial's module, never trained


def agree(step: Step, inputs: Callable[[], Inputs], trials: Iterable[Alone]) -> None:
    """Compare a step with the first of some trials alone whose gradients are finite; ``Unclear`` where none has any.

    Where numbers differ from trial to trial, two trials are compared.
    """
    done = 0
    for alone in trials:
        try:
            _agree_at_last(step, inputs, alone)
        except Unclear:
            continue
        done += 1
        if done == (2 if step.way.varying else 1):
            break
    if not done:
        raise Unclear


def _agree_at_last(step: Step, inputs: Callable[[], Inputs], alone: Alone) -> None:
    """Compare again while the way finds out what inputs it needs: keys to draw by, numbers of the config."""
    while True:
        try:
            agree_alone(step, inputs(), alone)
        except (Drew, Numbered):
            continue
        return


def agree_alone(step: Step, inputs: Inputs, alone: Alone) -> None:
    """Refuse a step whose way is not exact in float64, or not about right as it will be used.

    Raises ``Unclear`` where this trial cannot tell.
    """
    row = alone.row
    frozen = {name for name, p in alone.trial.model.named_parameters() if not p.requires_grad}
    names = [name for name in step.names if name not in frozen]

    def trained(grads: Grads) -> Grads:
        """The gradients without those of parameters that only other trials train."""
        return [grad for name, grad in zip(step.names, grads, strict=False) if name not in frozen]

    def together() -> Grads:
        return trained(_of(step.gradients(inputs)[1], row))

    with _traceless(inputs, alone.trial):
        right = _alone(alone, step, names)
    whole = _length(right)
    if not math.isfinite(whole):
        raise Unclear
    with _traceless(inputs, alone.trial):
        compare(names, together(), right, ABOUT, whole)
    with _traceless(inputs, alone.trial):
        found = _in_float64(step, inputs, alone)
    if found is not None:
        compare(names, trained(found[0]), trained(found[1]), EXACT)
        return
    precision = step.task.precision
    with _traceless(inputs, alone.trial):
        nudged = _nudged(alone, step, names, 2**-8 if precision == "bf16" else 2**-23)
    far = sum(float(distance(a, b)) ** 2 for a, b in zip(right, nudged, strict=True) if a is not None and b is not None)
    tolerance = min(ABOUT, max(NARROW[precision], CONTROLS * far**0.5 / max(whole, 1e-30)))
    with _traceless(inputs, alone.trial):
        compare(names, together(), right, tolerance, whole)


@contextmanager
def _traceless(inputs: Inputs, trial: Training) -> Iterator[None]:
    """Undo whatever a look at gradients writes: weights, buffers, the module's own attributes, the task's."""
    with unchanged(inputs.touched()), own_attributes(trial.model), untouched(trial.task):
        yield


@contextmanager
def own_attributes(model: nn.Module) -> Iterator[None]:
    """Give every module back the attributes, their content and the buffers that it had, and parameters their memory."""
    memory = [(p, p.data) for p in model.parameters()]
    modules = [(vars(module), dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    contents = Contents(value for _, before, _ in modules for name, value in before.items() if name not in REGISTRIES)
    try:
        yield
    finally:
        for now, before, buffers in modules:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
            now["_buffers"].clear()
            now["_buffers"].update(buffers)
        for p, data in memory:
            if p.data_ptr() != data.data_ptr():  # ``p.data = …``
                p.data = data
        contents.put_back()


def _alone(alone: Alone, step: Step, names: Sequence[str]) -> Grads:
    trial, idle = alone.trial, step.idle
    trial.model.train()
    drawn, looks, outside = position(), attributes(trial.model), look(trial.task)
    params = dict(trial.model.named_parameters())
    buffers = dict(trial.model.named_buffers())
    wanted = [params[name] for name in (*names, *(name for name in idle if params[name].requires_grad))]
    with unhooked(trial.model), unwritten(trial.model.modules()):
        grads = trial.gradients(alone.batch, wanted)
        changed = attributes(trial.model)
    if any(grad is not None for grad in grads[len(names) :]):
        raise Reached
    if position() != drawn:
        raise Unfusable("the loss draws from Python's or numpy's random generator, which trials cannot share")
    if changed != looks:
        state = trial.model.state_dict()
        if refusal := carried(looks, changed, alone.plain, state, alone.batch, partial(_run, trial)):
            raise Unfusable(refusal)
    if wrote := written(trial.task, outside):
        raise Unfusable(f"the loss writes {wrote}, which trials would share: keep it in a buffer of the model")
    assigned = [name for name, now in trial.model.named_buffers() if now is not buffers[name]]
    if assigned and not step.way.takes_all:
        raise Unfusable(f"the forward assigns the buffer {assigned[0]}, which torch.vmap does not see: write into it")
    return grads[: len(names)]


def _run(trial: Training, model: nn.Module, batch: Any) -> None:
    with Keyed(SoloKeys(trial.seed, trial.step)), trial.autocast():
        trial.task.loss(model, handed_out(batch), trial.config)


def _nudged(alone: Alone, step: Step, names: Sequence[str], eps: float) -> Grads:
    """The gradients of a trial alone whose weights are a little off, by as much as rounding may put them off."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in alone.trial.model.parameters():
            p.mul_(1 + eps * (torch.rand(p.shape, generator=generator) * 2 - 1).to(p))
    return _alone(alone, step, names)


def _in_float64(step: Step, inputs: Inputs, alone: Alone) -> tuple[Grads, Grads] | None:
    """The gradients of a row, together with its neighbour and alone; None where a model takes no float64."""
    trial = alone.trial
    model = copied(alone.plain).double().train()
    model.load_state_dict(trial.model.state_dict())
    for one, buffer in zip(model.buffers(), trial.model.buffers(), strict=True):  # also those that no state has
        one.copy_(buffer)
    for path, module in trial.model.named_modules():
        for name, _ in PER_TRIAL.get(type(module), ()):
            setattr(model.get_submodule(path), name, getattr(module, name))
    for label, number in attributes_of(trial.model).items():
        set_attribute(model, label, number)
    for label in configs_of(trial.model, trial.config):
        set_attribute(model, label, attribute(trial.model, label))
    own = {name: p.requires_grad_() for name, p in model.named_parameters()}
    try:
        with Keyed(SoloKeys(trial.seed, trial.step)) as mode:
            loss = trial.task.loss(model, tree_map(_double, alone.batch), trial.config)
            grads = mode.gradients(loss, [own[name] for name in step.names])
    except Exception:
        return None
    if not math.isfinite(_length(grads)):
        return None
    first = min(alone.row, max(0, len(inputs.rows[0]) - 2))
    two = inputs.part(first, min(first + 2, len(inputs.rows[0])))
    wide = {name: tree_map(_double, getattr(two, name)) for name in ("rows", "others", "buffers", "batch")}
    return _of(step.gradients(replace(two, **wide), full=True)[1], alone.row - first), grads


def _length(grads: Grads) -> float:
    squares = [grad.double().square().sum() for grad in grads if grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0  # one wait for a device


def compare(names: Sequence[str], together: Grads, alone: Grads, tolerance: float, whole: float | None = None) -> None:
    """Refuse gradients that differ by more than a part of the trial's ``whole`` gradient."""
    whole = _length(alone) if whole is None else whole
    distances = {}
    for name, one, own in zip(names, together, alone, strict=False):
        if one is not None and own is not None:
            distances[name] = distance(own, one)
        elif one is not own:
            raise Unfusable(f"the gradient of {name} is there or missing, unlike that of the trial alone")
    off = torch.stack([*distances.values()]) / max(whole, 1e-30) if distances else torch.empty(0)
    for name, far in zip(distances, off.tolist(), strict=True):  # one wait for a device
        if not far <= tolerance:
            raise Unfusable(f"the gradient of {name} is off by {far:.2g} of that of the trial alone")


# A compiled step, and the plain one


def agree_plain(step: Step, faster: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> None:
    """Refuse a faster form of a step that does not do the same to copies of these inputs, where that is finite."""
    leaves, spec = inputs.leaves()
    plain, fast = (Inputs(*tree_unflatten([_copy(leaf) for leaf in leaves], spec)) for _ in range(2))
    expected = step(plain)
    step.way.release()
    losses = faster(fast)
    off = COMPILED["float64" if expected.dtype == torch.float64 else step.task.precision]
    _same_change(torch.zeros_like(expected), expected, losses, off, 0.0)
    # Of averages of gradients, and of buffers that have settled, a step changes hardly more than rounding does.
    for part, of_change, of_all in (("rows", off, 0.0), ("state", 0.0, off), ("buffers", off, off / 25)):
        for old, one, other in zip(*(tree_flatten(getattr(x, part))[0] for x in (inputs, plain, fast)), strict=True):
            _same_change(old, one, other, of_change, of_all)


def _same_change(old: torch.Tensor, right: torch.Tensor, made: torch.Tensor, of_change: float, of_all: float) -> None:
    there = torch.isfinite(right)
    old, right, made = (torch.where(there, x, 0) for x in (old, right, made))
    far, changed, length = (float(distance(right, x)) for x in (made, old, torch.zeros_like(right)))
    eps = torch.finfo(torch.promote_types(right.dtype, torch.float32)).eps
    if not far <= of_change * changed + max(of_all, 4 * eps) * length:
        raise Unfusable(f"the compiled step differs from the plain one by {far / max(changed, 1e-30):.2g}")


# Penstock's own kernels, and torch's operators


def agree_kernels(step: Step, inputs: Inputs) -> None:
    """Refuse kernels whose gradients or buffers are farther from those in full float32 than torch's are.

    A step in bfloat16 or TF32 is off by what rounding does to it, with kernels as without.
    """
    buffers = list(inputs.buffers.values())
    with unchanged(buffers):
        exact = [_in_float32(step, inputs), _kept(inputs)]
    off = []
    for wanted in (False, True):
        with unchanged(buffers), kernels(wanted):
            made = [torch.cat(step.joined(step.gradients(inputs)[1]), 1), _kept(inputs)]
            off.append([distance(right, one, dim=1) for one, right in zip(made, exact, strict=True)])
        del made
    step.way.release()
    for what, right, torchs, ours in zip(("gradients", "buffers"), exact, *off, strict=True):
        length = right.norm(dim=1)
        bad = torch.isfinite(length) & torch.isfinite(torchs) & ~(ours <= TIMES * torchs + MORE * length)
        if bool(bad.any()):
            worst = int(torch.where(bad, ours / length, 0).argmax())
            raise Unfusable(
                f"the {what} of trial {worst} of the bundle are off by {float(ours[worst] / length[worst]):.2g}, "
                f"where torch's own operators are off by {float(torchs[worst] / length[worst]):.2g}"
            )


def _in_float32(step: Step, inputs: Inputs) -> torch.Tensor:
    made = []
    with _full_float32(), kernels(False):
        for first in range(0, len(inputs.rows[0]), ROWS):
            part = inputs.part(first, first + ROWS)
            made.append(torch.cat(step.joined(step.gradients(part, full=True)[1]), 1).double())
    return torch.cat(made)


def _kept(inputs: Inputs) -> torch.Tensor:
    """The buffers, such as the statistics of a BatchNorm, in which modules keep something of the batches they saw."""
    trials = len(inputs.rows[0])
    kept = [rows.double().reshape(trials, -1) for rows in inputs.buffers.values() if rows.is_floating_point()]
    return torch.cat([*kept, torch.zeros(trials, 0, device=inputs.rows[0].device)], 1)


@contextmanager
def _full_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _of(grads: Grads, row: int) -> Grads:
    return [None if grad is None else grad[row] for grad in grads]


def _double(leaf: Any) -> Any:
    """A copy of a tensor of real numbers in float64; anything else as it is."""
    return leaf.to(torch.float64, copy=True) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
