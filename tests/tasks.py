"""Small tasks that the tests train."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import penstock as ps


def blobs(rows=120, seed=7):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator)
    y = (x[:, 0] * 2 + x[:, 1] * x[:, 2] > 0).long()
    return x, y


class Blobs(ps.Task):
    """A two-layer network with every kind of state: BatchNorm, dropout, momentum, a scheduler a step."""

    batch_size = 16
    eval_batch_size = 7

    def data(self, config):
        x, y = blobs()
        return (x[:90], y[:90]), (x[90:], y[90:])

    def model(self, config):
        return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 2))

    def optimizer(self, params, config):
        return torch.optim.SGD(params, lr=config["lr"], momentum=config.get("momentum", 0.9))

    def scheduler(self, optimizer, config):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100), "step"

    def loss(self, model, batch, config):
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model, batch, config):
        x, y = batch
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(-1) == y).float().mean()}


class Noisy(Blobs):
    """Draws from Python's and numpy's generators in its forward, which a resumed trial must draw again."""

    def loss(self, model, batch, config):
        x, y = batch
        noise = random.random() + np.random.rand()
        return F.cross_entropy(model(x * (1 + 0.1 * noise)), y)


class Rows(Dataset):
    """A map-style dataset with augmentation by all three generators; keeps the samples it was asked for."""

    def __init__(self, x, y):
        self.x, self.y, self.asked = x, y, []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.x[index] + 0.1 * torch.rand(()) + 0.1 * random.random() + 0.1 * float(np.random.rand()), self.y[
            index
        ]


class Augmented(Blobs):
    """The same network over a dataset."""

    def data(self, config):
        x, y = blobs()
        return Rows(x[:90], y[:90]), Rows(x[90:], y[90:])


class Fails(Blobs):
    """Raises where the config says so."""

    def loss(self, model, batch, config):
        if config.get("fail"):
            1 / 0  # noqa: B018
        return super().loss(model, batch, config)


def trivial(trial):
    """The distance from 2, shrinking with the units; goes on from its state."""
    for unit in range(trial.state or 0, 10**6):
        trial.report(unit + 1, state=unit + 1, loss=(trial.config["x"] - 2) ** 2 / (unit + 1))


def stateless(trial):
    """The same without a state: begins again each time."""
    for unit in range(10**6):
        trial.report(unit + 1, loss=(trial.config["x"] - 2) ** 2 / (unit + 1))


class TimeFirst(nn.Module):
    """Six features as three steps of two, in the first dimension."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop, self.outer = nn.Linear(2, 5), nn.Dropout(0.4), nn.Linear(5, 2)

    def forward(self, x):
        return self.outer(self.drop(self.inner(x.view(-1, 3, 2).transpose(0, 1)).relu()).mean(0))
