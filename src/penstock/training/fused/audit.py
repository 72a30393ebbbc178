"""Audits: now and then one trial of a bundle repeats its step alone, and both must have come to the same.

A comparison before the first step cannot show what a later step does: a compiled or captured step has frozen whatever
Python decided when it was made. So steps are audited all along: the first of each kind, two of the first that a faster
step takes, then about one in ``EVERY``, as long as audits take no more than ``COST`` of the time.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch

from penstock.training.contents import Contents
from penstock.training.fused.agreement import distance, own_attributes
from penstock.training.fused.copies import Copies, lengths
from penstock.training.fused.stack import Stack
from penstock.training.fused.stacked import Unfusable
from penstock.training.keeping import untouched
from penstock.training.loop import Training
from penstock.training.random.generators import own_randomness

EVERY = 200  # steps between two audits, about
EARLY = (2, 11)  # which of a faster step's replays are audited first
COST = 0.01  # the share of time that audits may take
# By the precision of the rows and of the task. CLOSE: how far a step may be from the trial's own, in parts of the
# change that it makes. QUIET: which gradients are but rounding, in parts of all: an adaptive optimizer makes whole
# steps of them. ROUNDING: how far weights are nudged to see how far rounding alone puts a step off.
CLOSE = {"float64": 1e-7, "fp32": 1e-3, "tf32": 0.02, "bf16": 0.05}
QUIET = {"float64": 1e-8, "fp32": 1e-3, "tf32": 0.1, "bf16": 0.3}
ROUNDING = {"float64": 2**-52, "fp32": 2**-23, "tf32": 2**-10, "bf16": 2**-8}
TIMES = 10  # how many times as far as that a step may be (invariant 2)


class Differs(Unfusable):
    """A trial's step in a bundle was another than its step alone: the trials go back to their last states."""


Tensors = dict[str, torch.Tensor]


