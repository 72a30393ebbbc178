"""Optimizers are made, stepped, saved and loaded without an import of torch's compiler, and do what they do with it."""

import copy

import pytest
import torch

from penstock.training import uncompiled
from penstock.training.uncompiled import _marked, _written, step


@pytest.fixture
def absent(monkeypatch):
    """As in a process that has not imported the compiler."""
    monkeypatch.setattr(uncompiled, "_COMPILER", "no compiler")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_is_the_one_that_torch_takes(kind, scheduled, absent):
    both = []
    for plainly in (False, True):
        p = torch.nn.Parameter(torch.arange(4.0))
        with uncompiled.uncompiled():
            optimizer = kind([p], lr=0.1, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if scheduled else None
        for _ in range(3):
            p.grad = p.detach() + 1
            optimizer.step() if plainly else step(optimizer)
            if scheduler is not None:
                scheduler.step()
        both.append((p.detach(), copy.deepcopy(optimizer.state_dict()["state"])))
    assert torch.equal(both[0][0], both[1][0])
    assert str(both[0][1]) == str(both[1][1])


@pytest.mark.parametrize(("kind", "module"), [(torch.optim.Adam, "adam"), (torch.optim.AdamW, "adam")])
def test_a_step_is_found_inside_its_wrappers_also_where_it_is_inherited(kind, module):
    written = _written(kind([torch.zeros(1)], lr=0.1))
    assert (written.__code__.co_name, written.__globals__["__name__"]) == ("step", f"torch.optim.{module}")


def test_a_step_that_somebody_replaced_or_watches_is_called_as_it_is(absent):
    p = torch.nn.Parameter(torch.zeros(1))
    p.grad = torch.ones(1)
    called = []
    replaced = torch.optim.SGD([p], lr=0.1)
    replaced.step = lambda: called.append("replaced")
    step(replaced)
    watched = torch.optim.SGD([p], lr=0.1)
    watched.register_step_post_hook(lambda *_: called.append("watched"))
    step(watched)

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            called.append("own")

    step(Own([p], lr=0.1))
    assert called == ["replaced", "watched", "own"]


def test_nothing_stays_changed_in_torch(absent):
    before = [dict(vars(method)) for method in _marked()]
    with uncompiled.uncompiled():
        torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert [dict(vars(method)) for method in _marked()] == before
