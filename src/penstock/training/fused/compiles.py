"""The compiled steps of a signature: which of them pay, those that were asked for, and what came of them.

A process beside training compiles them, so that training loses little: the trace, the comparison with the plain step,
and on a GPU a capture. On a CPU it loses a part of a core for as long as compiling takes.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field

from penstock.training.fused.artifacts import Run
from penstock.training.fused.compiled import trace
from penstock.training.fused.inductor import inductor
from penstock.training.fused.step import Inputs, Step
from penstock.training.fused.traces import Traced
from penstock.training.kernels.choice import kernels

MADE = 1.5  # seconds of training that a trace, a comparison and a capture take, until they were measured
IMPORTING = 6.0  # seconds of training that the compiler's imports take, once in a process, as Python has one lock
WAITED = {False: 60.0, True: 10.0}  # seconds that a step is waited for, until one was; True where steps are captured
SAVED = {False: 0.25, True: 0.4}  # the share of a step that compiling saves, until it was measured
SAVED_BESIDE_KERNELS = 0.15  # the same of a step with Penstock's kernels: little is left to compile
AHEAD = 3.0  # seconds of captured steps of a signature after which the step of one trial is compiled ahead


@dataclass
class Compiled:
    """A step that was traced to be compiled."""

    traced: Traced
    read: tuple[str, ...]  # the names of the values in configs that it took as they were
    plain: tuple[object, ...]  # these values, and those of modules
    trials: int
    seconds: float  # that the trace took
    run: Run | None = None  # once it is loaded
    faster: bool | None = None  # than the captured step, once both were timed


@dataclass
class Compiles:
    """The compiled steps of a signature, by kind of step."""

    known: dict[Hashable, list[Compiled]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)  # captured steps of so many trials until now
    spent: float = 0.0  # seconds of all these
    ahead: bool = False  # whether the step of one trial was asked for ahead
    cost: tuple[float, float] | None = None  # seconds that training lost to the last one, and the share of a step saved

    def count(self, trials: int, steps: int, pace: float) -> None:
        """Note captured steps that were taken."""
        self.steps[trials] = self.steps.get(trials, 0) + steps
        self.spent += steps * pace

    def pays(self, trials: int, certain: int, pace: float, *, captured: bool, kernels: bool) -> bool:
        """Whether a compiled step pays that is to be taken so often, by the trials that there are.

        Beside captured steps, on a GPU, nothing is gained while it is compiled, and nothing lost. Trials of the
        signature that come later take such steps too: about as many as were taken until now. On a CPU, compiling takes
        a core from training, and the steps that are certain must repay all of it (Hydro §4.2).
        """
        made, saved = self.cost or (MADE, SAVED_BESIDE_KERNELS if kernels else SAVED[captured])
        made += 0.0 if inductor().imported else IMPORTING
        warm = captured and inductor().warm
        wait = 0.0 if self.asked(trials) else inductor().waits(0.0 if warm else WAITED[captured])
        if not captured:
            return certain * pace * saved > made + wait
        return certain > 0 and ((certain + self.steps.get(trials, 0)) * pace - wait) * saved > made

    def asked(self, trials: int) -> bool:
        """Whether a step of so many trials was asked for before."""
        return any(one.trials == trials for every in self.known.values() for one in every)

    def repaid(self, certain: int, pace: float) -> bool:
        """Whether a compiled step that is there repays being taken up, by the steps that are certain."""
        made, saved = self.cost or (MADE, SAVED[True])
        return certain * pace * saved > made

    def expects_one(self, trials: int) -> bool:
        """Whether to compile the step of one trial ahead: a long ASHA ends with one trial after another.

        That alone repays no imports.
        """
        beside = inductor()
        return trials > 1 and not self.ahead and self.spent > AHEAD and beside.imported and beside.idle

    def find(self, step: Step, inputs: Inputs, used: bool) -> Compiled | None:
        """A step that was asked for, for trials with the values that it took."""
        for one in self.known.get(_kind(step, inputs, used), ()):
            if step.way.plain(one.read) == one.plain:
                return one
        return None

    def trace(self, step: Step, inputs: Inputs, used: bool) -> Compiled:
        """Trace a step, with Penstock's kernels or without."""
        began = time.perf_counter()
        with kernels(used):
            made = trace(step, inputs)
        read, seconds = step.way.read, time.perf_counter() - began
        one = Compiled(made, read, step.way.plain(read), len(inputs.rows[0]), seconds)
        self.known.setdefault(_kind(step, inputs, used), []).append(one)
        return one


def _kind(step: Step, inputs: Inputs, used: bool) -> Hashable:
    return inputs.kind(), step.way.fixed, used
