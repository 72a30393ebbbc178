"""When a bundle's step is compiled or captured: where the steps that are certain repay it, and never otherwise.

Hydro's lazy rule (§4.2): a trial is sure to train to its grant, the next rung, and not to the last one. So what counts
is how many steps the bundle will take as it is now, until the first of its trials leaves.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from penstock.task import Task
from penstock.training.fused.compiled import CapturedStep, CompiledStep, FastStep, Inputs, agree
from penstock.training.kernels.agreement import check
from penstock.training.kernels.choice import available, kernels

COMPILING = 60.0  # seconds that compiling takes, until it was measured
SAVED = {"cpu": 0.25, "cuda": 0.5}  # the share of a step that compiling saves, until it was measured
CAPTURING = 10  # steps that a capture costs about
TIMED = 5  # steps after which a compiled step is known


class Speeding:
    """Watches a bundle's pace and makes its step faster where that pays."""

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe
        self.wanted: str | None = None
        self.pace: float | None = None  # seconds of a plain step
        self.making = 0.0  # seconds that went into making steps, which are no step's own

    def consider(self, certain: int, pace: float, *, known: bool = True) -> None:
        """Decide, given how many steps are certain and what seconds a plain one takes, at least, if not ``known``."""
        self.pace, self.wanted = pace if known else None, None
        cost, saved = self.recipe.compiling or (COMPILING, _saved())
        if self.recipe.compilable and certain * pace * saved > cost:
            self.wanted = "compiled"
        elif self.recipe.capturable and certain > 5 * CAPTURING and torch.cuda.is_available():
            self.wanted = "captured"

    def make(self, inputs: Inputs, shared: bool, trial: Any, flats: Any) -> FastStep | None:
        """The step that is wanted, made for such inputs; None where it cannot be, or is not what the plain one is."""
        wanted, self.wanted = self.wanted, None
        if wanted == "captured" and not inputs.rows[0].is_cuda:
            return None  # its graph would be empty
        recipe, began = self.recipe, time.perf_counter()
        try:
            # Graphs are recorded, and kernels run, on the current device.
            with torch.cuda.device_of(inputs.rows[0]):  # type: ignore[no-untyped-call]
                step = self._make(wanted, inputs, shared, trial.task, flats, began)
        except Exception as error:  # for want of memory too: the plain step has enough
            torch.cuda.empty_cache()
            said = str(error).strip().splitlines()
            recipe.refusals.append(f"{wanted}: {said[0] if said else type(error).__name__}")
            if wanted == "compiled":
                recipe.compilable = False
            else:
                recipe.capturable = False
            return None
        finally:
            self.making += time.perf_counter() - began
        return step

    def _make(self, wanted: str | None, inputs: Inputs, shared: bool, task: Task, flats: Any, began: float) -> FastStep:
        recipe = self.recipe
        if wanted == "compiled" and recipe.kernels is None:
            recipe.kernels = self._with_kernels(inputs, shared, task, flats)
        given = (recipe.way, task, flats, inputs, shared)
        with kernels(bool(recipe.kernels)):
            if wanted != "compiled":
                return CapturedStep(*given)
            step = CompiledStep(*given)
            agree(step, inputs)
            recipe.compiling = (time.perf_counter() - began, (recipe.compiling or (0.0, _saved()))[1])
            return CapturedStep(*given, step) if recipe.capturable and inputs.rows[0].is_cuda else step

    def _with_kernels(self, inputs: Inputs, shared: bool, task: Task, flats: Any) -> bool:
        """Whether Penstock's own kernels make the step faster, with gradients as good as torch's."""
        way = self.recipe.way
        if way.name != "native" or not available(inputs.rows[0].device):
            return False
        try:
            check(way, task, flats, inputs, shared)
            seconds = {}
            for wanted in (False, True):
                with kernels(wanted), inputs.unchanged():
                    seconds[wanted] = _seconds(CapturedStep(way, task, flats, inputs, shared), inputs)
        except Exception as error:  # for want of memory too: the bundle has enough without this comparison
            torch.cuda.empty_cache()
            self.recipe.refusals.append(f"kernels: {(str(error).strip().splitlines() or [type(error).__name__])[0]}")
            return False
        return seconds[True] < seconds[False]

    def timed(self, pace: float) -> bool:
        """Take the pace of the faster step; whether it is one."""
        if self.pace is None:
            return True
        if self.recipe.compiling is not None:
            self.recipe.compiling = (self.recipe.compiling[0], max(0.0, 1 - pace / self.pace))
        return pace <= self.pace


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
