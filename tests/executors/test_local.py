"""The executor inside the driver's process."""

import random

import numpy as np
import torch

from penstock.bundle import Job, Placement
from penstock.executors.local import LocalExecutor
from tests.contracts.executors import CONFIG, ExecutorContract
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
