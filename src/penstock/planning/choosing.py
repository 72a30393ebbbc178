"""The cheapest plan of a frontier whose samples keep the deadline, or the quickest whose samples keep the cost.

Means add up along a plan, and quantiles do not: so the frontier is that of the means, and a plan on it is judged by
samples of its whole execution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from penstock.planning.baselines import greedy, naives, statics
from penstock.planning.cloud import Cloud
from penstock.planning.draws import Array
from penstock.planning.execution import Choice, Execution, Outcome, Path
from penstock.planning.frontier import Labelled, frontier
from penstock.planning.plan import Kind
from penstock.planning.spec import Job
from penstock.planning.weights import Weights, weigh

WEIGHING, JUDGING = (4096, 8, 64), (131_072, 256, 1024)  # trials of a stage that are sampled; samples at least, at most
NEAR = 12  # plans next to the first that holds: where costs are nearly equal, a cheaper one may hold as well
LEAST = 1e-9  # a change that gains less than this part is none
SHOWN = 50  # plans of a frontier that are sampled to be shown
TIGHTER = 0.97  # a baseline whose samples miss the deadline is made for so much of it


@dataclass(frozen=True)
class Candidate:
    """A plan for each bracket, with the mean seconds until the last has ended, and the mean cost of all."""

    seconds: float
    cost: float
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class Judged:
    """A plan and the samples of its execution, bracket by bracket."""

    candidate: Candidate
    outcomes: tuple[Outcome, ...]
    seconds: Array
    cost: Array

    def chance(self, deadline: float | None) -> float:
        """The part of the samples that keep the deadline."""
        return 1.0 if deadline is None else float((self.seconds <= deadline).mean())

    def late(self, confidence: float) -> float:
        """The seconds that so many of the samples keep."""
        return quantile(self.seconds, confidence)

    def paid(self, confidence: float) -> float:
        """The cost that so many of the samples keep."""
        return quantile(self.cost, confidence)


def quantile(samples: Array, confidence: float) -> float:
    """The least value that so large a part of the samples does not exceed."""
    return float(np.quantile(samples, confidence, method="inverted_cdf"))


class Choosing:
    """All plans of a job on a cloud."""

    def __init__(self, job: Job, cloud: Cloud, held: Mapping[int, Choice], *, ahead: bool, seed: int) -> None:
        self.ahead = ahead
        self._weighing, self._judging = list[Execution](), list[Execution]()
        weights = list[tuple[Weights, ...]]()
        for works in job.brackets:
            trials = max(work.trials for work in works)
            bracket, own = works[0].bracket, held.get(works[0].bracket)
            for made, (sampled, least, most), at in ((self._weighing, WEIGHING, 0), (self._judging, JUDGING, 1)):
                samples = min(max(sampled // trials, least), most)
                key = 2 * (seed * 1000 + bracket) + at
                made.append(Execution(job, works, cloud, samples=samples, seed=key, held=own))
            weights.append(weigh(self._weighing[-1], ahead=ahead))
        # By each count of the least that is paid for a node; a bracket for which none differs has but one.
        self._models = [[one[min(at, len(one) - 1)] for one in weights] for at in range(max(map(len, weights)))]
        self._frontiers = [_together([frontier(one) for one in model]) for model in self._models]
        self._judged = dict[tuple[tuple[Path, ...], bool], Judged]()

    @property
    def frontier(self) -> list[Candidate]:
        """The plans that no other plan beats in both, the quickest first.

        Where the least that is paid for a node counts, some of them, with the cost of their samples.
        """
        if len(self._models) == 1:
            return self._frontiers[0]
        plans = [one for front in self._frontiers for one in [*front[:: -(-len(front) // SHOWN)], front[-1]]]
        return _undominated(Candidate(*_means(self._weighing, one.paths, self.ahead), one.paths) for one in plans)

    def ends(self) -> tuple[Judged, Judged]:
        """The quickest plan and the cheapest."""
        quick = [self.judge(one[0]) for one in self._frontiers]
        cheap = [self.judge(one[-1]) for one in self._frontiers]
        first = min(quick, key=lambda one: (_time(one), _cost(one)))
        return self._better(first, _time), self._better(min(cheap, key=_cost), _cost)

    @property
    def executions(self) -> list[Execution]:
        """The executions by which plans are judged."""
        return self._judging

    def judge(self, candidate: Candidate, *, hold: bool = False) -> Judged:
        """The samples of a plan; with ``hold``, of one whose nodes stay to the end of their stage."""
        if (key := (candidate.paths, hold)) not in self._judged:
            pairs = zip(self._judging, candidate.paths, strict=True)
            outcomes = tuple(execution.run(path, ahead=self.ahead, hold=hold) for execution, path in pairs)
            rows = max(len(one.seconds) for one in outcomes)
            seconds = np.max([np.resize(one.seconds, rows) for one in outcomes], axis=0)
            cost = np.sum([np.resize(one.cost, rows) for one in outcomes], axis=0)
            self._judged[key] = Judged(candidate, outcomes, seconds, cost)
        return self._judged[key]

    def cheapest(self, deadline: float | None, confidence: float) -> Judged | None:
        """The cheapest plan whose samples keep the deadline; None where none does."""

        def holds(plan: Judged) -> bool:
            return deadline is None or plan.late(confidence) <= deadline

        kept = (self._keeping(one, deadline, confidence) for one in self._frontiers)
        best = min(filter(None, kept), key=_cost, default=None)
        if best is None and holds(quick := self.ends()[0]):
            best = quick
        return None if best is None else self._better(best, _cost, holds)

    def quickest(self, max_cost: float, confidence: float) -> Judged | None:
        """The quickest plan whose samples keep the cost; None where none does."""

        def holds(plan: Judged) -> bool:
            return plan.paid(confidence) <= max_cost

        kept = (self._first(one, holds, _time) for one in self._frontiers)
        best = min(filter(None, kept), key=_time, default=None)
        if best is None and holds(cheap := self.ends()[1]):
            best = cheap
        return None if best is None else self._better(best, _time, holds)

    def _better(
        self, judged: Judged, value: Callable[[Judged], float], holds: Callable[[Judged], bool] = lambda plan: True
    ) -> Judged:
        """What small changes of a plan lead to, while each makes it better and it holds.

        The weights of a plan are those of its samples but for nodes that are late, and short-lived ones.
        """
        while True:
            tried = (self.judge(one) for one in self._changed(judged, value))
            best = min(filter(holds, tried), key=value, default=judged)
            if value(best) >= value(judged) * (1 - LEAST):
                return judged
            judged = best

    def _changed(self, judged: Judged, value: Callable[[Judged], float]) -> list[Candidate]:
        """The plans next to one that are better by few samples."""
        by_cost = value is _cost
        now = _means(self._weighing, judged.candidate.paths, self.ahead)[by_cost]
        found = list[tuple[float, Candidate]]()
        for bracket, path in enumerate(judged.candidate.paths):
            for new in _beside(self._weighing[bracket].cloud, path):
                paths = (*judged.candidate.paths[:bracket], new, *judged.candidate.paths[bracket + 1 :])
                means = _means(self._weighing, paths, self.ahead)
                if means[by_cost] < now * (1 - LEAST):
                    found.append((means[by_cost], Candidate(*means, paths)))
        return [one for _, one in sorted(found, key=lambda one: one[0])[:NEAR]]

    def _first(
        self,
        ranked: Sequence[Candidate],
        holds: Callable[[Judged], bool],
        value: Callable[[Judged], float],
        hold: bool = False,
    ) -> Judged | None:
        """The best plan that holds, of plans from the best to the one that holds most surely."""
        low, high = 0, len(ranked) - 1
        if not holds(self.judge(ranked[high], hold=hold)):
            return None
        while low < high:
            middle = (low + high) // 2
            if holds(self.judge(ranked[middle], hold=hold)):
                high = middle
            else:
                low = middle + 1
        near = (self.judge(one, hold=hold) for one in ranked[max(0, high - NEAR) : high + 1])
        return min(filter(holds, near), key=value)

    def others(self, deadline: float | None, confidence: float) -> dict[Kind, Judged]:
        """The plans of other kinds that keep the deadline."""
        made: dict[Kind, Judged | None] = {
            "static": self.static(deadline, confidence),
            "naive": self.naive(deadline, confidence),
            "greedy": self.greedy(deadline, confidence),
        }
        return {kind: one for kind, one in made.items() if one is not None}

    def static(self, deadline: float | None, confidence: float) -> Judged | None:
        """The cheapest plan with the same nodes from the beginning of a bracket to its end that keeps the deadline."""
        return self._of(statics, deadline, confidence, hold=True)

    def naive(self, deadline: float | None, confidence: float) -> Judged | None:
        """The cheapest plan with the same devices a trial in all stages of a bracket that keeps the deadline."""
        return self._of(naives, deadline, confidence)

    def greedy(self, deadline: float | None, confidence: float) -> Judged | None:
        """RubberBand's plan; it is made for an earlier deadline where its samples miss this one."""
        return _cheaper(self._greedy(model, deadline, confidence) for model in self._models)

    def _greedy(self, model: Sequence[Weights], deadline: float | None, confidence: float) -> Judged | None:
        goal = math.inf if deadline is None else deadline
        while True:
            paths = [greedy(one, weights, goal) for one, weights in zip(self._weighing, model, strict=True)]
            if any(path is None for path in paths):
                return None
            judged = self.judge(self._candidate(path for path in paths if path is not None))
            if deadline is None or judged.late(confidence) <= deadline:
                return judged
            goal *= TIGHTER

    def _of(
        self, kind: Callable[[Execution], Iterable[Path]], deadline: float | None, confidence: float, hold: bool = False
    ) -> Judged | None:
        plans = []
        for execution, weights in zip(self._weighing, self._models[0], strict=True):
            plans.append([Labelled(*weights.means(path), path) for path in kind(execution)])
        if not all(plans):
            return None
        return self._keeping(_together(plans), deadline, confidence, hold)

    def _keeping(
        self, plans: Sequence[Candidate], deadline: float | None, confidence: float, hold: bool = False
    ) -> Judged | None:
        """The cheapest of plans from the quickest to the cheapest whose samples keep the deadline."""
        if deadline is None:
            return self.judge(plans[-1], hold=hold)
        return self._first(plans[::-1], lambda one: one.late(confidence) <= deadline, _cost, hold)

    def _candidate(self, paths: Iterable[Path]) -> Candidate:
        made = tuple(paths)
        means = [weights.means(path) for weights, path in zip(self._models[0], made, strict=True)]
        return Candidate(max(time for time, _ in means), sum(cost for _, cost in means), made)


