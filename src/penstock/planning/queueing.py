"""Samples of trials: when those that wait for devices begin and end, how long those that share take, and lost nodes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.planning.draws import Array
from penstock.planning.layout import Layout
from penstock.speed.curve import Curve

WAVES = 12  # of trials, beyond which they are placed one by one
ROWS = 24  # of samples, beyond which numpy finds the device that is free first more quickly than a heap


def lost(random: np.random.Generator, seconds: Array, units: Array, rate: float, again: float) -> Array:
    """The extra seconds of trials whose nodes are lost at a ``rate`` a second: a loss costs the unit under way.

    The mean of a trial of one unit of T seconds is (e^(rate·T) − 1)·(1/rate + again) − T.
    """
    unit = seconds / units
    whole = np.exp(-rate * unit)  # the chance that a unit is not lost
    losses = random.negative_binomial(units, np.clip(whole, 1e-12, 1.0)).ravel()
    each = np.repeat(np.arange(losses.size), losses)
    part = random.random(each.size) * (1 - whole.ravel()[each])
    wasted = -np.log1p(-part) / rate + again
    extra: Array = np.bincount(each, wasted, losses.size).astype(float)
    return extra.reshape(seconds.shape)


def shared(alone: Array, signs: NDArray[np.intp], curves: Sequence[Curve], layout: Layout) -> Array:
    """The seconds of bundles of trials that share a device: a bundle trains in step, at its trials' mean pace."""
    sizes = np.array(layout.sizes(alone.shape[1]))
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    factors = np.array([[curve.at(1 / count) for count in range(1, sizes.max() + 1)] for curve in curves])
    seconds = alone * factors[signs, np.repeat(sizes - 1, sizes)[None, :]]
    means: Array = np.add.reduceat(seconds, bounds[:-1], axis=1) / sizes
    return means


def queue(seconds: Array, slots: int, begin: Array | None = None) -> tuple[Array, Array]:
    """When each slot is free for good, and when the last trial begins: each on the slot that is free first, in order.

    ``begin`` is when each slot can have its first trial, rising; at once where nothing is given.

    >>> [one.tolist() for one in queue(np.array([[3.0, 1.0, 1.0, 4.0]]), 2)]
    [[[3.0, 6.0]], [2.0]]
    """
    rows, trials = seconds.shape
    first = np.zeros((rows, slots)) if begin is None else begin
    ends, last = first.copy(), np.zeros(rows)
    few = trials > slots * WAVES
    unlike = np.full(rows, few)
    for at in range(0, trials if not few else 0, slots):
        # A wave of trials goes to the slots in the order in which these are free. That is right unless a trial of the
        # wave has ended before a later one begins.
        wave = seconds[:, at : at + slots]
        order = np.argsort(ends, axis=1, kind="stable")[:, : wave.shape[1]]
        free = np.take_along_axis(ends, order, axis=1)
        after, last = free + wave, free[:, -1]
        unlike |= (np.minimum.accumulate(after, axis=1)[:, :-1] < free[:, 1:]).any(axis=1)
        np.put_along_axis(ends, order, after, axis=1)
    if unlike.any():
        ends[unlike], last[unlike] = _one_by_one(seconds[unlike], first[unlike])
    if begin is not None:  # a slot that comes too late for any trial is free once the last has begun
        ends = np.where(ends == begin, np.minimum(ends, last[:, None]), ends)
    return ends, last


def _one_by_one(seconds: Array, begin: Array) -> tuple[Array, Array]:
    """The same, trial by trial: right always, and quicker where there are many waves of few trials each."""
    ends, rows = begin.copy(), np.arange(len(seconds))
    last = np.zeros(len(rows))
    if len(rows) > ROWS:
        for length in np.ascontiguousarray(seconds.T):
            slot = ends.argmin(axis=1)
            last = ends[rows, slot]
            ends[rows, slot] = last + length
        return ends, last
    exchange = heapq.heapreplace
    for row in rows:
        heap = [(end, slot) for slot, end in enumerate(begin[row].tolist())]  # in order, and so a heap
        for length in seconds[row].tolist():
            end, slot = heap[0]
            exchange(heap, (end + length, slot))
        last[row] = end
        for end, slot in heap:
            ends[row, slot] = end
    return ends, last
