"""A model that two trials would share is refused. Parts that no step changes may be shared; nothing is kept alive."""

import gc
import weakref
from copy import deepcopy

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.training.returned import _OWNERS, made_model
from tests.studies import studies
from tests.tasks import Blobs

study = studies(Blobs, {"lr": ps.loguniform(1e-3, 0.1)}, trials=3, algorithm=ps.Random(budget=1))


class Evaluated(nn.Sequential):
    """Stays in evaluation, as people freeze a backbone with BatchNorm."""

    def train(self, mode=True):
        return super().train(False)


def linear():
    return nn.Linear(6, 2)


def body():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU())


def normed(kind=nn.Sequential):
    return kind(nn.Linear(6, 12), nn.BatchNorm1d(12, affine=False), nn.ReLU())


def frozen(module):
    return module.requires_grad_(False)


class Kept(Blobs):
    """Makes its models from a module that was made once."""

    def __init__(self, kept, make):
        self.kept, self.make = kept, make

    def model(self, config):
        return self.make(self.kept)


def whole(kept):
    return kept


def headed(kept):
    return nn.Sequential(kept, nn.Linear(12, 2))


def tied(kept):
    head = nn.Linear(6, 2)
    head.weight = kept.weight
    return nn.Sequential(head)


def ended(kept):
    return nn.Sequential(nn.Identity(), kept)


@pytest.mark.parametrize(
    ("kept", "make", "said"),
    [
        (linear, whole, "the one that it returned before: make it in model(), or return copy.deepcopy of it."),
        (body, headed, "one with the submodule '0' of one that it returned before: make it in model(), or use copy."),
        (lambda: frozen(normed()), headed, "one with the submodule '0' of one that it returned before: make it"),
        (linear, tied, "one with the parameter '0.weight' of one that it returned before: make it in model()"),
        (linear, ended, "one with the submodule '1' of one that it returned before: make it in model(), or "),
    ],
)
@pytest.mark.parametrize("sharing", ["solo", "fused"])
def test_a_module_that_was_made_once_is_refused_before_anything_trains(kept, make, said, sharing):
    with pytest.raises(ps.TaskError) as raised:
        study(Kept(kept(), make)).run(sharing=sharing, progress=False)
    assert str(raised.value).startswith(f"Kept.model must return a new module for each trial, got {said}")


class Unlike(nn.Linear):
    """Cannot be fused, so nothing but this check makes a second model of it in the dry batch."""

    def __init__(self):
        super().__init__(6, 2)
        self.odd = object()


def test_a_module_that_cannot_be_fused_is_refused_too():
    with pytest.raises(ps.TaskError, match="a new module for each trial, got the one that it returned before"):
        study(Kept(Unlike(), whole)).run(progress=False)


@pytest.mark.parametrize(
    ("kept", "make"),
    [
        (linear(), deepcopy),
        (frozen(body()), headed),
        (frozen(normed(Evaluated)), headed),
        (nn.ReLU(), lambda kept: nn.Sequential(nn.Linear(6, 2), kept)),
    ],
)
def test_copies_and_parts_that_no_step_changes_are_taken(kept, make):
    before = deepcopy(kept.state_dict())
    shared = study(Kept(kept, make), name="shared").run(sharing="solo", progress=False)
    alone = study(Kept(kept, lambda kept: make(deepcopy(kept))), name="alone").run(sharing="solo", progress=False)
    assert [list(trial.curve) for trial in shared.trials] == [list(trial.curve) for trial in alone.trials]
    assert all(torch.equal(value, before[name]) for name, value in kept.state_dict().items())


def test_a_look_at_a_shared_part_leaves_its_modes():
    kept = frozen(normed(Evaluated))
    task = Kept(kept, lambda kept: headed(kept).eval())
    assert not any(module.training for _ in range(2) for module in made_model(task, {}).modules())


def test_no_model_is_kept_alive_and_a_tied_weight_is_no_sharing():
    class Tied(Blobs):
        def model(self, config):
            one, other = nn.Linear(6, 6), nn.Linear(6, 6)
            other.weight = one.weight
            return nn.Sequential(one, one, other)

    gc.collect()
    before, models = len(_OWNERS), [made_model(Tied(), {}) for _ in range(3)]
    assert len(_OWNERS) > before
    gone = [weakref.ref(model) for model in models]
    del models
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    assert len(_OWNERS) == before


def test_parameters_of_a_model_that_was_returned_can_be_swapped():
    model = made_model(Blobs(), {})
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.zeros(12, 6)))
    assert not model[0].weight.any()