@dataclass
class Audits:
    """Decides which steps are audited, from the seed of the trials; nothing is decided by the outcome of one."""

    seen: set[Any] = field(default_factory=set)  # the kinds of step that were audited
    replays: int = 0  # steps that the present faster step has taken
    left: int = EVERY  # steps until the next audit
    spent: float = 0.0  # seconds of audits
    since: float = field(default_factory=time.perf_counter)
    off: bool = False  # for want of memory
    put_off: bool = False  # while steps are timed: an audit that is due in between comes afterwards
    faster: set[object] = field(default_factory=set)  # the kinds of faster steps that there were

    def begin_fast(self, kind: object = "") -> None:
        """Count the steps of a kind of faster step, such as "captured", that is made for the first time."""
        if kind not in self.faster:
            self.faster.add(kind)
            self.replays = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the seconds of an audit."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent += time.perf_counter() - began

    def attempt(self, step: Callable[[], Copies]) -> Copies | None:
        """What a step alone changes; None where memory is too small for one, and no more audits are made."""
        try:
            return step()
        except (MemoryError, torch.OutOfMemoryError):
            self.off = True
            return None
        except Exception as error:
            raise Differs(f"the trial's own step fails with {type(error).__name__}: {error}") from error

    def ahead(self, kind: Any) -> int:
        """How many steps of a kind, by a faster step, come before the next one that may be audited."""
        if self.off:
            return EVERY
        if (kind, True) not in self.seen:
            return 0
        early = [number - self.replays for number in EARLY if number > self.replays]
        return max(0, min(EVERY if self.put_off else self.left, *early, EVERY) - 1)

    def skip(self, steps: int) -> None:
        """Count some steps, by a faster step, that were not audited."""
        self.left, self.replays = self.left - steps, self.replays + steps

    def due(self, kind: Any, seed: int, *, fast: bool) -> bool:
        """Whether the next step is to be audited."""
        if self.off:
            return False
        self.left -= 1
        first = (kind, fast) not in self.seen
        self.seen.add((kind, fast))
        if fast:
            self.replays += 1
            first = first or self.replays in EARLY
        if not first and (self.left > 0 or self.put_off):
            return False
        if self.left <= 0:
            self.left = random.Random(f"audit {seed}").randint(EVERY // 2, 3 * EVERY // 2)
        return first or self.spent <= COST * (time.perf_counter() - self.since)


def audited(
    audits: Audits, stack: Stack, trial: Training, batch: Any, train: Callable[[], None], now: Callable[[], object]
) -> None:
    """Train, and compare what became of one trial with its step alone; unless the rows ``now`` lie in another stack."""
    with audits.timed():
        start, before = Row(stack, trial), holdings(stack, trial)
    train()
    if now() is stack:
        with audits.timed():
            made = holdings(stack, trial).less(before)
            alone = audits.attempt(partial(step_alone, start, batch))
            if alone is not None:
                compare(start, batch, alone, made)


_COPIED = {"param_groups", "state"}  # an optimizer's attributes whose copies are of their own kind


class Row:
    """A copy of all that a trial holds in a stack, and of its own optimizer's attributes and state."""

    def __init__(self, stack: Stack, trial: Training) -> None:
        self.stack, self.trial = stack, trial
        self._row = stack.copy_row(trial)
        self._groups = [dict(group) for group in trial.optimizer.param_groups]
        self._attributes = dict(vars(trial.optimizer))
        self._contents = Contents(value for name, value in self._attributes.items() if name not in _COPIED)
        state = trial.optimizer.state
        self._state = {p: {name: _copy(value) for name, value in own.items()} for p, own in state.items()}

    def put_back(self) -> None:
        """Let the trial hold again what it held when the copy was made."""
        self.stack.put_row(self.trial, self._row)
        optimizer = self.trial.optimizer
        vars(optimizer).clear()
        vars(optimizer).update(self._attributes)
        self._contents.put_back()
        for group, before in zip(optimizer.param_groups, self._groups, strict=False):
            group.clear()
            group.update(before)
        optimizer.state.clear()
        for p, own in self._state.items():
            optimizer.state[p] = {name: _copy(value) for name, value in own.items()}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def step_alone(start: Row, batch: Any, nudge: float = 0.0) -> Copies:
    """What a trial's step alone changes, from where it stood at ``start``; ``nudge``: from weights that far off.

    Where its gradient is but rounding, the change of a parameter is NaN: it tells nothing. Nothing of the step stays:
    neither in the trial nor in the task, in its module or in the generators.
    """
    stack, trial = start.stack, start.trial
    now = Row(stack, trial)
    with own_randomness(), untouched(trial.task), own_attributes(trial.model):
        try:
            start.put_back()
            if nudge:
                generator = torch.Generator().manual_seed(trial.step)
                with torch.no_grad():
                    for p in trial.model.parameters():
                        p.mul_(1 + nudge * (torch.rand(p.shape, generator=generator) * 2 - 1).to(p))
            before = holdings(stack, trial)
            grads = stack.step_alone(trial, batch)
            made = holdings(stack, trial).less(before)
        finally:
            now.put_back()
    sizes = Copies.of(grads)
    quiet = QUIET[precision(stack, trial)] * sizes.vector.square().mean().sqrt()
    for name, size in sizes.items():
        made[f"the parameter {name}"].masked_fill_(size.abs() <= quiet, math.nan)
    return made


def holdings(stack: Stack, trial: Training) -> Copies:
    """Copies of a trial's weights, buffers and optimizer state; those of one sort lie side by side."""
    found: Tensors = {f"the parameter {name}": p for name, p in trial.model.named_parameters()}
    found |= {f"the buffer {name}": b for name, b in trial.model.named_buffers()}
    stack.export(trial)
    states: Tensors = {}
    for name, p in trial.model.named_parameters():
        for what, value in trial.optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                states[f"the optimizer's {what} of {name}"] = value
    made = Copies.of(found | {name: states[name] for name in sorted(states, key=_sort)})
    stack.forget(trial)
    return made


def compare(start: Row, batch: Any, alone: Copies, made: Copies) -> None:
    """Refuse what a bundle's step has ``made`` of a trial where it is not what the trial ``alone`` makes of itself."""
    if made.places != alone.places:
        unlike = {name for name in made.keys() | alone.keys() if made.places.get(name) != alone.places.get(name)}
        raise Differs(f"{min(unlike)} is there, missing or of another shape, unlike in the trial's own step")
    kind = precision(start.stack, start.trial)
    sorts = {sort: list(names) for sort, names in groupby(alone, _sort)}
    finite = torch.isfinite(alone.vector)
    right = torch.where(finite, alone.vector, 0.0)
    off = torch.where(finite, made.vector, 0.0) - right
    whole, far_off = lengths([right, off], [alone.numbers(names) for names in sorts.values()])
    of_sort = dict(zip(sorts, whole, strict=True))
    suspects = list[str]()
    for (sort, names), far in zip(sorts.items(), far_off, strict=True):
        if not far <= CLOSE[kind] * of_sort[sort]:  # or each of them is close
            suspects += names
    control: Copies | None = None
    for name in suspects:
        right = alone[name]
        there = torch.isfinite(right)
        far, length = float(distance(right[there], made[name][there])), of_sort[_sort(name)]
        if not math.isfinite(far):
            far = math.inf
        if far <= CLOSE[kind] * length:
            continue
        if control is None:
            control = step_alone(start, batch, ROUNDING[kind])
        off = torch.where(there & torch.isfinite(control[name]), control[name] - right, 0.0)
        if not far <= CLOSE[kind] * length + TIMES * float(off.norm()):
            raise Differs(f"{name} is off by {far / max(length, 1e-30):.2g} of what the trial's own step makes of it")


def _sort(name: str) -> str:
    """All parameters are of one sort, and each of an optimizer's states; a buffer is its own."""
    return name if name.startswith("the buffer") else name.rpartition(" of ")[0] or "the parameters"


def precision(stack: Stack, trial: Training) -> str:
    """The precision that a trial's steps are computed in."""
    if stack.flats and stack.flats[0].rows.dtype == torch.float64:
        return "float64"
    if trial.task.precision == "bf16":
        return "bf16"
    tf32 = stack.device.type == "cuda" and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)
    return "tf32" if tf32 else "fp32"
