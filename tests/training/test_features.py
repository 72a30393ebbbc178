"""Features: a frozen module that runs once for each sample, whoever trains on it and however."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.training.data import DataCache
from penstock.trial import Report
from tests.tasks import Blobs, blobs
from tests.training.runs.test_packed import ALIKE, Packed, Reads, Unlike

CPU = torch.device("cpu")


class Backbone(nn.Module):
    """Counts the samples that go through any of its kind."""

    computed = 0

    def __init__(self, scale=1.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()).double().requires_grad_(False)
        self.scale = scale

    def forward(self, x):
        Backbone.computed += len(x)
        return self.scale * self.layers(x)


class Featured(Unlike):
    def features(self, config):
        return Backbone(config.get("scale", 1.0))


class ByHand(Unlike):
    """The same with a frozen module that its loss and metrics run themselves."""

    backbone = None

    def loss(self, model, batch, config):
        return super().loss(model, (self.backbone(batch[0]), batch[1]), config)

    def metrics(self, model, batch, config):
        return super().metrics(model, (self.backbone(batch[0]), batch[1]), config)


@pytest.fixture(autouse=True)
def uncounted():
    Backbone.computed = 0


def packed(task, tmp_path):
    pack = Packed(task, tmp_path)
    pack.solo(*(pack.placement(trial, 2, width=4 + trial, optimizer="sgd", batch_size=7 + trial) for trial in (0, 1)))
    pack.fused("alike", *(pack.placement(trial, 2, **ALIKE) for trial in (2, 3)))
    pack.declare()
    pack.go_on()
    assert [getattr(pack.left(trial), "error", "") for trial in range(4)] == [""] * 4
    return pack


def curves(pack):
    return [[event.metrics["loss"] for event in pack.of(trial, Report)] for trial in range(4)]


def test_its_forward_runs_once_a_sample_for_trials_alone_fused_and_packed(tmp_path):
    task = Featured()
    pack = packed(task, tmp_path)
    assert Backbone.computed == 90 + 30 + 2, "and twice for two of them, to see that they do not depend on the batch"
    pack.assert_as_alone(*range(4))
    other = ByHand()
    (features,) = (features for _, features, _ in pack.worker.trials.data._featured)
    other.backbone = features.module
    by_hand = curves(packed(other, tmp_path / "by hand"))
    for ours, theirs in zip(curves(pack), by_hand, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


class Both(Reads):
    def features(self, config):
        return Backbone()

    def loss(self, model, batch, config):
        return Unlike.loss(self, model, (batch["x"], batch["y"]), config)


def test_the_samples_of_a_dataset_go_through_it_once_an_epoch(tmp_path):
    pack = packed(Both(), tmp_path)
    assert Backbone.computed < 2 * 90 + 30 + 250, "four trials apart would have 960; some read the first steps alone"
    for trial in range(4):
        alone = Packed(Both(), tmp_path / f"{trial}")
        alone.solo(pack.placed[trial])
        alone.declare()
        alone.go_on()
        assert curves(alone)[trial] == pytest.approx(curves(pack)[trial], rel=1e-9)


def test_features_of_equal_values_are_shared_and_data_is_loaded_once():
    calls = []

    class Kinds(Blobs):
        def data(self, config):
            calls.append("data")
            return super().data(config)

        def features(self, config):
            return nn.Linear(6, 4 if config["kind"] == "small" else 6).requires_grad_(False)

    cache = DataCache(Kinds(), 0, CPU)
    first = cache.get({"kind": "large", "lr": 1})
    assert cache.get({"kind": "largest", "lr": 2}) is first
    small = cache.get({"kind": "small", "lr": 1})
    assert small is not first
    assert [data.train.tensors[0].shape[1] for data in (first, small)] == [6, 4]
    assert calls == ["data"]


class Stays(nn.Linear):
    def train(self, mode=True):
        return super().train(True)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Linear(6, 6), "without gradients, but weight requires one: return it with requires_grad_"),
        (Stays(6, 6).requires_grad_(False), "in evaluation, but Stays stays in training"),
        (nn.Sequential(nn.BatchNorm1d(6, affine=False, track_running_stats=False)), "but BatchNorm1d 0 normalizes by"),
        (nn.Softmax(dim=0), "whose output for a sample is the same in any batch, but it differs"),
        (nn.Flatten(0), r"with a row for each of 7 samples, got \(42,\)"),
        (nn.Linear, "must return an nn.Module or None, got a type"),
    ],
)
def test_what_is_not_frozen_is_refused(module, said):
    task = type("T", (Blobs,), {"features": lambda self, config: module})()
    with pytest.raises(ps.TaskError, match=said):
        DataCache(task, 0, CPU).get({})


def test_a_tensor_a_tuple_and_a_dict_have_their_first_input_replaced():
    x, y = blobs()
    module = nn.Linear(6, 3).requires_grad_(False)
    for data in ((x, y), {"x": x, "y": y}, [(a, b) for a, b in zip(x, y, strict=True)]):
        task = type("T", (Blobs,), {"data": lambda self, c, d=data: (d, d), "features": lambda self, c: module})()
        train = DataCache(task, 0, CPU).get({}).train
        batch = next(train.batches(0, 0, 8))
        first, second = batch.values() if isinstance(batch, dict) else batch
        assert torch.allclose(first, module(x[train.order(0)[:8]]))
        assert torch.equal(second, y[train.order(0)[:8]])
