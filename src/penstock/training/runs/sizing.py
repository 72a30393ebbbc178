"""How many trials of a fused bundle are trained at once: measured on its own first steps, and told."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.bundle import Measured
from penstock.speed.sizes import REPAID, best_size, most
from penstock.training.runs.base import Events, failed, out_of_memory

if TYPE_CHECKING:
    from penstock.training.fused.measuring import Measuring
    from penstock.training.runs.fused import FusedRun


class Sizing:
    """The size of a fused run's bundle: the measuring that is under way, and what came of it."""

    def __init__(self, run: FusedRun) -> None:
        self.run, self.worker, self.fused = run, run.worker, run.fused
        self.measuring: Measuring | None = None
        self.dissolving = False  # whether its trials are about to go on solo, as it was told that this is better
        self._alone: float | None = None  # the seconds of a step alone, as they were measured here
        self._parted = 0, 0.0  # how many trials took the last step in parts, and its seconds
        self._lost = 0.0  # seconds by which steps in parts were longer than those of trials alone
        self._began: float | None = None
        self._clock = time.perf_counter

    def measure_alone(self) -> Events:
        """The first trial takes a few steps alone before it joins the others."""
        from penstock.training.fused.measuring import ALONE, Measuring, stopwatch

        members = self.run.members
        if self.run.bundle.size is not None:
            self.fused.recipe.limit(self.run.bundle.size)
            return
        certain = sum(member.certain() for member in members)
        clock = stopwatch(self.worker.device)
        self.measuring = Measuring(len(members), self.worker.free_bytes(), certain, clock, self.run.bundle.guess)
        first = members[0]
        if any(first.training is trial for trial in self.fused.trials):  # it was here alone until now
            self.fused.leave(first.training)
        for _ in range(ALONE):
            if any(first.training is ended for ended in self.fused.ended):
                break  # a unit has ended, which the next boundary reports
            began, timed = time.perf_counter(), clock()
            try:
                self.fused.step_alone(first.training)
                for _, error in self.fused.take_failed():  # of its scheduler
                    raise error
            except Exception as error:
                members.remove(first)
                self.measuring = None
                yield failed(first.placement, error)
                if len(members) > 1:
                    yield from self.measure_alone()
                return
            self.worker.synchronize()
            self.measuring.took(1, clock() - timed, None)
            self.worker.account.charge([first.entry], time.perf_counter() - began)
            yield None

    @property
    def captures(self) -> bool:
        """Whether its step is going to be captured, soon after its first steps."""
        from penstock.training.fused.speeding import CAPTURING

        certain = min(member.certain() for member in self.run.members)
        return self.worker.on_gpu and self.fused.recipe.capturable and certain >= CAPTURING

    def begin(self) -> None:
        """A step begins; it is timed once trials were seen to part."""
        way = self.fused.recipe.way
        parts = way is not None and bool(way.parting.reason) and not self.worker.on_gpu
        self._began = self._clock() if parts and self._alone is not None else None

    def end(self, trials: int) -> None:
        """A step of so many trials has ended. Sizes were timed on whole steps, and steps in parts may lose by it."""
        if self._alone is not None and self._began is not None:
            self._parted = trials, self._clock() - self._began
            self._lost += self._parted[1] - trials * self._alone

    @property
    def _losing(self) -> bool:
        """Whether more was lost by steps in parts than an attempt in vain may cost."""
        steps = sum(member.training.step + member.certain() for member in self.run.members)
        return self._alone is not None and not self.dissolving and self._lost > REPAID * steps * self._alone

    def look(self, size: int | None) -> Events:
        """Tell the measured size once it is known, and a smaller one where memory ran out."""
        from penstock.training.fused.measuring import LARGEST
        from penstock.training.fused.measuring import reason as why

        recipe = self.fused.recipe
        if self.measuring is not None and self.measuring.done:
            measured, self.measuring = self.measuring, None
            recipe.limit(max(2, measured.size))
            self.dissolving = measured.size == 1
            self._alone = measured.seconds.get(1) if measured.steady else None
            yield self.told(measured.size, measured.seconds if measured.steady else {}, measured.reason(recipe.named))
            if measured.steady:
                cost = {0: measured.checking, 1: measured.seconds[1]}
                size = measured.size
                yield Measured(self.run.bundle.signature, self.worker.device, "trying", cost, size, "", recipe.named)
            self.fused.speeding.expect(min(member.certain() for member in self.run.members))
        elif times := self.fused.speeding.take_times():
            each = self.fused.fast.bytes // max(times)
            found = best_size(times, min(LARGEST, max(1, most((0, each), self.worker.free_bytes()))))
            recipe.limit(max(2, found))
            self.dissolving = found == 1
            yield self.told(found, times, why(times, found, f"{recipe.named}, captured"))
        elif self._losing:
            assert self._alone is not None
            recipe.limit(2)
            self.dissolving = True
            trials, took = self._parted
            rates = f"alone a trial trains at {1 / self._alone:.0f} steps/s, {trials} in parts at {trials / took:.0f}"
            yield self.told(1, {1: self._alone, trials: took}, f"{rates}: not worth it")
        elif recipe.size is not None and (recipe.size != size or recipe.news):
            reason = recipe.reason or self.run.bundle.reason
            yield self.told(recipe.size, {}, reason if recipe.size == size else no_memory(recipe.size))

    def told(self, size: int, seconds: dict[int, float], reason: str) -> Measured:
        """The event that tells a size, with all that was refused."""
        recipe = self.fused.recipe
        said, signature = recipe.tell(reason), self.run.bundle.signature
        return Measured(signature, self.worker.device, "sharing", dict(seconds), size, said, recipe.named)


def no_memory(size: int) -> str:
    """The reason for a size beyond which memory does not reach."""
    return f"memory ran out with more than {size} trials together"


def why_halved(error: Exception, size: int) -> str:
    """The reason for a size beyond which a step failed."""
    cause = error.__cause__
    if isinstance(cause, Exception) and not out_of_memory(cause):
        return f"a step of more than {size} trials failed half-way, with {type(cause).__name__}: {cause}"
    return no_memory(size)
