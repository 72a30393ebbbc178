"""The fused mode: a bundle of trials trained as one model on one device, each exactly as if it were alone.

A step reads one batch for every position at which trials stand, runs the task's own loss once for all of them, and
steps all optimizers at once. Trials enter and leave between steps; what comes out is a plain trial.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from penstock.seeds import step_key
from penstock.training.checkpoint import State
from penstock.training.data import Streams
from penstock.training.fused.agreement import Case, agree, gradients
from penstock.training.fused.compiled import FastStep, Inputs, step_kind
from penstock.training.fused.measuring import Measuring
from penstock.training.fused.speeding import Speeding
from penstock.training.fused.stack import Stack
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.ways import General, Native, Tensors, Way
from penstock.training.loop import Training
from penstock.training.random.masks import halves
from penstock.trial import Metrics

Position = tuple[int, int]


class Torn(Exception):
    """An error, such as a lack of memory, while parameters were being written: trials go on from their last states."""


@contextmanager
def _whole_or_torn() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Torn(str(error)) from error


@dataclass
class Recipe:
    """What was found out about training a signature's trials together; kept from bundle to bundle."""

    ways: list[type[Way]] = field(default_factory=lambda: [Native, General])
    way: Way | None = None
    agreed: set[Any] = field(default_factory=set)  # which numbers differed, and the batch's shape, when compared
    refusals: list[str] = field(default_factory=list)  # why a way cannot be taken
    idle: frozenset[str] = frozenset()  # parameters that the loss does not reach
    alone: str | None = None  # why trials are measured one by one
    size: int | None = None  # the most trials that a step computes at once
    reason: str = ""  # why this size, as it was told last
    told: tuple[str, str | None] | None = None  # the way and ``alone``, as they were told last
    compilable: bool = True
    capturable: bool = True
    pace: tuple[int, float] | None = None  # how many trials took a plain step last, and its seconds
    kernels: bool | None = None  # whether Penstock's own are used in a compiled step, once that is known
    compiling: tuple[float, float] | None = None  # seconds that compiling took, and the share of a step that it saved


