"""When a bundle's step is captured or compiled: where the steps that are certain repay it, and never otherwise.

Hydro's lazy rule (§4.2): a trial is sure to train to its grant, the next rung, and not to the last one. So the number
that counts is how many steps the bundle will take as it is now, until the first of its trials leaves. A capture costs a
few steps, so it comes as soon as a way is found. Penstock's own kernels have to be compiled, which a process beside
this one does: until they are there, the step is captured without them.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import replace
from typing import Literal

import torch

from penstock.training.fused import recording
from penstock.training.fused.agreement import agree_kernels, agree_plain
from penstock.training.fused.compiled import CapturedStep, CompiledStep, FastStep, captured
from penstock.training.fused.laying import Laid
from penstock.training.fused.recipe import Recipe
from penstock.training.fused.recording import Pool
from penstock.training.fused.step import Inputs, Step, unchanged
from penstock.training.kernels.choice import available, kernels
from penstock.training.kernels.compiling import compiling
from penstock.training.kernels.needed import Job, needed
from penstock.training.kernels.tuning import about, untimed
from penstock.training.loop import Training

COMPILING = 60.0  # seconds that compiling takes, until it was measured
SAVED = {"cpu": 0.25, "cuda": 0.3}  # the share of a step that compiling saves, until it was measured
SAVED_BESIDE_KERNELS = 0.15  # the same of a step with Penstock's kernels: little is left to compile
CAPTURING = 12  # steps that repay a capture, which takes as long as three or four
RECURRING = 3  # steps of a rarer kind after which more are expected
TIMED = 5  # steps after which a step's time is known
NEAR = 4  # how many times more or fewer trials there may be where kernels are taken to be as good


class Speeding:
    """Watches a bundle's pace and makes its step faster where that pays."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.pool = Pool()
        self.wanted: Literal["compiled", "captured"] | None = None
        self._pace: float | None = None  # seconds of a step before the present one was made
        self._making = 0.0  # seconds that went into making steps since the last ``took``
        self._together: list[Training] = []  # the trials that the counts below are of
        self._steps, self._seconds = 0, 0.0  # since the last unit
        self.times: dict[int, float] = {}  # seconds of a captured step of so many trials, where these were measured
        self._awaited: dict[Hashable, list[Job]] = {}  # kernels that are compiled beside, by the kind of their step
        self.remade = 0  # how often these were there, and a step was wanted again

    def meet(self, trials: list[Training]) -> bool:
        """Begin to count anew when trials have come or gone; whether they have."""
        if trials == self._together:
            return False
        self._together, self._steps, self._seconds = trials, 0, 0.0
        self._awaited.clear()
        return True

    def expect(self, certain: int) -> None:
        """Want a faster step for trials that have just met, if it pays."""
        self.wanted = None
        if self._captures(certain):
            self.wanted = "captured"
        elif self.recipe.pace is not None:
            trials, seconds = self.recipe.pace
            self.consider(certain, seconds * min(1.0, len(self._together) / trials), known=False)

    def _captures(self, uses: int) -> bool:
        recorded = bool(self._together) and recording.records(self._together[0].device)
        return recorded and self.recipe.capturable and uses >= CAPTURING

    def again(self, tried: int) -> bool:
        """Whether to capture steps of a rarer kind, such as those of short batches, of which so many were taken."""
        if self.wanted is None and tried >= RECURRING and self._captures(CAPTURING):
            self.wanted = "captured"
            return True
        return False

    def take_times(self) -> dict[int, float]:
        """The seconds of captured steps by the number of trials, where they were measured since the last call."""
        times, self.times = self.times, {}
        return times

    def took(self, seconds: float, steps: int = 1) -> None:
        """Count some steps; the seconds that went into making a faster one are no step's own."""
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds - self._making
        self._making = 0.0

    def end_unit(self, certain: int, *, fast: bool, by_device: float | None = None) -> bool:
        """After a unit, want a faster step if it pays; whether the one there is, if ``fast``, is to stay.

        ``by_device``: the seconds of a step by the device's clock, where it was seen.
        """
        pace = self._seconds / self._steps
        self._steps, self._seconds = 0, 0.0
        captured = self._captures(certain)
        if not fast:
            self.recipe.take_pace(len(self._together), pace)
        if captured and not fast:  # compiling is considered once it is known how fast a captured step is
            self._pace, self.wanted = pace, "captured"
            return True
        if not fast or captured:
            if not captured or by_device is not None:  # the host counts the turns of other runs too
                self.consider(certain, by_device or pace)
            return True
        if recording.records(self._together[0].device):
            return True  # this unit was its last, and the step was timed beside others when it was made
        if self._pace is None:
            return True
        if self.recipe.compiling is not None:
            self.recipe.take_compiling(self.recipe.compiling[0], max(0.0, 1 - pace / self._pace))
        if pace > self._pace:
            self.recipe.rule_out("compiled", "captured")
            return False
        return True

    def consider(self, certain: int, pace: float, *, known: bool = True) -> None:
        """Decide by how many steps are certain and the seconds of one, at least these where not ``known``."""
        self._pace, self.wanted = pace if known else None, None
        cost, saved = self.recipe.compiling or (COMPILING, self._saved())
        if self.recipe.compilable and certain * pace * saved > cost:
            self.wanted = "compiled"

    @property
    def awaits(self) -> bool:
        """Whether a step is to become faster once its kernels are compiled."""
        return bool(self._awaited)

    def look(self) -> None:
        """Want the step again once the kernels that are compiled beside are there."""
        there = [kind for kind, jobs in self._awaited.items() if compiling().ready(jobs)]
        for kind in there:
            del self._awaited[kind]
        if there:
            self.wanted, self.remade = self.wanted or "captured", self.remade + 1

    def make(self, step: Step, inputs: Inputs, laid: Laid | None = None) -> FastStep | None:
        """The step that is wanted, made for such inputs; None where it cannot be made or differs from the plain one."""
        wanted, self.wanted = self.wanted, None
        if wanted is None or (wanted == "captured" and not recording.records(inputs.rows[0].device)):
            return None
        began = time.perf_counter()
        try:
            # Graphs are recorded, and kernels run, on the current device.
            with torch.cuda.device_of(inputs.rows[0]):  # type: ignore[no-untyped-call]
                return self._make(wanted, step, inputs, laid)
        except Exception as error:  # for want of memory too: the plain step has enough
            if inputs.rows[0].is_cuda:
                torch.cuda.empty_cache()
            self._refuse(wanted, error)
            self.recipe.rule_out(wanted)
            return None
        finally:
            self._making += time.perf_counter() - began

    def _make(self, wanted: str, step: Step, inputs: Inputs, laid: Laid | None) -> FastStep:
        recorded = self.recipe.capturable and recording.records(inputs.rows[0].device)
        if wanted == "captured":
            made = self._captured(step, inputs, laid)
            self._time(made, step, inputs)
            return made
        began = time.perf_counter()
        # Steps enough repay the timing of block sizes here, too.
        plain = self._faster(step, inputs, laid) if recorded else None
        with kernels(self._used(inputs)):
            compiled = CompiledStep(step, inputs)
            agree_plain(step, compiled, inputs)
            faster = captured(step, inputs, laid, self.pool, compiled) if recorded else None
        seconds, saved = time.perf_counter() - began, (self.recipe.compiling or (0.0, self._saved()))[1]
        if plain is None or faster is None:
            self.recipe.take_compiling(seconds, saved)
            return compiled
        before, after = (_seconds(one, inputs) for one in (plain, faster))
        self.recipe.take_compiling(seconds, max(0.0, 1 - after / before))
        if after < before:
            return faster
        self.recipe.rule_out("compiled")
        return plain

    def _captured(self, step: Step, inputs: Inputs, laid: Laid | None) -> CapturedStep:
        """A captured step: with Penstock's kernels where these are there, as good as torch's, and faster."""
        wanted, kind = self._used(inputs), inputs.kind()
        self._awaited.pop(kind, None)
        with untimed():
            if wanted or self._undecided(step, inputs):
                try:
                    jobs = self._needed(step, inputs)
                except Exception as error:  # as where Triton finds no compiler: the step is captured all the same
                    self._refuse("kernels", error)
                    self.recipe.use_kernels(about(len(inputs.rows[0])), False)
                    return captured(step, inputs, laid, self.pool)
                if not compiling().ready(jobs):
                    self._awaited[kind], wanted = jobs, False
                elif not wanted:
                    return self._faster(step, inputs, laid)
            if wanted and (made := self._with_kernels(step, inputs, laid)) is not None:
                return made
            with kernels(False):
                return captured(step, inputs, laid, self.pool)

    def _with_kernels(self, step: Step, inputs: Inputs, laid: Laid | None) -> CapturedStep | None:
        """A captured step with kernels. None where some would have to be compiled first: a process beside does it."""
        try:
            with kernels(True), needed(load=True) as missing:
                if not self.recipe.kernels:
                    agree_kernels(step, inputs)
                made = captured(step, inputs, laid, self.pool)
        except Exception:
            if not missing:
                raise
        if not missing:
            return made
        compiling().ask(missing)
        self._awaited[inputs.kind()] = missing
        return None

    def _time(self, made: CapturedStep, step: Step, inputs: Inputs) -> None:
        """Time a step of all trials and one of a trial alone, where nothing is known of how many should be together."""
        count, device = len(inputs.rows[0]), inputs.rows[0].device
        if self.recipe.size is not None or count < 2 or self.times:
            return
        first = replace(inputs.part(0, 1), numbers=step.way.numbers(0, 1, device))  # which a recording cannot read back
        try:
            with kernels(False):
                alone = CapturedStep(step, first, self.pool)
            self.times = {1: _seconds(alone, inputs), count: _seconds(made, inputs)}
        except Exception as error:  # the step of all trials is there, and is not given up for want of a comparison
            self._refuse("timed alone", error)
            self.recipe.limit(count)
        finally:
            step.way.numbers(0, count, device)  # a run is of all trials again

    def _used(self, inputs: Inputs) -> bool:
        """Whether kernels are faster for about so many trials; one trial fills a device so little that it is timed."""
        count, known = about(len(inputs.rows[0])), self.recipe.kernels
        if count in known or count == 1:
            return known.get(count, False)
        near = [used for size, used in known.items() if 1 < size <= NEAR * count and count <= NEAR * size]
        return bool(near) and all(near)

    def _undecided(self, step: Step, inputs: Inputs) -> bool:
        """Whether kernels could be used, and it is not known whether that is faster for about so many trials."""
        known = about(len(inputs.rows[0])) in self.recipe.kernels or self._used(inputs)
        return not known and step.way.name == "native" and available(inputs.rows[0].device)

    def _needed(self, step: Step, inputs: Inputs) -> list[Job]:
        """The kernels that a step needs and that nobody has compiled; a process beside this one is asked for them."""
        with kernels(True), needed() as jobs, unchanged(inputs.written()):
            step.repeated()(inputs)
        step.way.release()
        compiling().ask(jobs)
        return jobs

    def _faster(self, step: Step, inputs: Inputs, laid: Laid | None) -> CapturedStep:
        """The faster of two captured steps, without kernels and, where it is not known to be slower, with them."""
        made: dict[bool, CapturedStep] = {}
        with kernels(False):
            made[False] = captured(step, inputs, laid, self.pool)
        if self._used(inputs) or self._undecided(step, inputs):
            try:
                with_kernels = self._with_kernels(step, inputs, laid)
            except Exception as error:  # for want of memory too: the bundle has enough without this comparison
                self._refuse("kernels", error)
            else:
                if with_kernels is None:
                    return made[False]
                made[True] = with_kernels
            seconds = {used: _seconds(one, inputs) for used, one in made.items()}
            self.recipe.use_kernels(about(len(inputs.rows[0])), min(seconds, key=lambda used: seconds[used]))
        return made[self._used(inputs)]

    def _saved(self) -> float:
        """The share of a step that compiling probably saves."""
        if any(self.recipe.kernels.values()):
            return SAVED_BESIDE_KERNELS
        return SAVED["cuda" if torch.cuda.is_available() else "cpu"]

    def _refuse(self, what: str, error: Exception) -> None:
        said = str(error).strip().splitlines() or [type(error).__name__]
        self.recipe.refusals.append(f"{what}: {said[0]}")


def _seconds(step: CapturedStep, inputs: Inputs) -> float:
    """The least time of a few steps on the device."""
    with unchanged(inputs.written()):
        return min(step.timed() for _ in range(TIMED)) / 1e3
