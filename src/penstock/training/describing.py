"""A worker's look at configs before any training: their trials are made, described, and kept where they are as new."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.bundle import Description
from penstock.training.check import Reads, describe, describe_whole
from penstock.training.loop import Training
from penstock.training.random.generators import own_randomness, random_state
from penstock.training.unlike import Signatures
from penstock.trial import Config

if TYPE_CHECKING:
    from penstock.training.worker import Worker


class Describing:
    """Describes trials of a task, and keeps what was seen of them for those that follow."""

    def __init__(self, worker: Worker, threads: int) -> None:
        self._worker = worker
        self._threads = threads  # the most that a worker on a CPU may compute with
        self._reads: list[Reads] = []  # the values that loss and metrics were seen to read from configs
        self._signatures: dict[str, Signatures] = {}  # of the trials that were described, by variant

    def describe(self, config: Config, *, train: bool, trial: int | None, variant: str) -> Description:
        """Describe a config's trial, with one dry batch if ``train``; the global random states stay."""
        worker, trials = self._worker, self._worker.trials
        seen = self._signatures.setdefault(variant, Signatures())
        with own_randomness(), self._outside_kept():
            if worker.job.shards(variant) > 1:
                kind = trials.spread_kind(variant)
                return describe_whole(trials.made(kind, 0, config, variant)) if train else Description()
            if train:
                training = trials.made(Training, 0, config, variant)
                described = describe(training, self._reads, train=True, seen=seen)
                if worker.on_gpu:
                    return described
                from penstock.training.threads import looked

                return replace(described, threads=looked(training, self._threads, fixed=worker.job.deterministic))
            try:
                training, known = trials.made(Training, trial or 0, config, variant), len(self._reads)
                random = random_state(with_torch=True)
                described = describe(training, self._reads, train=False, seen=seen)
                description = replace(described, steps=training.unit_length)
            except Exception:
                return Description()  # the error is told when the trial trains
        if trial is not None and len(self._reads) == known:  # it has computed nothing: it is as it was made
            trials.keep_described(trial, training, random, description.bytes or 0)
        return description

    @contextmanager
    def _outside_kept(self) -> Iterator[None]:
        """Let the trial that trains here find its values outside of its model again, whatever is described."""
        try:
            yield
        finally:
            if self._worker.trials.kept is not None:
                self._worker.trials.kept.bring_back()
