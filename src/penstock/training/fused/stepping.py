"""A step of some rows of a bundle: in the way that was found right for them, by a faster step, or with less memory."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.training.copying import copied
from penstock.training.fused.agreement import Alone, agree
from penstock.training.fused.batches import Batches, shapes_of
from penstock.training.fused.compiled import LaidStep, step_kind
from penstock.training.fused.evaluating import step_keys
from penstock.training.fused.faster import Faster
from penstock.training.fused.flat import Room
from penstock.training.fused.laying import Row
from penstock.training.fused.recipe import Kind, Recipe
from penstock.training.fused.stack import Stack
from penstock.training.fused.step import Inputs, Step, Torn, hooked, whole_or_torn
from penstock.training.fused.watching import Again, Drew, Numbered, Unclear, Unreached
from penstock.training.fused.ways import Way
from penstock.training.loop import Training
from penstock.training.schedulers import reads_state


class Stepping:
    """The rows of a bundle, and steps of some of them; an error leaves all as it was, or is ``Torn``."""

    def __init__(self, recipe: Recipe, capacity: int) -> None:
        self.recipe, self.capacity = recipe, capacity
        self.rows: Stack | None = None
        self.losses = torch.empty(0)  # of the rows that were trained last
        self.fast = Faster(recipe)  # compiled or captured steps
        self._plain: nn.Module | None = None  # a copy of the first trial's module, never trained

    @property
    def trials(self) -> list[Training]:
        """The trials, in the order of their rows."""
        return [] if self.rows is None else self.rows.trials

    @property
    def stack(self) -> Stack:
        """The rows, once a trial has come."""
        assert self.rows is not None
        return self.rows

    @property
    def way(self) -> Way:
        """The way, once it is found."""
        assert self.recipe.way is not None
        return self.recipe.way

    def enter(self, trial: Training) -> None:
        """Give a trial a row."""
        if not self.recipe.own and (hooked(trial.model) or reads_state(trial.scheduler)):
            self._step_own()
        if self.rows is None:
            self.rows = self._stack_for(trial, self.capacity)
            self._plain = copied(trial.model)
        self.rows.enter(trial)

    def leap(self, fast: LaidStep, rows: list[Row]) -> None:
        """Take steps of all trials whose inputs are laid down."""
        with whole_or_torn():
            self.losses = fast.leap(rows, self.way.numbers(0, len(self.trials), self.stack.device))

    def renew(self) -> None:
        """Look again at what trials train, as it changed: the gradients of other parameters are computed now."""
        self.stack.renew()
        self.recipe.agreed.clear()
        self.recipe.proven.clear()
        self.fast.clear()

    def train(self, first: int, last: int, batches: Batches) -> None:
        """A step of some rows. Where memory runs out it is done again with less, from where it began."""
        batch, shared = batches.together(self.trials[first:last])
        if last - first == len(self.trials) and self._train_fast(batch, shared, batches):
            self.stack.count(first, last)
        else:
            self._train_plain(first, last, batch, shared, batches)

    def _train_fast(self, batch: Any, shared: bool, batches: Batches) -> bool:
        """A step of all trials by a faster step, where there is one for it or one is to be made."""
        way, kind = self.recipe.way, step_kind(len(self.trials), shared, batch)
        if way is None or kind_of_step(way, batches.own(self.trials[0])) not in self.recipe.agreed:
            return False
        fast = self.fast.steps.get(kind)
        if self.fast.due(kind, batch, shared, self.trials[0].batch_size):
            self.stack.spare()
            inputs = self.inputs(way, 0, len(self.trials), batch, shared)
            fast = self.fast.make(kind, self.step_by(way), inputs, self.stack)
        losses = None
        if fast is not None:
            whole = partial(self.inputs, way, 0, len(self.trials), batch, shared)
            losses = self.fast.train(fast, self.stack, way, whole)
        if losses is None:
            self.fast.given_up(kind)
            return False
        self.losses = losses
        return True

    def _train_plain(self, first: int, last: int, batch: Any, shared: bool, batches: Batches) -> None:
        """A plain step of some rows; an error before parameters are written leaves all as it was."""
        stack, again, versions = self.stack, None, None
        before = [(rows, rows[first:last].clone()) for rows in stack.written_by_loss(weights=self.recipe.writes)]
        try:
            self._trust(first, last, batch, shared, batches)
            versions = stack.versions()
            self._step(first, last, batch, shared)
        except Torn:
            raise
        except Exception as error:
            if versions is not None and versions != stack.versions() and not self.recipe.writes:
                self.recipe.expect_writes()
                raise Torn("the loss wrote weights before it failed") from error
            for rows, value in before:
                rows[first:last] = value
            if isinstance(error, Again):
                again = error
            elif not isinstance(error, torch.OutOfMemoryError) or (last - first == 1 and not self.fast):
                raise
        else:
            stack.count(first, last)
            self.recipe.has_stepped()
            return
        # The error is gone, and with it the tensors that it held.
        if again is None:
            self._train_with_less(first, last, batches)
        else:
            self._train_again(again, first, last, batch, shared, batches)

    def _train_again(self, why: Again, first: int, last: int, batch: Any, shared: bool, batches: Batches) -> None:
        """Take a step again, in the way that is right for what it turned out to do."""
        if isinstance(why, Unclear):
            self.recipe.cannot_tell()
            raise why  # each trial takes it alone, by ``step_each``
        if isinstance(why, Unreached) and not self.recipe.stepped:
            self._set_aside(why.names)
        elif not isinstance(why, Drew | Numbered):
            self._step_own()
        self._train_plain(first, last, batch, shared, batches)

    def _step(self, first: int, last: int, batch: Any, shared: bool) -> None:
        room = self.stack.room(last - first)
        self.losses = self.step_by(self.way)(self.inputs(self.way, first, last, batch, shared, room))

    def _train_with_less(self, first: int, last: int, batches: Batches) -> None:
        """The same without the memory that a captured step holds, whether it runs or not; or else in halves."""
        size = last - first
        if self.fast:
            self.fast.clear()
            self.recipe.rule_out("captured")
        else:
            size = (size + 1) // 2
            self.recipe.limit(size)
        torch.cuda.empty_cache()
        for a in range(first, last, size):
            self.train(a, min(a + size, last), batches)

    def step_by(self, way: Way) -> Step:
        """The step of a way."""
        return Step(way, self.trials[0].task, self.stack.flats, sorted(self.stack.idle))

    def inputs(self, way: Way, first: int, last: int, batch: Any, shared: bool, room: Room | None = None) -> Inputs:
        """The inputs of a step of some rows."""
        way.train()  # which keys are needed depends on it
        keys = step_keys(way, self.trials[first:last])
        numbers = way.numbers(first, last, self.stack.device)
        return Inputs.of(self.stack, first, last, batch, shared, keys, numbers, room)

    def _set_aside(self, idle: frozenset[str]) -> None:
        """Parameters without a gradient are not stepped: neither decayed nor given a state, as in a plain run."""
        self.recipe.set_aside(idle)
        self._stack_anew()

    def _step_own(self) -> None:
        """Let each trial's own optimizer step from now on."""
        self.recipe.step_alone()
        if self.rows is not None:
            self._stack_anew()

    def _stack_anew(self) -> None:
        """Lay the rows out anew, for the same trials in the same order."""
        self.fast.clear()
        trials = list(self.trials)
        for trial in trials:
            self.stack.leave(trial)
        self.rows = self._stack_for(trials[0], max(self.capacity, len(trials)))
        for trial in trials:
            self.rows.enter(trial)

    def _stack_for(self, first: Training, capacity: int) -> Stack:
        return Stack(first, idle=self.recipe.idle, capacity=capacity, own=self.recipe.own)

    # Which way

    def _trust(self, first: int, last: int, batch: Any, shared: bool, batches: Batches) -> None:
        """Find a way, or compare the one there is where a number or a shape is new."""
        way, own = self.recipe.way, batches.own(self.trials[first])
        if way is not None and kind_of_step(way, own) in self.recipe.agreed:
            return
        if way is None:
            way = self._find_way(first, last, batch, shared, batches)
        else:
            self._agree(way, first, last, batch, shared, batches)
        self.recipe.agree(kind_of_step(way, own))

    def _find_way(self, first: int, last: int, batch: Any, shared: bool, batches: Batches) -> Way:
        """Take the first way whose gradients agree with those of a trial alone, on this very batch."""
        assert self._plain is not None
        plain, trial = self._plain, self.trials[first]

        def attempt(kind: type[Way]) -> Way:
            way = kind(plain, trial.config)
            way.watch(trial.task)
            way.vary(self.trials)
            self._agree(way, first, last, batch, shared, batches)
            return way

        return self.recipe.choose(attempt)

    def _proof(self, way: Way, batch: Any) -> Hashable:
        """All that a comparison depends on, among bundles of one signature."""
        step = self.step_by(way)
        return way.name, tuple(step.names), tuple(step.idle), self.recipe.own, kind_of_step(way, batch)

    def _agree(self, way: Way, first: int, last: int, batch: Any, shared: bool, batches: Batches) -> None:
        """Compare a way with a trial alone, unless another bundle of the signature has done so."""
        assert self._plain is not None
        plain, trials, own = self._plain, enumerate(self.trials[first:last]), batches.own(self.trials[first])
        if self._proof(way, own) in self.recipe.proven:
            return
        alone = (Alone(trial, row, batches.own(trial), plain) for row, trial in trials)
        agree(self.step_by(way), lambda: self.inputs(way, first, last, batch, shared), alone)
        self.recipe.proven.add(self._proof(way, own))  # numbers may have come to be known meanwhile


def kind_of_step(way: Way, batch: Any) -> Kind:
    """The kind of step, each of which is compared before it is trusted."""
    return way.varying, shapes_of(batch)
