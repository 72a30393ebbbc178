"""A task's data: made once for all trials that ask for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import IterableDataset, TensorDataset

from penstock.errors import TaskError
from penstock.numeric import shown, whole
from penstock.seeds import key
from penstock.task import Task, task_name
from penstock.training.comparing import compared
from penstock.training.features import Features
from penstock.training.keeping import Values, left_by
from penstock.training.random.generators import own_randomness, seed_everything
from penstock.training.reads import ABSENT, ReadConfig
from penstock.training.sources import DatasetSource, Source, TensorSource
from penstock.trial import Config


@dataclass(frozen=True)
class Data:
    """The data that a trial trains on and is measured on, and the config's values that it was made from."""

    train: Source
    valid: Source
    read: Config
    left: Values = field(default_factory=dict)  # what making it has left outside of it


class DataCache:
    """Loads a task's data once for all trials whose ``data`` reads the same config values.

    So it does with features, where ``Task.features`` gives modules of equal values. ``trials`` gives the ones that
    train beside each other: a dataset is read once for all of them.
    """

    def __init__(
        self, task: Task, seed: int, device: torch.device, trials: Callable[[], Iterable[Any]] | None = None
    ) -> None:
        self.task, self.seed, self.device, self._trials = task, seed, device, trials
        self.loaded: list[tuple[Config, Data]] = []  # the values that were read, and the data they gave
        self._pairs: list[tuple[Config, Any]] = []  # the same, before any features
        self._featured: list[tuple[Any, Features, Data]] = []

    def get(self, config: Config) -> Data:
        """The data of a trial."""
        for read, data in self.loaded:
            if _reads(config, read):
                return data
        recorded = ReadConfig(config)
        known = next((one for one in self._pairs if _reads(config, one[0])), None)
        with own_randomness(), left_by(self.task) as left:
            if known is None:
                seed_everything(key(self.seed, "data"))
                pair = self.task.data(recorded)
                known = dict(recorded.read), pair
            read, pair = known
            seed_everything(key(self.seed, "features"))
            features = Features.of(self.task, recorded, self.device)
        recorded.read.update(read)
        data = self._known(pair, features) or self._sources(pair, recorded.read, features, left)
        if features is not None:
            self._pairs.append((read, pair))
            self._featured.append((pair, features, data))
        self.loaded.append((recorded.read, data))
        return data

    def _known(self, pair: Any, features: Features | None) -> Data | None:
        """The data of a trial whose features are equal, by their values."""
        return next((data for other, one, data in self._featured if other is pair and one == features), None)

    def _sources(self, pair: Any, read: Config, features: Features | None, left: Values) -> Data:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TaskError(
                f"{task_name(self.task)}.data must return (training, validation) data, got {_kind(pair)}: "
                "return a pair of datasets or of tuples of tensors."
            )
        train, valid = (
            self._source(one, role, features) for one, role in zip(pair, ("training", "validation"), strict=True)
        )
        data = Data(train, valid, read, left)
        if (trials := self._trials) is not None:
            if isinstance(data.train, DatasetSource):
                data.train.share(lambda: [(t.epoch, t.place, t.batch_size) for t in trials() if t.data is data])
            if isinstance(data.valid, DatasetSource):
                size = self.task.eval_batch_size
                data.valid.share(lambda: [(0, 0, size) for t in trials() if t.data is data])
        return data

    def forget(self) -> None:
        """Let go what was kept for trials beside others."""
        for _, data in self.loaded:
            for source in (data.train, data.valid):
                if isinstance(source, DatasetSource):
                    source.forget()

    def _source(self, data: Any, role: str, features: Features | None) -> Source:
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
            tensors = self._of_one_length(data, role)
            if features is not None and len(tensors[0]):
                tensors = features.all(tensors[0], self.task.eval_batch_size), *tensors[1:]
            source: Source = TensorSource(tensors, self.seed, self.device, names)
        elif (
            hasattr(data, "__len__")
            and hasattr(data, "__getitem__")
            and not (columns or isinstance(data, IterableDataset))
        ):
            source = DatasetSource(data, self.seed, self.device, self.task.loader, features)
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


def _reads(config: Config, read: Config) -> bool:
    """Whether a config has the values that were read from another."""
    return all(_same(config.get(name, ABSENT), value) for name, value in read.items())


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


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in value))
        return f"a {type(value).__name__} of {len(value)} ({kinds})"
    return f"a {type(value).__name__}"


def batch_size(task: Task, config: Config, length: int) -> int:
    """The batch size from the config or the task, or a clear refusal."""
    given = config.get("batch_size", task.batch_size)
    size = whole(given)
    if size is None or size < 1:
        raise TaskError(f"The batch size of {task_name(task)} must be a whole number above 0, got {shown(given)}.")
    if size > length:
        raise TaskError(
            f"The batch size of {task_name(task)} is {size}, above its {length} training samples: "
            "choose a smaller batch_size or give more data."
        )
    return size
