"""A new process: what it computes is what this one does, and it trains without imports that take it seconds.

There is one for all tests of this file, because it takes seconds to import torch.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.training.checkpoint import save
from tests import tasks
from tests.training.test_loop import curve, same, take, training
from tests.training.test_signature import signature

PROGRAM = """
import json, sys, torch
from pathlib import Path
torch.set_num_threads(1)
told = {}

from penstock.training.check import describe
from tests.tasks import Blobs
from tests.training.together import Together, Trials, go_on

trials = Trials(Blobs())
describe(trials.make(2, {"lr": 0.1}), [], train=True)
one, other = (trials.make(n, {"lr": 0.1}) for n in range(2))
together = Together().enter(one, other).step(14)
together.leave(one)
go_on(one, 7)
trials.make(0, {"lr": 0.1}).restore(one.state(), inherited=False)
describe(trials.make(2, {"lr": 0.1}), [], train=True)
told["compiler"] = "torch._dynamo" in sys.modules

from torch import nn
from tests.training.fused.written import Written, fused_as_alone

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.body(x[None])[0])

fused_as_alone(Written(Encoder))
told["symbols"] = "sympy" in sys.modules

from penstock.training.checkpoint import load, save
from penstock.trial import StateRef
from tests import tasks
from tests.training.test_loop import curve, training
from tests.training.test_signature import signature

told["signature"], told["curves"] = signature(Blobs()).signature, []
for task, folder, ref in json.loads(sys.argv[1]):
    run = training(getattr(tasks, task)())
    run.restore(load(Path(folder), StateRef(*ref)), inherited=False)
    told["curves"].append(curve(run, 4))
    save(run.state(), Path(folder), "end.pt")
print(json.dumps(told))
"""
STOPPED = {"Blobs": 1, "Noisy": 12, "Augmented": 17}  # the step after which each task's trial goes on in the process


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: tmp_path_factory.mktemp(name) for name in STOPPED}


@pytest.fixture(scope="module")
def begun(folders):
    """By task: the rows of a trial until it is stopped, and the state that it leaves."""
    found = {}
    for name, stop in STOPPED.items():
        run = training(getattr(tasks, name)())
        rows = take(run, stop)
        found[name] = rows, save(run.state(), folders[name], "state.pt")
    return found


@pytest.fixture(scope="module")
def told(begun, folders):
    states = [(name, str(folders[name]), list(vars(ref).values())) for name, (_, ref) in begun.items()]
    command, repo = [sys.executable, "-c", PROGRAM, json.dumps(states)], Path(__file__).parents[2]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=repo).stdout)


def test_trials_are_checked_and_train_fused_and_alone_without_the_compiler(told):
    assert not told["compiler"]


def test_attention_trains_fused_without_symbolic_shapes(told):
    assert not told["symbols"]


def test_a_signature_is_the_same(told):
    assert told["signature"] == signature(tasks.Blobs()).signature


def test_stopped_at_any_step_and_continued_in_another_process_gives_the_same_bits(told, begun, folders):
    for (name, (before, _)), after in zip(begun.items(), told["curves"], strict=True):
        whole = training(getattr(tasks, name)())
        assert before + after == curve(whole, 4), name
        assert same(torch.load(folders[name] / "end.pt", weights_only=True), whole.state()), name
