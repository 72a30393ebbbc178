"""A worker: trains the bundle that it was given on one device, and tells of it in events."""

from __future__ import annotations

import gc
import math
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from penstock.bundle import Bundle, BundleMode, Description, Gathering, Job, Measured, Placement, WorkerEvent
from penstock.errors import StateError, TaskError
from penstock.log.states import prefix
from penstock.task import FunctionTask, Task, shards
from penstock.training.account import Account
from penstock.training.runs.base import Events, Run
from penstock.training.runs.fused import FusedRun, alone
from penstock.training.runs.packed import PackedRun, grows_into
from penstock.training.runs.solo import SoloRun
from penstock.trial import Config, StateRef

if TYPE_CHECKING:
    import torch

    from penstock.training.check import Reads
    from penstock.training.checkpoint import State
    from penstock.training.data import DataCache
    from penstock.training.fused.recipe import Recipe
    from penstock.training.keeping import Kept
    from penstock.training.loop import Training
    from penstock.training.spread.data_parallel import Distributed
    from penstock.training.trainable import Trainable
    from penstock.training.unlike import Signatures

    Kind = TypeVar("Kind", bound=Training)

WARM, WARM_BYTES = 64, 2**26  # how many trials stay in memory beside their states, and how many bytes they may take
BEGUN_BYTES = 2**28  # how many bytes the trials of a bundle that is given up may take: they were in memory before


def _gang(worker: Worker, bundle: Bundle) -> Run:
    from penstock.training.runs.gang import GangRun  # torch.distributed takes a while to import

    return GangRun(worker, bundle)


RUNS: dict[BundleMode, Callable[[Worker, Bundle], Run]] = {
    "solo": alone,
    "processes": SoloRun,
    "fused": FusedRun,
    "packed": PackedRun,
    "distributed": _gang,
}


