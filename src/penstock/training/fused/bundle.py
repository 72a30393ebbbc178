"""The fused mode: a bundle of trials trained as one model on one device, each exactly as if it were alone.

A step reads one batch for every position at which trials stand, runs the task's own loss once for all of them, and
steps all optimizers at once. Trials enter and leave between steps; a trial that leaves is a plain one again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from penstock.training.checkpoint import State
from penstock.training.copying import brought
from penstock.training.fused.audit import audited
from penstock.training.fused.batches import Batches, position_of, shapes_of
from penstock.training.fused.evaluating import Fetch, Measures, evaluate, evaluate_alone
from penstock.training.fused.laying import LAID, Row
from penstock.training.fused.measuring import Measuring, parts
from penstock.training.fused.optimizers import hooked_step
from penstock.training.fused.recipe import Kind, Recipe, first_line
from penstock.training.fused.stack import Stack
from penstock.training.fused.stepping import Stepping
from penstock.training.fused.watching import Numbered
from penstock.training.loop import Training
from penstock.training.sources import Streams
from penstock.trial import Metrics


class Fused:
    """A bundle in training: ``step`` trains every trial by one step, ``take_ended`` gives all that ended a unit."""

    def __init__(self, recipe: Recipe, capacity: int = 8) -> None:
        self.recipe, self.stepping = recipe, Stepping(recipe, capacity)
        self.ended: list[Training] = []
        self.failed: list[tuple[Training, Exception]] = []
        self.fast, self.speeding = self.stepping.fast, self.stepping.fast.speeding
        self.measures = Measures(self.speeding.pool)
        self._streams: Streams | None = None
        self._changed = True  # since the rows were arranged
        self._round = 0  # steps of the bundle
        self._ahead: dict[int, int] = {}  # the round that a trial takes part in next

    @property
    def trials(self) -> list[Training]:
        return self.stepping.trials

    @property
    def stack(self) -> Stack:
        return self.stepping.stack

    @property
    def losses(self) -> torch.Tensor:
        return self.stepping.losses

    # Coming and going

    def enter(self, trial: Training) -> None:
        """Take in a trial, with all of its state."""
        if self._streams is None:
            self._streams = Streams(trial.data.train, trial.batch_size)
        self.stepping.enter(trial)
        self._changed = True

    def leave(self, trial: Training) -> None:
        """Let a trial go: it is a plain one again."""
        self.stack.leave(trial)
        self._ahead.pop(id(trial), None)
        self._changed = True

    def wait(self, steps: Mapping[int, int]) -> None:
        """Let trials, by id, take part again only once the others have taken so many steps."""
        self._ahead.update((trial, self._round + count) for trial, count in steps.items())

    def state(self, trial: Training) -> State:
        """The state that a plain run of this trial would save."""
        self.stack.export(trial)
        trial.keep_best(self.stack.best_weights(trial))
        state = trial.state(drawn=False)
        trial.keep_best({})
        best = state["best"]
        there = dict(state["model"]), state["optimizer"], best["model"]
        state["model"], state["optimizer"], best["model"] = brought(there)
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
        fast = self.fast.laid(self.stack, self.stepping.way) if ready else None
        if fast is None:
            return 0
        rows, most = list[Row](), min(most, LAID, self.recipe.audits.ahead(self._audited_kind(fast.laid.one)))
        while len(rows) < most and not (self.ended or self.failed):
            if (rows and self.stack.outdated()) or (row := fast.laid.row(self.stack)) is None:
                break
            rows.append(row)
            self.stack.count(0, len(self.trials))
            self._count(self.trials)
            self._round += 1
        if rows:
            self.stepping.leap(fast, rows)
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
            self.stack.leave(trial)
        for trial in trials:
            try:
                if any(trial is one for one in behind):
                    self.step_alone(trial)
            except Exception as error:
                failed.append((trial, error))
            else:
                self.stack.enter(trial)
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
        cuda = self.stack.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.stack.device)
            torch.cuda.reset_peak_memory_stats(self.stack.device)
        began = measuring.clock()
        self.stepping.train(first, last, batches)
        if cuda:
            torch.cuda.synchronize(self.stack.device)
        peak = torch.cuda.max_memory_allocated(self.stack.device) if cuda else None
        measuring.took(last - first, measuring.clock() - began, peak)

    def _arrange(self) -> None:
        """After trials have come or gone: let trials at the same place lie side by side, and let the way read all."""
        if not self.trials:
            return
        if self.stack.outdated():
            self.stepping.renew()
            self._changed = True
        if self._changed:
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
        train = partial(self.stepping.train, first, last, batches)
        audits, kind = self.recipe.audits, self._audited_kind(batch)
        noted = hooked_step(trial.optimizer)  # hooks may count the steps that they see
        if noted or not audits.due(kind, trial.seed ^ self._round, fast=bool(self.fast)):
            train()
        else:
            audited(audits, self.stack, trial, batch, train, lambda: self.stack)

    def _audited_kind(self, batch: Any) -> Kind:
        return () if self.recipe.way is None else self.recipe.way.varying, shapes_of(batch)

    # Measuring

    def evaluate(self, trials: Sequence[Training]) -> Fetch:
        """Measure trials over the validation data; gives how to fetch the task's metrics of each."""
        self._arrange()
        while self.recipe.alone is None and self.recipe.way is not None:
            try:
                return evaluate(self.stack, self.recipe, trials, self.measures if self.fast else None)
            except torch.OutOfMemoryError:
                raise
            except Numbered:
                continue
            except Exception as error:
                self.recipe.measure_alone(first_line(error))
        return evaluate_alone(self.stack, trials)

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
            self.stack.keep_best([self.trials.index(trial) for trial in better])
