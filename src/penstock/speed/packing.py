"""Whether bundles that share a device in a pack gain by it: measured, and not assumed (Pack §4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

JOINS = 1.05
"""A bundle joins a pack where the pack's throughput grows by this factor; several at once, by as much for each."""
STAYS = 1.03
"""Where the throughput of a pack is no more than this times that of its bundles in turn, they take turns."""


def throughput(alone: Sequence[float], packed: Sequence[float]) -> float:
    """σ, how many times as fast a pack trains as its bundles in turn: Σ tᵢ(alone) / tᵢ(packed), of seconds a step.

    >>> throughput([1.0, 3.0], [2.0, 6.0]), throughput([1.0, 3.0], [1.0, 4.0])
    (1.0, 1.75)
    """
    return sum(a / p for a, p in zip(alone, packed, strict=True))


def improvement(sigma: float) -> float:
    """IMPV, the part of the time in turn that a pack saves: eq. 3 of Pack.

    >>> improvement(2.0), improvement(0.8)
    (0.5, -0.25)
    """
    return 1 - 1 / sigma


def switching(in_turn: float, alone: Sequence[float]) -> float:
    """SwOH, the seconds that changing from model to model costs: eq. 4 of Pack.

    >>> switching(133.0, [61.0, 61.0])
    11.0
    """
    return in_turn - sum(alone)


def next_count(count: int, most: int) -> int:
    """The number of bundles to time together next: one more, and where there are many, half as many again.

    >>> counts = [2]
    >>> while counts[-1] < 32:
    ...     counts.append(next_count(counts[-1], 32))
    >>> counts
    [2, 3, 4, 6, 9, 13, 19, 28, 32]
    """
    return min(most, max(count + 1, count * 3 // 2))


def gains(before: tuple[int, float], count: int, sigma: float) -> bool:
    """Whether so many bundles train enough faster than the number before, whose throughput is known.

    >>> gains((4, 3.0), 5, 3.2), gains((4, 3.0), 6, 3.2)
    (True, False)
    """
    fewer, known = before
    return sigma >= JOINS ** (count - fewer) * known


def how_many(sigmas: Mapping[int, float]) -> int:
    """How many bundles a pack has, of its throughputs by their number; 1 where they are to take turns.

    >>> how_many({2: 1.6, 3: 1.9, 4: 1.92}), how_many({2: 1.02}), how_many({})
    (3, 1, 1)
    """
    best = 1, 1.0
    for count, sigma in sorted(sigmas.items()):
        if not gains(best, count, sigma):
            break
        best = count, sigma
    return best[0] if best[1] > STAYS else 1


def reason(sigmas: Mapping[int, float]) -> str:
    """Why a pack has as many bundles as it has, in a sentence for the user.

    >>> reason({2: 1.6, 3: 1.62})
    '2 bundles together train 1.60 times as fast as in turn, 3 1.62 times'
    """
    first, *others = sorted(sigmas.items())
    said = [f"{first[0]} bundles together train {first[1]:.2f} times as fast as in turn"]
    return ", ".join([*said, *(f"{count} {sigma:.2f} times" for count, sigma in others)])
