"""Batches that memory is too short for: taken in parts, one after another, with the curve of the whole."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.training.parts import Part
from tests.contracts.executors import Exact, alone

CONFIG = {"lr": 0.05}


class Plain(Exact):
    """Without BatchNorm; its memory holds so many rows."""

    holds = 10**6

    def model(self, config):
        return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 2)).double()

    def loss(self, model, batch, config):
        if torch.is_grad_enabled() and len(batch[0]) > self.holds:
            raise torch.OutOfMemoryError("Tried to allocate more than there is")
        return super().loss(model, batch, config)


class Short(Plain):
    holds = 5


class Normalized(Short):
    def model(self, config):
        return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2)).double()


class Accepting(Normalized):
    accumulate = True


class Weighted(Short):
    def loss(self, model, batch, config):
        super().loss(model, batch, config)
        return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([0.1, 0.9]).double())


class Nested(Short):
    """Batches with names, as a dataset of dicts gives them."""

    def data(self, config):
        return tuple(Rows(*pair) for pair in super().data(config))

    def loss(self, model, batch, config):
        return super().loss(model, (batch["x"], batch["y"][0]), config)

    def metrics(self, model, batch, config):
        return super().metrics(model, (batch["x"], batch["y"][0]), config)


class Rows(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": (self.y[index], str(index))}


def tuned(task, units=3):
    study = ps.Study(task, {"lr": ps.grid([0.05])}, metric="loss", mode="min", algorithm=ps.Grid(budget=units))
    return study.run(sharing="solo", progress=False).trials[0]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("task", [Short(), Nested()])
def test_the_curve_is_that_of_whole_batches(task):
    """Of 16 rows 5 fit: two parts are too few, four are not; of the last batch, of 10, parts are 2 and 3 rows."""
    trial = tuned(task)
    for row, expected in zip(trial.curve, alone(Plain(), 0, CONFIG, 3), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-9)


def test_batch_norm_is_not_shown_parts_unless_that_is_accepted():
    why = "nor can it be taken in parts: BatchNorm would see parts of a batch: set accumulate = True"
    assert why in tuned(Normalized()).error
    assert len(tuned(Accepting()).curve) == 3


def test_a_loss_that_is_no_mean_is_not_taken_in_parts():
    trial = tuned(Weighted())
    assert "it is no mean over samples" in trial.error


def test_what_does_not_fit_at_all_fails():
    class Nothing(Short):
        holds = 0

    with pytest.raises(ps.TaskError, match="Tried to allocate more than there is"):
        tuned(Nothing())


def test_what_cannot_be_cut_is_not():
    with pytest.raises(ValueError, match=r"a tensor of \(3,\) in a batch of 4"):
        Part(0, 2, 4).cut((torch.zeros(4, 2), torch.zeros(3)))
