"""The sources of batches: tensors, or a dataset that is read through DataLoaders.

Data order comes from (study seed, epoch); the batch size only cuts it, and the last, shorter batch is kept. Random
choices in reading a sample (augmentation) are keyed by (study seed, epoch, place in the order): they belong to the
stream and not to a trial (invariant 3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from penstock.errors import TaskError
from penstock.numeric import shown
from penstock.seeds import key
from penstock.task import left_by_exit
from penstock.training.random.generators import own_randomness, seed_everything
from penstock.training.reading import Common, Differs, Read

GATHERED = 2**24  # bytes of shuffled rows that are made at a time
Cut = Callable[[int], slice]  # from the length of a batch, the rows of it that are wanted
KEPT = 2**26  # bytes of shuffled epochs that are kept for the next trial
ORDERS = 2**24  # bytes of epochs' orders that are kept


class Source(ABC):
    """One data set on one device: batches from any place of any epoch."""

    device = torch.device("cpu")  # of the batches

    def __init__(self, seed: int, length: int) -> None:
        self.seed = seed
        self.length = length
        self._orders: dict[int, torch.Tensor] = {}

    def order(self, epoch: int) -> torch.Tensor:
        """The samples of an epoch in their order, ready to be read by the device.

        The last few orders are kept: all bundles of a task, and each of their streams, ask for the same.
        """
        if (kept := self._orders.get(epoch)) is None:
            generator = torch.Generator().manual_seed(key(self.seed, "order", epoch))
            kept = self._orders[epoch] = staged(torch.randperm(self.length, generator=generator), self.device)
            while sum(order.nbytes for order in self._orders.values()) > ORDERS and len(self._orders) > 1:
                self._orders.pop(next(iter(self._orders)))
        return kept

    @abstractmethod
    def batches(self, epoch: int, start: int, size: int, cut: Cut | None = None) -> Iterator[Any]:
        """The training batches of an epoch from the sample at ``start`` on; ``cut`` says which rows of each."""

    @abstractmethod
    def all(self, size: int, first: int = 0, every: int = 1) -> Iterator[tuple[Any, int]]:
        """Every sample once in its own order, for validation: batches with their lengths.

        With other workers, one has the ``first`` batch and ``every`` so many batches another.
        """


class TensorSource(Source):
    """Tensors of equal length, whole on the device where they fit. With ``names``, a batch is a dict of them.

    Every trial sees the same epochs, so a small epoch's batches are made once and kept for the next trial. A task that
    changes a batch in place slows down itself alone: torch counts a tensor's changes, and a changed tensor is made
    again.
    """

    def __init__(
        self, tensors: tuple[torch.Tensor, ...], seed: int, device: torch.device, names: tuple[str, ...] = ()
    ) -> None:
        super().__init__(seed, len(tensors[0]))
        self.device = device
        self.names = names  # of the tensors, where a batch is a dict
        self.bytes = sum(t.nbytes for t in tensors)
        self.tensors = tuple(t.to(device) for t in tensors) if _fits(self.bytes, device) else tensors
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # bundles on other streams read them too
        self._kept: dict[tuple[int, int, int], tuple[list[torch.Tensor], list[int], list[Any]]] = {}

    def batches(self, epoch: int, start: int, size: int, cut: Cut | None = None) -> Iterator[Any]:
        batches = self._batches(epoch, start, size)
        if cut is not None:
            batches = (tuple(t[cut(len(batch[0]))] for t in batch) for batch in batches)
        return map(self.named, batches) if self.names else batches

    def named(self, batch: tuple[torch.Tensor, ...]) -> Any:
        """A batch as the task sees it. A dict is made anew each time, since a loss may take entries out of it."""
        return dict(zip(self.names, batch, strict=True)) if self.names else batch

    def _batches(self, epoch: int, start: int, size: int) -> Iterator[tuple[torch.Tensor, ...]]:
        if self.bytes > GATHERED or start % size:
            chunk = max(1, GATHERED * self.length // max(1, self.bytes) // size) * size
            for rows in torch.split(self.order(epoch)[start:], chunk):
                yield from self._cut(self._gather(rows), size)
            return
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        kept = self._kept.get((epoch, size, stream))  # the batches that one stream makes are not ready for another
        if kept is None or [t._version for t in kept[0]] != kept[1]:
            gathered = self._gather(self.order(epoch))
            kept = gathered, [t._version for t in gathered], self._cut(gathered, size)
            self._kept[epoch, size, stream] = kept
            while len(self._kept) * self.bytes > KEPT:
                self._kept.pop(next(iter(self._kept)))
        yield from kept[2][start // size :]

    def _gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        there = self.tensors[0].device
        rows = staged(rows, there).to(there, non_blocking=True)
        return [t.index_select(0, rows).to(self.device) for t in self.tensors]

    def _cut(self, gathered: list[torch.Tensor], size: int) -> list[Any]:
        return list(zip(*(torch.split(t, size) for t in gathered), strict=True))

    def all(self, size: int, first: int = 0, every: int = 1) -> Iterator[tuple[Any, int]]:
        before = [t._version for t in self.tensors]
        for begin in range(first * size, self.length, every * size):
            batch = tuple(t[begin : begin + size].to(self.device) for t in self.tensors)
            yield self.named(batch), len(batch[0])
        if [t._version for t in self.tensors] != before:
            raise TaskError("Task.metrics changed a validation batch in place, which all trials share: work on a copy.")


class DatasetSource(Source):
    """A map-style dataset, read through DataLoaders that live as long as the data: one for each stream at a time."""

    def __init__(
        self,
        dataset: Any,
        seed: int,
        device: torch.device,
        loader: Mapping[str, Any],
        features: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(seed, len(dataset))
        self.device, self._features = device, features
        self.readers: Callable[[], Sequence[Reader]] = tuple
        self._dataset, self._arguments = _Keyed(dataset, seed), loader
        self._idle: list[tuple[DataLoader[Any], _Plan]] = []  # loaders that no stream is reading from
        self._commons: dict[int, Common] | None = {}  # what trials share, by batch size; None where they cannot

    def _loader(self) -> tuple[DataLoader[Any], _Plan]:
        if self._idle:
            return self._idle.pop()
        plan, given = _Plan(), self._arguments
        keep = {"persistent_workers": given.get("num_workers", 0) > 0}
        try:
            return DataLoader(self._dataset, batch_sampler=plan, **{**keep, **given}), plan
        except (TypeError, ValueError) as error:
            raise TaskError(
                f"A task's loader must have arguments of torch's DataLoader, got {shown(given)}: {error}"
            ) from None

    def batches(self, epoch: int, start: int, size: int, cut: Cut | None = None) -> Iterator[Any]:
        if cut is None:
            return self._beside(epoch, start, size, self._training)
        whole = self._order(epoch, start, self.length, size)
        return (batch for batch, _ in self._read([rows[cut(len(rows))] for rows in whole]))

    def all(self, size: int, first: int = 0, every: int = 1) -> Iterator[tuple[Any, int]]:
        if every == 1:
            batches = self._beside(0, 0, size, self._validation)
            return ((batch, min(size, self.length - i * size)) for i, batch in enumerate(batches))
        return self._read(_cut([("all", place, place) for place in range(self.length)], size)[first::every])

    def share(self, readers: Callable[[], Sequence[Reader]]) -> None:
        """Read once for the trials that ``readers`` gives, as long as they are several."""
        self.readers = readers

    def forget(self) -> None:
        """Keep nothing for other trials."""
        for common in (self._commons or {}).values():
            common.clear()

    def _beside(self, epoch: int, start: int, size: int, read: Read) -> Iterator[Any]:
        """Batches for a trial, which others may read too, from now on or until now."""
        alone: Iterator[Any] | None = None
        for place in range(start, self.length, size):
            readers = self.readers()
            if self._commons is not None and (
                len(readers) > 1 or (readers and any(common.any for common in self._commons.values()))
            ):
                alone = None
                yield self._together(epoch, place, size, read, readers)
                continue
            if alone is None:
                self.forget()
                alone = read(epoch, place, self.length, size)
            yield next(alone)

    def _together(self, epoch: int, place: int, size: int, read: Read, readers: Sequence[Reader]) -> Any:
        assert self._commons is not None
        by_rows = "collate_fn" not in self._arguments
        kind = 0 if by_rows else size  # a function of the user's gives batches that are used as they are
        if (common := self._commons.get(kind)) is None:
            common = self._commons[kind] = Common(self.length, read, self.device, by_rows=by_rows)
        try:
            return common.take(epoch, place, size, [one[:2] for one in readers if kind in (0, one[2])])
        except Differs as found:
            self.forget()
            self._commons = None
            return found.own

    def _order(self, epoch: int, start: int, stop: int, size: int) -> list[_Rows]:
        order = self.order(epoch).tolist()
        return _cut([(epoch, place, order[place]) for place in range(start, stop)], size)

    def _training(self, epoch: int, start: int, stop: int, size: int) -> Iterator[Any]:
        return (batch for batch, _ in self._read(self._order(epoch, start, stop, size)))

    def _validation(self, epoch: int, start: int, stop: int, size: int) -> Iterator[Any]:
        return (batch for batch, _ in self._read(_cut([("all", i, i) for i in range(start, stop)], size)))

    def _read(self, batches: list[_Rows]) -> Iterator[tuple[Any, int]]:
        loader, plan = self._loader()
        plan.want(batches)
        with own_randomness():
            reading = iter(loader)
        try:
            for rows in batches:
                with own_randomness():
                    batch = _next(reading)
                batch = _to(batch, self.device)
                yield batch if self._features is None else self._features(batch), len(rows)
        finally:
            self._idle.append((loader, plan))


def _next(reading: Iterator[Any]) -> Any:
    try:
        return next(reading)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise TaskError(left_by_exit("The dataset", error)) from None


Reader = tuple[int, int, int]  # of a trial: its epoch, the place in its order, and its batch size
_Rows = list[tuple[object, int, int]]  # by sample of a batch: the epoch, the place in it, and the index


def _cut(samples: _Rows, size: int) -> list[_Rows]:
    return [samples[i : i + size] for i in range(0, len(samples), size)]


class _Plan:
    """The batches that a source wants next, as the DataLoader's batch sampler; one loader serves every epoch."""

    def __init__(self) -> None:
        self._batches: list[_Rows] = []

    def want(self, batches: list[_Rows]) -> None:
        """Let the loader read other batches next."""
        self._batches = batches

    def __iter__(self) -> Iterator[_Rows]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class _Keyed(Dataset[Any]):
    """The user's dataset, with the random generators set for each sample by its place in the stream."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, sample: tuple[object, int, int]) -> Any:
        epoch, place, index = sample
        seed_everything(key(self.seed, "sample", epoch, place))
        return self.dataset[index]


class Streams:
    """The batches of trials that train together: trials at one position share a batch, and each batch is read once."""

    def __init__(self, source: Source, size: int) -> None:
        self.source, self.size = source, size
        self._open: dict[tuple[int, int], Iterator[Any]] = {}

    def take(self, positions: set[tuple[int, int]], waiting: set[tuple[int, int]]) -> dict[tuple[int, int], Any]:
        """The batch at each position; ``waiting`` are the positions that will be asked for later."""
        batches, following = {}, {at: stream for at, stream in self._open.items() if at in waiting}
        for at in positions:
            epoch, place = at
            stream = self._open.get(at)
            if stream is None:
                stream = self.source.batches(epoch, place, self.size)
            batches[at] = next(stream)
            if place + self.size < self.source.length:
                following[epoch, place + self.size] = stream
        self._open = following
        return batches


def staged(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """In memory that a device reads while the host goes on; torch keeps it until it was read."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _fits(size: int, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return size < free // 2  # the other half is for models


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {k: _to(v, device) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to(v, device) for v in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_to(v, device) for v in batch)
    return batch