def _cheaper(plans: Iterable[Judged | None]) -> Judged | None:
    return min(filter(None, plans), key=_cost, default=None)


def _beside(cloud: Cloud, path: Path) -> Iterator[Path]:
    """The plans next to one: with other nodes in a stage, or in two that follow one another, or of another offer."""
    for stage, choice in enumerate(path):
        for nodes in {choice.nodes - 1, choice.nodes + 1, choice.nodes // 2, 2 * choice.nodes} - {choice.nodes}:
            if 1 <= nodes <= cloud.most:
                yield (*path[:stage], Choice(choice.offer, nodes), *path[stage + 1 :])
        for offer in set(range(len(cloud.offers))) - {choice.offer}:
            yield (*path[:stage], Choice(offer, choice.nodes), *path[stage + 1 :])
    for stage, (one, other) in enumerate(pairwise(path)):
        for more, fewer in product((1, -1), repeat=2):
            both = Choice(one.offer, one.nodes + more), Choice(other.offer, other.nodes + fewer)
            if all(1 <= choice.nodes <= cloud.most for choice in both):
                yield (*path[:stage], *both, *path[stage + 2 :])


def _time(plan: Judged) -> float:
    return float(plan.seconds.mean())


def _cost(plan: Judged) -> float:
    return float(plan.cost.mean())


def _means(executions: Sequence[Execution], paths: Sequence[Path], ahead: bool) -> tuple[float, float]:
    """The mean seconds and cost of samples."""
    outcomes = [execution.run(path, ahead=ahead) for execution, path in zip(executions, paths, strict=True)]
    return max(float(one.seconds.mean()) for one in outcomes), sum(float(one.cost.mean()) for one in outcomes)


def _undominated(plans: Iterable[Candidate]) -> list[Candidate]:
    """The plans that no other plan beats in both, the quickest first."""
    front = list[Candidate]()
    for plan in sorted(plans, key=lambda one: (one.seconds, one.cost)):
        if not front or plan.cost < front[-1].cost:
            front.append(plan)
    return front


def _together(brackets: Sequence[Sequence[Labelled]]) -> list[Candidate]:
    """Plans of several brackets at once: for each time, the cheapest plan of each bracket that has ended by then."""
    fronts = [_undominated(Candidate(one.seconds, one.cost, (one.path,)) for one in plans) for plans in brackets]
    least = max(front[0].seconds for front in fronts)
    made, at = list[Candidate](), [0] * len(fronts)
    for seconds in sorted({least, *(plan.seconds for front in fronts for plan in front if plan.seconds > least)}):
        for number, front in enumerate(fronts):
            while at[number] + 1 < len(front) and front[at[number] + 1].seconds <= seconds:
                at[number] += 1
        chosen = [front[number] for front, number in zip(fronts, at, strict=True)]
        paths = tuple(path for one in chosen for path in one.paths)
        made.append(Candidate(max(one.seconds for one in chosen), sum(one.cost for one in chosen), paths))
    return made
