"""The faster steps of a bundle: made when they are wanted, found again by the kind of step, given up when outdated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from penstock.training.fused import recording
from penstock.training.fused.batches import full, position_of
from penstock.training.fused.compiled import FastStep, LaidStep, StepKind
from penstock.training.fused.laying import Laid, layable, short_of
from penstock.training.fused.recipe import Recipe
from penstock.training.fused.speeding import Speeding
from penstock.training.fused.stack import Stack
from penstock.training.fused.step import Inputs, Step, whole_or_torn
from penstock.training.fused.ways import Way

KEPT = 8  # faster steps of one bundle: as trials come and go, their number often comes back


class Faster:
    """The faster steps of a bundle, each of all of its trials."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.speeding = recipe, Speeding(recipe)
        self.steps: dict[StepKind, FastStep] = {}
        self._tried = Counter[StepKind]()  # plain steps of a kind

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def bytes(self) -> int:
        """The memory of captured steps, which share it, besides what torch counts."""
        return max((step.bytes for step in self.steps.values()), default=0)

    def clear(self) -> None:
        """Give all of them up."""
        self.steps.clear()

    def given_up(self, kind: StepKind) -> None:
        """Note a plain step of a kind: a faster one that there was is for trials that are no longer these."""
        self.steps.pop(kind, None)
        self._tried[kind] += 1

    def due(self, kind: StepKind, batch: Any, shared: bool, rows: int) -> bool:
        """Whether a faster step is to be made now: it is wanted, or steps of a rarer kind recur."""
        if full(batch, shared, rows):
            return self.speeding.wanted is not None
        return kind not in self.steps and self.speeding.again(self._tried[kind])

    def make(self, kind: StepKind, step: Step, inputs: Inputs, stack: Stack) -> FastStep | None:
        """Make the faster step that is wanted."""
        rows, laid = short_of(stack.trials), None
        if rows is not None and recording.records(stack.device) and not inputs.owners and layable(stack.trials):
            laid = Laid(stack, rows, shared=inputs.shared, drawn=inputs.keys is not None)
        present = self.steps.pop(kind, None)
        made = self.speeding.make(step, inputs, laid, present)
        if made is not None and made is not present:
            self.recipe.audits.begin_fast("compiled" if made.compiled else "captured")
        if made is not None:
            self.steps[kind] = made
            while len(self.steps) > KEPT:
                self.steps.pop(next(iter(self.steps)))
        return made

    def laid(self, stack: Stack, way: Way) -> LaidStep | None:
        """The faster step with laid down inputs that can take the next step of all trials."""
        kind = short_of(stack.trials), len({position_of(trial) for trial in stack.trials}) == 1
        for fast in self.steps.values():
            if isinstance(fast, LaidStep) and (fast.laid.rows, fast.laid.shared) == kind and _reads(fast, stack, way):
                return fast
        return None

    def train(self, fast: FastStep, stack: Stack, way: Way, inputs: Callable[[], Inputs]) -> torch.Tensor | None:
        """A step of all trials by a faster one: their losses; None where it was not made for such a step."""
        if isinstance(fast, LaidStep):
            row = fast.laid.row(stack) if _reads(fast, stack, way) else None
            if row is None:
                return None
            with whole_or_torn():
                return fast.leap([row], way.numbers(0, len(stack.trials), stack.device))
        given = inputs()
        if not fast.takes(given):
            return None
        with whole_or_torn():
            return fast(given)


def _reads(fast: LaidStep, stack: Stack, way: Way) -> bool:
    """Whether a step that reads laid down inputs was made for the trials as they are."""
    way.train()
    laid, count = fast.laid, len(stack.trials)
    keys, numbers = laid.keys if way.random[True] else None, way.numbers(0, count, stack.device)
    given = stack, 0, count, laid.batch, laid.shared, keys, numbers
    return fast.takes(Inputs.of(*given, coefficients=laid.coefficients))
