"""When a bundle's step is captured or compiled: where the steps that are certain repay it, and never otherwise.

Hydro's lazy rule (§4.2): a trial is sure to train to its grant, the next rung, and not to the last one. So the number
that counts is how many steps the bundle will take as it is now, until the first of its trials leaves. A capture costs a
few steps, so it comes as soon as a way is found. Penstock's own kernels, and steps by Inductor, are compiled by
processes beside this one: until they are there, the step goes on captured, or plain on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch.utils._pytree import tree_map

from penstock.training.fused import recording
from penstock.training.fused.agreement import agree_kernels, agree_plain
from penstock.training.fused.compiled import CapturedStep, CompiledStep, FastStep, captured
from penstock.training.fused.compiles import SAVED, Compiled
from penstock.training.fused.inductor import inductor
from penstock.training.fused.laying import Laid
from penstock.training.fused.recipe import Recipe
from penstock.training.fused.recording import Pool
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.step import Inputs, Step, unchanged
from penstock.training.kernels.choice import available, kernels
from penstock.training.kernels.compiling import compiling
from penstock.training.kernels.needed import Job, needed
from penstock.training.kernels.tuning import about, untimed
from penstock.training.loop import Training

CAPTURING = 12  # steps that repay a capture, which takes as long as three or four
RECURRING = 3  # steps of a rarer kind after which more are expected
TUNING = 40.0  # seconds that timing the block sizes of kernels takes, in which training stands still
TUNED = 0.1  # the share of a step that it saves
NEAR = 4  # how many times more or fewer trials there may be where kernels are taken to be as good


class Speeding:
    """Watches a bundle's pace and makes its step faster where that pays."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.pool = Pool()
        self.wanted: Literal["compiled", "captured", "ahead"] | None = None
        self._pace: float | None = None  # seconds of a step before the present one was made
        self._making = 0.0  # seconds that went into making steps since the last ``took``
        self._together: list[Training] = []  # the trials that the counts below are of
        self._steps, self._seconds = 0, 0.0  # since the last unit
        self.times: dict[int, float] = {}  # seconds of a captured step of so many trials, where these were measured
        self._awaited: dict[Hashable, list[Job]] = {}  # kernels that are compiled beside, by the kind of their step
        self._considered = False  # whether a compiled step was asked for, for these trials
        self._compiling: Compiled | None = None  # while it is compiled beside
        self._certain, self._now = 0, 0.0  # the steps that are certain, and the seconds of one as it is now
        self.remade = 0  # how often either was there, and a step was made again

    def meet(self, trials: list[Training]) -> bool:
        """Begin to count anew when trials have come or gone; whether they have."""
        if trials == self._together:
            return False
        self._together, self._steps, self._seconds = trials, 0, 0.0
        self._awaited.clear()
        self._considered, self._compiling = False, None
        return True

    def expect(self, certain: int) -> None:
        """Want a faster step for trials that have just met, if it pays."""
        self.wanted, self._certain = None, certain
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
        self._making, self._certain = 0.0, self._certain - steps

    def end_unit(self, certain: int, *, fast: bool, by_device: float | None = None) -> bool:
        """After a unit, want a faster step if it pays; whether the one there is, if ``fast``, is to stay.

        ``by_device``: the seconds of a step by the device's clock, where it was seen.
        """
        pace, steps, trials = self._seconds / self._steps, self._steps, len(self._together)
        self._steps, self._seconds, self._certain = 0, 0.0, certain
        recorded, captured = recording.records(self._together[0].device), self._captures(certain)
        if not fast:
            self.recipe.take_pace(trials, pace)
        if captured and not fast:  # compiling is considered once it is known how fast a captured step is
            self._pace, self.wanted = pace, "captured"
        elif not fast:
            self.consider(certain, pace)
        elif recorded:
            if by_device is not None:  # the host counts the turns of other runs too
                self.recipe.compiles.count(trials, steps, by_device)
                self.consider(certain, by_device)
        elif self._pace is not None:
            compiles = self.recipe.compiles
            compiles.cost = (compiles.cost or (0.0, 0.0))[0], max(0.0, 1 - pace / self._pace)
            if pace > self._pace:
                self._rule_out_compiled(_slower(trials, pace, self._pace, "plain"))
                return False
        return True

    def consider(self, certain: int, pace: float, *, known: bool = True) -> None:
        """Decide by how many steps are certain and the seconds of one, at least these where not ``known``."""
        self._pace, self._now = pace if known else None, pace
        if self.wanted is not None or self._considered or not self.recipe.compilable:
            return
        trials, compiles = len(self._together), self.recipe.compiles
        if self._awaited and compiling().failed is None and not compiles.asked(trials):
            return  # another step is to be compiled, once its kernels are there
        captured = self.recipe.capturable and recording.records(self._together[0].device)
        with_kernels = any(self.recipe.kernels.values())
        if compiles.pays(trials, certain, pace, captured=captured, kernels=with_kernels):
            self.wanted = "compiled" if inductor().prepared() else None
        elif compiles.expects_one(trials):
            self.wanted = "ahead" if inductor().prepared() else None

    @property
    def compiles(self) -> bool:
        """Whether a step is compiled beside, to take the present one's place."""
        return self._compiling is not None

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
            self.wanted, self.remade, self._considered = self.wanted or "captured", self.remade + 1, False
        if self._compiling is not None and self.wanted is None and self._there(self._compiling):
            self.wanted = "compiled"

    def _there(self, one: Compiled) -> bool:
        """Whether a compiled step is there and repays being taken up; if it cannot be compiled, none is."""
        try:
            there = inductor().ready(one.traced)
        except Unfusable as error:
            self._compiling = None
            self._rule_out_compiled(error)
            return False
        return there and self.recipe.compiles.repaid(self._certain, self._now)

    def make(
        self, step: Step, inputs: Inputs, laid: Laid | None = None, present: FastStep | None = None
    ) -> FastStep | None:
        """The step that is wanted, made for such inputs; None where it cannot be made or differs from the plain one.

        The ``present`` one goes on where a compiled step is not there yet, or not faster.
        """
        wanted, self.wanted = self.wanted, None
        if wanted is None or (wanted != "compiled" and not recording.records(inputs.rows[0].device)):
            return None
        began = time.perf_counter()
        try:
            # Graphs are recorded, and kernels run, on the current device.
            with torch.cuda.device_of(inputs.rows[0]):  # type: ignore[no-untyped-call]
                if wanted == "ahead":
                    self._ask_ahead(step, inputs)
                elif wanted == "compiled":
                    present = self._compiled(step, inputs, laid, present)
                elif self._known(step, inputs):
                    wanted = "compiled"
                    present = self._compiled(step, inputs, laid, None)
                else:
                    before, present = present, None
                    made = self._captured(step, inputs, laid)
                    self._time(made, step, inputs)
                    present = made if before is None else self._faster_still(before, made, inputs)
                return present
        except Exception as error:  # for want of memory too: the plain step has enough
            if inputs.rows[0].is_cuda:
                torch.cuda.empty_cache()
            if wanted == "captured":
                self._refuse(wanted, error)
                self.recipe.rule_out(wanted)
            else:
                self._rule_out_compiled(error)
            return present
        finally:
            self._making += time.perf_counter() - began

    def _known(self, step: Step, inputs: Inputs) -> bool:
        """Whether such a step is there compiled, and was seen to be faster."""
        if not self.recipe.compilable or self._undecided(step, inputs):
            return False
        one = self.recipe.compiles.find(step, inputs, self._used(inputs))
        return one is not None and one.run is not None and one.faster is True

    def _compiled(self, step: Step, inputs: Inputs, laid: Laid | None, present: FastStep | None) -> FastStep | None:
        """A compiled step, once it is there, if it is faster than the ``present`` one."""
        if not self._considered and self._tunes(step, inputs):
            present = self._faster(step, inputs, laid, tune=True)
        compiles, used = self.recipe.compiles, self._used(inputs)
        one = compiles.find(step, inputs, used) or compiles.trace(step, inputs, used)
        self._considered = True
        if one.faster is False:
            return present
        if one.run is None and inductor().ready(one.traced):
            one.run = inductor().load(one.traced)
        self._compiling = one if one.run is None else None
        return present if one.run is None else self._taken(one, step, inputs, laid, present)

    def _taken(
        self, one: Compiled, step: Step, inputs: Inputs, laid: Laid | None, present: FastStep | None
    ) -> FastStep:
        """The faster of a compiled step and the ``present`` one, where it was compared with the plain one."""
        assert one.run is not None
        began, compiles = time.perf_counter(), self.recipe.compiles
        with untimed(), kernels(self._used(inputs)):
            compiled = CompiledStep(step, inputs, one.run, one.traced.kept, one.read)
            agree_plain(step, compiled, inputs)
            if not (self.recipe.capturable and recording.records(inputs.rows[0].device)):
                compiles.cost = one.seconds + time.perf_counter() - began, (compiles.cost or (0.0, SAVED[False]))[1]
                return compiled
            made = captured(step, inputs, laid, self.pool, compiled)
            self.remade += present is not None  # a pack is timed again where its step was another before
            if one.faster:
                return made
            known = isinstance(present, CapturedStep) and present.takes(inputs)
            before = present if known else captured(step, inputs, laid, self.pool)
        assert isinstance(before, CapturedStep)
        old, new = before.seconds(inputs), made.seconds(inputs)
        one.faster = new < old
        if one.faster:
            compiles.cost = one.seconds + time.perf_counter() - began, 1 - new / old
        else:
            self._refuse("compiled", _slower(len(inputs.rows[0]), new, old, "captured"))
        return made if one.faster else before

    def _faster_still(self, before: FastStep, made: CapturedStep, inputs: Inputs) -> CapturedStep:
        """The faster of a compiled step that went on until kernels were there, and one captured with them."""
        if not (isinstance(before, CapturedStep) and before.compiled and before.takes(inputs)):
            return made
        return before if before.seconds(inputs) < made.seconds(inputs) else made

    def _tunes(self, step: Step, inputs: Inputs) -> bool:
        """Whether the steps that are certain repay the timing of block sizes, for the kernels that a step may use."""
        repaid = self._certain * self._now * TUNED > TUNING and available(inputs.rows[0].device)
        return repaid and self.recipe.capturable and (self._used(inputs) or self._undecided(step, inputs))

    def _ask_ahead(self, step: Step, inputs: Inputs) -> None:
        """Have the step of one trial compiled."""
        compiles, count, device = self.recipe.compiles, len(inputs.rows[0]), inputs.rows[0].device
        compiles.ahead, first = True, _first(step, inputs)
        if not inputs.shared:  # alone, it has a batch without others beside it
            batch = tree_map(lambda leaf: leaf[0] if isinstance(leaf, torch.Tensor) else leaf, first.batch)
            first = replace(first, batch=batch, shared=True)
        try:
            used = self._used(inputs)  # as for one trial most probably, too
            if compiles.find(step, first, used) is None:
                inductor().ready(compiles.trace(step, first, used).traced)
        finally:
            step.way.numbers(0, count, device)  # a run is of all trials again

    def _rule_out_compiled(self, error: Exception) -> None:
        self._refuse("compiled", error)
        self.recipe.rule_out("compiled")

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

    def _with_kernels(self, step: Step, inputs: Inputs, laid: Laid | None, tune: bool = False) -> CapturedStep | None:
        """A captured step with kernels. None where some would have to be compiled first: a process beside does it.

        ``tune``: their block sizes are timed, for which they are compiled here.
        """
        noting: AbstractContextManager[list[Job]] = nullcontext([]) if tune else needed(load=True)
        try:
            with kernels(True), noting as missing:
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
        first = _first(step, inputs)
        try:
            with kernels(False):
                alone = CapturedStep(step, first, self.pool)
            self.times = {1: alone.seconds(inputs), count: made.seconds(inputs)}
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

    def _faster(self, step: Step, inputs: Inputs, laid: Laid | None, tune: bool = False) -> CapturedStep:
        """The faster of two captured steps, without kernels and, where it is not known to be slower, with them."""
        made: dict[bool, CapturedStep] = {}
        with kernels(False):
            made[False] = captured(step, inputs, laid, self.pool)
        if self._used(inputs) or self._undecided(step, inputs):
            try:
                with_kernels = self._with_kernels(step, inputs, laid, tune)
            except Exception as error:  # for want of memory too: the bundle has enough without this comparison
                self._refuse("kernels", error)
            else:
                if with_kernels is None:
                    return made[False]
                made[True] = with_kernels
            seconds = {used: one.seconds(inputs) for used, one in made.items()}
            self.recipe.use_kernels(about(len(inputs.rows[0])), min(seconds, key=lambda used: seconds[used]))
        return made[self._used(inputs)]

    def _refuse(self, what: str, error: Exception) -> None:
        said = str(error).strip().splitlines() or [type(error).__name__]
        self.recipe.refusals.append(f"{what}: {said[0]}")


def _slower(trials: int, new: float, old: float, how: str) -> Unfusable:
    return Unfusable(f"a step of {trials} trials takes {new * 1e3:.3g} ms, and {old * 1e3:.3g} {how}")


def _first(step: Step, inputs: Inputs) -> Inputs:
    """The inputs of a step of the first trial alone, with its own numbers, which a recording cannot read back."""
    return replace(inputs.part(0, 1), numbers=step.way.numbers(0, 1, inputs.rows[0].device))
