"""Optimizers that are not torch's as they stand, and schedulers that rebuild them: fused as alone, whatever they do."""

import types

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from penstock.training.check import describe
from penstock.training.fused.ways import Native
from tests.training.fused.written import Written, fused_as_alone
from tests.training.together import Alone, Together, Trials


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Rebuilding:
    """A scheduler that does something to the optimizer at one step, and can be saved."""

    def __init__(self, optimizer, at, change):
        self.optimizer, self.at, self.change, self.count = optimizer, at, change, 0

    def step(self):
        self.count += 1
        if self.count == self.at:
            self.change(self.optimizer)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def freeze(optimizer):
    for p in optimizer.param_groups[0]["params"][:2]:
        p.requires_grad_(False)


def unfreeze(optimizer):
    for p in optimizer.param_groups[0]["params"][:2]:
        p.requires_grad_(True)


def frozen():
    model = Model()
    model[0].requires_grad_(False)
    return model


def adam(params, lr):
    return optim.Adam(params, lr=lr)


def part(params, lr):
    return optim.AdamW(params[2:], lr=lr)


def momentum(params, lr):
    return optim.SGD(params, lr=lr, momentum=0.9)


CHANGES = {
    "freezes": (Model, adam, freeze),
    "unfreezes": (frozen, adam, unfreeze),
    "nesterov": (Model, momentum, lambda o: o.param_groups[0].update(nesterov=True)),
    "momentum to 0": (Model, momentum, lambda o: o.param_groups[0].update(momentum=0.0)),
    "momentum from 0": (Model, lambda p, lr: optim.SGD(p, lr=lr), lambda o: o.param_groups[0].update(momentum=0.9)),
    "maximize": (Model, adam, lambda o: o.param_groups[0].update(maximize=True)),
    "forgets momentum": (Model, momentum, lambda o: o.state.clear()),
    "halves momentum": (Model, momentum, lambda o: [one["momentum_buffer"].mul_(0.5) for one in o.state.values()]),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_scheduler_that_rebuilds_an_optimizer_is_noticed(name, clip):
    make, optimizer, change = CHANGES[name]
    task = Written(make, optimize=optimizer, schedule=lambda o: (Rebuilding(o, 3, change), "step"), clip_grad_norm=clip)
    fused_as_alone(task, steps=8)


def test_a_scheduler_that_adds_a_group_is_noticed():
    model = {}

    class Kept(Written):
        def optimizer(self, params, config):
            made = part(params, config["lr"])
            model[id(made)] = params[:2]
            return made

    def add(optimizer):
        optimizer.add_param_group({"params": model[id(optimizer)], "lr": 0.01})

    fused_as_alone(Kept(Model, schedule=lambda o: (Rebuilding(o, 3, add), "step")), steps=8)


def test_parameters_that_have_taken_unlike_numbers_of_steps_are_stepped_each_by_its_own():
    task = Written(frozen, optimize=adam, schedule=lambda o: (Rebuilding(o, 2, unfreeze), "step"))
    trials, together = Trials(task), Together(Native)
    ours = [trials.make(number, {"lr": 0.1 * (number + 1)}) for number in range(2)]
    together.enter(*ours).step(4)
    assert together.fused.stack.vectorised
    assert sorted(flat.steps[0] for flat in together.fused.stack.flats) == [2, 4]
    together.leave(*ours)
    for number, one in enumerate(ours):
        Alone(trials, number, {"lr": 0.1 * (number + 1)}, 4).assert_like(one, together.curve(one))


class Noisy(optim.SGD):
    """Draws, as stochastic gradient Langevin dynamics do."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.01)


def replaced(params, lr):
    made = optim.SGD(params, lr=lr)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(group["lr"] * p.grad.sign())

    made.step = types.MethodType(step, made)
    return made


class Slow(optim.Optimizer):
    """Lookahead: steps by another optimizer, and goes back half of the way at every second step."""

    def __init__(self, base):
        self.base, self.count = base, 0
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        self.slow = [p.detach().clone() for p in base.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self):
        return {"base": self.base.state_dict(), "slow": self.slow, "count": self.count}


OPTIMIZERS = {
    "steps by another": lambda p, lr: Slow(optim.Adam(p, lr=lr)),
    "draws": lambda p, lr: Noisy(p, lr=lr),
    "replaced": replaced,
    "muon": lambda p, lr: optim.Muon([one for one in p if one.ndim == 2], lr=lr),
    "adafactor": lambda p, lr: optim.Adafactor(p, lr=lr),
    "asgd": lambda p, lr: optim.ASGD(p, lr=lr),
    "rprop": lambda p, lr: optim.Rprop(p, lr=lr),
    "decay by rule": lambda p, lr: optim.AdamW(
        [
            {"params": [one for one in p if one.ndim > 1], "weight_decay": 0.1},
            {"params": [one for one in p if one.ndim == 1], "weight_decay": 0.0},
        ],
        lr=lr,
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scheduled", [False, True])
def test_optimizers_step_as_they_would_alone(name, scheduled):
    def schedule(optimizer):
        return (optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)), "step") if scheduled else None

    fused_as_alone(Written(Model, optimize=OPTIMIZERS[name], schedule=schedule))


class ByGradients:
    """A scheduler that reads gradients."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        group = self.optimizer.param_groups[0]
        group["lr"] = 0.1 / (1 + sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None))

    def state_dict(self):
        return {}


def test_a_scheduler_that_reads_gradients_is_refused():
    task = Written(Model, schedule=lambda optimizer: (ByGradients(optimizer), "step"))
    told = describe(Trials(task).make(0, {"lr": 0.1}), [], train=True)
    assert told.signature is None
    assert told.reason == (
        "ByGradients reads gradients, which trials do not keep while they are trained together: compute what it needs "
        "in the loss, as a buffer of the model"
    )


class Holding(optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.held = [p.data for p in self.param_groups[0]["params"]]


def test_an_optimizer_that_keeps_the_data_of_parameters_is_refused():
    told = describe(Trials(Written(Model, optimize=Holding)).make(0, {"lr": 0.1}), [], train=True)
    assert told.signature is None
    assert told.reason.startswith("Holding keeps the data of 0.weight in held")


class Numbered:
    """As the schedulers of timm are: told the number of the epoch, and of the step."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, epoch, metric=None):
        self.optimizer.param_groups[0]["momentum"] = 0.5 / epoch

    def step_update(self, num_updates, metric=None):
        self.optimizer.param_groups[0]["lr"] = 0.1 / num_updates

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_scheduler_of_timm_is_told_the_numbers_of_steps_and_units():
    fused_as_alone(Written(Model, optimize=momentum, schedule=Numbered), steps=7)


def test_hooks_of_all_optimizers_keep_them_to_their_own_steps():
    seen = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        fused_as_alone(Written(Model), steps=3)
    finally:
        handle.remove()
    assert len(seen) == 14  # three trials of 3, 3 and 1 steps, fused and alone


def test_trials_whose_optimizers_come_apart_go_on_by_their_own_steps():
    task = Written(Model, optimize=adam, schedule=lambda o: (Rebuilding(o, 3, freeze), "step"), clip_grad_norm=0.5)
    fused_as_alone(task, steps=4)  # the last trial entered late, and is not frozen yet
