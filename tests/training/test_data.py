"""A task's data: loaded once, in the study's order, on the device."""

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

import penstock as ps
from penstock.training.data import DataCache
from penstock.training.reads import ReadConfig
from penstock.training.sources import DatasetSource, TensorSource
from tests.tasks import Augmented, Blobs, Rows, blobs

CPU = torch.device("cpu")


def source(data, role="train", seed=0):
    class Given(Blobs):
        def data(self, config):
            return (data, blobs()) if role == "train" else (blobs(), data)

    return getattr(DataCache(Given(), seed, CPU).get({}), role)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(zip(*blobs(), strict=True))

    def __len__(self):
        return 9


def test_data_is_loaded_once_for_configs_that_read_the_same():
    calls = []

    class Counted(Blobs):
        def data(self, config):
            calls.append(config["noise"])
            return super().data(config)

    cache = DataCache(Counted(), 0, CPU)
    first = cache.get({"noise": 1, "lr": 0.1})
    assert cache.get({"noise": 1, "lr": 0.2}) is first
    assert cache.get({"noise": 2, "lr": 0.1}) is not first
    assert calls == [1, 2]


def test_a_value_that_was_looked_for_and_absent_counts_as_read():
    cache = DataCache(type("T", (Blobs,), {"data": lambda self, c: (blobs(), blobs(c.get("rows", 30)))})(), 0, CPU)
    first = cache.get({"lr": 1})
    assert cache.get({"lr": 2}) is first
    assert cache.get({"rows": 40}) is not first


@pytest.mark.parametrize(
    "read",
    [
        dict,
        lambda c: {**c},
        lambda c: list(c.items()),
        lambda c: list(c),
        lambda c: sorted(c.values()),
        lambda c: (c.pop("a"), c.pop("b", 0)),
        lambda c: (c.setdefault("a", 5), c.setdefault("b")),
    ],
)
def test_reading_all_of_a_config_is_noticed(read):
    config = ReadConfig({"a": 1, "b": 2})
    read(config)
    assert config.read == {"a": 1, "b": 2}


@pytest.mark.parametrize("kind", [np.array, torch.tensor, lambda values: (np.array(values), 1)])
def test_values_that_are_compared_element_by_element(kind):
    cache = DataCache(
        type("T", (Blobs,), {"data": lambda self, c: (blobs(), blobs()) if "mask" in c else None})(), 0, CPU
    )
    first = cache.get({"mask": kind([1, 0])})
    assert cache.get({"mask": kind([1, 0])}) is first
    assert cache.get({"mask": kind([1, 1])}) is not first


def test_an_epoch_is_gathered_once_and_again_only_where_a_task_changed_it():
    train = source(blobs())
    first = list(train.batches(0, 0, 50))
    assert all(a[0] is b[0] for a, b in zip(first, train.batches(0, 0, 50), strict=True))
    clean = [x.clone() for x, _ in first]
    first[1][0].add_(1.0)  # what a careless task might do
    assert [torch.equal(x, y) for x, (y, _) in zip(clean, train.batches(0, 0, 50), strict=True)] == [True] * 3
    assert torch.equal(next(iter(train.batches(0, 50, 50)))[0], clean[1])


def test_large_data_is_gathered_in_pieces_and_not_kept(monkeypatch):
    whole = list(source(blobs()).batches(2, 0, 16))
    monkeypatch.setattr("penstock.training.sources.GATHERED", 1500)
    train = source(blobs())
    pieces = list(train.batches(2, 0, 16))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(pieces, whole, strict=True))
    assert not train._kept


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr("penstock.training.sources.KEPT", 10_000)
    train = source(blobs())
    for epoch in range(9):
        list(train.batches(epoch, 0, 16))
    assert [epoch for epoch, *_ in train._kept] == [7, 8]


def test_the_order_of_an_epoch_is_drawn_once_for_all_streams_and_few_are_kept(monkeypatch):
    draw, drawn = torch.randperm, []
    monkeypatch.setattr(torch, "randperm", lambda n, **how: drawn.append(n) or draw(n, **how))
    monkeypatch.setattr("penstock.training.sources.GATHERED", 1500)
    train = source(blobs())
    monkeypatch.setattr("penstock.training.sources.ORDERS", 2 * 8 * train.length)
    for epoch in (0, 1, 0, 1, 2, 1, 2, 0):
        next(train.batches(epoch, 16, 16))
    assert len(drawn) == 4
    assert torch.equal(train.order(2), source(blobs()).order(2))


