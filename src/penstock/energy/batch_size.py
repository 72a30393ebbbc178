"""Which batch size the next run of a recurring job trains with: the contract of a policy, and two plain ones.

A job recurs, and each recurrence trains a model to the same target (Zeus §3.3). A recurrence is one run, or several
where runs are stopped: a run that costs more than its stake is stopped, and the recurrence goes on with another run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from numpy.random import Generator


@dataclass(frozen=True)
class Terms:
    """What is known of a recurring job beforehand.

    ``unit_costs`` has EpochCost(b; η): the cost of a unit of each size at its best power limit (Zeus eq. 7).
    ``default_cost`` is that of a unit of the default size as it was before: at the greatest limit. ``recurrences`` is
    how many there are to be in all, as far as the user knows.
    """

    sizes: tuple[int, ...]
    default: int
    max_budget: int
    recurrences: int
    unit_costs: Mapping[int, float]
    default_cost: float


@dataclass(frozen=True)
class Choice:
    """A size to run, and the cost beyond which its run is stopped. ``pruning``: a round of pruning tries it.

    ``limit`` is a power limit in watts, where the policy sets one.
    """

    size: int
    stake: float = inf
    pruning: bool = False
    limit: float | None = None

    def units(self, unit_cost: float, most: int) -> int:
        """How many units its stake pays for, up to ``most``: the unit that would pass the stake is not trained."""
        return most if self.stake >= unit_cost * most else int(self.stake / unit_cost + 1e-9)


@dataclass(frozen=True)
class Run:
    """A run that has ended: its units, their cost, and whether it reached the target.

    ``elsewhere``: it ran on another device, so that its units tell something and its cost does not (Zeus §7).
    """

    choice: Choice
    recurrence: int
    units: int
    cost: float
    reached: bool
    elsewhere: bool = False

    @property
    def size(self) -> int:
        """The batch size it trained with."""
        return self.choice.size


@dataclass(frozen=True)
class Past:
    """All runs so far in the order in which they ended, and the choices of the runs under way."""

    runs: tuple[Run, ...] = ()
    running: tuple[Choice, ...] = field(default=())
    spent: float = 0.0  # the cost of all else, such as dry steps

    def with_run(self, run: Run) -> Past:
        """One run more; it is no longer under way."""
        running = list(self.running)
        if run.choice in running:
            running.remove(run.choice)
        return Past((*self.runs, run), tuple(running), self.spent)


class Policy(Protocol):
    """Chooses the size of the next run: a pure function of its arguments.

    ``stopped`` are the runs of the same recurrence so far, none of which reached the target.
    """

    @property
    def learns(self) -> bool:
        """Whether it needs the cost of a unit of every size before the first run."""

    def choose(self, terms: Terms, past: Past, stopped: Sequence[Run], draw: Generator) -> Choice:
        """The next run's size and stake."""


@dataclass(frozen=True)
class Default:
    """Always the default size, which is never stopped: doing nothing (Zeus §6.1)."""

    @property
    def learns(self) -> bool:
        return False

    def choose(self, terms: Terms, past: Past, stopped: Sequence[Run], draw: Generator) -> Choice:
        """The default size."""
        return Choice(terms.default)


@dataclass(frozen=True)
class Grid:
    """Each size once, and then the cheapest; a size that misses the target is left out at other limits (Zeus §6.1).

    With ``limits`` each size is tried at each power limit, as the paper's grid search with pruning does.
    """

    limits: tuple[float, ...] = ()

    @property
    def learns(self) -> bool:
        return False

    def choose(self, terms: Terms, past: Past, stopped: Sequence[Run], draw: Generator) -> Choice:
        """The next point of the grid, or the best."""
        missed = {run.size for run in past.runs if not run.reached} - {terms.default}
        tried = {(run.size, run.choice.limit) for run in past.runs}
        tried |= {(one.size, one.limit) for one in past.running}
        sizes = sorted(terms.sizes, key=lambda size: (size != terms.default, size))
        limits: list[float | None] = [*sorted(self.limits, reverse=True)] or [None]
        for size in () if stopped else sizes:
            for limit in limits:
                if size not in missed and (size, limit) not in tried:
                    return Choice(size, limit=limit)
        reached = [run for run in past.runs if run.reached]
        if not reached:
            return Choice(terms.default, limit=max(self.limits, default=None))
        best = min(reached, key=lambda run: run.cost)
        return Choice(best.size, limit=best.choice.limit)
