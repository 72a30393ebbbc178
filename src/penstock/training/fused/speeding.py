"""When a bundle's step is compiled or captured: where the steps that are certain repay it, and never otherwise.

Hydro's lazy rule (§4.2): a trial is sure to train to its grant, the next rung, and not to the last one. So the number
that counts is how many steps the bundle will take as it is now, until the first of its trials leaves.
"""

from __future__ import annotations

import time
from typing import Literal

import torch

from penstock.training.fused.agreement import agree_kernels, agree_plain
from penstock.training.fused.compiled import CapturedStep, CompiledStep, FastStep
from penstock.training.fused.recipe import Recipe
from penstock.training.fused.step import Inputs, Step, unchanged
from penstock.training.kernels.choice import available, kernels
from penstock.training.loop import Training

COMPILING = 60.0  # seconds that compiling takes, until it was measured
SAVED = {"cpu": 0.25, "cuda": 0.5}  # the share of a step that compiling saves, until it was measured
CAPTURING = 10  # steps that a capture costs about
TIMED = 5  # steps after which a compiled step is known


class Speeding:
    """Watches a bundle's pace and makes its step faster where that pays."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.wanted: Literal["compiled", "captured"] | None = None
        self._pace: float | None = None  # seconds of a plain step
        self._making = 0.0  # seconds that went into making steps since the last ``took``
        self._together: list[Training] = []  # the trials that the counts below are of
        self._steps, self._seconds = 0, 0.0  # since the last unit

    def meet(self, trials: list[Training]) -> bool:
        """Begin to count anew when trials have come or gone; whether they have."""
        if trials == self._together:
            return False
        self._together, self._steps, self._seconds = trials, 0, 0.0
        return True

    def expect(self, certain: int) -> None:
        """Want a faster step for trials that have just met, if it pays by the pace of others."""
        if self.recipe.pace is not None:
            trials, seconds = self.recipe.pace
            self.consider(certain, seconds * min(1.0, len(self._together) / trials), known=False)

    def took(self, seconds: float) -> None:
        """Count a step; the seconds that went into making a faster one are no step's own."""
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds - self._making
        self._making = 0.0

    def end_unit(self, certain: int, *, fast: bool) -> bool:
        """After a unit, want a faster step if it pays; whether the one there is, if ``fast``, is to stay."""
        pace = self._seconds / self._steps
        self._steps, self._seconds = 0, 0.0
        if not fast:
            self.recipe.take_pace(len(self._together), pace)
            self.consider(certain, pace)
            return True
        if self._pace is None:
            return True
        if self.recipe.compiling is not None:
            self.recipe.take_compiling(self.recipe.compiling[0], max(0.0, 1 - pace / self._pace))
        if pace > self._pace:
            self.recipe.rule_out("compiled", "captured")
            return False
        return True

    def consider(self, certain: int, pace: float, *, known: bool = True) -> None:
        """Decide by how many steps are certain and the seconds of a plain one, at least these where not ``known``."""
        self._pace, self.wanted = pace if known else None, None
        cost, saved = self.recipe.compiling or (COMPILING, _saved())
        if self.recipe.compilable and certain * pace * saved > cost:
            self.wanted = "compiled"
        elif self.recipe.capturable and certain > 5 * CAPTURING and torch.cuda.is_available():
            self.wanted = "captured"

    def make(self, step: Step, inputs: Inputs) -> FastStep | None:
        """The step that is wanted, made for such inputs; None where it cannot be made or differs from the plain one."""
        wanted, self.wanted = self.wanted, None
        if wanted is None or (wanted == "captured" and not inputs.rows[0].is_cuda):
            return None  # the graph of a CPU's step would be empty
        began = time.perf_counter()
        try:
            # Graphs are recorded, and kernels run, on the current device.
            with torch.cuda.device_of(inputs.rows[0]):  # type: ignore[no-untyped-call]
                return self._make(wanted, step, inputs, began)
        except Exception as error:  # for want of memory too: the plain step has enough
            torch.cuda.empty_cache()
            self._refuse(wanted, error)
            self.recipe.rule_out(wanted)
            return None
        finally:
            self._making += time.perf_counter() - began

    def _make(self, wanted: str, step: Step, inputs: Inputs, began: float) -> FastStep:
        recipe = self.recipe
        if wanted == "compiled" and recipe.kernels is None:
            recipe.use_kernels(self._with_kernels(step, inputs))
        with kernels(bool(recipe.kernels)):
            if wanted != "compiled":
                return CapturedStep(step, inputs)
            compiled = CompiledStep(step, inputs)
            agree_plain(step, compiled, inputs)
            recipe.take_compiling(time.perf_counter() - began, (recipe.compiling or (0.0, _saved()))[1])
            captured = recipe.capturable and inputs.rows[0].is_cuda
            return CapturedStep(step, inputs, compiled) if captured else compiled

    def _with_kernels(self, step: Step, inputs: Inputs) -> bool:
        """Whether Penstock's own kernels make the step faster, with gradients as good as torch's."""
        if step.way.name != "native" or not available(inputs.rows[0].device):
            return False
        try:
            agree_kernels(step, inputs)
            seconds = {}
            for wanted in (False, True):
                with kernels(wanted), unchanged(inputs.written()):
                    seconds[wanted] = _seconds(CapturedStep(step, inputs), inputs)
        except Exception as error:  # for want of memory too: the bundle has enough without this comparison
            torch.cuda.empty_cache()
            self._refuse("kernels", error)
            return False
        return seconds[True] < seconds[False]

    def _refuse(self, what: str, error: Exception) -> None:
        said = str(error).strip().splitlines() or [type(error).__name__]
        self.recipe.refusals.append(f"{what}: {said[0]}")


def _saved() -> float:
    return SAVED["cuda" if torch.cuda.is_available() else "cpu"]


def _seconds(step: FastStep, inputs: Inputs) -> float:
    """The least time of a few steps."""
    times = []
    for _ in range(TIMED):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step(inputs)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)
