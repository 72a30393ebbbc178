"""Packs on a worker: each part trains as if it were alone, whoever comes and goes and whatever goes wrong beside it."""

import random
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.bundle import Bundle, Job, StateSaved, TrialFailed, TrialFinished, TrialStopped
from penstock.task import as_task
from penstock.training.worker import Worker
from tests.training.runs.test_fused import Driven, Exact

OPTIMIZERS = {
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "adam": lambda params, lr: torch.optim.Adam(params, lr=lr / 10),
    "rmsprop": lambda params, lr: torch.optim.RMSprop(params, lr=lr / 10),
}


class Unlike(Exact):
    """Networks, optimizers and batch sizes as the config says; one draws from Python's and numpy's generators too."""

    def model(self, config):
        self.width = config["width"]  # a value outside of the model, which is the trial's own
        layers = [nn.Linear(6, config["width"]), nn.BatchNorm1d(config["width"]), nn.ReLU(), nn.Dropout(0.3)]
        return nn.Sequential(*layers, nn.Linear(config["width"], 2)).double()

    def optimizer(self, params, config):
        return OPTIMIZERS[config["optimizer"]](params, config["lr"])

    def loss(self, model, batch, config):
        loss = super().loss(model, batch, config)
        if config.get("wrong"):
            raise ValueError("raised")
        if config.get("noisy"):
            loss = loss * (1 + 0.1 * random.random() + 0.1 * np.random.rand())
        return loss * (self.width / config["width"])


class Packed(Driven):
    """A worker with a pack; ``parts`` are the bundles that were declared last, by name."""

    def __init__(self, task, tmp_path, **job):
        super().__init__(task, tmp_path)
        self.worker = Worker(Job(as_task(task), 0, "loss", "min", self.states, **job), "cpu")
        self.parts = {}

    def solo(self, *placements):
        for one in placements:
            self.parts[f"trial {one.trial}"] = Bundle(f"trial {one.trial}", ("cpu",), (one,))

    def fused(self, name, *placements):
        self.parts[name] = Bundle(name, ("cpu",), placements, "fused", name, 4)

    def free(self, trial):
        for name, part in list(self.parts.items()):
            left = tuple(p for p in part.placements if p.trial != trial)
            self.parts[name] = replace(part, placements=left)
            if not left:
                del self.parts[name]

    def declare(self, name="pack"):
        parts = tuple(self.parts.values())
        placements = tuple(p for part in parts for p in part.placements)
        self.worker.place(Bundle(name, ("cpu",), placements, "packed", parts=parts))

    def advance(self, boundaries):
        for _ in range(boundaries):
            if self.worker.idle:
                return
            if (event := self.worker.advance()) is not None:
                self.events.append(event)
                if isinstance(event, TrialFinished | TrialStopped | TrialFailed):
                    self.free(event.trial)

    def read(self, state):
        """A state as one of a trial that has drawn nothing: what a trial draws shows in its curve."""
        return {**super().read(state), "random": None}

    def last(self, trial):
        return next((e for e in reversed(self.of(trial)) if not isinstance(e, StateSaved)), None)

    @property
    def there(self):
        return [p.trial for part in self.parts.values() for p in part.placements]

    def again(self, trial):
        """A placement of a trial that was made to leave, from its last state."""
        self.attempt += 1
        return replace(self.placed[trial], attempt=self.attempt, state=self.of(trial, TrialStopped)[-1].state)


@pytest.fixture
def pack(tmp_path):
    return Packed(Unlike(), tmp_path)


ALIKE = {"width": 5, "optimizer": "sgd"}
KINDS = st.fixed_dictionaries(
    {
        "width": st.integers(2, 9),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "batch_size": st.sampled_from([7, 16, 30]),
        "noisy": st.booleans(),
    }
)


@settings(max_examples=6, deadline=None)
@given(kinds=st.lists(KINDS, min_size=2, max_size=4), alike=st.integers(0, 3), seed=st.integers(0, 2**16))
def test_unlike_trials_that_come_and_go_are_each_as_if_alone(tmp_path_factory, kinds, alike, seed):
    pack, trials, pick = Packed(Unlike(), tmp_path_factory.mktemp("pack")), count(), random.Random(seed)
    waiting = [pack.placement(next(trials), pick.randint(1, 3), **kind) for kind in kinds]
    pack.solo(waiting.pop())
    if alike:
        pack.fused("alike", *(pack.placement(next(trials), pick.randint(1, 3), **ALIKE) for _ in range(alike)))
    pack.declare()
    while not pack.worker.idle or waiting:
        pack.advance(pick.randint(1, 9))
        gone = [t for t in pack.placed if t not in pack.there and isinstance(pack.last(t), TrialStopped)]
        waiting += [pack.again(t) for t in gone if all(p.trial != t for p in waiting)]
        if waiting and (pick.random() < 0.5 or pack.worker.idle):
            pack.solo(waiting.pop())
        elif len(pack.there) > 1 and pick.random() < 0.3:
            pack.free(pick.choice(pack.there))
        pack.declare()
    pack.assert_as_alone(*pack.placed)
    assert all(isinstance(pack.last(trial), TrialFinished) for trial in pack.placed)