class Worker:
    """Trains one bundle at a time. ``advance`` gives an event, None at a step boundary, and stops when idle."""

    def __init__(self, job: Job, device: str, host: str = "127.0.0.1", threads: int = 1) -> None:
        self.job = job
        self.device = device
        self.host = host  # where workers on other devices reach this one
        self._threads = threads  # the most that a worker on a CPU may compute with
        self.account = Account(device)
        self._save_cost = 0.0  # seconds, as last measured
        self._saves_between = True
        self._next: Bundle | None = None
        self._unsaid: deque[WorkerEvent] = deque()
        self._run: Run | None = None
        self._events: Events | None = None
        self._checked = False  # whether a function's state was seen to be loadable; a dry batch shows that of a task
        self._warm: dict[str, tuple[Training, State | None]] = {}  # by state: the trial, and its random states
        self._new: dict[int, tuple[Training, State | None]] = {}  # by trial without a state: it, and its random states
        self._regrown: dict[int, State] = {}  # by trial: the state that the legs before it gave
        self._data: DataCache | None = None
        self._beside: Callable[[], Iterable[Trainable]] = tuple  # the trials that train beside each other
        self.kept: Kept | None = None  # what the trial that began last keeps outside of its model
        self._reads: list[Reads] = []  # the values that loss and metrics were seen to read from configs
        self._seen: Signatures | None = None  # the signatures of the trials that were described
        self._recipes: dict[str, list[Recipe]] = {}  # by signature: as many as bundles of it trained at the same time
        self.parts: dict[str, int] = {}  # by signature: how many parts of a batch fit into several devices
        self.spreadable: set[str] = set()  # signatures whose batches were seen to give the same in parts

    @property
    def idle(self) -> bool:
        return self._events is None and not self._unsaid

    @property
    def training(self) -> Run | None:
        """The run of the bundle that trains now."""
        return self._run

    def place(self, bundle: Bundle) -> None:
        """Take a bundle, or change the one there is at the next step boundary."""
        if bundle.threads is not None:
            from penstock.training.threads import use

            use(bundle.threads, self._threads)
        if self._next is not None:  # that bundle came while another was leaving, and goes before it began
            self._unsaid += [p.turned_away(self.job.study) for p in self._next.placements]
        self._next = bundle if bundle.placements else None
        if self._run is None:
            self._begin_next()
        elif grows_into(bundle, self._run):
            self._run = PackedRun(self, bundle, (self._run, self._events))
            self._events, self._next = self._run.events(), None
        elif self._run.declare(bundle):
            self._next = None

    def say(self, event: WorkerEvent) -> None:
        """Tell an event of a trial that is not in training."""
        self._unsaid.append(event)

    def advance(self) -> WorkerEvent | Gathering | None:
        """Train to the next event or step boundary."""
        event = self._unsaid.popleft() if self._unsaid else self._train()
        if event is None or isinstance(event, Gathering | Measured):
            return event  # neither is about a trial
        return replace(event, study=self.job.study)

    def _train(self) -> WorkerEvent | Gathering | None:
        assert self._events is not None
        assert self._run is not None
        event, ended = None, False
        try:
            event = next(self._events)
        except StopIteration:  # the run gave up: trials that were to enter have not begun
            ended = True
            self._run.declare(replace(self._run.bundle, placements=()))
        if ended or self._run.over:
            self._events.close()
            self._run = self._events = None
            self._begin_next()
        return event

    def _begin_next(self) -> None:
        if self._next is not None:
            self._run = self.run(self._next)
            self._events, self._next = self._run.events(), None

    def run(self, bundle: Bundle) -> Run:
        """The run of a bundle, by its mode."""
        return RUNS[bundle.mode](self, bundle)

    def close(self) -> None:
        """Leave at once, without saving. Data and trials are let go, as the study may live on after its run."""
        if self._events is not None:
            self._events.close()
            self._run = self._events = None
        self._data = self._seen = None
        for kept in (self._warm, self._new, self._regrown, self._reads, self._recipes):
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

        return self._made(Training, trial, config, variant)

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
            training = self._made(kind, placement.trial, placement.config, placement.variant)
        if placement.state is None:
            self._expect(training)
        self._restore(training, placement)
        return training

    def begin_spread(self, placement: Placement) -> Distributed:
        """A trial that other workers train too, at its placement's state."""
        training = self._made(self._spread, placement.trial, placement.config, placement.variant)
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

    @property
    def _spread(self) -> type[Distributed]:
        if shards(self.job.task) > 1:
            from penstock.training.spread.sharded import Sharded

            return Sharded
        from penstock.training.spread.data_parallel import Distributed

        return Distributed

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.device)

    def _made(self, kind: type[Kind], trial: int, config: Config, variant: str = "") -> Kind:
        from penstock.training.data import DataCache

        task, device = self.job.task, self.torch_device
        assert isinstance(task, Task)
        if self._data is None:
            self._data = DataCache(task, self.job.seed, device, lambda: self._beside())
        return kind(
            self.job.variants.get(variant, task),
            trial,
            config,
            self._data.get(config),
            seed=self.job.seed,
            device=device,
            metric=self.job.metric,
            mode=self.job.mode,
        )

    def train_beside(self, trials: Callable[[], Iterable[Trainable]]) -> None:
        """Say which trials train beside each other; a dataset is read once for all of them."""
        self._beside = trials
        if self._data is not None and not trials():
            self._data.forget()

    @property
    def save_cost(self) -> float:
        """Seconds that writing a state takes; infinite where states are written with reports alone."""
        return self._save_cost if self._saves_between else math.inf

    def save_with_reports_alone(self) -> None:
        """Write no states between reports: when they are written in between depends on the real clock."""
        self._saves_between = False

    def save(self, placement: Placement, state: State) -> StateRef:
        """Write a trial's state."""
        from penstock.training.checkpoint import check_loadable, save

        began = time.perf_counter()
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

    def recipe(self, bundle: Bundle) -> Recipe:
        """A recipe that no other bundle trains by, as far as it is known here, with the size that the bundle says."""
        from penstock.speed.profiles import family
        from penstock.training.fused.recipe import Recipe

        known = self._recipes.setdefault(bundle.signature, [])
        recipe = next((one for one in known if not one.taken), None)
        if recipe is None:
            fast = not self.job.deterministic  # a compiled step rounds otherwise, and measured times decide about it
            near = [own for other, own in self._recipes.items() if own and family(other) == family(bundle.signature)]
            if known:
                recipe = known[-1].beside()
            else:
                recipe = near[-1][-1].of_another_size() if near else Recipe(compilable=fast, capturable=fast)
            known.append(recipe)
        if bundle.size is not None and bundle.mode == "fused":
            recipe.limit(bundle.size)
        return recipe

    def captures(self, bundle: Bundle) -> bool:
        """Whether the step of a trial alone may be captured: on a GPU, as far as nothing is known against it."""
        if not self.on_gpu or not bundle.signature or isinstance(self.job.task, FunctionTask):
            return False
        recipe = self.recipe(bundle)
        return recipe.capturable and not recipe.own and not recipe.refused

    def free_bytes(self) -> int:
        """The memory that a bundle may take; half of a CPU's, which other programs use too."""
        import torch

        if self.device.startswith("cuda"):
            free, _ = torch.cuda.mem_get_info(self.device)
            return free + torch.cuda.memory_reserved(self.device)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 2

    def free(self) -> None:
        """Give back memory that nothing holds any more."""
        gc.collect()
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.empty_cache()

    @property
    def on_gpu(self) -> bool:
        """Whether its device computes while the host goes on."""
        return self.device.startswith("cuda")

    def synchronize(self) -> None:
        """Wait until an accelerator has computed everything that was asked of it on the current stream."""
        if self.on_gpu:
            import torch

            torch.cuda.current_stream(self.device).synchronize()

    def describe_all(
        self, configs: Sequence[Config], *, train: bool, trials: Sequence[int] = (), variants: Sequence[str] = ()
    ) -> list[Description]:
        """Describe several configs' trials, whose numbers are ``trials`` where they are known."""
        numbers: Sequence[int | None] = trials or [None] * len(configs)
        of = zip(configs, numbers, variants or [""] * len(configs), strict=True)
        return [self.describe(config, train=train, trial=number, variant=one) for config, number, one in of]

    def describe(self, config: Config, *, train: bool, trial: int | None = None, variant: str = "") -> Description:
        """Describe a config's trial, with one dry batch if ``train``; the global random states stay."""
        if isinstance(self.job.task, FunctionTask):
            return Description(reason="a function has a loop of its own")
        from penstock.training.check import describe, describe_whole
        from penstock.training.loop import Training
        from penstock.training.random.generators import own_randomness, random_state
        from penstock.training.unlike import Signatures

        self._seen = self._seen or Signatures()
        with own_randomness(), self._outside_kept():
            if shards(self.job.task) > 1:
                return describe_whole(self._made(self._spread, 0, config, variant)) if train else Description()
            if train:
                training = self._made(Training, 0, config, variant)
                described = describe(training, self._reads, train=True, seen=self._seen)
                if self.on_gpu:
                    return described
                from penstock.training.threads import looked

                return replace(described, threads=looked(training, self._threads, fixed=self.job.deterministic))
            try:
                training, known = self._made(Training, trial or 0, config, variant), len(self._reads)
                random = random_state(with_torch=True)
                described = describe(training, self._reads, train=False, seen=self._seen)
                description = replace(described, steps=training.unit_length)
            except Exception:
                return Description()  # the error is told when the trial trains
        small = (description.bytes or 0) <= WARM_BYTES // WARM
        if trial is not None and small and len(self._reads) == known:  # it has computed nothing: it is as it was made
            self._keep_new(trial, training, random)
        return description

    def outside(self, kept: Kept | None) -> None:
        """Note what the trials that train now keep outside of their models."""
        self.kept = kept

    @contextmanager
    def _outside_kept(self) -> Iterator[None]:
        """Let the trial that trains here find its values outside of its model again, whatever is described."""
        try:
            yield
        finally:
            if self.kept is not None:
                self.kept.bring_back()

    def keep_begun(self, placement: Placement, training: Training) -> bool:
        """Let a small trial that goes before it has a state stay in memory: it goes on here as it is, or else anew."""
        if placement.state is not None or placement.legs:
            return False
        bytes = 5 * sum(p.nbytes for p in training.model.parameters())  # as many as ``describe`` counts
        if bytes * (len(self._new) + 1) > BEGUN_BYTES:
            return False
        self._keep_new(placement.trial, training, None)
        return True

    def _keep_new(self, trial: int, training: Training, random: State | None) -> None:
        """A trial without a state stays in memory until it is placed here: it is not made twice."""
        self._new[trial] = training, random
        while len(self._new) > WARM:
            self._new.pop(next(iter(self._new)))