class Fused:
    """A bundle in training: ``step`` trains every trial by one step and gives those that have ended a unit."""

    def __init__(self, recipe: Recipe, capacity: int = 8) -> None:
        self.recipe, self.capacity = recipe, capacity
        self.stack: Stack | None = None
        self.losses = torch.empty(0)  # of the rows that were trained last
        self.ended: list[Training] = []
        self.failed: list[tuple[Training, Exception]] = []
        self.fast: dict[Any, FastStep] = {}  # compiled or captured steps, by what they were made for
        self.speeding = Speeding(recipe)
        self._streams: Streams | None = None
        self._changed = True
        self._round = 0  # steps of the bundle
        self._ahead: dict[int, int] = {}  # the round that a trial takes part in next

    @property
    def trials(self) -> list[Training]:
        return [] if self.stack is None else self.stack.trials

    # Coming and going

    def enter(self, trial: Training) -> None:
        """Take in a trial, with all of its state."""
        if self.stack is None:
            self.stack = Stack(trial, idle=self.recipe.idle, capacity=self.capacity)
            self._streams = Streams(trial.data.train, trial.batch_size)
            self._plain = copy.deepcopy(trial.model)
        self.stack.enter(trial)
        self._changed = True

    def leave(self, trial: Training) -> None:
        """Let a trial go: it is a plain one again."""
        assert self.stack is not None
        self.stack.leave(trial)
        self._ahead.pop(id(trial), None)
        self._changed = True

    def state(self, trial: Training) -> State:
        """What a plain run of this trial would save."""
        assert self.stack is not None
        self.stack.export(trial)
        trial.best_model = self.stack.best_model(trial)
        state = trial.state(drawn=False)
        trial.best_model = {}
        state["model"] = {name: tensor.clone() for name, tensor in state["model"].items()}
        state["optimizer"] = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, state["optimizer"])
        self.stack.forget(trial)
        return state

    # Training

    def step(self, measuring: Measuring | None = None) -> None:
        """Train by one step every trial that is behind; those that end a unit by it are in ``ended``.

        While measuring, a step is done in parts of the sizes that are to be timed.
        """
        self._arrange()
        behind = self.behind()
        batches = self._batches(behind)
        for first, last in self._runs(behind, batches, measuring):
            if measuring is None:
                self._train(first, last, batches)
            else:
                self._time(measuring, first, last, batches)
            self._count(self.trials[first:last])
        self._round += 1

    def behind(self) -> list[Training]:
        """The trials that take part in the next step: all, but for those that were ahead when others came."""
        return [trial for trial in self.trials if self._ahead.get(id(trial), 0) <= self._round]

    def step_alone(self, trial: Training) -> None:
        """One step of a trial that is not in the bundle, ahead of the others."""
        batch = next(iter(trial.data.train.batches(trial.epoch, trial.place, trial.batch_size)))
        trial.model.train()
        trial.train_step(batch)
        self._count([trial])

    def step_each(self) -> list[tuple[Training, Exception]]:
        """After an error in a step: every trial that is behind takes it alone. Gives those that fail, which are out."""
        behind, trials, failed = self.behind(), list(self.trials), []
        for trial in trials:
            self._stack.leave(trial)
        for trial in trials:
            try:
                if any(trial is one for one in behind):
                    self.step_alone(trial)
            except Exception as error:
                failed.append((trial, error))
            else:
                self._stack.enter(trial)
        self._changed = True
        return failed

    def _count(self, trials: Sequence[Training]) -> None:
        for trial in trials:
            self._ahead[id(trial)] = max(self._ahead.get(id(trial), 0), self._round) + 1
            try:
                if trial.count_step():
                    self.ended.append(trial)
            except Exception as error:  # its scheduler's: the others have trained too, and are to be counted
                self.failed.append((trial, error))

    def take_failed(self) -> list[tuple[Training, Exception]]:
        """The trials whose schedulers raised, which are then to be taken out."""
        failed, self.failed = self.failed, []
        return failed

    def take_ended(self) -> list[Training]:
        """The trials that have ended a unit, which are then to be measured."""
        ended, self.ended = self.ended, []
        return ended

    def _time(self, measuring: Measuring, first: int, last: int, batches: dict[Position, Any]) -> None:
        cuda = self._stack.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self._stack.device)
            torch.cuda.reset_peak_memory_stats(self._stack.device)
        began = time.perf_counter()
        self._train(first, last, batches)
        if cuda:
            torch.cuda.synchronize(self._stack.device)
        peak = torch.cuda.max_memory_allocated(self._stack.device) if cuda else None
        measuring.took(last - first, time.perf_counter() - began, peak)

    def _arrange(self) -> None:
        """After trials have come or gone: those at the same place lie side by side, and the way knows their numbers."""
        if self._changed and self.stack is not None:
            self.stack.order(sorted(self.trials, key=lambda trial: (trial.place, trial.epoch)))
            if self.recipe.way is not None:
                self.recipe.way.vary([trial.model for trial in self.trials])
            self._changed = False

    def _batches(self, trials: Sequence[Training]) -> dict[Position, Any]:
        assert self._streams is not None
        chosen = {_position(trial) for trial in trials}
        return self._streams.take(chosen, {_position(trial) for trial in self.trials} - chosen)

    def _runs(
        self, trials: Sequence[Training], batches: dict[Position, Any], measuring: Measuring | None
    ) -> Iterator[tuple[int, int]]:
        """Neighbouring rows whose batches have one shape, at most ``size`` at a time."""
        shapes = {at: _shapes(batch) for at, batch in batches.items()}
        chosen = set(map(id, trials))
        last = 0
        keys = [shapes[_position(trial)] if id(trial) in chosen else None for trial in self.trials]
        for key, rows in groupby(keys):
            first, last = last, last + len(list(rows))
            while key is not None and first < last:
                left = last - first
                size = min(left, self.recipe.size or left) if measuring is None else measuring.next(left)
                yield first, first + size
                first += size

    def _train(self, first: int, last: int, batches: dict[Position, Any]) -> None:
        """A step of some rows. Where memory runs out it is done again with less, from where it began."""
        trials = self.trials[first:last]
        batch, shared = self._together(trials, batches)
        fast = self.fast.get(step_kind(last - first, shared, batch)) if self.fast else None
        whole = bool(self.fast or self.speeding.wanted) and self._whole(first, last, batch, shared)
        if whole and self.speeding.wanted is not None:
            fast = self._hurry(first, last, batch, shared)
        if fast is not None and fast.takes(inputs := self._inputs(first, last, batch)):
            with _whole_or_torn():
                self.losses = fast(inputs)
            self._stack.count(first, last)
            return
        if whole:
            self.fast = {}  # made for trials that are no longer these: whether to make another is asked again
        before = {name: rows[first:last].clone() for name, rows in self._stack.buffers.items()}
        grads = None
        try:
            grads = self._gradients(first, last, batches, before)
        except Exception as error:
            self._put_back(first, last, before)
            if not isinstance(error, torch.OutOfMemoryError) or (last - first == 1 and not self.fast):
                raise
        if grads is None:  # the error is gone, and with it what it held
            self._train_with_less(first, last, batches)
            return
        with _whole_or_torn():
            self._stack.update(first, last, grads, self.trials[0].task.clip_grad_norm)

    def _train_with_less(self, first: int, last: int, batches: dict[Position, Any]) -> None:
        """The same with less memory: without what a captured step holds, whether it runs or not, or else in halves."""
        size = last - first
        if self.fast:
            self.fast, self.recipe.capturable = {}, False
        else:
            self.recipe.size = size = (size + 1) // 2
        torch.cuda.empty_cache()
        for a in range(first, last, size):
            self._train(a, min(a + size, last), batches)

    def _whole(self, first: int, last: int, batch: Any, shared: bool) -> bool:
        """Whether this is the step that most steps are: of all trials, on a full batch."""
        tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
        sizes = {n for leaf in tensors for n in (leaf.shape[:1] if shared else leaf.shape[1:2])}
        return last - first == len(self.trials) and self.trials[0].batch_size in sizes

    def _hurry(self, first: int, last: int, batch: Any, shared: bool) -> FastStep | None:
        """Make the faster step that is wanted."""
        self._stack.spare()
        made = self.speeding.make(self._inputs(first, last, batch), shared, self.trials[0], self._stack.flats)
        self.fast = {} if made is None else {step_kind(last - first, shared, batch): made}
        return made

    def _inputs(self, first: int, last: int, batch: Any) -> Inputs:
        trials, way = self.trials[first:last], self.recipe.way
        assert way is not None
        way.train()  # which keys are needed depends on it
        keys = self._keys(trials)
        return Inputs.of(self._stack, first, last, batch, keys, way.numbers(first, last, self._stack.device))

    def _put_back(self, first: int, last: int, before: Tensors) -> None:
        """Give some rows the buffers that they had before a step."""
        for name, rows in before.items():
            self._stack.buffers[name][first:last] = rows

    def _gradients(
        self, first: int, last: int, batches: dict[Position, Any], before: Tensors
    ) -> tuple[torch.Tensor, ...]:
        if self.recipe.way is None:
            self._find_way(first, last, batches)
        assert self.recipe.way is not None
        if (kind := self._kind(first, batches)) not in self.recipe.agreed:  # a number or a shape that is new
            agree(self.recipe.way, self._case(first, last, batches))
            self.recipe.agreed.add(kind)
        grads = self._gradients_by(self.recipe.way, first, last, batches)
        idle = {name for name, grad in zip(self._stack.trained(), grads, strict=True) if grad is None}
        if idle:
            self._set_aside(idle)
            self._put_back(first, last, before)  # a forward has been there already
            grads = self._gradients_by(self.recipe.way, first, last, batches)
        return grads

    def _kind(self, first: int, batches: dict[Position, Any]) -> tuple[Any, ...]:
        assert self.recipe.way is not None
        return self.recipe.way.varying, _shapes(batches[_position(self.trials[first])])

    def _gradients_by(self, way: Way, first: int, last: int, batches: dict[Position, Any]) -> tuple[torch.Tensor, ...]:
        stack, trials = self._stack, self.trials[first:last]
        params, buffers = stack.leaves(first, last)
        batch, shared = self._together(trials, batches)
        way.train()
        numbers, keys = way.numbers(first, last, stack.device), self._keys(trials)
        losses, grads = gradients(way, trials[0], params, buffers, stack.trained(), batch, shared, keys, numbers)
        self.losses = losses.detach()
        return grads

    def _set_aside(self, idle: set[str]) -> None:
        """Parameters without a gradient are not stepped: neither decayed nor given a state, as in a plain run."""
        self.recipe.idle |= idle
        self.recipe.agreed.clear()  # other steps may reach them
        self.fast = {}
        trials = list(self.trials)
        for trial in trials:
            self._stack.leave(trial)
        self.stack = Stack(trials[0], idle=self.recipe.idle, capacity=max(self.capacity, len(trials)))
        for trial in trials:
            self.stack.enter(trial)

    def _together(self, trials: Sequence[Training], batches: dict[Position, Any]) -> tuple[Any, bool]:
        positions = [_position(trial) for trial in trials]
        if len(set(positions)) == 1:
            return batches[positions[0]], True
        return tree_map(_stack_leaves, *(batches[at] for at in positions)), False

    def _keys(self, trials: Sequence[Training], stream: int = 0) -> torch.Tensor | None:
        """The keys of the trials' next step, one row each; None where nothing is drawn."""
        way = self.recipe.way
        if way is not None and not way.random[way.template.training]:
            return None
        keys = [halves(step_key(trial.seed ^ stream, trial.step)) for trial in trials]
        return torch.tensor(keys, dtype=torch.int32).to(self._stack.device)

    # Which way

    def _find_way(self, first: int, last: int, batches: dict[Position, Any]) -> None:
        """Take the first way whose gradients agree with those of a trial alone, on this very batch."""
        case = self._case(first, last, batches)
        while self.recipe.ways:
            kind = self.recipe.ways[0]
            try:
                way = kind(self._plain, case.trial.config)
                way.vary([trial.model for trial in self.trials])
                agree(way, case)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.recipe.refusals.append(f"{kind.name}: {said(error)}")
                self.recipe.ways.pop(0)
            else:
                self.recipe.way = way
                self.recipe.agreed.add(self._kind(first, batches))
                return
        raise Unfusable("; ".join(self.recipe.refusals))

    def _case(self, first: int, last: int, batches: dict[Position, Any]) -> Case:
        trials = self.trials[first:last]
        if self.recipe.way is not None:
            self.recipe.way.train()  # which keys are needed depends on it
        batch, shared = self._together(trials, batches)
        alone = batches[_position(trials[0])]
        return Case(self._stack, first, last, batch, shared, self._keys(trials), alone, self._plain)

    @property
    def _stack(self) -> Stack:
        assert self.stack is not None
        return self.stack

    # Measuring

    def evaluate(self, trials: Sequence[Training]) -> list[Metrics]:
        """The task's metrics of each trial over the validation data."""
        self._arrange()
        if self.recipe.alone is None and self.recipe.way is not None:
            try:
                return self._evaluate(trials)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.recipe.alone = said(error)
        return [trial.evaluate() for trial in trials]

    @torch.no_grad()
    def _evaluate(self, trials: Sequence[Training]) -> list[Metrics]:
        assert self.recipe.way is not None
        way, task, valid = self.recipe.way, trials[0].task, trials[0].data.valid
        made: dict[int, Metrics] = {}
        way.eval()
        chosen = set(map(id, trials))
        row = 0
        for wanted, rows in groupby(self.trials, lambda t: id(t) in chosen):
            start, row = row, row + len(list(rows))
            size = self.recipe.size or row - start
            for first in range(start, row, size) if wanted else ():
                last = min(first + size, row)
                params, buffers = self._stack.leaves(first, last)
                own = self.trials[first:last]
                keys = self._keys(own, 1)
                numbers = way.numbers(first, last, self._stack.device)
                sums, lengths = dict[str, torch.Tensor](), Counter[str]()
                with own[0].autocast():
                    for batch, length in valid.all(task.eval_batch_size):
                        values = way.run(task.metrics, params, buffers, batch, True, keys, numbers)
                        for name, value in values.items():
                            number = torch.as_tensor(value).to(torch.float64).expand(last - first) * length
                            sums[name] = sums[name] + number if name in sums else number
                            lengths[name] += length
                columns = {name: (total / lengths[name]).tolist() for name, total in sums.items()}
                for i, trial in enumerate(own):
                    made[id(trial)] = {name: column[i] for name, column in columns.items()}
        return [made[id(trial)] for trial in trials]

    def take_metrics(self, trials: Sequence[Training], metrics: Sequence[Metrics]) -> None:
        """Count a unit of each trial, and keep the weights of those that were never better."""
        better = []
        for trial, row in zip(trials, metrics, strict=True):
            try:
                if trial.count_unit(row):
                    better.append(trial)
            except Exception as error:
                self.failed.append((trial, error))
        if better:
            self._stack.keep_best([self.trials.index(trial) for trial in better])


def _position(trial: Training) -> Position:
    return trial.epoch, trial.place


def _shapes(batch: Any) -> tuple[Any, ...]:
    return tuple((v.shape, v.dtype) if isinstance(v, torch.Tensor) else type(v) for v in tree_flatten(batch)[0])


def _stack_leaves(*leaves: Any) -> Any:
    if isinstance(leaves[0], torch.Tensor):
        return torch.stack(leaves)
    if any(leaf != leaves[0] for leaf in leaves):
        raise Unfusable(f"a batch holds a {type(leaves[0]).__name__} that differs from position to position")
    return leaves[0]


def said(error: Exception) -> str:
    """The first line of an error, with its kind where it is not one of ours."""
    text = str(error) if isinstance(error, Unfusable) else f"{type(error).__name__}: {error}"
    return text.strip().splitlines()[0]
