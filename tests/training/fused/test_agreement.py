"""What a way must have in common with a trial alone before it is trusted, and what is as before afterwards."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.training.fused import agreement
from penstock.training.fused.agreement import ABOUT, EXACT, compare
from penstock.training.fused.audit import Audits
from penstock.training.fused.recipe import Recipe
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.ways import Native
from tests.tasks import Blobs, Noisy
from tests.training.together import Alone, Together, Trials, go_on

ONES = [torch.ones(3), torch.ones(1)]


def far(*grads, tolerance=EXACT, alone=ONES):
    compare(("weight", "bias"), grads, alone, tolerance)


def test_gradients_may_differ_by_a_part_of_the_whole_gradient():
    far(*ONES)
    far(torch.ones(3), torch.ones(1) + 1.9 * EXACT, tolerance=EXACT)  # the whole has a norm of 2
    with pytest.raises(Unfusable, match=r"the gradient of bias is off by 1.1e-06 of that of the trial alone"):
        far(torch.ones(3), torch.ones(1, dtype=torch.float64) + 2.2 * EXACT)


def test_a_gradient_that_is_no_number_is_refused():
    nan = [torch.ones(3), torch.full((1,), torch.nan)]
    with pytest.raises(Unfusable, match="bias is off by nan"):
        far(*nan, tolerance=ABOUT)


def test_a_gradient_is_missing_in_both_or_in_none():
    far(torch.ones(3), None, alone=[torch.ones(3), None])
    for one, own in ((None, torch.ones(1)), (torch.zeros(1), None)):
        with pytest.raises(Unfusable, match="the gradient of bias is there or missing"):
            far(torch.ones(3), one, alone=[torch.ones(3), own])


class Exact(Blobs):
    def data(self, config):
        return tuple(tuple(t.double() if t.is_floating_point() else t for t in part) for part in super().data(config))

    def model(self, config):
        return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(config["p"]), nn.Linear(12, 2)).double()


def together(task, *configs, way=Native, **known):
    trials = Trials(task)
    ours = [trials.make(number, {"lr": 0.1, **config}) for number, config in enumerate(configs or ({}, {}))]
    return trials, ours, Together(recipe=Recipe(ways=[way], **known)).enter(*ours)


class Off(Native):
    """A way that is not quite right."""

    off = 0.0

    def run(self, *args):
        return super().run(*args) * (1 + self.off)


@pytest.mark.parametrize(("off", "refused"), [(1e-8, False), (1e-5, True), (0.9, True)])
def test_a_way_is_exact_in_float64_or_refused(off, refused, monkeypatch):
    monkeypatch.setattr(Off, "off", off)
    _, _, found = together(Blobs(), way=Off)
    if refused:
        with pytest.raises(Unfusable, match=r"gradient of [\w.]+ is off by"):
            found.step()
    else:
        found.step()


class Rounds(Native):
    """Right in float64, and off in what the task itself computes with."""

    off = 0.0

    def run(self, function, params, *rest):
        losses = super().run(function, params, *rest)
        return losses if losses.dtype == torch.float64 else losses * (1 + self.off)


def test_a_way_that_is_exact_in_float64_may_be_about_right_in_the_tasks_precision(monkeypatch):
    monkeypatch.setattr(Audits, "due", lambda *_, **__: False)
    monkeypatch.setattr(Rounds, "off", 0.2)
    _, _, found = together(Blobs(), way=Rounds)
    found.step()
    monkeypatch.setattr(Rounds, "off", 2.0)
    _, _, found = together(Blobs(), way=Rounds)
    with pytest.raises(Unfusable, match="is off by"):
        found.step()


class Narrow(Blobs):
    """Takes no float64."""

    def loss(self, model, batch, config):
        assert batch[0].dtype == torch.float32
        return super().loss(model, batch, config)


def test_a_model_that_takes_no_float64_is_compared_in_its_own_precision():
    _, _, found = together(Narrow())
    assert found.step().recipe.way.name == "native"


class Rough(Blobs):
    """In bfloat16, whose gradients are nothing like exact."""

    precision = "bf16"

    def metrics(self, model, batch, config):
        return {**super().metrics(model, batch, config), "bits": torch.tensor(model(batch[0]).dtype.itemsize * 8.0)}


def test_rounding_of_the_tasks_own_precision_is_no_reason_to_refuse():
    trials, ours, found = together(Rough())
    assert found.step(7).recipe.way.name == "native"
    for number, one in enumerate(ours):
        _, curve = trials.alone(number, {"lr": 0.1}, 7)
        assert found.curve(one)[0]["loss"] == pytest.approx(curve[0]["loss"], rel=0.05)
        assert found.curve(one)[0]["bits"] == curve[0]["bits"] == 16, "in metrics too"


class Nothing(set):
    """Forgets what has agreed, so that every step of every part is compared."""

    def __contains__(self, item):
        return False


class Looks(Exact):
    """Measured one by one, which leaves the modules in evaluation."""

    def metrics(self, model, batch, config):
        return {name: value.item() for name, value in super().metrics(model, batch, config).items()}


@pytest.mark.parametrize("task", [Exact(), Looks()], ids=lambda task: type(task).__name__)
@pytest.mark.parametrize("rates", [(0.3,) * 5, (0.1, 0.5, 0.0, 0.2, 0.5)])
def test_comparing_leaves_no_trace(task, rates):
    configs = [{"p": rate} for rate in rates]
    trials, ours, found = together(task, *configs, size=2, agreed=Nothing(), proven=Nothing())
    found.step(8)
    for number, one in enumerate(ours):
        state = found.fused.state(one)
        Alone(trials, number, {"lr": 0.1, **configs[number]}, 8).assert_like(state, found.curve(one))


class Counts(nn.Module):
    """Its gradient is another one with every forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.count += 1
        return self.layer(x) * self.count


