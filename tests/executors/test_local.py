"""The executor inside the driver's process."""

import gc
import random

import numpy as np
import pytest
import torch

from penstock.bundle import Job, Placement, TrialFinished
from penstock.executors.local import LocalExecutor
from tests.contracts.executors import CONFIG, Exact, ExecutorContract, alone
from tests.tasks import Noisy


class TestLocalExecutor(ExecutorContract):
    @classmethod
    def make(cls, job):
        return LocalExecutor(job)

    def test_the_callers_random_states_are_as_before(self, tmp_path):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3)
        expected = random.random(), np.random.rand(), torch.rand(1)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3)
        executor = self.make(Job(Noisy(), 0, "loss", "min", tmp_path / "states"))
        self.place(executor, Placement(0, 1, CONFIG, 2))
        self.until_left(executor)
        executor.close()
        assert (random.random(), np.random.rand(), torch.rand(1)) == expected

    def test_a_trial_ends_with_the_unit_that_has_the_metric_it_trains_until_and_a_state(self, tmp_path, monkeypatch):
        monkeypatch.setattr("penstock.training.runs.solo.SAVING", 1e-12)  # no other state is due
        curve = [metrics["loss"] for metrics in alone(Exact(), 0, CONFIG, 6)]
        until = sorted(curve)[2]
        executor = self.make(Job(Exact(), 0, "loss", "min", tmp_path / "states", until=until))
        self.place(executor, Placement(0, 1, CONFIG, 99))
        *_, before, last, finished = self.until_left(executor)
        executor.close()
        assert last.metrics["loss"] == pytest.approx(until, abs=1e-9)
        assert (last.unit, last.state.unit) == (curve.index(until) + 1,) * 2
        assert before.state is None
        assert isinstance(finished, TrialFinished)

    def test_once_closed_it_holds_no_data_and_no_trial(self, tmp_path):
        """A study goes with the cycles it is part of, when Python looks for some; its tensors cannot wait for that."""
        there = {id(one) for one in tensors()}
        executor = self.make(Job(Exact(), 0, "loss", "min", tmp_path / "states"))
        self.place(executor, Placement(0, 1, CONFIG, 1))
        self.until_left(executor)
        self.fuse(executor, Placement(1, 2, CONFIG, 1), Placement(2, 3, CONFIG, 1))
        self.until_left(executor, 2)
        assert {id(one) for one in tensors()} - there, "trials stay in memory while it is open"
        executor.close()
        assert not [one for one in tensors() if id(one) not in there]


def tensors():
    gc.collect()
    return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
