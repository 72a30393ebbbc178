"""The inputs of many steps, laid down on the device at once and read there by a step counter.

A step that was recorded once reads its own row of these tables: the optimizers' coefficients, the keys of its random
draws and where its batch begins. So a run of steps needs nothing from the host but their launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.seeds import step_key
from penstock.training.fused.stack import Stack
from penstock.training.loop import Training
from penstock.training.random.masks import halves
from penstock.training.sources import TensorSource, staged

LAID = 256  # the most steps that are laid down at once


@dataclass(frozen=True)
class Row:
    """The inputs of one step, on the host."""

    coefficients: list[dict[str, NDArray[Any]]]  # for each flat
    keys: list[tuple[int, int]] | None
    starts: list[int]  # where the batch of each position begins in the orders of epochs


def layable(trials: Sequence[Training]) -> bool:
    """Whether the batches of some trials can be gathered on the device."""
    source = trials[0].data.train
    return isinstance(source, TensorSource) and source.tensors[0].device == trials[0].device


def short_of(trials: Sequence[Training]) -> int | None:
    """How many rows the next batch of every trial has; None where they have unlike batches."""
    rows = {min(trial.batch_size, trial.data.train.length - trial.place) for trial in trials}
    return rows.pop() if len(rows) == 1 else None


class Laid:
    """Tables for the steps of some trials, with batches of so many ``rows``; ``shared``: all trials have one batch."""

    def __init__(self, stack: Stack, rows: int, *, shared: bool, drawn: bool) -> None:
        trials, device, count = stack.trials, stack.device, len(stack.trials)
        source = trials[0].data.train
        assert isinstance(source, TensorSource)
        self.shared, self.rows, self._source = shared, rows, source
        self.names = [tuple(found) for found in _coefficients(stack)]
        kinds = [(len(names), flat.rows.dtype) for names, flat in zip(self.names, stack.flats, strict=True)]
        self._tables = [torch.zeros(LAID, n, count, 1, dtype=dtype, device=device) for n, dtype in kinds]
        self._rows = [torch.zeros_like(table[:1]) for table in self._tables]
        self.coefficients = [
            dict(zip(names, row[0].unbind(), strict=True)) for names, row in zip(self.names, self._rows, strict=True)
        ]
        self._keys = torch.zeros(LAID, count, 2, dtype=torch.int32, device=device) if drawn else None
        self.keys = None if self._keys is None else torch.zeros_like(self._keys[0])
        positions = 1 if shared else count
        self._starts = torch.zeros(LAID, positions, dtype=torch.int64, device=device)
        self._within = torch.arange(rows, device=device)
        slots = len({trial.epoch for trial in trials}) + 1
        self._orders = torch.zeros(slots, source.length, dtype=torch.int64, device=device)
        self._slots: dict[int, int] = {}  # by epoch: where its order lies
        self._laid: set[int] = set()  # epochs that steps read which are not launched yet
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._gathered = [t.new_zeros(positions * rows, *t.shape[1:]) for t in source.tensors]
        front = (rows,) if shared else (positions, rows)
        self.batch: Any = source.named(tuple(t.view(*front, *t.shape[1:]) for t in self._gathered))
        self.one: Any = source.named(tuple(t[:rows] for t in self._gathered))  # the batch of one trial

    def read(self) -> None:
        """Bring the next step's row into place. All of it is work of the device, which can be recorded."""
        for table, row in zip(self._tables, self._rows, strict=True):
            torch.index_select(table, 0, self._counter, out=row)
        if self._keys is not None and self.keys is not None:
            torch.index_select(self._keys, 0, self._counter, out=self.keys.unsqueeze(0))
        starts = self._starts.index_select(0, self._counter)
        places = (starts.view(-1, 1) + self._within).view(-1)
        samples = self._orders.view(-1).index_select(0, places)
        for tensor, gathered in zip(self._source.tensors, self._gathered, strict=True):
            torch.index_select(tensor, 0, samples, out=gathered)
        self._counter += 1

    def row(self, stack: Stack) -> Row | None:
        """The inputs of the trials' next step; None where that step is of another kind."""
        trials = stack.trials
        found = _coefficients(stack)
        if [tuple(names) for names in found] != self.names or short_of(trials) != self.rows:
            return None
        positions = trials[:1] if self.shared else trials
        epochs = {trial.epoch for trial in positions}
        if not all(self._has(epoch, epochs) for epoch in epochs):
            return None
        self._laid |= epochs
        starts = [self._slots[trial.epoch] * self._source.length + trial.place for trial in positions]
        keys = None if self.keys is None else [halves(step_key(trial.seed, trial.step)) for trial in trials]
        return Row(found, keys, starts)

    def _has(self, epoch: int, wanted: set[int]) -> bool:
        """Whether there is a place for an epoch's order; an epoch that no step reads any more gives up its own."""
        if epoch in self._slots:
            return True
        if len(self._slots) == len(self._orders):
            past = [one for one in self._slots if one not in wanted | self._laid]
            if not past:
                return False
            self._slots[epoch] = self._slots.pop(past[0])
        else:
            self._slots[epoch] = len(self._slots)
        order = staged(self._source.order(epoch), self._orders.device)
        self._orders[self._slots[epoch]].copy_(order, non_blocking=True)
        return True

    def lay(self, rows: Sequence[Row]) -> None:
        """Let the next steps read these rows, from the first on."""
        device, count = self._counter.device, len(rows)
        for i, (table, names) in enumerate(zip(self._tables, self.names, strict=True)):
            values = np.array([[row.coefficients[i][name] for name in names] for row in rows])
            table[:count].copy_(
                staged(torch.from_numpy(values).to(table.dtype).unsqueeze(-1), device), non_blocking=True
            )
        if self._keys is not None:
            keys = torch.tensor([row.keys for row in rows], dtype=torch.int32)
            self._keys[:count].copy_(staged(keys, device), non_blocking=True)
        starts = torch.tensor([row.starts for row in rows])
        self._starts[:count].copy_(staged(starts, device), non_blocking=True)
        self._counter.zero_()
        self._laid.clear()


def _coefficients(stack: Stack) -> list[dict[str, NDArray[Any]]]:
    return [flat.on_host(stack.trials, 0, len(stack.trials)) for flat in stack.flats]
