"""A dataset that several trials read is read once for all of them (Pack §3.4): preprocessed once, and copied once.

All trials see an epoch's samples in one order, and each cuts it by its own batch size. So what one trial has read is
kept for the others, on the device, until the slowest has used it, within a bound. A trial that comes first to a place
reads on from there, as it would alone. Every batch is a copy, so a task may change what it is given.

That is right only where a sample depends on its place in the stream and on nothing else. Now and then a trial reads its
own batch all the same. If it is another, the dataset keeps a state of its own, and nothing is shared from then on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

KEPT = 2**28  # bytes of a dataset's batches that are kept for slower trials
ROOM = 2**25  # bytes that are made free at once where that is too little
EARLY, EVERY = (1, 2, 3), 200  # the batches that are read again: of the ones that were kept, counted from 1

Read = Callable[[int, int, int, int], Iterator[Any]]  # of an epoch, from one place to another, in batches of a size
Position = tuple[int, int]  # the epoch, and the place in its order


class Differs(Exception):
    """What a trial would be given is not the batch that it reads by itself, which is ``own``."""

    def __init__(self, own: Any) -> None:
        self.own = own


class _Unlike(Exception):
    """Batches that cannot be cut or joined by rows."""


@dataclass(frozen=True)
class _Block:
    """A batch as it was read, with its place in the stream."""

    epoch: int
    start: int
    stop: int
    batch: Any
    ready: torch.cuda.Event | None  # when it is on the device: other streams wait for that

    @property
    def end(self) -> Position:
        """Where the next block begins."""
        return self.epoch, self.stop

    @property
    def bytes(self) -> int:
        """The memory that it takes."""
        return sum(leaf.nbytes for leaf in tree_leaves(self.batch) if isinstance(leaf, torch.Tensor))


@dataclass
class _Front:
    """A reading of an epoch that goes on from a place."""

    epoch: int
    place: int
    size: int
    batches: Iterator[Any]


class Common:
    """What several trials read of one dataset; ``by_rows`` says whether batches may be cut and joined."""

    def __init__(self, length: int, read: Read, device: torch.device, *, by_rows: bool) -> None:
        self.length, self.by_rows = length, by_rows
        self._read, self._device = read, device
        self._kept: dict[int, list[_Block]] = defaultdict(list)  # by epoch, in order
        self._bytes = 0
        self._fronts: list[_Front] = []
        self._reused = 0  # batches that were made of what was kept

    def take(self, epoch: int, start: int, size: int, readers: Sequence[Position]) -> Any:
        """The batch of a trial at a place; ``readers`` are the places of all trials, this one included."""
        stop, waiting = min(start + size, self.length), list(readers)
        with suppress(ValueError):  # a trial that is only looked at is none of them
            waiting[waiting.index((epoch, start))] = (epoch, stop)
        try:
            batch, reused = self._made(epoch, start, stop, size, waiting)
        except _Unlike:
            raise Differs(self._alone(epoch, start, stop)) from None
        except Exception:  # of a sample, which need not be one of its own
            self._fronts = [front for front in self._fronts if front.epoch != epoch]
            return self._alone(epoch, start, stop)
        self._drop(waiting)
        if reused:
            self._reused += 1
            if self._reused in EARLY or self._reused % EVERY == 0:
                self._check(batch, self._alone(epoch, start, stop))
        return batch

    @property
    def any(self) -> bool:
        """Whether it keeps something for a trial."""
        return bool(self._kept)

    def clear(self) -> None:
        """Keep nothing any more."""
        self._kept.clear()
        self._fronts.clear()
        self._bytes = 0

    def _alone(self, epoch: int, start: int, stop: int) -> Any:
        return next(self._read(epoch, start, stop, stop - start))

    def _check(self, batch: Any, own: Any) -> None:
        try:
            alike = tree_leaves(tree_map(_equal, batch, own))
        except ValueError:
            alike = [False]
        if not all(alike):
            raise Differs(own)

    def _made(self, epoch: int, start: int, stop: int, size: int, waiting: Sequence[Position]) -> tuple[Any, bool]:
        """A batch, of blocks that are kept and blocks that are read now; and whether any was kept."""
        parts, place, reused = [], start, False
        while place < stop:
            block = self._find(epoch, place, stop)
            reused |= block is not None
            if block is None:
                block = self._next(epoch, place, size)
                if not self._keep(block, waiting) and (block.start, block.stop) == (start, stop):
                    return block.batch, False
                if not _sharable(block, by_rows=self.by_rows):
                    raise _Unlike
            parts.append(_rows(self._here(block), block.stop - block.start, place - block.start, stop - block.start))
            place = block.stop
        return (_joined(parts) if self.by_rows else tree_map(_copied, parts[0])), reused

    def _find(self, epoch: int, place: int, stop: int) -> _Block | None:
        """The block that is kept of a place."""
        blocks = self._kept.get(epoch, [])
        i = bisect_right(blocks, place, key=lambda block: block.start) - 1
        if i < 0 or blocks[i].stop <= place or not (self.by_rows or (blocks[i].start, blocks[i].stop) == (place, stop)):
            return None
        return blocks[i]

    def _next(self, epoch: int, place: int, size: int) -> _Block:
        """The next block of the reading that is at a place, or else of a new one."""
        at = (epoch, place)
        front = next((one for one in self._fronts if (one.epoch, one.place) == at), None)
        if front is None:
            front = _Front(epoch, place, size, self._read(epoch, place, self.length, size))
            self._fronts.append(front)
        batch, start = next(front.batches), front.place
        front.place = min(start + front.size, self.length)
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return _Block(epoch, start, front.place, batch, ready)

    def _here(self, block: _Block) -> Any:
        """A block's batch, for work on the stream that is current now."""
        if block.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(block.ready)
            for leaf in tree_leaves(block.batch):
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                    leaf.record_stream(stream)
        return block.batch

    # What is kept

    def _keep(self, block: _Block, waiting: Sequence[Position]) -> bool:
        """Keep a block that a trial has still to use, if it can be shared."""
        if all(at >= block.end for at in waiting) or not _sharable(block, by_rows=self.by_rows):
            return False
        blocks = self._kept[block.epoch]
        blocks.insert(bisect_right(blocks, block.start, key=lambda one: one.start), block)
        self._bytes += block.bytes
        if self._bytes > KEPT:
            self._make_room(waiting)
        return any(one is block for one in blocks)

    def _drop(self, waiting: Sequence[Position]) -> None:
        """Drop what all have used, and the readings that no trial will come to."""
        least = min(waiting)
        for epoch in [epoch for epoch in self._kept if epoch <= least[0]]:
            used = [block for block in self._kept[epoch] if block.end <= least]
            self._forget(used)
        self._fronts = [
            one
            for one in self._fronts
            if one.place < self.length and any(at[0] == one.epoch and at[1] <= one.place for at in waiting)
        ]

    def _make_room(self, waiting: Sequence[Position]) -> None:
        """Drop the blocks that are used again last."""

        def until(block: _Block) -> int:
            left = [(block.epoch - epoch) * self.length + block.stop - place for epoch, place in waiting]
            return min((one for one in left if one > 0), default=2**62)

        blocks = sorted((block for some in self._kept.values() for block in some), key=until)
        room = max(0, KEPT - ROOM)
        while blocks and self._bytes > room:
            self._forget([blocks.pop()])

    def _forget(self, blocks: Sequence[_Block]) -> None:
        for block in blocks:
            kept = self._kept[block.epoch] = [one for one in self._kept[block.epoch] if one is not block]
            self._bytes -= block.bytes
            if not kept:
                del self._kept[block.epoch]


