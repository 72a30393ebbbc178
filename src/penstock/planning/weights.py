"""The mean seconds and cost of each stage on each choice of nodes, and of each change of nodes between two stages.

They add up along a plan, because stages are separated by barriers. Quantiles do not add up: they are left to samples of
a whole plan. Nor does the least that is paid for a node, which may stay for several stages. It is counted where a node
goes: as if the node had been there from the beginning, or had come for the last of its stages, or for the last two. Of
the plans that are best by one of these counts, samples choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.planning.draws import Array
from penstock.planning.execution import HOUR, Choice, Execution, Path, Trained


@dataclass(frozen=True)
class Weights:
    """A graph in layers: a layer has a state for each choice of nodes of a stage.

    ``seconds`` and ``cost`` have for each stage what a change from a state of the layer before to a state of its own
    takes and costs, the stage itself included. The first layer has one state before it: what is held.
    """

    choices: tuple[Choice, ...]
    seconds: tuple[Array, ...]
    cost: tuple[Array, ...]
    last: Array  # what the last stage costs in each of its states, after what the change to it has cost

    def path(self, states: Sequence[int]) -> Path:
        """The plan along the states."""
        return tuple(self.choices[state] for state in states)

    def means(self, path: Path) -> tuple[float, float]:
        """The mean seconds and cost of a plan."""
        states = [choice.offer * self.most + choice.nodes - 1 for choice in path]
        steps = [(number, at, to) for number, (at, to) in enumerate(pairwise((0, *states)))]
        seconds = sum(float(self.seconds[number][at, to]) for number, at, to in steps)
        return seconds, sum(float(self.cost[number][at, to]) for number, at, to in steps) + float(self.last[states[-1]])

    @property
    def most(self) -> int:
        """The most nodes of a choice."""
        return self.choices[-1].nodes


def weigh(execution: Execution, *, ahead: bool) -> tuple[Weights, ...]:
    """The weights of all plans of a bracket, by each count of the least that is paid for a node that differs."""
    cloud, coming = execution.cloud, execution.cloud.arrival.expected + execution.cloud.preparing.expected
    choices = tuple(Choice(offer, nodes) for offer in range(len(cloud.offers)) for nodes in range(1, cloud.most + 1))
    seconds, costs = list[Array](), list[Array]()
    shorts: tuple[list[Array], ...] = ([], [], [])
    before, priors = [execution.nothing], [execution.held]
    none = np.zeros(len(choices))
    ages, means = (none, none, none), none  # of nodes where the stage before begins, by each count; its mean seconds
    least = cloud.minimum
    for stage in range(len(execution.works)):
        trained = [execution.trained(stage, choice) if stage else execution.first(choice)[0] for choice in choices]
        time, cost, beyond = _changes(execution, stage, before, priors, choices, ahead=ahead)
        for short, age in zip(shorts, ages, strict=True):
            short.append(beyond(least - age))
        ages, means = (ages[0] + means, none, means), np.array([one.seconds.mean() for one in trained])
        seconds.append(time + means)
        costs.append(cost + np.array([_running(execution, *pair) for pair in zip(trained, choices, strict=True)]))
        before, priors = trained, list(choices)
        # A first stage counts from when its nodes are asked for, and others from when they are ready.
        least, means = (
            (cloud.minimum - cloud.preparing.expected, means)
            if stage
            else (cloud.minimum + cloud.arrival.expected, means - coming)
        )
    last = list(zip(before, choices, strict=True))
    early = np.array([-execution.price(choice) * one.early[choice.nodes] for one, choice in last])
    for short, age in zip(shorts, ages, strict=True):
        pairs = zip(last, least - age, strict=True)
        short.append(
            np.array([execution.price(choice) * one.short(left)[choice.nodes] for (one, choice), left in pairs])
        )
    made = list[Weights]()
    for number, short in enumerate(shorts):
        if not any(all(map(np.array_equal, short, other)) for other in shorts[:number]):
            paid = tuple(cost + one for cost, one in zip(costs, short, strict=False))
            made.append(Weights(choices, tuple(seconds), paid, early + short[-1]))
    return tuple(made)


def _running(execution: Execution, trained: Trained, choice: Choice) -> float:
    """What a stage costs where all of its nodes stay to its end."""
    rate = execution.price(choice) * choice.nodes + execution.cloud.head / HOUR
    device_seconds = float(trained.device_seconds.mean())
    return rate * float(trained.seconds.mean()) + execution.function_price(choice) * device_seconds


def _changes(
    execution: Execution,
    stage: int,
    before: list[Trained],
    priors: list[Choice] | list[Choice | None],
    choices: tuple[Choice, ...],
    *,
    ahead: bool,
) -> tuple[Array, Array, Callable[[Array], Array]]:
    """The mean wait and cost of each change of nodes at the barrier before a stage.

    The function gives what is paid beyond use, by the least seconds that are paid for nodes of each state in it.
    """
    cloud = execution.cloud
    wait, gap = _waits(execution, stage, before, ahead=ahead)
    coming = execution.coming(stage)
    there = np.concatenate([[0.0], np.cumsum(coming.there.mean(axis=0))])
    had = np.array([prior.nodes if prior else 0 for prior in priors])
    of = np.array([prior.offer if prior else -1 for prior in priors])
    paid = np.array([execution.price(prior) if prior else 0.0 for prior in priors])
    early = np.zeros((len(before), max(cloud.most, *had) + 1))
    for row, one in enumerate(before if stage else []):  # nodes that were held before the first stage go at once
        early[row, : len(one.early)] = one.early
    rows = np.arange(len(before))
    seconds, cost = np.empty((2, len(before), len(choices)))
    going = np.empty((len(before), len(choices)), dtype=int)
    for column, choice in enumerate(choices):
        kept = np.where(of == choice.offer, np.minimum(had, choice.nodes), 0)
        new, price = choice.nodes - kept, execution.price(choice)
        used = execution.trained(stage, choice).layout.nodes
        late = np.where(kept < used, wait[rows, new], 0.0)
        seconds[:, column] = late
        cost[:, column] = (
            price * (kept * late + new * (gap[rows, new] + late) - there[new])
            - paid * early[rows, had - kept]
            + new * cloud.data * cloud.data_price
            + cloud.head / HOUR * late
        )
        going[:, column] = had - kept

    def beyond(least: Array) -> Array:
        if not stage or not (least > 0).any():
            return np.zeros(cost.shape)
        paid_for = [one.short(left)[gone] for one, left, gone in zip(before, least, going, strict=True)]
        return paid[:, None] * np.array(paid_for)

    return seconds, cost, beyond


def _waits(execution: Execution, stage: int, before: list[Trained], *, ahead: bool) -> tuple[Array, Array]:
    """By the state before and the number of new nodes: the mean wait for them after the barrier, and the mean time
    from when they are asked for to the barrier.

    Before the first stage the wait is a part of the stage. Later, trials are taken to wait for the last node.
    """
    seconds = np.stack([one.seconds for one in before])  # a row for each state
    means = seconds.mean(axis=1, keepdims=True)
    coming = execution.coming(stage)
    wait, gap = np.zeros((2, len(before), execution.cloud.most + 1))
    for new in range(1, execution.cloud.most + 1 if stage else 1):
        ready = coming.all[:, new - 1]
        asked = np.maximum(0.0, means - execution.lead(stage, new)) if ahead else np.inf
        ahead_by = seconds - np.minimum(asked, seconds)
        wait[:, new] = np.maximum(0.0, ready - ahead_by).mean(axis=1)
        gap[:, new] = ahead_by.mean(axis=1)
    return wait, gap
