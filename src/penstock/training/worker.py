"""A worker: trains the bundle it was given on one device and says what happens, in the executor's events."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Generator
from typing import Any

from penstock.bundle import (
    Bundle,
    Description,
    Failed,
    Finished,
    Job,
    Placement,
    Saved,
    Stopped,
    WorkerEvent,
)
from penstock.errors import TaskError
from penstock.task import FunctionTask, Task
from penstock.trial import Config, Report, StateRef, Usage

WARM, WARM_BYTES = 64, 2**26  # how many trials stay in memory beside their states, and how many bytes they may take
SAVING = 0.01  # the share of training time that states between reports may cost (invariant 5)


class Worker:
    """Trains one bundle at a time. ``advance`` gives an event, None at a step boundary, and stops when idle."""

    def __init__(self, job: Job, device: str) -> None:
        self.job = job
        self.device = device
        self._next: Placement | None = None
        self._unsaid: deque[WorkerEvent] = deque()
        self._training: Generator[WorkerEvent | None, None, None] | None = None
        self._current: Placement | None = None
        self._budget = 0
        self._leaving = False
        self._save_cost = 0.0
        self._checked = False  # that a function's state can be kept; a task's is, by its dry batch
        self._warm: dict[str, tuple[Any, Any]] = {}
        self._data: Any = None

    @property
    def idle(self) -> bool:
        return self._training is None and not self._unsaid

    def place(self, bundle: Bundle) -> None:
        """Take a bundle, or change the one there is at the next step boundary."""
        if self._next is not None:  # it came while another was leaving, and goes before it began
            self._unsaid.append(Stopped(self._next.trial, self._next.attempt, self._next.state))
        self._next = bundle.placements[0] if bundle.placements else None
        if self._training is None:
            self._begin_next()
        elif self._next is not None and _same(self._next, self._current):
            self._budget, self._leaving, self._next = self._next.budget, False, None
        else:
            self._leaving = True

    def advance(self) -> WorkerEvent | None:
        """Train to the next event or step boundary."""
        if self._unsaid:
            return self._unsaid.popleft()
        assert self._training is not None
        event = next(self._training)
        if isinstance(event, Finished | Stopped | Failed):
            self._training.close()
            self._training = None
            self._begin_next()
        return event

    def _begin_next(self) -> None:
        if self._next is not None:
            self._current, self._budget, self._leaving = self._next, self._next.budget, False
            self._training, self._next = self._solo(self._next), None

    def close(self) -> None:
        """Leave at once, without saving."""
        if self._training is not None:
            self._training.close()
            self._training = None

    def _solo(self, placement: Placement) -> Generator[WorkerEvent | None, None, None]:
        trial, attempt = placement.trial, placement.attempt
        began = saved = time.perf_counter()
        steps: Generator[Any, None, None] | None = None
        try:
            run = self._begin(placement)
            first_step, steps = run.step, run.steps()
            for metrics in steps:
                now = time.perf_counter()
                due = now - saved > self._save_cost / SAVING
                if metrics is None:
                    if due and run.can_stop and (state := self._save(run, placement)) is not None:
                        yield Saved(trial, attempt, state)
                        saved = time.perf_counter()
                    yield None
                    if self._leaving and run.can_stop:
                        yield Stopped(trial, attempt, self._save(run, placement))
                        return
                    continue
                ended = run.unit >= self._budget
                state = None
                if ended or due or run.urgent:
                    state = self._save(run, placement)
                    saved = time.perf_counter()
                usage = Usage(now - began, run.step - first_step, self._peak_bytes())
                began, first_step = now, run.step
                yield Report(trial, run.unit, metrics, attempt, state, usage)
                if run.unit >= self._budget:
                    yield Finished(trial, attempt)
                    return
                if self._leaving:
                    yield Stopped(trial, attempt, state or self._save(run, placement))
                    return
            yield Finished(trial, attempt)  # a function that returned before its grant
        except Exception as error:
            yield Failed(trial, attempt, _explain(error), died=_out_of_memory(error))
        finally:
            if steps is not None:
                steps.close()

    def _begin(self, placement: Placement) -> Any:
        task, config = self.job.task, placement.config
        run: Any
        warm = self._warm.pop(placement.state.file, None) if placement.state else None
        if warm is not None and not placement.inherited:
            run, random = warm
            run.take_up(random)
            return run
        if isinstance(task, FunctionTask):
            from penstock.training.function import FunctionRun

            run = FunctionRun(task, placement.trial, config, seed=self.job.seed, device=self.device)
        else:
            run = self._training_of(task, placement.trial, config)
        if placement.state is not None:
            from penstock.training.checkpoint import load

            run.restore(load(self.job.states, placement.state), inherited=placement.inherited)
        elif self._save_cost == 0.0 and isinstance(task, Task):
            self._save_cost = 0.01 + sum(p.nbytes for p in run.model.parameters()) / 50e6  # until one is measured
        return run

    def _training_of(self, task: Task, trial: int, config: Config) -> Any:
        import torch

        from penstock.training.data import DataCache
        from penstock.training.loop import Training

        device = torch.device(self.device)
        if self._data is None:
            self._data = DataCache(task, self.job.seed, device)
        return Training(
            task,
            trial,
            config,
            self._data.get(config),
            seed=self.job.seed,
            device=device,
            metric=self.job.metric,
            mode=self.job.mode,
        )

    def _save(self, run: Any, placement: Placement) -> StateRef | None:
        began = time.perf_counter()
        state = run.state()
        if state is None:
            return None
        from penstock.training.checkpoint import check_loadable, save

        if isinstance(self.job.task, FunctionTask) and not self._checked:
            check_loadable({"state": state["state"]}, f"trial {placement.trial}")
            self._checked = True
        name = f"{placement.trial:06d}-{placement.attempt}-{state['step']}.pt"
        ref = save(state, self.job.states, name)
        self._save_cost = time.perf_counter() - began
        if isinstance(self.job.task, Task) and run.unit >= self._budget:
            self._keep_warm(ref, run, state["random"])
        return ref

    def _keep_warm(self, ref: StateRef, run: Any, random: Any) -> None:
        """Small models stay in memory for a while after their state was written: the next rung often takes them up."""
        if ref.bytes <= WARM_BYTES // WARM:
            self._warm[ref.file] = run, random
            while len(self._warm) > WARM:
                self._warm.pop(next(iter(self._warm)))

    def _peak_bytes(self) -> int | None:
        if not self.device.startswith("cuda"):
            return None
        import torch

        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def describe(self, config: Config) -> Description:
        """Try one dry batch of a config; the global random states are left as they were."""
        if isinstance(self.job.task, FunctionTask):
            return Description()
        from penstock.training.check import dry_batch
        from penstock.training.randomness import own_randomness

        with own_randomness():
            return dry_batch(self._training_of(self.job.task, 0, config))


def _same(one: Placement, other: Placement | None) -> bool:
    return other is not None and (one.trial, one.attempt) == (other.trial, other.attempt)


def _explain(error: Exception) -> str:
    if isinstance(error, TaskError):
        return str(error)
    return "".join(traceback.format_exception(error)).strip()


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
