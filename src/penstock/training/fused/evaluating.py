"""The metrics of a bundle's trials over the validation data, for all trials at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import torch

from penstock.seeds import step_key
from penstock.training.fused.recipe import Recipe
from penstock.training.fused.stack import Stack
from penstock.training.fused.ways import Way
from penstock.training.loop import Training
from penstock.training.random.masks import halves
from penstock.trial import Metrics


@torch.no_grad()
def evaluate(stack: Stack, recipe: Recipe, trials: Sequence[Training]) -> list[Metrics]:
    """The task's metrics of each of some trials in the stack."""
    assert recipe.way is not None
    way, task, valid = recipe.way, trials[0].task, trials[0].data.valid
    made: dict[int, Metrics] = {}
    way.eval()
    chosen = set(map(id, trials))
    row = 0
    for wanted, rows in groupby(stack.trials, lambda t: id(t) in chosen):
        start, row = row, row + len(list(rows))
        size = recipe.size or row - start
        for first in range(start, row, size) if wanted else ():
            last = min(first + size, row)
            params, buffers = stack.leaves(first, last)
            own = stack.trials[first:last]
            keys = step_keys(way, own, 1)
            numbers = way.numbers(first, last, stack.device)
            sums, lengths = dict[str, torch.Tensor](), Counter[str]()
            with own[0].autocast():
                for batch, length in valid.all(task.eval_batch_size):
                    values = way.run(task.metrics, params, buffers, batch, True, keys, numbers)
                    way.settle()
                    for name, value in values.items():
                        number = torch.as_tensor(value).to(torch.float64).expand(last - first) * length
                        sums[name] = sums[name] + number if name in sums else number
                        lengths[name] += length
            columns = {name: (total / lengths[name]).tolist() for name, total in sums.items()}
            for i, trial in enumerate(own):
                made[id(trial)] = {name: column[i] for name, column in columns.items()}
    return [made[id(trial)] for trial in trials]


def evaluate_alone(stack: Stack, trials: Sequence[Training]) -> list[Metrics]:
    """The same, one trial after another."""
    made: list[Metrics] = []
    for trial in trials:
        made.append(trial.evaluate())
        stack.take_buffers(trial)
    return made


def step_keys(way: Way, trials: Sequence[Training], stream: int = 0) -> torch.Tensor | None:
    """The keys of the trials' next step, one row each; None where nothing is drawn."""
    if not way.random[way.template.training]:
        return None
    keys = [halves(step_key(trial.seed ^ stream, trial.step)) for trial in trials]
    return torch.tensor(keys, dtype=torch.int32).to(trials[0].device)
