"""The fused mode: a bundle of trials trained as one model on one device, each exactly as if it were alone.

A step reads one batch for every position at which trials stand, runs the task's own loss once for all of them, and
steps all optimizers at once. Trials enter and leave between steps; a trial that leaves is a plain one again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from penstock.training.checkpoint import State
from penstock.training.copying import copied
from penstock.training.fused.agreement import Alone, agree
from penstock.training.fused.audit import audited
from penstock.training.fused.batches import Batches, position_of, shapes_of
from penstock.training.fused.compiled import step_kind
from penstock.training.fused.evaluating import Fetch, Measures, evaluate, evaluate_alone, step_keys
from penstock.training.fused.faster import Faster
from penstock.training.fused.flat import Room
from penstock.training.fused.laying import LAID, Row
from penstock.training.fused.measuring import Measuring, parts
from penstock.training.fused.optimizers import hooked_step
from penstock.training.fused.recipe import Kind, Recipe, first_line
from penstock.training.fused.stack import Stack
from penstock.training.fused.step import Inputs, Step, Torn, hooked, whole_or_torn
from penstock.training.fused.watching import Again, Drew, Numbered, Unclear, Unreached
from penstock.training.fused.ways import Way
from penstock.training.loop import Training
from penstock.training.sources import Streams
from penstock.trial import Metrics


class Fused:
    """A bundle in training: ``step`` trains every trial by one step, ``take_ended`` gives all that ended a unit."""

    def __init__(self, recipe: Recipe, capacity: int = 8) -> None:
        self.recipe, self.capacity = recipe, capacity
        self.stack: Stack | None = None
        self.losses = torch.empty(0)  # of the rows that were trained last
        self.ended: list[Training] = []
        self.failed: list[tuple[Training, Exception]] = []
        self.fast = Faster(recipe)  # compiled or captured steps
        self.speeding = self.fast.speeding
        self.measures = Measures(self.speeding.pool)
        self._streams: Streams | None = None
        self._plain: nn.Module | None = None  # a copy of the first trial's module, never trained
        self._changed = True  # since the rows were arranged
        self._round = 0  # steps of the bundle
        self._ahead: dict[int, int] = {}  # the round that a trial takes part in next

    @property
    def trials(self) -> list[Training]:
        return [] if self.stack is None else self.stack.trials

    # Coming and going

    def enter(self, trial: Training) -> None:
        """Take in a trial, with all of its state."""
        if hooked(trial.model) and not self.recipe.own:
            self._step_own()
        if self.stack is None:
            self.stack = self._stack_for(trial, self.capacity)
            self._streams = Streams(trial.data.train, trial.batch_size)
            self._plain = copied(trial.model)
        self.stack.enter(trial)
        self._changed = True

    def leave(self, trial: Training) -> None:
        """Let a trial go: it is a plain one again."""
        assert self.stack is not None
        self.stack.leave(trial)
        self._ahead.pop(id(trial), None)
        self._changed = True

    def wait(self, steps: Mapping[int, int]) -> None:
        """Let trials, by id, take part again only once the others have taken so many steps."""
        self._ahead.update((trial, self._round + count) for trial, count in steps.items())

    def state(self, trial: Training) -> State:
        """The state that a plain run of this trial would save."""
        assert self.stack is not None
        self.stack.export(trial)
        trial.keep_best(self.stack.best_model(trial))
        state = trial.state(drawn=False)
        trial.keep_best({})
        state["model"] = {name: tensor.clone() for name, tensor in state["model"].items()}
        state["optimizer"] = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, state["optimizer"])
        self.stack.forget(trial)
        return state

    # Training

    def step(self, measuring: Measuring | None = None) -> None:
        """Train by one step every trial that is behind; the trials that end a unit by it are added to ``ended``.

        While measuring, a step is done in parts of the sizes that are to be timed.
        """
        self._arrange()
        behind = self.behind()
        if not behind and not self.ended:  # the trials that the others waited for have left
            self._round = min(self._ahead[id(trial)] for trial in self.trials)
            behind = self.behind()
        batches = self._batches(behind)
        for first, last in parts(batches.alike(self.trials, behind), self.recipe.size, measuring):
            if measuring is None:
                self._train_audited(first, last, batches)
            else:
                self._time(measuring, first, last, batches)
            self._count(self.trials[first:last])
        self._round += 1

    def leap(self, most: int) -> int:
        """Take up to ``most`` steps whose inputs are laid down at once; gives how many, 0 where none can be.

        They end with a unit, and before a step that is to be audited. The device may still be at work on them.
        """
        self._arrange()
        everyone = len(self.behind()) == len(self.trials)
        ready = self.fast and everyone and self.speeding.wanted is None  # a step that is wanted is made first
        fast = self.fast.laid(self._stack, self._way) if ready else None
        if fast is None:
            return 0
        rows, most = list[Row](), min(most, LAID, self.recipe.audits.ahead(self._audited_kind(fast.laid.one)))
        while len(rows) < most and not (self.ended or self.failed):
            if (rows and self._stack.outdated()) or (row := fast.laid.row(self._stack)) is None:
                break
            rows.append(row)
            self._stack.count(0, len(self.trials))
            self._count(self.trials)
            self._round += 1
        if rows:
            with whole_or_torn():
                self.losses = fast.leap(rows, self._way.numbers(0, len(self.trials), self._stack.device))
            self.recipe.audits.skip(len(rows))
        return len(rows)

    def behind(self) -> list[Training]:
        """The trials that take part in the next step: all but the ones that were ahead when others came."""
        return [trial for trial in self.trials if self._ahead.get(id(trial), 0) <= self._round]

    def step_alone(self, trial: Training) -> None:
        """One step of a trial that is not in the bundle, ahead of the others."""
        batch = next(iter(trial.data.train.batches(trial.epoch, trial.place, trial.batch_size)))
        trial.model.train()
        trial.train_step(batch)
        self._count([trial])

    def step_each(self) -> list[tuple[Training, Exception]]:
        """After an error in a step: every trial that is behind takes it alone. Gives the trials that fail and leave."""
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
            except Exception as error:  # of its scheduler: the other trials have trained too, and are to be counted
                self.failed.append((trial, error))

    def take_failed(self) -> list[tuple[Training, Exception]]:
        """The trials whose schedulers raised, which are then to be taken out."""
        failed, self.failed = self.failed, []
        return failed

    def take_ended(self) -> list[Training]:
        """The trials that have ended a unit, which are then to be measured."""
        ended, self.ended = self.ended, []
        return ended

    def _time(self, measuring: Measuring, first: int, last: int, batches: Batches) -> None:
        cuda = self._stack.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self._stack.device)
            torch.cuda.reset_peak_memory_stats(self._stack.device)
        began = measuring.clock()
        self._train(first, last, batches)
        if cuda:
            torch.cuda.synchronize(self._stack.device)
        peak = torch.cuda.max_memory_allocated(self._stack.device) if cuda else None
        measuring.took(last - first, measuring.clock() - began, peak)

    def _arrange(self) -> None:
        """After trials have come or gone: let trials at the same place lie side by side, and let the way read all."""
        if self.stack is not None and self.stack.outdated():
            self.stack.renew()
            self.recipe.agreed.clear()  # the gradients of other parameters are computed now
            self.recipe.proven.clear()
            self.fast.clear()
            self._changed = True
        if self._changed and self.stack is not None:
            self.stack.order(sorted(self.trials, key=lambda trial: (trial.place, trial.epoch)))
            if self.recipe.way is not None:
                self.recipe.way.vary(self.trials)
            self._changed = False

    def _batches(self, trials: Sequence[Training]) -> Batches:
        assert self._streams is not None
        chosen = {position_of(trial) for trial in trials}
        return Batches(self._streams.take(chosen, {position_of(trial) for trial in self.trials} - chosen))

    def _train_audited(self, first: int, last: int, batches: Batches) -> None:
        """A step of some rows; where an audit is due, one of their trials takes it alone too."""
        trial = self.trials[first + self._round % (last - first)]
        batch = batches.own(trial)
        train = partial(self._train, first, last, batches)
        audits, kind = self.recipe.audits, self._audited_kind(batch)
        noted = hooked_step(trial.optimizer)  # hooks may count the steps that they see
        if noted or not audits.due(kind, trial.seed ^ self._round, fast=bool(self.fast)):
            train()
        else:
            audited(audits, self._stack, trial, batch, train, lambda: self.stack)

    def _audited_kind(self, batch: Any) -> Kind:
        return () if self.recipe.way is None else self.recipe.way.varying, shapes_of(batch)

    def _train(self, first: int, last: int, batches: Batches) -> None:
        """A step of some rows. Where memory runs out it is done again with less, from where it began."""
        batch, shared = batches.together(self.trials[first:last])
        if last - first == len(self.trials) and self._train_fast(batch, shared, batches):
            self._stack.count(first, last)
        else:
            self._train_plain(first, last, batch, shared, batches)

    def _train_fast(self, batch: Any, shared: bool, batches: Batches) -> bool:
        """A step of all trials by a faster step, where there is one for it or one is to be made."""
        way, kind = self.recipe.way, step_kind(len(self.trials), shared, batch)
        if way is None or _kind(way, batches.own(self.trials[0])) not in self.recipe.agreed:
            return False
        fast = self.fast.steps.get(kind)
        if self.fast.due(kind, batch, shared, self.trials[0].batch_size):
            self._stack.spare()
            inputs = self._inputs(way, 0, len(self.trials), batch, shared)
            fast = self.fast.make(kind, self._step_by(way), inputs, self._stack)
        losses = None
        if fast is not None:
            whole = partial(self._inputs, way, 0, len(self.trials), batch, shared)
            losses = self.fast.train(fast, self._stack, way, whole)
        if losses is None:
            self.fast.given_up(kind)
            return False
        self.losses = losses
        return True

    def _train_plain(self, first: int, last: int, batch: Any, shared: bool, batches: Batches) -> None:
        """A plain step of some rows; an error before parameters are written leaves all as it was."""
        stack, again, versions = self._stack, None, None
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
        room = self._stack.room(last - first)
        self.losses = self._step_by(self._way)(self._inputs(self._way, first, last, batch, shared, room))

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
            self._train(a, min(a + size, last), batches)

    def _step_by(self, way: Way) -> Step:
        return Step(way, self.trials[0].task, self._stack.flats, sorted(self._stack.idle))

    def _inputs(self, way: Way, first: int, last: int, batch: Any, shared: bool, room: Room | None = None) -> Inputs:
        way.train()  # which keys are needed depends on it
        keys = step_keys(way, self.trials[first:last])
        numbers = way.numbers(first, last, self._stack.device)
        return Inputs.of(self._stack, first, last, batch, shared, keys, numbers, room)

    def _set_aside(self, idle: frozenset[str]) -> None:
        """Parameters without a gradient are not stepped: neither decayed nor given a state, as in a plain run."""
        self.recipe.set_aside(idle)
        self._stack_anew()

    def _step_own(self) -> None:
        """Let each trial's own optimizer step from now on."""
        self.recipe.step_alone()
        if self.stack is not None:
            self._stack_anew()

    def _stack_anew(self) -> None:
        """Lay the rows out anew, for the same trials in the same order."""
        self.fast.clear()
        trials = list(self.trials)
        for trial in trials:
            self._stack.leave(trial)
        self.stack = self._stack_for(trials[0], max(self.capacity, len(trials)))
        for trial in trials:
            self.stack.enter(trial)

    def _stack_for(self, first: Training, capacity: int) -> Stack:
        return Stack(first, idle=self.recipe.idle, capacity=capacity, own=self.recipe.own)

    # Which way

    def _trust(self, first: int, last: int, batch: Any, shared: bool, batches: Batches) -> None:
        """Find a way, or compare the one there is where a number or a shape is new."""
        way, own = self.recipe.way, batches.own(self.trials[first])
        if way is not None and _kind(way, own) in self.recipe.agreed:
            return
        if way is None:
            way = self._find_way(first, last, batch, shared, batches)
        else:
            self._agree(way, first, last, batch, shared, batches)
        self.recipe.agree(_kind(way, own))

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
        step = self._step_by(way)
        return way.name, tuple(step.names), tuple(step.idle), self.recipe.own, _kind(way, batch)

    def _agree(self, way: Way, first: int, last: int, batch: Any, shared: bool, batches: Batches) -> None:
        """Compare a way with a trial alone, unless another bundle of the signature has done so."""
        assert self._plain is not None
        plain, trials, own = self._plain, enumerate(self.trials[first:last]), batches.own(self.trials[first])
        if self._proof(way, own) in self.recipe.proven:
            return
        alone = (Alone(trial, row, batches.own(trial), plain) for row, trial in trials)
        agree(self._step_by(way), lambda: self._inputs(way, first, last, batch, shared), alone)
        self.recipe.proven.add(self._proof(way, own))  # numbers may have come to be known meanwhile

    @property
    def _way(self) -> Way:
        assert self.recipe.way is not None
        return self.recipe.way

    @property
    def _stack(self) -> Stack:
        assert self.stack is not None
        return self.stack

    # Measuring

    def evaluate(self, trials: Sequence[Training]) -> Fetch:
        """Measure trials over the validation data; gives how to fetch the task's metrics of each."""
        self._arrange()
        while self.recipe.alone is None and self.recipe.way is not None:
            try:
                return evaluate(self._stack, self.recipe, trials, self.measures if self.fast else None)
            except torch.OutOfMemoryError:
                raise
            except Numbered:
                continue
            except Exception as error:
                self.recipe.measure_alone(first_line(error))
        return evaluate_alone(self._stack, trials)

    def take_metrics(self, trials: Sequence[Training], metrics: Sequence[Metrics]) -> None:
        """Count a unit of each trial, and keep the weights of every trial that was never better."""
        better = []
        for trial, row in zip(trials, metrics, strict=True):
            try:
                if trial.count_unit(row):
                    better.append(trial)
            except Exception as error:
                self.failed.append((trial, error))
        if better:
            self._stack.keep_best([self.trials.index(trial) for trial in better])


def _kind(way: Way, batch: Any) -> Kind:
    return way.varying, shapes_of(batch)
