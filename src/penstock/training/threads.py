"""How many threads a worker computes with on a CPU: one or all, whichever measured steps are faster with.

Torch's threads wait for each other at each operator. On a small model that costs more than it gives, and far more on a
machine that is busy or whose cores are rationed. The number decides how sums are rounded, so it is chosen once for a
study, before any step that counts, on steps of a trial that is thrown away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch

from penstock.bundle import Measured
from penstock.training.cores import cores
from penstock.training.keeping import untouched

if TYPE_CHECKING:
    from penstock.training.loop import Training

GIVEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables of the environment by which users say how many threads there are to be."""
TURN = 0.01
"""Seconds of steps with one number, before the other has its turn: a busy machine shows itself in that time."""
ROUNDS = 5
"""How many turns each number has."""
LONG = 0.5
"""Seconds after which no further round begins."""
GAIN = 1.2
"""How many times as fast all threads have to be: one leaves the other cores to others, and never waits for them."""


def given() -> bool:
    """Whether the user has said how many threads there are to be."""
    return any(os.environ.get(name) for name in GIVEN)


def most() -> int:
    """The most threads that this process should compute with."""
    return torch.get_num_threads() if given() else min(torch.get_num_threads(), cores())


def timed(step: Callable[[], object], most: int, clock: Callable[[], float] = time.perf_counter) -> dict[int, float]:
    """The mean seconds of a step with one thread and with ``most``, which take turns.

    On a busy machine most steps are as quick as ever, and a few wait for a thread that has no core. So a median of few
    steps would say nothing.
    """
    seconds, steps = {1: 0.0, most: 0.0}, {1: 0, most: 0}
    before, began = torch.get_num_threads(), clock()
    try:
        for _ in range(ROUNDS):
            for count in seconds:
                torch.set_num_threads(count)
                start = now = clock()
                while now - start < TURN:
                    step()
                    steps[count] += 1
                    now = clock()
                seconds[count] += now - start
            if clock() - began > LONG:
                break
    finally:
        torch.set_num_threads(before)
    return {count: seconds[count] / steps[count] for count in seconds}


def chosen(seconds: Mapping[int, float]) -> Measured:
    """The faster number of threads, as an event of the log.

    >>> chosen({1: 0.004, 8: 0.001}).size, chosen({1: 0.001, 8: 0.001}).size
    (8, 1)
    """
    most = max(seconds)
    count = most if GAIN * seconds[most] < seconds[1] else 1
    reason = f"a step takes {1e3 * seconds[1]:.3g} ms with one thread and {1e3 * seconds[most]:.3g} ms with {most}"
    return Measured("threads", "cpu", "threads", dict(seconds), count, reason, "solo")


def looked(training: Training, most: int, *, fixed: bool) -> Measured | None:
    """How many of ``most`` threads to compute with, found on a trial that is thrown away; None if there is no choice.

    Where nothing is to be decided by measured times, the number is ``fixed``.
    """
    if most < 2 or given():
        return None
    if fixed:
        return Measured("threads", "cpu", "threads", {}, most, "fixed by deterministic=True", "solo")
    training.model.train()
    with (
        suppress(Exception),
        untouched(training.task),
    ):  # a lack of memory, which the dry batch evades with a smaller one
        batch = next(iter(training.data.train.batches(0, 0, training.batch_size)))
        return chosen(timed(partial(training.train_step, batch), most))
    return None


def use(count: int, most: int) -> None:
    """Compute with so many threads from now on in the thread that calls, or with as many as there are here."""
    if not given() and torch.get_num_threads() != min(count, most):
        torch.set_num_threads(min(count, most))
