"""The metrics of a bundle's trials over the validation data, for all trials at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from penstock.seeds import step_key
from penstock.training.fused import recording
from penstock.training.fused.recipe import Recipe
from penstock.training.fused.recording import Pool
from penstock.training.fused.stack import Stack
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.ways import Way
from penstock.training.loop import Training
from penstock.training.random.masks import halves
from penstock.training.sources import TensorSource
from penstock.trial import Metrics

REPEATED = 4  # batches of one length that are worth a recording

Fetch = Callable[[], list[Metrics]]  # waits for the device, and gives the metrics of each trial


@dataclass
class Sums:
    """Metrics of some trials, summed over batches by their length."""

    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    lengths: Counter[str] = field(default_factory=Counter)

    def add(self, values: dict[str, Any], length: int, trials: int) -> None:
        """Count a batch."""
        for name, value in values.items():
            number = torch.as_tensor(value).to(torch.float64).expand(trials) * length
            if name in self.totals:
                self.totals[name] += number
            else:
                self.totals[name] = number.clone()
            self.lengths[name] += length

    def columns(self) -> dict[str, list[float]]:
        """The mean of each metric, by trial."""
        totals = {name: total.tolist() for name, total in self.totals.items()}
        # Divided on the host, as one trial's mean is: a device multiplies by the inverse.
        return {name: [one / self.lengths[name] for one in column] for name, column in totals.items()}


@torch.no_grad()
def evaluate(stack: Stack, recipe: Recipe, trials: Sequence[Training], measures: Measures | None = None) -> Fetch:
    """Measure some trials in the stack; gives how to fetch the task's metrics of each."""
    assert recipe.way is not None
    way = recipe.way
    made: list[tuple[Sequence[Training], Sums]] = []
    way.eval()
    chosen = set(map(id, trials))
    row = 0
    for wanted, rows in groupby(stack.trials, lambda t: id(t) in chosen):
        start, row = row, row + len(list(rows))
        size = recipe.size or row - start
        for first in range(start, row, size) if wanted else ():
            last = min(first + size, row)
            made.append((stack.trials[first:last], _measured(stack, way, first, last, measures)))

    def fetch() -> list[Metrics]:
        found: dict[int, Metrics] = {}
        for own, sums in made:
            columns = sums.columns()
            for i, trial in enumerate(own):
                found[id(trial)] = {name: column[i] for name, column in columns.items()}
        return [found[id(trial)] for trial in trials]

    return fetch


def _measured(stack: Stack, way: Way, first: int, last: int, measures: Measures | None) -> Sums:
    own, count = stack.trials[first:last], last - first
    task, valid, size = own[0].task, own[0].data.valid, own[0].task.eval_batch_size
    keys = step_keys(way, own, 1)
    sums, done = (Sums(), 0) if measures is None or keys is not None else measures.of(stack, way, first, last)
    params, buffers = stack.leaves(first, last)
    numbers = way.numbers(first, last, stack.device)
    with own[0].autocast():
        for number, (batch, length) in enumerate(valid.all(size)):
            if number >= done:
                sums.add(way.run(task.metrics, params, buffers, batch, True, keys, numbers), length, count)
                way.settle()
    return sums


class Measures:
    """Recordings of the metrics of one full validation batch, by the rows that they are of."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._made: dict[tuple[int, int], Measure] = {}
        self.refused = ""  # why no more recordings are made

    def of(self, stack: Stack, way: Way, first: int, last: int) -> tuple[Sums, int]:
        """The sums over the full batches that a recording can have, and how many batches these are."""
        trial = stack.trials[first]
        valid, count = trial.data.valid, trial.data.valid.length // trial.task.eval_batch_size
        there = isinstance(valid, TensorSource) and valid.tensors[0].device == stack.device
        if self.refused or not recording.records(stack.device) or not there or count < REPEATED:
            return Sums(), 0
        found = self._made.get((first, last))
        if found is None or not found.holds(stack, way, first, last):
            try:
                found = self._made[first, last] = Measure(stack, way, first, last, self._pool)
            except Exception as error:
                self._made.clear()
                self.refused = f"{type(error).__name__}: {error}"
                return Sums(), 0
        return found(way.numbers(first, last, stack.device), count), count

    @property
    def bytes(self) -> int:
        """The memory of the largest recording."""
        return max((one.bytes for one in self._made.values()), default=0)


class Measure:
    """The metrics of some rows on one full validation batch after another, recorded."""

    def __init__(self, stack: Stack, way: Way, first: int, last: int, pool: Pool) -> None:
        trial, count = stack.trials[first], last - first
        valid, size = trial.data.valid, trial.task.eval_batch_size
        assert isinstance(valid, TensorSource)
        params, buffers = stack.leaves(first, last)
        self._numbers = [values.clone() for values in way.numbers(first, last, stack.device)]
        self._size, self._sums = size, Sums()
        self._made_for = self._kind(stack, way, first, last)
        self._counter = torch.zeros(1, dtype=torch.int64, device=stack.device)
        within = torch.arange(size, device=stack.device)

        def run() -> None:
            rows = self._counter * size + within
            batch = valid.named(tuple(tensor.index_select(0, rows) for tensor in valid.tensors))
            with trial.autocast():
                values = way.run(trial.task.metrics, params, buffers, batch, True, None, self._numbers)
                way.settle()
            if not all(isinstance(value, torch.Tensor) and value.device == stack.device for value in values.values()):
                raise Unfusable("a metric is no tensor on the device")
            self._sums.add(values, size, count)
            self._counter.add_(1)

        try:
            self._recording = recording.Recording(run, buffers.values(), pool)
        finally:
            way.release()
        self.bytes = self._recording.bytes
        self._read = way.read
        self._plain = way.plain(self._read)

    def holds(self, stack: Stack, way: Way, first: int, last: int) -> bool:
        """Whether it was made for these rows as they lie now."""
        return way.plain(self._read) == self._plain and self._kind(stack, way, first, last) == self._made_for

    @staticmethod
    def _kind(stack: Stack, way: Way, first: int, last: int) -> tuple[object, ...]:
        tensors = [tensor for part in stack.leaves(first, last) for tensor in part.values()]
        return way, way.fixed, way.varying, [tensor.data_ptr() for tensor in tensors]

    def __call__(self, numbers: list[torch.Tensor], batches: int) -> Sums:
        """The sums over so many full batches."""
        for into, value in zip(self._numbers, numbers, strict=True):
            into.copy_(value)
        for total in (*self._sums.totals.values(), self._counter):
            total.zero_()
        for _ in range(batches):
            self._recording.replay()
        totals = {name: total.clone() for name, total in self._sums.totals.items()}
        return Sums(totals, Counter(dict.fromkeys(totals, batches * self._size)))


def evaluate_alone(stack: Stack, trials: Sequence[Training]) -> Fetch:
    """The same, one trial after another."""
    made: list[Metrics] = []
    for trial in trials:
        made.append(trial.evaluate())
        stack.take_buffers(trial)
    return lambda: made


def step_keys(way: Way, trials: Sequence[Training], stream: int = 0) -> torch.Tensor | None:
    """The keys of the trials' next step, one row each; None where nothing is drawn."""
    if not way.random[way.template.training]:
        return None
    keys = [halves(step_key(trial.seed ^ stream, trial.step)) for trial in trials]
    return torch.tensor(keys, dtype=torch.int32).to(trials[0].device)