def test_metrics_that_change_their_batch_are_refused():
    batches = source(blobs(), "valid").all(120)
    (x, _), _ = next(batches)
    x.mul_(2.0)
    with pytest.raises(ps.TaskError, match="changed a validation batch in place, which all trials share"):
        next(batches)


def test_a_tensor_dataset_is_read_as_its_tensors():
    assert isinstance(source(TensorDataset(*blobs())), TensorSource)


def test_a_dataset_gives_every_sample_once_in_the_order_of_the_epoch():
    x, y = blobs()
    read = Rows(x, y)
    rows = source(read)
    assert isinstance(rows, DatasetSource)
    list(rows.batches(1, 0, 50))
    assert read.asked == rows.order(1).tolist()


def test_augmentation_belongs_to_the_stream_and_not_to_the_batch_size():
    x, y = blobs()
    rows = source(Rows(x, y))
    whole = torch.cat([batch[0] for batch in rows.batches(1, 0, 120)])
    assert torch.equal(torch.cat([batch[0] for batch in rows.batches(1, 0, 32)]), whole)
    assert torch.equal(torch.cat([batch[0] for batch in rows.batches(1, 64, 7)]), whole[64:])
    again = source(Rows(x, y))
    assert torch.equal(next(iter(again.batches(1, 0, 120)))[0], whole)
    other = next(iter(source(Rows(x, y), seed=1).batches(1, 0, 120)))[0]
    assert not torch.equal(other, whole)


def test_worker_processes_of_the_loader_give_the_same_stream():
    class Workers(Augmented):
        loader = {"num_workers": 2}

    one = DataCache(Augmented(), 0, CPU).get({}).train
    two = DataCache(Workers(), 0, CPU).get({}).train
    for epoch in (0, 1):
        for a, b in zip(one.batches(epoch, 0, 32), two.batches(epoch, 0, 32), strict=True):
            assert torch.equal(a[0], b[0])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (blobs()[0], "must return .training, validation. data, got a Tensor"),
        ((blobs(),), "got a tuple of 1"),
        ((blobs(), (torch.zeros(0, 6), torch.zeros(0))), "validation data of T.data has length 0"),
        ((Rows(torch.zeros(0, 6), []), blobs()), "training data of T.data has length 0"),
        ((blobs(), (torch.zeros(3, 6), torch.zeros(2))), r"one length, got \[3, 2\]"),
        (({"x": [1.0, 2.0]}, blobs()), "map-style dataset .*, got a dict"),
        ((tuple(one.numpy() for one in blobs()), blobs()), r"got a tuple of 2 \(ndarray\): make tensors of arrays"),
        ((Endless(), blobs()), "got a Endless: "),
        ((iter([1, 2]), blobs()), "map-style dataset .with __len__ and __getitem__., got a list_iterator"),
    ],
)
def test_data_that_cannot_be_trained_on(data, said):
    task = type("T", (Blobs,), {"data": lambda self, config: data})()
    with pytest.raises(ps.TaskError, match=said):
        DataCache(task, 0, CPU).get({})


class Hundreds(TensorDataset):
    """Adds 100 to what torch's own would give."""

    def __getitem__(self, index):
        return tuple(t + 100 for t in super().__getitem__(index))


class Longer(TensorDataset):
    """Has each row twice."""

    def __len__(self):
        return 2 * super().__len__()

    def __getitem__(self, index):
        return super().__getitem__(index // 2)


def test_a_tensor_dataset_with_a_getitem_of_its_own_is_asked_for_its_samples():
    x, y = blobs()
    for kind, expected in ((Hundreds, lambda rows: x[rows] + 100), (Longer, lambda rows: x[rows // 2])):
        asked = source(kind(x, y))
        assert torch.equal(next(asked.batches(0, 0, 4))[0], expected(asked.order(0)[:4]))
    assert isinstance(source(TensorDataset(x, y)), TensorSource), "whose rows are gathered at once"


@pytest.mark.parametrize("made", [TensorDataset, lambda *tensors: tensors], ids=["dataset", "tuple"])
def test_tensors_go_through_a_collate_fn(made):
    class Collated(Blobs):
        loader = {"collate_fn": lambda samples: {"x": torch.stack([x for x, _ in samples]) * 2, "n": len(samples)}}

        def data(self, config):
            return made(*blobs()), made(*blobs())

    data = DataCache(Collated(), 0, CPU).get({})
    batch = next(data.train.batches(0, 0, 4))
    assert torch.equal(batch["x"], blobs()[0][data.train.order(0)[:4]] * 2)
    assert next((batch["n"], rows) for batch, rows in data.valid.all(4)) == (4, 4)
