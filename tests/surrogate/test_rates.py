"""Factors of learning rates are applied at the step: solo and fused alike, and whatever a scheduler writes."""

import pytest
import torch
from torch.optim import lr_scheduler

from penstock.surrogate import twin
from penstock.surrogate.flow import Flowed
from penstock.surrogate.settings import Surrogate
from penstock.surrogate.task import narrowed
from penstock.training.check import describe
from penstock.training.fused.agreement import agree_plain
from penstock.training.fused.ways import Native
from penstock.training.rates import PLAIN, Factor, at_rates
from tests.surrogate.models import KINDS, Doubles, perceptron
from tests.training.fused.test_compiled import made
from tests.training.together import Alone, Together, Trials, as_traced

NAMES = [name for name in KINDS if name != "LBFGS"]


class Scheduled(Doubles):
    def scheduler(self, optimizer, config):
        return lr_scheduler.OneCycleLR(optimizer, max_lr=config["lr"], total_steps=50, cycle_momentum=False), "step"


def twins(task=Scheduled):
    return Trials(narrowed(task(lambda: perceptron(64)), Surrogate(scale=4)))


@pytest.mark.parametrize("kind", NAMES)
def test_fused_trials_step_at_the_rates_of_each_alone(kind):
    trials = twins()
    configs = [{"optimizer": kind, "lr": lr, "decay": 0.1} for lr in (0.01, 0.003, 0.001)]
    made = [trials.make(number, config) for number, config in enumerate(configs)]
    assert made[0].rates, "a surrogate has factors"
    together = Together(Native).enter(*made).step(4)
    assert together.fused.stack.vectorised
    together.leave(*made)
    for number, (config, trial) in enumerate(zip(configs, made, strict=True)):
        Alone(trials, number, config, 4).assert_like(trial, together.curve(trial))


@pytest.mark.parametrize("kind", NAMES)
def test_a_step_is_that_of_groups_with_the_factors_written_into_them(kind):
    training = twins(Doubles).make(0, {"optimizer": kind, "lr": 0.01, "decay": 0.1})
    named = dict(training.model.named_parameters())
    copies = {name: p.detach().clone().requires_grad_() for name, p in named.items()}
    eps = training.optimizer.defaults.get("eps", 0.0)
    groups = [
        {"params": [copies[n]], "lr": 0.01 * f.rate, "weight_decay": 0.1 / f.rate, "eps": eps * f.eps}
        for n in named
        for f in [training.rates.get(n, PLAIN)]
    ]
    by_hand = KINDS[kind](groups)
    for step in range(3):
        for number, name in enumerate(named):
            named[name].grad = torch.full_like(named[name], 0.1 * (number + step + 1))
            copies[name].grad = named[name].grad.clone()
        training.step_optimizer()
        by_hand.step()
    for name, p in named.items():
        torch.testing.assert_close(p, copies[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "Adagrad", "RMSprop"])
def test_where_epsilon_is_far_above_the_gradients_a_step_is_that_of_sgd(kind, monkeypatch):
    """An epsilon that is not scaled would leave Adam's factors, and the best learning rate would move with width."""

    class Damped(Doubles):
        def optimizer(self, params, config):
            if config["optimizer"] == "SGD":
                return torch.optim.SGD(params, lr=1e-3)
            return KINDS[kind](params, lr=1e5, eps=1e8, weight_decay=0)

    monkeypatch.setattr(twin, "flowed", lambda *about, **how: Flowed())  # an output of zero would leave no gradients
    moved = []
    for one in ("SGD", kind):
        training = twins(Damped).make(0, {"optimizer": one})
        before = [p.detach().clone() for p in training.model.parameters()]
        training.train_step(next(training.batches()))
        moved.append([float((p - b).detach().norm()) for p, b in zip(training.model.parameters(), before, strict=True)])
    ratios = [one / other for one, other in zip(*moved, strict=True)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-4)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=9),
        lambda o: lr_scheduler.LambdaLR(o, [lambda step: 1 / (step + 1)]),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
        ),
    ],
)
def test_schedulers_and_states_see_the_users_groups_alone(scheduler):
    p, q = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    model = torch.nn.ParameterDict({"p": p, "q": q})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    schedule = scheduler(optimizer)
    for _ in range(4):
        before = [one.detach().clone() for one in model.values()]
        for one in model.values():
            one.grad = torch.ones(1)
        rate = optimizer.param_groups[0]["lr"]
        with at_rates(optimizer, model, {"q": Factor(4.0)}):
            assert [group["lr"] for group in optimizer.param_groups] == [rate, 4 * rate]
            optimizer.step()
        assert len(optimizer.param_groups) == 1
        assert optimizer.param_groups[0]["lr"] == rate
        moved = [after.detach() - one for after, one in zip(model.values(), before, strict=True)]
        torch.testing.assert_close(moved[1], 4 * moved[0])
        schedule.step()
    assert len(optimizer.state_dict()["param_groups"]) == 1


def test_a_state_goes_on_at_the_same_rates_and_a_target_has_another_signature():
    trials = twins()
    config = {"optimizer": "Adam", "lr": 0.01}
    whole, _ = trials.alone(0, config, 6)
    half, _ = trials.alone(0, config, 3)
    again = trials.make(0, config)
    again.restore(half.state(), inherited=False)
    assert again.rates == half.rates
    for _ in zip(range(3), again.steps(), strict=False):
        pass
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    target = Trials(trials.task.target).make(0, config)
    assert target.rates == {}
    plain = trials.make(0, config)
    plain.rates = {}
    signatures = [describe(one, [], train=False).signature for one in (target, trials.make(0, config), plain)]
    assert None not in signatures
    assert len({*signatures}) == 3


def test_a_compiled_step_takes_the_factors_as_they_are_at_each_step():
    """OneCycle changes the learning rate at each; Inductor itself is left out, as it takes seconds."""
    trials = twins()
    pair = [trials.make(number, {"optimizer": "AdamW", "lr": lr}) for number, lr in enumerate((0.01, 0.003))]
    together = Together(Native).enter(*pair).step(2)
    step, inputs = made(together.fused, as_traced)
    agree_plain(step.step, step, inputs)
    again = made(together.step(3).fused)[1]
    assert step.takes(again)
    agree_plain(step.step, step, again)
