"""A task's data: read once for all trials that ask for the same, in an order that only the study's seed decides.

Data order comes from (study seed, epoch); the batch size only cuts it, and the last, shorter batch is kept. Random
choices in reading a sample (augmentation) are keyed by (study seed, epoch, place in the order): they belong to the
stream and not to a trial (invariant 3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from penstock.errors import TaskError
from penstock.numeric import shown
from penstock.seeds import key
from penstock.task import Task, left_by_exit, task_name
from penstock.training.comparing import compared
from penstock.training.random.generators import own_randomness, seed_everything
from penstock.training.reads import ABSENT, ReadConfig
from penstock.trial import Config

GATHERED = 2**24  # bytes of shuffled rows that are made at a time
Cut = Callable[[int], slice]  # from the length of a batch, the rows of it that are wanted
KEPT = 2**26  # bytes of shuffled epochs that are kept for the next trial


class Source(ABC):
    """One data set on one device: batches from any place of any epoch."""

    def __init__(self, seed: int, length: int) -> None:
        self.seed = seed
        self.length = length

    def order(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(key(self.seed, "order", epoch))
        return torch.randperm(self.length, generator=generator)

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
        rows = rows.to(self.tensors[0].device)
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

    def __init__(self, dataset: Any, seed: int, device: torch.device, loader: Mapping[str, Any]) -> None:
        super().__init__(seed, len(dataset))
        self.device = device
        self._dataset, self._arguments = _Keyed(dataset, seed), loader
        self._idle: list[tuple[DataLoader[Any], _Plan]] = []  # loaders that no stream is reading from

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
        order = self.order(epoch).tolist()
        batches = _cut([(epoch, place, order[place]) for place in range(start, self.length)], size)
        for batch, _ in self._read(batches if cut is None else [rows[cut(len(rows))] for rows in batches]):
            yield batch

    def all(self, size: int, first: int = 0, every: int = 1) -> Iterator[tuple[Any, int]]:
        return self._read(_cut([("all", place, place) for place in range(self.length)], size)[first::every])

    def _read(self, batches: list[_Rows]) -> Iterator[tuple[Any, int]]:
        loader, plan = self._loader()
        plan.want(batches)
        with own_randomness():
            reading = iter(loader)
        try:
            for rows in batches:
                with own_randomness():
                    batch = _next(reading)
                yield _to(batch, self.device), len(rows)
        finally:
            self._idle.append((loader, plan))


def _next(reading: Iterator[Any]) -> Any:
    try:
        return next(reading)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise TaskError(left_by_exit("The dataset", error)) from None


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


@dataclass(frozen=True)
class Data:
    """The data that a trial trains on and is measured on, and the config's values that it was made from."""

    train: Source
    valid: Source
    read: Config


class DataCache:
    """Loads a task's data once for all trials whose ``data`` reads the same config values."""

    def __init__(self, task: Task, seed: int, device: torch.device) -> None:
        self.task, self.seed, self.device = task, seed, device
        self.loaded: list[tuple[Config, Data]] = []  # the values that were read, and the data they gave

    def get(self, config: Config) -> Data:
        for read, data in self.loaded:
            if all(_same(config.get(name, ABSENT), value) for name, value in read.items()):
                return data
        recorded = ReadConfig(config)
        with own_randomness():
            seed_everything(key(self.seed, "data"))
            pair = self.task.data(recorded)
        data = self._sources(pair, recorded.read)
        self.loaded.append((recorded.read, data))
        return data

    def _sources(self, pair: Any, read: Config) -> Data:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TaskError(
                f"{task_name(self.task)}.data must return (training, validation) data, got {_kind(pair)}: "
                "return a pair of datasets or of tuples of tensors."
            )
        return Data(self._source(pair[0], "training"), self._source(pair[1], "validation"), read)

    def _source(self, data: Any, role: str) -> Source:
        if isinstance(data, TensorDataset) and _plain(data):
            data = data.tensors
        if isinstance(data, torch.Tensor):
            data = (data,)
        if _tensors(data) and "collate_fn" in self.task.loader:
            data = TensorDataset(*self._of_one_length(data, role))  # whose samples go through that function
        name = task_name(self.task)
        names: tuple[str, ...] = ()
        if isinstance(data, Mapping) and data and all(_is_column(*item) for item in data.items()):
            names, data = tuple(data), self._of_one_length(tuple(data.values()), role)
            if "collate_fn" in self.task.loader:
                data = [dict(zip(names, row, strict=True)) for row in zip(*data, strict=True)]
        columns = isinstance(data, Mapping) and 0 not in data  # a mapping from 0 on is a dataset
        columns |= isinstance(data, tuple) and any(hasattr(t, "shape") for t in data)
        if _tensors(data):
            source: Source = TensorSource(self._of_one_length(data, role), self.seed, self.device, names)
        elif (
            hasattr(data, "__len__")
            and hasattr(data, "__getitem__")
            and not (columns or isinstance(data, IterableDataset))
        ):
            source = DatasetSource(data, self.seed, self.device, self.task.loader)
        else:
            raise TaskError(
                f"The {role} data of {name}.data must be a tuple or a dict of tensors, or a map-style dataset "
                f"(with __len__ and __getitem__), got {_kind(data)}: make tensors of arrays, and "
                "leave batches to Penstock."
            )
        if source.length == 0:
            raise TaskError(f"The {role} data of {name}.data has length 0: expected at least one sample.")
        return source

    def _of_one_length(self, tensors: Any, role: str) -> tuple[torch.Tensor, ...]:
        lengths = [len(t) if t.ndim else 0 for t in tensors]
        if len(set(lengths)) > 1:
            raise TaskError(
                f"The {role} tensors of {task_name(self.task)}.data must have one length, got {lengths}: a row of each "
                "is a sample."
            )
        return tuple(tensors)


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # arrays and tensors, which are compared element by element
        return compared(one) == compared(other)


def _is_column(key: object, value: object) -> bool:
    return isinstance(key, str) and isinstance(value, torch.Tensor)


def handed_out(batch: Any) -> Any:
    """A batch for one call of a loss, which may take entries out of a dict: ``labels = batch.pop("labels")``.

    >>> batch = {"x": 1, "labels": 2}; handed_out(batch).pop("labels"), batch
    (2, {'x': 1, 'labels': 2})
    """
    return dict(batch) if type(batch) is dict else batch


def _tensors(data: Any) -> bool:
    return isinstance(data, tuple | list) and bool(data) and all(isinstance(t, torch.Tensor) for t in data)


def _plain(data: TensorDataset) -> bool:
    """Whether a dataset's samples are the rows of its tensors: a class of the user's own may give others."""
    reading = ("__getitem__", "__len__")
    return all(getattr(type(data), name, None) is getattr(TensorDataset, name, None) for name in reading) and not (
        vars(data).keys() & set(reading)
    )


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


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in value))
        return f"a {type(value).__name__} of {len(value)} ({kinds})"
    return f"a {type(value).__name__}"
