"""A worker: trains the bundle it was given on one device and says what happens, in the executor's events."""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.bundle import Bundle, Description, Gathering, Job, Placement, Stopped, WorkerEvent
from penstock.task import FunctionTask, Task, shards
from penstock.training.runs.base import Events, Run
from penstock.training.runs.fused import FusedRun
from penstock.training.runs.solo import SoloRun
from penstock.trial import Config, StateRef

if TYPE_CHECKING:
    import torch

    from penstock.training.fused.bundle import Recipe
    from penstock.training.loop import Training
    from penstock.training.spread.data_parallel import Distributed

WARM, WARM_BYTES = 64, 2**26  # how many trials stay in memory beside their states, and how many bytes they may take


class Worker:
    """Trains one bundle at a time. ``advance`` gives an event, None at a step boundary, and stops when idle."""

    def __init__(self, job: Job, device: str, host: str = "127.0.0.1") -> None:
        self.job = job
        self.device = device
        self.host = host  # where workers on other devices reach this one
        self.save_cost = 0.0  # seconds, as last measured
        self._next: Bundle | None = None
        self._unsaid: deque[WorkerEvent] = deque()
        self._run: Run | None = None
        self._events: Events | None = None
        self._checked = False  # that a function's state can be kept; a task's is, by its dry batch
        self._warm: dict[str, tuple[Any, Any]] = {}
        self._data: Any = None
        self._reads: list[Any] = []  # what loss and metrics were seen to do with configs
        self._recipes: dict[str, Recipe] = {}
        self.parts: dict[str, int] = {}  # in which batches of a signature fit into the memory of several devices
        self.spreadable: set[str] = set()  # signatures whose batches were seen to be what their parts are together

    @property
    def idle(self) -> bool:
        return self._events is None and not self._unsaid

    def place(self, bundle: Bundle) -> None:
        """Take a bundle, or change the one there is at the next step boundary."""
        if self._next is not None:  # it came while another was leaving, and goes before it began
            self._unsaid += [Stopped(p.trial, p.attempt, p.state) for p in self._next.placements]
        self._next = bundle if bundle.placements else None
        if self._run is None:
            self._begin_next()
        elif self._run.declare(bundle):
            self._next = None

    def say(self, event: WorkerEvent) -> None:
        """Tell something of a trial that is not in training."""
        self._unsaid.append(event)

    def advance(self) -> WorkerEvent | Gathering | None:
        """Train to the next event or step boundary."""
        if self._unsaid:
            return self._unsaid.popleft()
        assert self._events is not None
        assert self._run is not None
        event, ended = None, False
        try:
            event = next(self._events)
        except StopIteration:  # it gave up: whoever was to come has not begun
            ended = True
            self._run.declare(replace(self._run.bundle, placements=()))
        if ended or self._run.over:
            self._events.close()
            self._run = self._events = None
            self._begin_next()
        return event

    def _begin_next(self) -> None:
        if self._next is not None:
            self._run = self._run_of(self._next)
            self._events, self._next = self._run.events(), None

    def _run_of(self, bundle: Bundle) -> Run:
        if bundle.mode == "distributed":
            from penstock.training.runs.gang import GangRun

            return GangRun(self, bundle)
        return FusedRun(self, bundle) if bundle.mode == "fused" else SoloRun(self, bundle)

    def close(self) -> None:
        """Leave at once, without saving, and let data and trials go: a study outlives its run until Python looks."""
        if self._events is not None:
            self._events.close()
            self._run = self._events = None
        self._data = None
        for kept in (self._warm, self._reads, self._recipes):
            kept.clear()

    def begin(self, placement: Placement) -> Any:
        """A trial, ready to go on from its placement's state."""
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
            run = self._training_of(placement.trial, config)
        if placement.state is not None:
            from penstock.training.checkpoint import load

            run.restore(load(self.job.states, placement.state), inherited=placement.inherited)
        elif isinstance(task, Task):
            self._expect(run)
        return run

    def _expect(self, run: Training) -> None:
        if self.save_cost == 0.0:
            self.save_cost = 0.01 + sum(p.nbytes for p in run.model.parameters()) / 50e6  # until one is measured

    def begin_spread(self, placement: Placement) -> Distributed:
        """A trial that other workers train too, at its placement's state."""
        from penstock.training.checkpoint import load

        run: Distributed = self._training_of(placement.trial, placement.config, self._spread)
        self._expect(run)
        if placement.state is not None:
            run.restore(load(self.job.states, placement.state), inherited=placement.inherited)
        return run

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

    def _training_of(self, trial: int, config: Config, kind: type[Training] | None = None) -> Any:
        from penstock.training.data import DataCache
        from penstock.training.loop import Training

        task, device = self.job.task, self.torch_device
        assert isinstance(task, Task)
        if self._data is None:
            self._data = DataCache(task, self.job.seed, device)
        return (kind or Training)(
            task,
            trial,
            config,
            self._data.get(config),
            seed=self.job.seed,
            device=device,
            metric=self.job.metric,
            mode=self.job.mode,
        )

    def save(self, placement: Placement, state: Any) -> StateRef:
        """Write a trial's state."""
        from penstock.training.checkpoint import check_loadable, save

        began = time.perf_counter()
        if isinstance(self.job.task, FunctionTask) and not self._checked:
            check_loadable({"last": state["state"]}, f"trial {placement.trial}")
            self._checked = True
        name = f"{placement.trial:06d}-{placement.attempt}-{state['step']}.pt"
        ref = save(state, self.job.states, name)
        self.save_cost = time.perf_counter() - began
        return ref

    def keep_warm(self, ref: StateRef, run: Any, random: Any) -> None:
        """Small models stay in memory for a while after their state was written: the next rung often takes them up."""
        if isinstance(self.job.task, Task) and ref.bytes <= WARM_BYTES // WARM:
            self._warm[ref.file] = run, random
            while len(self._warm) > WARM:
                self._warm.pop(next(iter(self._warm)))

    def recipe(self, bundle: Bundle) -> Recipe:
        """What is known here about training a signature's trials together."""
        from penstock.training.fused.bundle import Recipe

        recipe = self._recipes.setdefault(bundle.signature, Recipe())
        if bundle.size is not None:
            recipe.size = bundle.size
        return recipe

    def peak_bytes(self, graphs: int = 0) -> int | None:
        """The most memory that was in use since the last call, on an accelerator, with what CUDA graphs hold."""
        if not self.device.startswith("cuda"):
            return None
        import torch

        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak + graphs

    def free_bytes(self) -> int:
        """Memory that a bundle may take; half of a CPU's, which is not ours alone."""
        import torch

        if self.device.startswith("cuda"):
            free, _ = torch.cuda.mem_get_info(self.device)
            return free + torch.cuda.memory_reserved(self.device)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 2

    def free(self) -> None:
        """Give back what nothing holds any more."""
        gc.collect()
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for what an accelerator still computes."""
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.synchronize(self.device)

    def describe(self, config: Config, *, train: bool) -> Description:
        """What a config's trial is like, with one dry batch if ``train``; the global random states stay."""
        if isinstance(self.job.task, FunctionTask):
            return Description(reason="a function has a loop of its own")
        from penstock.training.check import describe, describe_whole
        from penstock.training.random.generators import own_randomness

        with own_randomness():
            if shards(self.job.task) > 1:
                return describe_whole(self._training_of(0, config, self._spread)) if train else Description()
            if train:
                return describe(self._training_of(0, config), self._reads, train=True)
            try:
                return describe(self._training_of(0, config), self._reads, train=False)
            except Exception:
                return Description()  # it says what is wrong with it when it trains
