"""One trial on one worker."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from penstock.bundle import Finished, Saved, Stopped
from penstock.training.runs.base import SAVING, Events, OneTrial, failed, out_of_memory
from penstock.trial import Report, StateRef, Usage


class SoloRun(OneTrial):
    """A bundle of one trial on one worker."""

    def events(self) -> Events:
        try:
            yield from self._train(1)
        except Exception as error:
            self._over = True
            yield failed(self.placement, error)

    def _train(self, parts: int) -> Events:
        """Train, with each batch in so many parts; where memory runs out, again from the last state with more."""
        worker, placement = self.worker, self.placement
        trial, attempt = placement.trial, placement.attempt
        began = saved = time.perf_counter()
        steps: Generator[Any, None, None] | None = None
        run: Any = None
        try:
            run = worker.begin(placement)
            if parts > 1 and (reason := run.divide(parts)):
                raise MemoryError(f"Its batch does not fit into memory, nor can it be taken in parts: {reason}.")
            first_step, steps = run.step, run.steps()
            for metrics in steps:
                now = time.perf_counter()
                due = now - saved > worker.save_cost / SAVING
                if metrics is None:
                    if due and run.can_stop and (state := self._save(run)) is not None:
                        yield Saved(trial, attempt, state)
                        saved = time.perf_counter()
                    yield None
                    if self.leaving and run.can_stop:
                        self._over = True
                        yield Stopped(trial, attempt, self._save(run))
                        return
                    continue
                state = None
                if run.unit >= self.budget or due or run.urgent:
                    state = self._save(run)
                    saved = time.perf_counter()
                usage = Usage(now - began, run.step - first_step, worker.peak_bytes())
                began, first_step = now, run.step
                yield Report(trial, run.unit, metrics, attempt, state, usage)
                if run.unit >= self.budget:
                    self._over = True
                    yield Finished(trial, attempt)
                    return
                if self.leaving:
                    self._over = True
                    yield Stopped(trial, attempt, state or self._save(run))
                    return
            self._over = True
            yield Finished(trial, attempt)  # a function that returned before its grant
        except Exception as error:
            if steps is None or not out_of_memory(error) or not hasattr(run, "divide"):
                raise
        finally:
            if steps is not None:
                steps.close()
        del run, steps
        worker.free()
        yield from self._train(2 * parts)

    def _save(self, run: Any) -> StateRef | None:
        if (state := run.state()) is None:
            return None
        ref = self.worker.save(self.placement, state)
        self.placement = replace(self.placement, state=ref, inherited=False)  # where it would begin again
        if run.unit >= self.budget:
            self.worker.keep_warm(ref, run, state.get("random"))
        return ref
