"""The places that a convolution reads for each place that it makes, and how it is computed in blocks.

A block of places that lie side by side is made at once, from the patch that all of them read: where a trial has few
channels, that takes fewer loads and gives a product large enough for tensor cores. The weights of a block say for every
place of the patch and every place of the block which tap, if any, lies between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

Pair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """A place that is made reads ``(place × stride + tap × dilation - padding) / up``, where that is a place."""

    size: Pair  # of the images read
    made: Pair  # of the images written
    taps: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    up: Pair = (1, 1)

    @classmethod
    def of(cls, size: Pair, taps: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Geometry:
        """The geometry of an ordinary convolution."""
        five = zip(size, taps, stride, padding, dilation, strict=True)
        height, width = ((n + 2 * p - d * (t - 1) - 1) // s + 1 for n, t, s, p, d in five)
        return cls(size, (height, width), taps, stride, padding, dilation)

    def turned(self) -> Geometry:
        """The geometry of the input's gradient: from the places made back to the places read."""
        (t0, t1), (p0, p1), (d0, d1) = self.taps, self.padding, self.dilation
        padding = (d0 * (t0 - 1) - p0, d1 * (t1 - 1) - p1)
        return Geometry(self.made, self.size, self.taps, self.up, padding, self.dilation, self.stride)

    def numbers(self, examples: int, channels: int, made: int) -> int:
        """The most numbers of a trial that are read, with channels by fours as in shared images, or made."""
        (h, w), (a, b) = self.size, self.made
        return examples * max(h * w * (channels + -channels % 4), a * b * made)

    def flat(self) -> list[int]:
        """The geometry as a list of numbers, for an operator of torch."""
        return [n for pair in (self.size, self.made, self.taps, self.stride, self.padding, self.dilation, self.up)
                for n in pair]  # fmt: skip

    @classmethod
    def from_flat(cls, numbers: list[int]) -> Geometry:
        """The inverse of ``flat``."""
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        return cls(*pairs)


@dataclass(frozen=True)
class Axis:
    """One direction of a convolution that makes ``block`` places at a time."""

    block: int
    count: int  # of blocks
    taps: int  # of a patch
    step: int  # from one block's patch to the next
    padding: int
    dilation: int
    tap: tuple[tuple[int, ...], ...]  # [place of the block][place of the patch]: the tap between them, or -1


@cache
def axis(geometry: Geometry, which: int, block: int) -> Axis:
    """A direction of a geometry, in blocks of at least ``block`` places."""
    made, taps, stride, padding, dilation, up = (
        pair[which]
        for pair in (geometry.made, geometry.taps, geometry.stride, geometry.padding, geometry.dilation, geometry.up)
    )
    block = -(-block // up) * up
    if block == 1:
        return Axis(1, made, taps, stride, padding, dilation, (tuple(range(taps)),))
    reads = {
        (place, tap): (place * stride + tap * dilation - padding) // up
        for place in range(block)
        for tap in range(taps)
        if (place * stride + tap * dilation - padding) % up == 0
    }
    first, last = min(reads.values(), default=0), max(reads.values(), default=0)
    table = [[-1] * (last - first + 1) for _ in range(block)]
    for (place, tap), at in reads.items():
        table[place][at - first] = tap
    return Axis(block, -(-made // block), last - first + 1, block * stride // up, -first, 1, tuple(map(tuple, table)))


def sides(geometry: Geometry, made: int, columns: int) -> tuple[int, int]:
    """The places of a block, down and across, whose outputs make about so many columns."""
    if max(geometry.taps) == 1:  # patches of neighbours do not overlap
        return geometry.up
    places = max(1, columns // (1 << (max(8, made) - 1).bit_length()))
    down = 1 << (places.bit_length() - 1) // 2
    if geometry.up != (1, 1):  # places between two places that are read have patches of their own
        down = geometry.up[0]
    return down, max(geometry.up[1], places // down)


def between(geometry: Geometry, rows: Axis, columns: Axis) -> torch.Tensor:
    """[places of the patch, places of the block]: the tap between them, or the number of taps where there is none."""
    height, width = geometry.taps
    found = [
        [
            down[i] * width + across[j] if down[i] >= 0 and across[j] >= 0 else height * width
            for down in rows.tap
            for across in columns.tap
        ]
        for i in range(rows.taps)
        for j in range(columns.taps)
    ]
    return torch.tensor(found)


def through(geometry: Geometry, rows: Axis, columns: Axis) -> torch.Tensor:
    """[taps, places of the block]: the place of the patch that a tap reads for a place of the block."""
    table = between(geometry, rows, columns)
    where = torch.zeros(geometry.taps[0] * geometry.taps[1] + 1, table.shape[1], dtype=torch.long)
    for place, row in enumerate(table.tolist()):
        for own, tap in enumerate(row):
            where[tap, own] = place
    return where[:-1]
