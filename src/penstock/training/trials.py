"""The trials of a worker: made, taken up from memory or from a state, and saved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, TypeVar

from penstock.errors import StateError, TaskError
from penstock.log.states import prefix
from penstock.surrogate.task import own_data
from penstock.task import FunctionTask, Task
from penstock.trial import Config, StateRef

if TYPE_CHECKING:
    from penstock.bundle import Job, Placement
    from penstock.training.checkpoint import State
    from penstock.training.data import DataCache
    from penstock.training.keeping import Kept
    from penstock.training.loop import Training
    from penstock.training.spread.data_parallel import Distributed
    from penstock.training.trainable import Trainable

    Kind = TypeVar("Kind", bound=Training)

WARM, WARM_BYTES = 64, 2**26  # how many trials stay in memory beside their states, and how many bytes they may take
BEGUN_BYTES = 2**28  # how many bytes the trials of a bundle that is given up may take: they were in memory before


class Trials:
    """Makes a worker's trials and brings them to their states; keeps the data, and small trials that may come back."""

    def __init__(self, job: Job, device: str) -> None:
        self.job = job
        self.device = device
        self.kept: Kept | None = None  # what the trial that began last keeps outside of its model
        self._data: dict[str, DataCache] = {}  # by variant, where that has data of its own; else the task's, at ""
        self._beside: Callable[[], Iterable[Trainable]] = tuple  # the trials that train beside each other
        self._warm: dict[str, tuple[Training, State | None]] = {}  # by state: the trial, and its random states
        self._new: dict[int, tuple[Training, State | None]] = {}  # by trial without a state: it, and its random states
        self._regrown: dict[int, State] = {}  # by trial: the state that the legs before it gave
        self._save_cost = 0.0  # seconds, as last measured
        self.runs = 1  # how many runs this worker has
        self._saves_between = True
        self._checked = False  # whether a function's state was seen to be loadable; a dry batch shows that of a task

    def forget(self) -> None:
        """Let data and trials go: the study may live on after its run."""
        for kept in (self._data, self._warm, self._new, self._regrown):
            kept.clear()

    def begin(self, placement: Placement) -> Trainable:
        """A trial, ready to go on from its placement's state."""
        if not isinstance(self.job.task, FunctionTask):
            return self.begin_task(placement)
        training = self._new_training(placement.trial, placement.config, placement.variant)
        self._restore(training, placement)
        return training

    def _new_training(self, trial: int, config: Config, variant: str) -> Trainable:
        if isinstance(self.job.task, FunctionTask):
            from penstock.training.function import FunctionTraining

            return FunctionTraining(self.job, self.job.task, trial, config, device=self.device)
        from penstock.training.loop import Training

        return self.made(Training, trial, config, variant)

    def begin_task(self, placement: Placement) -> Training:
        """A trial of a task, ready to go on from its placement's state; one that is still in memory is taken up."""
        from penstock.training.loop import Training

        training = self._taken_up(placement, Training)
        self.kept = training.kept
        return training

    def _taken_up(self, placement: Placement, kind: type[Training]) -> Training:
        warm = self._warm.pop(placement.state.file, None) if placement.state else None
        if warm is not None and not placement.inherited:
            training, random = warm
            training.take_up(random)
            return training
        new = self._new.pop(placement.trial, None)
        if new is not None and new[0].config == placement.config:
            training, random = new
            training.take_up(random)
        else:
            training = self.made(kind, placement.trial, placement.config, placement.variant)
        if placement.state is None:
            self._expect(training)
        self._restore(training, placement)
        return training

    def begin_spread(self, placement: Placement) -> Distributed:
        """A trial that other workers train too, at its placement's state."""
        kind = self.spread_kind(placement.variant)
        training = self.made(kind, placement.trial, placement.config, placement.variant)
        self.kept = training.kept
        self._expect(training)
        self._restore(training, placement)
        return training

    def _restore(self, training: Trainable, placement: Placement) -> None:
        if placement.state is None:
            if placement.legs:
                training.restore(self._regrown.pop(placement.trial), inherited=placement.inherited)
            return
        from penstock.training.checkpoint import load

        try:
            state = load(self.job.states, placement.state)
        except StateError:
            self.job.states.probe()  # where no state can be read, the place is at fault and not this state
            raise
        training.restore(state, inherited=placement.inherited)

    def regrow(self, placement: Placement) -> Generator[bool, None, None]:
        """Train the legs behind a lost state, before its trial begins; yields whether it may be left at this step."""
        state: State | None = None
        for leg in placement.legs:
            from penstock.training.checkpoint import copied

            training = self._new_training(leg.trial, leg.config, placement.variant)
            if state is not None:
                training.restore(state, inherited=True)
            steps = training.steps()
            try:
                for metrics in steps:
                    if metrics is not None and training.unit >= leg.unit:
                        break
                    yield training.can_stop or metrics is not None
                if (reached := training.state()) is None or training.unit < leg.unit:
                    raise TaskError(f"Trial {leg.trial} no longer gives the state that it gave after unit {leg.unit}.")
                state = copied(reached)
            finally:
                steps.close()
        if state is not None:
            self._regrown[placement.trial] = state

    def _expect(self, training: Training) -> None:
        """Guess the cost of saving a state, until one is measured."""
        if self._save_cost == 0.0:
            self._save_cost = 0.01 + sum(p.nbytes for p in training.model.parameters()) / 50e6

    def spread_kind(self, variant: str) -> type[Distributed]:
        """The loop of a variant's trial on several workers."""
        if self.job.shards(variant) > 1:
            from penstock.training.spread.sharded import Sharded

            return Sharded
        from penstock.training.spread.data_parallel import Distributed

        return Distributed

    def made(self, kind: type[Kind], trial: int, config: Config, variant: str = "") -> Kind:
        """A trial as it is before its first step."""
        import torch

        from penstock.training.data import DataCache

        task, device = self.job.task, torch.device(self.device)
        assert isinstance(task, Task)
        own = self.job.variants.get(variant, task)
        if (whose := "" if own_data(own) is None else variant) not in self._data:
            self._data[whose] = DataCache(own if whose else task, self.job.seed, device, lambda: self._beside())
        return kind(
            own,
            trial,
            config,
            self._data[whose].get(config),
            seed=self.job.seed,
            device=device,
            metric=self.job.metric,
            mode=self.job.mode,
        )

    @property
    def data(self) -> DataCache | None:
        """The data of the study's own task, and of variants that have the same."""
        return self._data.get("")

    def train_beside(self, trials: Callable[[], Iterable[Trainable]]) -> None:
        """Say which trials train beside each other; a dataset is read once for all of them."""
        self._beside = trials
        for data in () if trials() else self._data.values():
            data.forget()

    @property
    def save_cost(self) -> float:
        """Seconds of the host that a state takes, for each run that waits meanwhile.

        Infinite where states are written with reports alone.
        """
        return self._save_cost * self.runs if self._saves_between else math.inf

    def save_with_reports_alone(self) -> None:
        """Write no states between reports: when they are written in between depends on the real clock."""
        self._saves_between = False

    def save(self, placement: Placement, state: State, *, began: float | None = None) -> StateRef:
        """Write a trial's state; ``began`` is when the making of it began, if that takes time of its own."""
        from penstock.training.checkpoint import check_loadable, save

        began = time.perf_counter() if began is None else began
        if isinstance(self.job.task, FunctionTask) and not self._checked:
            check_loadable({"last": state["state"]}, f"trial {placement.trial}")
            self._checked = True
        name = f"{prefix(placement.trial, placement.attempt)}{state['step']}.pt"
        ref = save({"trial": placement.trial, **state}, self.job.states, name)
        self._save_cost = time.perf_counter() - began
        return ref

    def keep_warm(self, ref: StateRef, training: Trainable, random: State | None) -> None:
        """Small models stay in memory for a while after their state was written: the next rung often takes them up."""
        from penstock.training.loop import Training

        if isinstance(training, Training) and ref.bytes <= WARM_BYTES // WARM:
            self._warm[ref.file] = training, random
            while len(self._warm) > WARM:
                self._warm.pop(next(iter(self._warm)))

    def outside(self, kept: Kept | None) -> None:
        """Note what the trials that train now keep outside of their models."""
        self.kept = kept

    def keep_begun(self, placement: Placement, training: Training) -> bool:
        """Let a small trial that goes before it has a state stay in memory: it goes on here as it is, or else anew."""
        if placement.state is not None or placement.legs:
            return False
        bytes = 5 * sum(p.nbytes for p in training.model.parameters())  # as many as ``describe`` counts
        if bytes * (len(self._new) + 1) > BEGUN_BYTES:
            return False
        self._keep_new(placement.trial, training, None)
        return True

    def keep_described(self, trial: int, training: Training, random: State | None, bytes: int) -> None:
        """Let a small trial that was described, and has computed nothing, stay in memory until it is placed."""
        if bytes <= WARM_BYTES // WARM:
            self._keep_new(trial, training, random)

    def _keep_new(self, trial: int, training: Training, random: State | None) -> None:
        """Keep a trial without a state: it is not made twice."""
        self._new[trial] = training, random
        while len(self._new) > WARM:
            self._new.pop(next(iter(self._new)))
