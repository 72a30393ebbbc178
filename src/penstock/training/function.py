"""A function task in training: the user's own loop, run in a thread that takes turns with the worker.

Between two reports the function has the device; inside ``trial.report`` it waits while the worker saves its state and
decides whether it goes on. Only one of the two runs at a time, so a study of function tasks repeats like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from copy import deepcopy
from dataclasses import dataclass
from numbers import Integral
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from penstock.bundle import Job
from penstock.errors import Paused, TaskError
from penstock.numeric import legible, shown, sort
from penstock.seeds import key
from penstock.task import FunctionTask, left_by_exit
from penstock.training.random.generators import random_state, seed_everything, set_random_state
from penstock.trial import Config, Metrics, score

if TYPE_CHECKING:
    from penstock.training.checkpoint import State


class FunctionTrial:
    """The argument of a function task: its config, the last state it saved, and ``report``.

    >>> def train(trial):
    ...     start = trial.state["epoch"] if trial.state else 0
    ...     for epoch in range(start, 10):
    ...         trial.report(epoch + 1, state={"epoch": epoch + 1}, loss=1 / (epoch + 1))
    """

    number: int
    """Its number in the study, from 0."""
    config: Config
    """Its config."""
    seed: int
    """A seed of its own, of which the global generators were seeded."""
    device: str
    """Where to train, as torch names it."""
    state: Any
    """The last state that was saved, or None where it begins."""

    def __init__(self, training: FunctionTraining, state: Any) -> None:
        self._training = training
        self.number, self.config = training.trial, dict(training.config)
        self.seed, self.device = training.seed, training.device
        self.state = state

    def report(self, step: int, *, state: Any = None, **metrics: float) -> None:
        """Report metrics after unit ``step`` (1, 2, 3, …) with the state to go on from; may raise ``Paused``."""
        self._training.take(step, state, metrics)


class Turn:
    """Whose turn it is: one thread waits until the other gives it. A queue is written in C, a semaphore in Python."""

    def __init__(self) -> None:
        self._given: SimpleQueue[None] = SimpleQueue()

    def give(self) -> None:
        """Let the thread go on that waits, or the next one that will."""
        self._given.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the turn; whether it came in time."""
        try:
            self._given.get(timeout=timeout)
        except Empty:
            return False
        return True


class FunctionTraining:
    """One trial of a function task. ``steps`` yields None while the function is busy, metrics when it reports."""

    can_stop = False  # only where it reports
    can_divide = False

    def __init__(self, job: Job, task: FunctionTask, trial: int, config: Config, *, device: str) -> None:
        self.task, self.trial, self.config, self.device = task, trial, config, device
        self._metric, self._mode = job.metric, job.mode
        self.seed = key(job.seed, "trial", trial)
        self.unit = self.step = 0
        self._first = True  # of this run of the function
        self._kept: Any = None  # the state of the last report: objects of the function, which it goes on to change
        self._skipped = False  # a report came without a state
        self._best = Best()  # of the reports that came with a state
        self._metrics: dict[str, float] = {}
        self._error: BaseException | None = None
        self._over = self._paused = False
        self._turn_of_worker, self._turn_of_function = Turn(), Turn()
        self.take_up(None)

    def take_up(self, random: State | None) -> None:
        """Set the global generators to where this trial left them; None where it has drawn nothing from them."""
        if random is None:
            seed_everything(self.seed)
        else:
            set_random_state(random)

    def divide(self, parts: int) -> str:
        """Refuse, as the function has batches of its own."""
        return "a function has a loop of its own"

    def restore(self, state: State, *, inherited: bool) -> None:
        """Go on from a state; the function finds what it saved in ``trial.state``."""
        self.unit = self.step = state["unit"]
        self._kept = state["state"]
        if not inherited:
            self.take_up(state["random"])
            self._best = Best.of(state)

    def state(self) -> State | None:
        """The state that the function gave with its last report; None where it gave none."""
        if self._kept is None:
            return None
        best, at_best = self._best, self._best.unit == self.unit
        return {
            "unit": self.unit,
            "step": self.step,
            "state": best.state if at_best else self._kept,
            "random": random_state(with_torch=True),
            "best": {"score": best.score, "unit": best.unit, "state": None if at_best else best.state},
        }

    @property
    def urgent(self) -> bool:
        """Whether the state must be written now, as the next report may bring none."""
        return self._skipped and self._kept is not None

    def steps(self) -> Generator[Metrics | None, None, None]:
        """Run the function in its thread: None while it is busy, the metrics where it reports."""
        trial = FunctionTrial(self, self._kept)
        threading.Thread(target=self._call, args=(trial,), name=f"trial {self.trial}", daemon=True).start()
        try:
            while True:
                while not self._turn_of_worker.wait(timeout=0.05):
                    yield None
                if self._over:
                    if self._error is not None:
                        raise self._error
                    return
                yield self._metrics
                self._turn_of_function.give()
        finally:  # closed by the worker: let the function unwind at the report it is in, or at its next one
            self._paused = True
            self._turn_of_function.give()

    def _call(self, trial: FunctionTrial) -> None:
        try:
            self.task.function(trial)
        except Paused:
            pass
        except (Exception, KeyboardInterrupt) as error:
            self._error = error
        except BaseException as error:  # sys.exit would end the program of its author; in a study it ends one trial
            self._error = TaskError(left_by_exit("The function", error))
        self._over = True
        self._turn_of_worker.give()

    def take(self, step: int, state: Any, metrics: dict[str, float]) -> None:
        """Take a report of the function, in the function's thread."""
        if self._paused:
            raise Paused
        expected = f"from 1 to {self.unit + 1}" if self._first and self.unit else str(self.unit + 1)
        if isinstance(step, bool) or not isinstance(step, Integral) or step < 1 or step > self.unit + 1:
            raise TaskError(
                f"trial.report expected step {expected} after {self.unit} reported units, got {shown(step)}: "
                "report every unit once, counting from 1 (go on from trial.state where there is one)."
            )
        if not self._first and step != self.unit + 1:
            raise TaskError(f"trial.report expected step {expected}, got {step}: report every unit once, in order.")
        self._metrics = {name: _number(name, value) for name, value in metrics.items()}
        self._first, self.unit, self.step, self._kept = False, int(step), int(step), state
        self._skipped = self._skipped or state is None
        value = score(self._metrics, self._metric, self._mode)
        if state is not None and value > self._best.score:
            self._best = Best(value, self.unit, on_cpu(state))  # a copy: the function goes on to change its objects
        self._turn_of_worker.give()
        self._turn_of_function.wait()
        if self._paused:
            raise Paused


@dataclass(frozen=True)
class Best:
    """The best of a trial's reports that came with a state, and a copy of that state."""

    score: float = float("-inf")
    unit: int = 0
    state: Any = None

    @classmethod
    def of(cls, saved: State) -> Best:
        """The best report that a saved state knows; none where the state is of a version that kept none."""
        if "best" not in saved:
            return cls()
        best = saved["best"]
        return cls(best["score"], best["unit"], saved["state"] if best["state"] is None else best["state"])


def on_cpu(state: Any) -> Any:
    """A copy of a function's state, with its tensors on the CPU; what cannot be copied is refused when it is saved."""
    import torch
    from torch.utils._pytree import tree_map

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu", copy=True)
        try:
            return deepcopy(value)
        except Exception:
            return value

    return tree_map(copied, state)


def _number(name: str, value: Any) -> float:
    if name != legible(name):
        raise TaskError(f"trial.report expected a metric's name that can be printed, got {shown(name)}.")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise TaskError(f"trial.report expected a number for {name}, got {sort(value)}.") from None
