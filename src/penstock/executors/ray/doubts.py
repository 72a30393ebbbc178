"""Nodes that are avoided for a while after workers were lost there: Ray places actors on dead nodes for some time."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Collection

from penstock.bundle import TrialFailed
from penstock.executors.base import DeviceLost, ExecutorEvent
from penstock.executors.ray.slot import Slot, alone, how

DOUBT = 15.0  # seconds that a node is avoided after a worker was lost there in an unclear way; each loss doubles them
STILLBORN = 5  # workers in a row that may die before they are ready; after more, the study is given up
FAILURES = 3  # losses on one node after which the user is warned


class Doubts:
    """The nodes in doubt, and until when each is avoided."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._stillborn = 0  # workers in a row
        self._deaths: dict[str, list[set[int]]] = {}  # the trials of each worker that died on a node since a report

    @property
    def avoided(self) -> Collection[str]:
        """The nodes to be avoided."""
        return self._until.keys()

    def doubt(self, node: str) -> None:
        """Avoid a node for a while, longer each time."""
        self._failures[node] += 1
        self._until[node] = time.monotonic() + DOUBT * 2 ** (self._failures[node] - 1)
        if self._failures[node] == FAILURES:
            warnings.warn(f"Node {node[:6]} has failed {FAILURES} times and is avoided for a while.", stacklevel=2)

    def trust(self, now: float) -> None:
        """Let nodes be used again whose time of doubt is over."""
        self._until = {node: end for node, end in self._until.items() if end > now}

    def blames_node(self, node: str, trials: Collection[int]) -> bool:
        """Take the death of a worker with its trials; says whether the node is at fault and not one of the trials.

        The node is at fault where several workers in a row died without a report and had no trial in common.
        """
        deaths = self._deaths.setdefault(node, [])
        if trials:
            deaths.append(set(trials))
        return len(deaths) >= FAILURES and not set.intersection(*deaths)

    def hopeless(self, slot: Slot, error: Exception | None) -> bool:
        """Take the death of a worker before it was ready; says whether workers cannot start on the cluster."""
        self._stillborn += not slot.rested
        return "creation task" in str(error) or self._stillborn > STILLBORN

    def born(self) -> None:
        """A worker is ready."""
        self._stillborn = 0

    def reported(self, node: str) -> None:
        """A trial on this node has reported, so workers can live there."""
        self._deaths.pop(node, None)

    def died(self, slot: Slot, error: Exception | None, study: str) -> list[ExecutorEvent]:
        """Account for the death of a ready worker; gives what the engine has to know of it."""
        assert slot.device is not None
        cause = "it did not answer any more" if error is None else how(error)
        said = f"worker process {slot.pid} on node {slot.node[:6]} died: {cause}"
        failed = [TrialFailed(*one, said, died=True, study=study) for one in slot.running]
        lost = [DeviceLost(slot.device)] if slot.phase == "ready" else []
        trials = [trial for trial, _ in slot.running]
        if alone(error) and not self.blames_node(slot.node, trials):
            return [*failed, *lost]  # one of its trials may have killed the worker
        self.doubt(slot.node)
        return [*lost, *failed]  # the device is lost first, so no trial is at fault
