"""One trial on one worker."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.bundle import StateSaved, TrialFinished, TrialStopped
from penstock.training.runs.base import SAVING, Events, OneTrial, failed, out_of_memory
from penstock.trial import Metrics, Report, StateRef, Usage

if TYPE_CHECKING:
    from penstock.bundle import Bundle
    from penstock.training.account import Entry
    from penstock.training.trainable import Trainable
    from penstock.training.worker import Worker


class SoloRun(OneTrial):
    """A bundle of one trial on one worker."""

    def __init__(self, worker: Worker, bundle: Bundle) -> None:
        super().__init__(worker, bundle)
        self._training: Trainable | None = None
        self._entry: Entry | None = None
        self._began = time.perf_counter()  # of the seconds that are not charged yet

    @property
    def reading(self) -> Sequence[Trainable]:
        return () if self._training is None else (self._training,)

    @property
    def settled(self) -> bool:
        return self.steps > 0

    @property
    def together(self) -> int:
        return 1

    @property
    def certain(self) -> int:
        training = self._training
        return 0 if training is None else (self.budget - training.unit) * getattr(training, "unit_length", 0)

    def events(self) -> Events:
        try:
            yield from self._train(1)
        except Exception as error:
            self._over = True
            yield replace(failed(self.placement, error), usage=self._used())

    def _train(self, parts: int) -> Events:
        """Train, with each batch in so many parts; where memory runs out, again from the last state with more."""
        worker, account, placement = self.worker, self.worker.account, self.placement
        trial, attempt = placement.trial, placement.attempt
        self._began = saved = time.perf_counter()
        steps: Generator[Metrics | None, None, None] | None = None
        training: Trainable | None = None
        try:
            for free in worker.trials.regrow(placement):
                yield None
                if self.leaving and free:
                    self._over = True
                    yield placement.turned_away(worker.job.study)
                    return
            training = self._training = worker.trials.begin(placement)
            if parts > 1 and (reason := training.divide(parts)):
                raise MemoryError(f"Its batch does not fit into memory, nor can it be taken in parts: {reason}.")
            before, self._entry = self._entry, account.open(training.step)
            if before is not None:  # memory ran out, and these steps are taken again
                self._entry.add(before.seconds)
            entry, steps = self._entry, training.steps()
            for metrics in steps:
                now = time.perf_counter()
                self.steps += 1
                due = now - saved > worker.trials.save_cost / SAVING
                if metrics is None:
                    if due and training.can_stop and (state := self._save(training)) is not None:
                        yield StateSaved(trial, attempt, state)
                        saved = time.perf_counter()
                    yield None
                    if self.leaving and training.can_stop:
                        self._over = True
                        yield TrialStopped(trial, attempt, self._save(training), usage=self._used())
                        return
                    continue
                state, reached = None, worker.job.reached(metrics)
                if training.unit >= self.budget or reached or due or training.urgent:
                    state = self._save(training)
                    saved = time.perf_counter()
                account.charge([entry], now - self._began)
                self._began = now
                usage = account.usage(entry, training.step, account.peak_bytes())
                yield Report(trial, training.unit, metrics, attempt, state, usage)
                if training.unit >= self.budget or reached:
                    self._over = True
                    yield TrialFinished(trial, attempt)
                    return
                if self.leaving:
                    self._over = True
                    yield TrialStopped(trial, attempt, state or self._save(training))
                    return
            written = 0 if self.placement.state is None else self.placement.state.step
            if training.step != written and (state := self._save(training)) is not None:
                yield StateSaved(trial, attempt, state)
            self._over = True
            yield TrialFinished(trial, attempt, usage=self._used())  # a function that returned before its grant
        except Exception as error:
            if training is None or steps is None or not out_of_memory(error) or not training.can_divide:
                raise
            account.charge([self._entry or account.open(0)], time.perf_counter() - self._began)
        finally:
            if steps is not None:
                steps.close()
        self._training = None
        del training, steps
        worker.free()
        yield from self._train(2 * parts)

    def _used(self) -> Usage:
        """What the trial used since its last report."""
        if self._entry is None or self._training is None:
            return Usage()
        account, now = self.worker.account, time.perf_counter()
        account.charge([self._entry], now - self._began)
        self._began = now
        return account.usage(self._entry, self._training.step, None)

    def _save(self, training: Trainable) -> StateRef | None:
        if (state := training.state()) is None:
            return None
        ref = self.worker.trials.save(self.placement, state)
        self.placement = replace(self.placement, state=ref, inherited=False)  # where it would begin again
        if training.unit >= self.budget:
            self.worker.trials.keep_warm(ref, training, state.get("random"))
        return ref
