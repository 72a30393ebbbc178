"""How a stage's trials lie on its nodes: each on several devices, each on one, or several sharing one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from penstock.planning.draws import Array
from penstock.planning.spec import Times, Work
from penstock.speed.sizes import best_size


@dataclass(frozen=True)
class Layout:
    """Trials on nodes: ``slots`` bundles at a time, of ``share`` trials on a device or of a trial on ``width`` devices.

    ``nodes`` have trials, of the nodes that are held.
    """

    slots: int
    width: int
    share: int
    nodes: int
    devices_a_node: int

    @property
    def devices(self) -> float:
        """The devices of a trial."""
        return self.width if self.share == 1 else 1 / self.share

    @property
    def span(self) -> int:
        """The nodes that a trial is on."""
        return -(-self.width // self.devices_a_node)

    def sizes(self, trials: int) -> list[int]:
        """The trials of each bundle where devices are shared: full bundles, and then the rest on as many devices.

        >>> Layout(4, 1, 3, 1, 4).sizes(27), Layout(3, 1, 3, 1, 4).sizes(8)
        ([3, 3, 3, 3, 3, 3, 3, 3, 1, 1, 1], [3, 3, 2])
        """
        waves, rest = divmod(trials - 1, self.share * self.slots)
        each, more = divmod(rest + 1, min(rest + 1, self.slots))
        last = [each + 1] * more + [each] * (min(rest + 1, self.slots) - more)
        return [self.share] * (waves * self.slots) + last

    @property
    def last(self) -> list[int]:
        """For each slot the number of the node with which it has its devices, where nodes come one by one."""
        return [-(-self.width * slot // self.devices_a_node) - 1 for slot in range(1, self.slots + 1)]

    def by_node(self, ends: Array) -> Array:
        """When each node has no more trials, by when each slot has none; rests of wide trials share nodes."""
        full, rest = divmod(self.width, self.devices_a_node)
        nodes = np.repeat(ends, full, axis=1)
        if not rest:
            return nodes
        first = np.arange(0, self.slots, self.devices_a_node // rest)
        return np.hstack([nodes, np.maximum.reduceat(ends, first, axis=1)])


def needed(slots: int, width: int, devices_a_node: int) -> int:
    """The fewest nodes that hold so many trials of that width.

    >>> needed(3, 1, 4), needed(2, 4, 4), needed(3, 6, 4)
    (1, 2, 5)
    """
    full, rest = divmod(width, devices_a_node)
    return slots * full + (-(-slots // (devices_a_node // rest)) if rest else 0)


def lay(work: Work, times: Sequence[Times], devices_a_node: int, nodes: int) -> Layout:
    """The layout of a stage on so many nodes: the devices are divided evenly (RubberBand §5, "Scheduling").

    Each of the trials that may run at once gets the most devices that all can have; where there are fewer devices than
    trials, the trials queue, or share devices where that ends sooner.
    """
    least = min(work.trials, work.at_once or work.trials)
    devices = nodes * devices_a_node
    if devices >= least:
        width = max(w for w in widths(times) if needed(least, w, devices_a_node) <= nodes)
        return Layout(least, width, 1, needed(least, width, devices_a_node), devices_a_node)
    best, layout = math.inf, None
    for share in range(1, min(_together(one.curve.sharing) for one in times) + 1):
        slots = min(devices, max(1, least // share), -(-work.trials // share))
        laid = Layout(slots, 1, share, needed(slots, 1, devices_a_node), devices_a_node)
        sizes = laid.sizes(work.trials)
        taken = sum(max(one.curve.at(1 / size) for one in times) for size in sizes[::slots])
        if taken < best * (1 - 1e-9):
            best, layout = taken, laid
    assert layout is not None
    return layout


@cache
def _together(sharing: tuple[float, ...]) -> int:
    """The most trials that a device has while each further one pays: workers make others leave."""
    return best_size(dict(enumerate(sharing, 1)), len(sharing))


def widths(times: Sequence[Times]) -> list[int]:
    """The numbers of devices that trials of every signature can be given."""
    return sorted(set.intersection(*(set(one.curve.counts) for one in times)))