def _words(value: Any) -> bool:
    """Whether a part of a batch is one text for each row, which torch's collate leaves as it is."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, str | bytes) for one in value)


def _sharable(block: _Block, *, by_rows: bool) -> bool:
    if not by_rows:
        return all(isinstance(one, torch.Tensor | str | bytes | int | float | None) for one in tree_leaves(block.batch))
    rows = block.stop - block.start
    return all(
        len(one) == rows if _words(one) else isinstance(one, torch.Tensor) and one.ndim > 0 and len(one) == rows
        for one in tree_leaves(block.batch, is_leaf=_words)
    )


def _rows(batch: Any, rows: int, first: int, last: int) -> Any:
    """Some rows of a batch that has so many."""
    if first == 0 and last >= rows:
        return batch
    return tree_map(lambda one: one[first:last], batch, is_leaf=_words)


def _joined(parts: Sequence[Any]) -> Any:
    """Batches one after another, as a copy."""

    def join(*some: Any) -> Any:
        if not isinstance(some[0], torch.Tensor):
            return type(some[0])(one for part in some for one in part)
        if any((part.dtype, part.shape[1:]) != (some[0].dtype, some[0].shape[1:]) for part in some):
            raise _Unlike
        return torch.cat(some)

    return tree_map(join, *parts, is_leaf=_words)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(one == other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
