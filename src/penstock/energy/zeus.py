"""Zeus's choice of the batch size (§4.3 and §4.4): pruning twice, then Gaussian Thompson sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, pvariance
from typing import TYPE_CHECKING

from penstock.energy.batch_size import Choice, Past, Run, Terms

if TYPE_CHECKING:
    from numpy.random import Generator

ROUNDS = 2  # of pruning: the second gives every size two costs, so that their variance is known (figure 4)


@dataclass(frozen=True)
class Zeus:
    """Algorithms 1 to 3 of Zeus, to the letter.

    A run is stopped once it would cost more than ``beta`` times the least cost of any run so far. ``prior`` is the mean
    and the variance of the belief about every size's cost; a flat one with None. Of each size the last ``window`` costs
    count, all of them with None.
    """

    beta: float = 2.0
    prior: tuple[float, float] | None = None
    window: int | None = None

    @property
    def learns(self) -> bool:
        return False

    def choose(self, terms: Terms, past: Past, stopped: Sequence[Run], draw: Generator) -> Choice:
        """The next size that pruning tries, or Thompson sampling draws."""
        reached = [run for run in past.runs if run.reached]
        stake = self.beta * min((run.cost for run in reached), default=inf)
        pruned = prune(terms, past.runs)
        if isinstance(pruned, int):
            if any(one.pruning for one in past.running):  # overlapping runs take the best known size meanwhile (§4.4)
                return Choice(min(reached, key=lambda run: run.cost).size if reached else terms.default, stake)
            return Choice(pruned, stake, pruning=True)
        return Choice(self.predict(pruned, past.runs, draw), stake)

    def predict(self, sizes: Sequence[int], runs: Sequence[Run], draw: Generator) -> int:
        """Algorithm 1: a mean cost is drawn from the belief about each size, and the smallest wins."""
        drawn = {}
        for size in sizes:
            costs = [cost(run) for run in runs if run.size == size][-(self.window or 0) :]
            mean, variance = self.observe(costs)
            drawn[size] = draw.normal(mean, sqrt(variance))
        return min(drawn, key=lambda size: drawn[size])

    def observe(self, costs: Sequence[float]) -> tuple[float, float]:
        """Algorithm 2: the belief about a size's mean cost, as mean and variance, from the costs of its runs.

        Equal costs have no variance: the belief is sure of their mean, which is the limit of the algorithm's formulas.
        """
        variance = pvariance(costs)
        if variance == 0:
            return fmean(costs), 0.0
        mean, precision = (0.0, 0.0) if self.prior is None else (self.prior[0], 1 / self.prior[1])
        posterior = 1 / (precision + len(costs) / variance)
        return posterior * (mean * precision + sum(costs) / variance), posterior


def cost(run: Run) -> float:
    """What a run says of its size's cost; a run that could not pay for one unit costs more than its stake."""
    return run.cost if run.units else run.choice.stake


def prune(terms: Terms, runs: Sequence[Run]) -> int | tuple[int, ...]:
    """The size that pruning tries next, or the sizes that are left once it is over (algorithm 3, lines 2 to 9).

    A round tries its first size, smaller sizes until one fails, then larger sizes until one fails. The sizes that
    reached the target go into the next round, which begins with the cheapest.
    """
    tries = iter([run for run in runs if run.choice.pruning])
    sizes, first = tuple(sorted(terms.sizes)), terms.default
    left: tuple[int, ...] = (terms.default,)
    for _ in range(ROUNDS):
        good: dict[int, float] = {}
        at = sizes.index(first)
        for way in (sizes[at::-1], sizes[at + 1 :]):
            for size in way:
                run = next(tries, None)
                if run is None:
                    return size
                if not run.reached:
                    break
                good[size] = run.cost
        if good:
            left, first = tuple(sorted(good)), min(good, key=lambda size: good[size])
        sizes = left  # where every size failed, though all of them reached the target before, all stay
    return sizes
