"""The buffers that modules keep: statistics and counts of all layers, written together at the end of a forward.

That takes a few launches for all layers of a step, where one layer after another takes ten each. Where a buffer is read
or written before, everything that waits for it is done first. From then on it has no wait in this forward, as there may
be other views of it. So no code sees that there was a wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from penstock.training.fused.stacked import Stacked


class Waiting(Protocol):
    """A computation that waits for the operations that follow it."""

    running: tuple[Any, ...]  # the statistics that a module keeps of it; none, where nobody needs it for these

    def compute(self) -> None: ...


class Kept(Stacked):
    """A buffer of every trial."""

    held: torch.Tensor  # the trials lie in front

    @property
    def whole(self) -> torch.Tensor:
        if (later := LATER.get()) is not None:
            later.settle(self)
            later.seen.add(id(self))
        return self.held

    @whole.setter
    def whole(self, value: torch.Tensor) -> None:
        self.held = value


@dataclass
class Later:
    """What waits for the end of a forward."""

    waiting: list[Waiting] = field(default_factory=list)
    counts: list[Kept] = field(default_factory=list)
    statistics: list[tuple[Kept, torch.Tensor, float]] = field(default_factory=list)  # a batch's, and its part
    seen: set[int] = field(default_factory=set)  # the buffers that were read

    def takes(self, buffer: Any) -> bool:
        """Whether a buffer may be written later."""
        return isinstance(buffer, Kept) and id(buffer) not in self.seen

    def settle(self, buffer: Any) -> None:
        """Do everything that a buffer waits for, so that batches are counted in the order in which they came."""
        for one in list(self.waiting):
            if any(running is buffer for running in one.running):
                one.compute()
        if self._writes(buffer):
            self.write()

    def _writes(self, buffer: Any) -> bool:
        return any(one is buffer for one in self.counts) or any(one is buffer for one, _, _ in self.statistics)

    @torch.no_grad()
    def write(self) -> None:
        """Write the counts, and the statistics: those of equal parts together."""
        counts, statistics, self.counts, self.statistics = self.counts, self.statistics, [], []
        if counts:
            torch._foreach_add_([one.held for one in counts], 1)
        alike = defaultdict(list)
        for one, new, part in statistics:
            alike[part].append((one.held, new))
        for part, pairs in alike.items():
            held = [before for before, _ in pairs]
            torch._foreach_mul_(held, 1 - part)
            torch._foreach_add_(held, [new for _, new in pairs], alpha=part)


LATER: ContextVar[Later | None] = ContextVar("later", default=None)


@contextmanager
def waiting() -> Iterator[None]:
    """Do everything that still waits at the end, because modules keep statistics of it."""
    later = Later()
    token = LATER.set(later)
    try:
        yield
        for one in list(later.waiting):
            if one.running:
                one.compute()
        later.write()
    finally:
        LATER.reset(token)


@torch.no_grad()
def keep(stat: Any, new: torch.Tensor, part: float | torch.Tensor) -> None:
    """Take a batch's statistics into a module's, by so large a part; now, or when all others are taken in."""
    later = LATER.get()
    if later is not None and later.takes(stat) and isinstance(part, float) and stat.held.dtype == new.dtype:
        later.settle(stat)
        later.statistics.append((stat, new, part))
        return
    stat.moved(0).copy_(stat.moved(0) * (1 - part) + new.to(stat.dtype) * part)


def counted(name: str, x: Any, values: tuple[Any, ...]) -> bool:
    """Whether an operation in place is the counting of a batch, which then waits."""
    later = LATER.get()
    if later is None or not later.takes(x) or (name, values) != ("add_", (1,)) or x.held.dtype != torch.int64:
        return False
    later.settle(x)
    later.counts.append(x)
    return True
