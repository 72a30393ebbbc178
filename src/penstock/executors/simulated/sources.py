"""Where a study's trials come from in simulation: from its tables, or from a worker that really trains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.bundle import Description, Job, Placement
from penstock.executors.simulated.runs import Lookup, Source, Trained
from penstock.executors.simulated.settings import Simulated
from penstock.speed.curve import Curve
from penstock.tabulated import TabulatedTask
from penstock.task import Task
from penstock.training.worker import Worker
from penstock.trial import Config

ANY_PARTS = 2**20  # the batch size of a tabulated trial: so large that it can be divided among any number of devices


class Sources:
    """The sources of one study's trials, and their descriptions."""

    def __init__(self, job: Job, settings: Simulated) -> None:
        self._job, self._settings = job, settings
        self._worker: Worker | None = None
        self._signatures: dict[str, str] = {}  # signatures of configs that really train

    def describe(self, configs: Sequence[Config], *, train: bool, variants: Sequence[str] = ()) -> list[Description]:
        """Look configs up, or have a worker describe them."""
        if isinstance(self._job.task, TabulatedTask):
            return [self._look_up(self._job.task, config, train) for config in configs]
        made = self._base().describe_all(configs, train=train, variants=variants)
        keys = map(_key, configs, variants or [""] * len(configs))
        self._signatures.update({key: one.signature or "" for key, one in zip(keys, made, strict=True)})
        return made

    def _look_up(self, task: TabulatedTask, config: Config, train: bool) -> Description:
        try:
            table = task.look_up(config)
        except Exception:
            if train:
                raise
            return Description()  # the trial raises this error again when it runs
        return Description(tuple(table.metrics), table.bytes, signature=table.signature, batch_size=ANY_PARTS)

    def of(self, placement: Placement) -> tuple[Source, Curve | None]:
        """The source of a trial's units, and the trial's own curve where it has one."""
        task, settings, config = self._job.task, self._settings, placement.config
        if isinstance(task, TabulatedTask):
            table = task.look_up(config)
            return Lookup(placement, table, self._job, settings.saving_every), table.curve
        worker = self._base()
        key = _key(config, placement.variant)
        if isinstance(task, Task) and key not in self._signatures:
            self.describe(
                [config], train=False, variants=[placement.variant]
            )  # makes the worker load the data, which its copies share
        signature, seconds = self._signatures.get(key, ""), settings.unit_seconds
        if isinstance(seconds, Mapping):
            seconds = seconds.get(signature)
        return Trained(placement, worker, seconds, signature), None

    def _base(self) -> Worker:
        if self._worker is None:
            from penstock.executors.local import find_devices

            self._worker = Worker(self._job, find_devices()[0].name)
        return self._worker


def _key(config: Config, variant: str) -> str:
    return f"{variant} {config!r}"
