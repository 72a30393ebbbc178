"""Stable random keys: every random number in Penstock is a function of its purpose alone (invariant 3)."""

from __future__ import annotations

from hashlib import blake2b

DRAWS = 2  # how a forward's draws come from its keys: 1 keyed dropout alone, 2 keys every random function of torch


def key(*parts: object) -> int:
    """A 63-bit number that depends on the parts alone: not on the process, the machine or the order of calls.

    >>> key(0, "weights", 3) == key(0, "weights", 3) != key(0, "weights", 4)
    True
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


def step_key(seed: int, step: int) -> int:
    """The key of one training step, from a trial's own key: cheap enough for every step of the smallest model.

    >>> step_key(1, 2) != step_key(1, 3)
    True
    """
    mixed = (seed + step * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF  # splitmix64: neighbouring steps share no bits
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) >> 1
