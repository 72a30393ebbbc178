"""How many trials to train together: the bundle size that follows from measured times and memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

UNKNOWN_SIZE = 64
"""The most trials of a bundle whose signature has not been measured yet."""
FIXED_SIZE = 16
"""The most trials of a bundle where nothing is decided by measured times."""
LARGEST = 512
"""The most trials of any bundle: larger bundles were never seen to gain."""

TRYING = 64
"""Steps of a trial alone that trying to fuse in vain was seen to cost.

It is the check of a way, the rows that trials are copied into and out of, and the timing of sizes.
"""
TRYING_CAPTURED = 16
"""The same on an accelerator, where every trial's step is captured: alone, each has the check and a capture as well.

So an attempt there costs no more than one capture of all trials and one of a trial alone, which is timed beside it.
"""
CHECKING = 20
"""How many of these the check costs, which every process makes again."""
REPAID = 0.04
"""The part of the training that an attempt to fuse may cost where it turns out in vain (invariant 8)."""


def steps_to_try(cost: float | None, *, captured: bool = False) -> float:
    """How many training steps repay an attempt to fuse, whatever comes of it; ``cost`` is its check's, in steps.

    An attempt in vain is made at most once for a signature. So it is made as soon as it is a small part of the steps
    that were asked for, whether they are trained already or not. Without a known cost the bound is a plain number,
    which is smaller where steps are ``captured``.

    >>> steps_to_try(None), steps_to_try(70), steps_to_try(None, captured=True)
    (1600.0, 2850.0, 400.0)
    """
    if cost is None:
        return (TRYING_CAPTURED if captured else TRYING) / REPAID
    return (cost + TRYING - CHECKING) / REPAID


def steps_to_check(cost: float | None, sharing: Mapping[int, float], trials: int) -> float:
    """How many training steps repay the check of a way where ``sharing`` is known to pay, for so many trials.

    ``sharing`` has the seconds of a step of a bundle by size, relative to a trial alone. The gain is counted half: not
    all trials may come together.

    >>> steps_to_check(10, {1: 1.0, 2: 1.2, 4: 1.6}, trials=3), steps_to_check(10, {1: 1.0, 2: 2.1}, trials=3)
    (50.0, inf)
    """
    gain = max((1 - t / size for size, t in sharing.items() if size <= trials), default=0.0)
    return math.inf if gain <= 0 else (CHECKING if cost is None else cost) / (gain / 2)


def marginal_benefit(seconds: Mapping[int, float], a: int, b: int) -> float:
    """The part of a trial's step time that each doubling of the bundle size from ``a`` to ``b`` saves.

    Fluid §4.2.2 has O = 1 - (p-1)/p · avg(T^p) / avg(T^(p-1)) for the p-th trial on a device. The trials of a bundle
    step together, so both averages are the bundle's t(F), and O is the saving in time per trial, t(F) / F:

        O(a, b) = 1 - r^(1 / log2(b/a)),  r = (t(b) / b) / (t(a) / a)

    which is Fluid's 1 - r for a doubling. The benefit is per doubling and not per trial, because the p-th trial saves
    at best 1/p: a threshold per trial would stop at the same size however well a model fuses. Trials that fuse for free
    have a benefit of 1/2 at every size.

    >>> marginal_benefit({1: 1.0, 2: 1.0, 8: 4.0}, 1, 2), marginal_benefit({1: 1.0, 2: 1.0, 8: 4.0}, 2, 8)
    (0.5, 0.0)
    """
    doublings = math.log2(b / a)
    # The growth of a step's time is computed from logarithms, because they do not overflow.
    growth = (math.log2(seconds[b]) - math.log2(seconds[a])) / doublings
    return 1 - math.exp2(min(growth - 1, 1000))


def best_size(seconds: Mapping[int, float], ceiling: int, threshold: float = 0.1) -> int:
    """The bundle size to train with: the size where the marginal benefit falls below ``threshold``, or 1 (solo).

    ``seconds`` has the time of one step of the whole bundle by its size. Size 1 is a trial that runs solo; without its
    time nothing shows that fusing pays. Each size in turn is compared with the last size that was taken. So one bad
    measurement does not stop growth: the next size is compared with the size before the bad one, over two doublings.
    As the benefits are per doubling, a size that is taken beats every smaller size, solo included, by the threshold for
    each doubling between them. Where the largest measured size is taken, no measurement speaks against a larger one
    and the ceiling decides. The ceiling also decides where it lies just below a measured size that would be taken.

    The default asks 11% more throughput of a doubling. A smaller gain may be the noise of timing a few steps, and it
    does not repay a cost that a step's time does not show: each doubling at the threshold makes every trial's own step
    1.8 times as long, so an algorithm gets its report later. A larger threshold would give real gains away: 7.4× at 128
    on a CPU and 5.2× at 128 on a GPU (``vmap``, rn18/8) are 25% and 21% a doubling on the average, and 2.3× at 64 is
    13%. Models that fuse at 1.0× or 0.6× are refused.

    >>> best_size({1: 1.0, 2: 1.1, 4: 1.4, 8: 2.7}, ceiling=64), best_size({1: 1.0, 2: 1.9, 4: 4.1}, ceiling=64)
    (4, 1)
    """
    usable = {size: t for size, t in sorted(seconds.items()) if size >= 1 and 0 < t < math.inf}
    best, fitting = 1, [size for size in usable if size <= ceiling]
    if 1 not in fitting:
        return best
    for size in fitting[1:]:
        if marginal_benefit(usable, best, size) >= threshold:
            best = size
    if best == 1:
        return best
    larger = next((size for size in usable if size > best), None)
    return ceiling if larger is None or marginal_benefit(usable, best, larger) >= threshold else best


CHEAPER = 0.5
"""How cheap a further trial may still become beyond the sizes that were timed, in parts of what the last ones cost."""


def foreseen(seconds: Mapping[int, float], largest: int) -> dict[int, float]:
    """The seconds of a bundle's step by its size, with those of larger sizes as they may be at the best.

    A step has a fixed cost, and every trial adds to it. So the least that larger sizes take lies on a line through the
    two largest that were timed. Trials alone are no part of that line, as their steps have other fixed costs.

    >>> foreseen({1: 1.0, 2: 4.0, 4: 4.0}, 16), foreseen({1: 1.0, 2: 3.0, 4: 5.0}, 8)
    ({1: 1.0, 2: 4.0, 4: 4.0, 8: 4.0, 16: 4.0}, {1: 1.0, 2: 3.0, 4: 5.0, 8: 7.0})
    """
    found, timed = dict(seconds), sorted(size for size in seconds if size > 1)
    if len(timed) < 2:
        return found
    a, b = timed[-2:]
    each = CHEAPER * max(0.0, seconds[b] - seconds[a]) / (b - a)
    size = 2 * b
    while size <= largest:
        found[size] = seconds[b] + (size - b) * each
        size *= 2
    return found


def first_guess(table: Mapping[int, float], size: int, batch_sizes: tuple[int, int]) -> int:
    """The size to time first, where a ``size`` was chosen from a ``table`` for trials of another batch size.

    ``batch_sizes`` are theirs and the present one: larger batches fill a device, and its memory, with fewer trials.

    >>> first_guess({1: 1.0, 16: 2.0, 32: 5.0}, 16, (64, 128)), first_guess({1: 1.0, 20: 2.0}, 512, (64, 32))
    (8, 16)
    """
    theirs, own = batch_sizes
    trials = min(size, max(table)) * theirs // max(theirs, own)
    return 1 << max(0, trials.bit_length() - 1)


def most(bytes: tuple[int, int], free: int, margin: float = 0.1) -> int:
    """The most trials whose bundle fits into ``free`` bytes less a ``margin``; 0 where not even one trial fits.

    >>> most((200, 100), free=1000)
    7
    """
    first, second = bytes
    left = int(free * (1 - margin)) - first
    if second <= 0:
        return sys.maxsize if left >= 0 else 0
    return max(0, left // second)