class Counting(Exact):
    def model(self, config):
        return Counts().double()


def test_a_comparison_begins_where_the_step_begins():
    trials, ours, found = together(Counting())
    found.step(2)
    Alone(trials, 1, {"lr": 0.1}, 2).assert_like(found.fused.state(ours[1]), [])


def test_trials_at_several_positions_are_compared_with_their_own_batches():
    trials, ours = Trials(Exact()), []
    found = Together(recipe=Recipe(ways=[Native]))
    for number in range(4):
        ours.append(trials.make(number, {"lr": 0.1, "p": 0.3}))
        go_on(ours[-1], number)
    found.enter(*ours).step()
    for number, one in enumerate(ours):
        Alone(trials, number, {"lr": 0.1, "p": 0.3}, number + 1).assert_like(found.fused.state(one), [])


def test_a_refusal_leaves_no_trace_either(monkeypatch):
    _, ours, found = together(Exact(), {"p": 0.3}, {"p": 0.5})
    found.step(3)
    before = [found.fused.state(one) for one in ours]
    found.recipe.agreed.clear()
    found.recipe.proven.clear()
    monkeypatch.setattr(agreement, "EXACT", -1.0)
    with pytest.raises(Unfusable):
        found.step()
    for one, kept in zip(ours, before, strict=True):
        for name, value in found.fused.state(one)["model"].items():
            assert torch.equal(value, kept["model"][name]), name


def test_a_loss_that_is_no_scalar_is_refused():
    class Rows(Blobs):
        def loss(self, model, batch, config):
            return F.cross_entropy(model(batch[0]), batch[1], reduction="none")[:1]

    _, _, found = together(Rows())
    with pytest.raises(Unfusable, match="the loss of a trial is no scalar tensor"):
        found.step()


def test_a_loss_that_draws_from_what_trials_cannot_share_is_refused():
    _, _, found = together(Noisy())
    with pytest.raises(Unfusable, match="draws from Python's or numpy's random generator"):
        found.step()


def test_trials_that_diverge_at_once_are_trained_all_the_same():
    trials, ours, found = together(Exact(), {"p": 0.3}, {"p": 0.3})
    with torch.no_grad():
        ours[0].model[0].weight.fill_(torch.inf)
    found.step(6)
    assert not found.curve(ours[0])[0]["loss"] < 1e9
    Alone(trials, 1, {"lr": 0.1, "p": 0.3}, 6).assert_like(found.fused.state(ours[1]), found.curve(ours[1]))


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.full = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        return self.always(x) + self.full(x) if len(x) == 16 else self.always(x)


class Reaches(Exact):
    """Its last batch of an epoch, which is shorter, leaves a layer out."""

    def model(self, config):
        return Sometimes().double()


@pytest.mark.parametrize("steps", [0, 5])
def test_a_parameter_that_the_loss_reaches_in_some_steps_only_is_stepped_in_those_alone(steps):
    trials, ours = Trials(Reaches()), []
    for number in range(2):
        ours.append(trials.make(number, {"lr": 0.1}))
        go_on(ours[-1], steps)
    found = Together(recipe=Recipe(ways=[Native])).enter(*ours).step(14 - steps)
    state = found.fused.state(ours[1])
    Alone(trials, 1, {"lr": 0.1}, 14).assert_like(state, found.curve(ours[1]))
