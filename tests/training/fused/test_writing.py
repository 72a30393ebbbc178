"""Attributes that a forward writes: fused where no step reads what the one before left, and refused by name else."""

import pytest
import torch
from torch import nn

from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.ways import Native
from tests.tasks import Blobs
from tests.training.together import Together, Trials, farthest


class Writes(nn.Module):
    """A forward that writes as it is told, and computes with what that gives."""

    def __init__(self, write):
        super().__init__()
        self.layer, self.write = nn.Linear(6, 2).double(), write
        self.kept = self.count = None
        self.calls, self.seen = 0, []

    def forward(self, x):
        return self.layer(x) * self.write(self, x)


def constant(module, x):
    if module.kept is None:
        module.kept = f"rows of {x.shape[1]}"
    return len(module.kept)


def mask(module, x):
    if module.kept is None:
        module.kept = torch.tensor([1.0, 2.0], dtype=x.dtype)
    return module.kept


def last(module, x):
    module.kept = module.layer(x).tanh()
    return 1 + module.kept


def count(module, x):
    module.calls += 1
    return 1.0


def decays(module, x):
    module.calls += 1
    return 1 / module.calls


def every_third(module, x):
    module.calls = module.calls + 1
    return 2.0 if module.calls % 3 == 0 else 1.0


def hidden(module, x):
    old = 0.0 if module.kept is None else module.kept
    module.kept = x.mean().detach()
    return 1 + old


def remembers(module, x):
    module.seen.append(len(x))
    return len(module.seen)


class Task(Blobs):
    def __init__(self, write):
        self.write = write

    def data(self, config):
        return tuple((x.double(), y) for x, y in super().data(config))

    def model(self, config):
        return Writes(self.write)


CONFIGS = [{"lr": 0.1}, {"lr": 0.3}]


@pytest.mark.parametrize("write", [constant, mask, last, count], ids=lambda one: one.__name__)
def test_what_no_later_step_reads_may_be_written(write):
    trials = Trials(Task(write))
    runs = [trials.make(number, config) for number, config in enumerate(CONFIGS)]
    together = Together(Native).enter(*runs).step(5)
    together.leave(*runs)
    for number, config in enumerate(CONFIGS):
        alone, _ = trials.alone(number, config, 5)
        assert farthest(runs[number].state(), alone.state())[0] < 1e-9


ADVICE = "To fuse it, register it as a buffer, so that each trial has its own, or compute it anew in each forward"


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (decays, "calls is 0 before and 1 after"),
        (every_third, "calls is 0 before and 1 after"),
        (hidden, "kept is None before and a tensor of float64 () after"),
        (remembers, "seen is list() before and list(16) after"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_a_later_step_reads_is_refused_by_name(write, said):
    trials = Trials(Task(write))
    together = Together(Native).enter(*(trials.make(number, config) for number, config in enumerate(CONFIGS)))
    with pytest.raises(Unfusable) as refused:
        together.step()
    assert str(refused.value) == (
        f"the model changes an attribute of its own in its forward, and reads it: {said}. {ADVICE}"
    )


def test_the_check_takes_back_what_it_wrote():
    trials = Trials(Task(constant))
    run = trials.make(0, CONFIGS[0])
    Together(Native).enter(run, trials.make(1, CONFIGS[1])).step()
    assert run.model.kept is None


def test_a_trial_that_holds_a_result_of_its_last_forward_can_enter():
    trials = Trials(Task(last))
    runs = [trials.alone(number, config, 2)[0] for number, config in enumerate(CONFIGS)]
    together = Together(Native).enter(*runs).step(3)
    together.leave(*runs)
    alone, _ = trials.alone(0, CONFIGS[0], 5)
    assert farthest(runs[0].state(), alone.state())[0] < 1e-9
