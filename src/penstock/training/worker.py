"""A worker: trains the bundle that it was given on one device, and tells of it in events."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.bundle import Bundle, BundleMode, Description, Gathering, Job, Limited, Measured, WorkerEvent
from penstock.task import FunctionTask
from penstock.training.account import Account
from penstock.training.runs.base import Events, Run
from penstock.training.runs.fused import FusedRun, alone
from penstock.training.runs.packed import PackedRun, grows_into
from penstock.training.runs.solo import SoloRun
from penstock.training.trials import Trials
from penstock.trial import Config

if TYPE_CHECKING:
    import torch

    from penstock.training.describing import Describing
    from penstock.training.fused.recipe import Recipe
    from penstock.training.limiting import Limiter


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
        self.trials = Trials(job, device)
        self._next: Bundle | None = None
        self._unsaid: deque[WorkerEvent | Gathering | Limited] = deque()
        self._unlimited: Limited | None = None  # why it has no limiter, until that is said
        self._run: Run | None = None
        self._events: Events | None = None
        self._looks: Describing | None = None  # what looks at trials before any training
        self._recipes: dict[str, list[Recipe]] = {}  # by signature: as many as bundles of it trained at the same time
        self.limiter: Limiter | None = None  # tries and sets power limits, where the study asks for it
        if job.power == "limit":
            from penstock.training.limiting import limiter

            self.limiter, unable = limiter(device, job.eta)
            self._unlimited = unable
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

    def advance(self) -> WorkerEvent | Gathering | Limited | None:
        """Train to the next event or step boundary."""
        event = self._unsaid.popleft() if self._unsaid else self._train()
        if event is None or isinstance(event, Gathering | Measured | Limited):
            return event  # neither is about a trial
        return replace(event, study=self.job.study)

    def _train(self) -> WorkerEvent | Gathering | Limited | None:
        assert self._events is not None
        assert self._run is not None
        event: WorkerEvent | Gathering | None = None
        ended = False
        try:
            event = next(self._events)
        except StopIteration:  # the run gave up: trials that were to enter have not begun
            ended = True
            self._run.declare(replace(self._run.bundle, placements=()))
        found: Limited | None = None
        if ended or self._run.over:
            self._events.close()
            found = None if self.limiter is None else self.limiter.left(self._run)
            self._run = self._events = None
            self._begin_next()
        elif self.limiter is not None:
            found = self._run.limit(self.limiter)
        if found is not None:
            if event is not None:  # it comes after the limit, as a study may end with its last trial's event
                self._unsaid.appendleft(event)
            return found
        if self._unlimited is not None:
            self._unsaid.append(self._unlimited)
            self._unlimited = None
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
        if self.limiter is not None:
            self.limiter.close()
        self._looks = None
        self._recipes.clear()
        self.trials.forget()

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
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.device)

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
        if self._looks is None:
            from penstock.training.describing import Describing

            self._looks = Describing(self, self._threads)
            if self.on_gpu and not self.job.deterministic:
                from penstock.training.kernels.choice import available
                from penstock.training.kernels.compiling import compiling

                if available(self.torch_device):
                    compiling().prepare()
        return self._looks.describe(config, train=train, trial=trial, variant=variant)
