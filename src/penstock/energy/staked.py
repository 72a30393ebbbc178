"""Penstock's own choice of the batch size: an untried size is staked no more than what is sure to be saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import TYPE_CHECKING

import numpy as np

from penstock.energy.batch_size import Choice, Past, Run, Terms
from penstock.energy.epochs import Belief, believe

if TYPE_CHECKING:
    from numpy.random import Generator

SURE = 2.0  # deviations of a mean below which it is sure not to be
REACH = 4.0  # how many times as large or small as a tried size an untried one may be
LATER = 0.5  # of the recurrences left: so many are believed in where a size is tried for their sake
STAKES = 16  # stakes of a size that are weighed against one another


@dataclass(frozen=True)
class Staked:
    """Units and their cost are learned apart, and a size is tried where it gains, at a stake that can be lost.

    ``risk`` is the part of the default's total cost that may be lost beyond what is sure to be saved. A run of a tried
    size is stopped at ``beta`` times the least mean cost. A stopped run is repeated with the best size, and where that
    is stopped, with the default, which never is.
    """

    risk: float = 0.0
    beta: float = 2.0

    @property
    def learns(self) -> bool:
        return True

    def choose(self, terms: Terms, past: Past, stopped: Sequence[Run], draw: Generator) -> Choice:
        """The untried size and stake of greatest expected gain, if there is one; else a draw among tried sizes."""
        belief = believe(terms.default, past.runs)
        if terms.default not in belief.reached:
            return Choice(terms.default)
        means = {size: belief.mean(size) * terms.unit_costs[size] for size in sorted(belief.reached)}
        best = min(means, key=lambda size: means[size])
        if stopped:
            again = best != terms.default and all(run.size != best for run in stopped)
            return Choice(best, self.beta * means[best]) if again else Choice(terms.default)
        if (tried := self.try_(terms, past, belief, best)) is not None:
            return tried
        can_lose = sure(terms, past, belief, self.risk)
        drawn = {size: belief.draw(size, draw) * terms.unit_costs[size] for size in means}
        able = [size for size in means if size == terms.default or excess(terms, belief, size) <= can_lose]
        size = min(able, key=lambda size: drawn[size])
        return Choice(size) if size == terms.default else Choice(size, self.beta * means[best])

    def try_(self, terms: Terms, past: Past, belief: Belief, best: int) -> Choice | None:
        """The untried size and the stake whose expected net gain is greatest, where that is above 0."""
        mean = belief.mean(best) * terms.unit_costs[best]
        most = min((1 + 2 * belief.cv) * mean, sure(terms, past, belief, self.risk))
        left = LATER * (terms.recurrences - done(past) - len(past.running) - 1)
        gain, found = 0.0, None
        under_way = {choice.size for choice in past.running}
        for size in sorted(set(terms.sizes) - belief.reached.keys() - under_way):
            cost = terms.unit_costs[size]
            if all(max(size / known, known / size) > REACH for known in belief.reached):
                continue  # a slope that holds here may not hold so far away, and the stake would be gone
            units = min(int(most / cost + 1e-9), terms.max_budget) if cost > 0 else 0
            if units < 1 or left < LATER:
                continue
            needed, means, weights = belief.foresee(size)
            stakes = np.unique(np.linspace(1, units, STAKES).astype(int))
            reach = needed[:, None] <= stakes + 0.5
            later = left * np.maximum(mean - means * cost, 0.0) + mean - np.maximum(needed, 1.0) * cost
            gains = weights @ np.where(reach, later[:, None], -stakes * cost)
            at = int(np.argmax(gains))
            if gains[at] > gain:
                gain, found = float(gains[at]), Choice(size, float(stakes[at] * cost))
        return found


def done(past: Past) -> int:
    """How many recurrences have reached the target."""
    return sum(run.reached and not run.elsewhere for run in past.runs)


def sure(terms: Terms, past: Past, belief: Belief, risk: float) -> float:
    """The cost that can be lost: saved so far, sure to be saved from now on, and risked; less all stakes under way."""
    default = belief.mean(terms.default)
    least = default - SURE * belief.deviation(terms.default)
    least, saved = max(0.0, least), -past.spent
    for run in past.runs:
        if run.elsewhere:
            continue
        would = run.units if run.size == terms.default else least
        saved += (would * terms.default_cost if run.reached else 0.0) - run.cost
    left = max(0, terms.recurrences - done(past))
    staked = sum(choice.stake for choice in past.running if choice.stake < inf)
    return saved + left * _each(terms, belief) + risk * terms.recurrences * default * terms.default_cost - staked


def excess(terms: Terms, belief: Belief, size: int) -> float:
    """By how much a run of a tried size may cost more than the default would."""
    most = belief.mean(size) + SURE * belief.deviation(size)
    return most * terms.unit_costs[size] - belief.mean(terms.default) * terms.default_cost


def _each(terms: Terms, belief: Belief) -> float:
    """What the best size is sure to save in each recurrence: at least the default's own, at a better power limit."""
    default, cost = belief.mean(terms.default), terms.default_cost
    savings = [default * (cost - terms.unit_costs[terms.default]), 0.0]
    for size in belief.reached.keys() - {terms.default}:
        unit = terms.unit_costs[size]
        deviation = sqrt((belief.deviation(terms.default) * cost) ** 2 + (belief.deviation(size) * unit) ** 2)
        savings.append(default * cost - belief.mean(size) * unit - SURE * deviation)
    return max(savings)
