"""Modules that get their shapes in their first forward."""

import torch
from torch import nn

from tests.tasks import Blobs
from tests.training.together import Together, Trials, farthest


class Counts(nn.Module):
    """Notes how often it ran, in a buffer and in an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64))
        self.last = None

    def forward(self, x):
        self.runs += 1
        self.last = "seen"
        return x


class Lazy(Blobs):
    def data(self, config):
        return tuple((x.double(), y) for x, y in super().data(config))

    def model(self, config):
        layers = nn.LazyLinear(5), nn.LazyBatchNorm1d(), Counts(), nn.ReLU(), nn.Dropout(0.2), nn.LazyLinear(2)
        return nn.Sequential(*layers).double()


def test_a_trial_is_made_with_its_shapes_and_with_nothing_else_of_that_forward():
    run = Trials(Lazy()).make(0, {"lr": 0.1})
    assert [tuple(p.shape) for p in run.model.parameters()] == [(5, 6), (5,), (5,), (5,), (2, 5), (2,)]
    assert run.model[2].runs == 0
    assert run.model[2].last is None
    assert torch.equal(run.model[1].running_mean, torch.zeros(5, dtype=torch.float64))
    assert run.model[1].num_batches_tracked == 0
    again, other = (Trials(Lazy()).make(number, {"lr": 0.1}) for number in (0, 1))
    assert torch.equal(run.model[0].weight, again.model[0].weight)
    assert not torch.equal(run.model[0].weight, other.model[0].weight)


def test_lazy_modules_are_fused_as_they_train_alone():
    trials, configs = Trials(Lazy()), [{"lr": 0.1}, {"lr": 0.3}]
    runs = [trials.make(number, config) for number, config in enumerate(configs)]
    together = Together().enter(*runs).step(5)
    together.leave(*runs)
    assert together.recipe.named == "native"
    for number, config in enumerate(configs):
        alone, _ = trials.alone(number, config, 5)
        assert farthest(runs[number].state(), alone.state())[0] < 1e-9
