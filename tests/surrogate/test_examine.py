"""What a study's surrogates are like before anything is spent; and each refusal, in one message."""

import warnings

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.report.surrogate import surrogate_facts
from penstock.space import Space
from penstock.surrogate import check
from penstock.surrogate.examine import examine, refuse_wrong
from penstock.surrogate.parametrize import Part
from penstock.surrogate.task import narrowed
from penstock.surrogate.twin import by_layers
from tests.surrogate.models import Narrowable, perceptron
from tests.surrogate.test_trace import Branching, Written

SPACE = Space.of({"lr": ps.loguniform(1e-3, 1e-1)})


def look(task=None, space=SPACE, scale=4, **settings):
    return examine(task or Narrowable(), space, ps.Surrogate(scale=scale, **settings))


def test_a_table_that_is_broken_fails_the_check_by_more_trials(monkeypatch):
    """One that is steep by the luck of a few trials is looked at again, as a U-Net's squeeze layers were."""
    trials, changes = [], check._changes
    monkeypatch.setattr(check, "_changes", lambda *given: trials.append(given[-1]) or changes(*given))
    found = look()
    assert set(trials) == {check.SEEDS}
    assert (found.family, found.scale, found.wrong) == ("SGD", 4, [])
    assert found.bytes[1] < found.bytes[0] / 5
    refuse_wrong(found)
    monkeypatch.setattr(Part, "rate", lambda part, family: part.summed)
    with pytest.raises(ps.StudyError, match=r"fail the coordinate check: the change of \d goes with"):
        refuse_wrong(look())
    assert set(trials) == {check.SEEDS, check.MORE}


def test_a_twin_whose_activations_are_not_finite_fails_the_check(monkeypatch):
    monkeypatch.setattr(Part, "init", property(lambda part: float("nan")))
    assert {one.slope for one in look().slopes} == {float("inf")}


class Bare(nn.Module):
    """Layers of parameters in a list, which no module gives the activations of."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(p.detach().T for p in perceptron(64).parameters() if p.ndim > 1)

    def forward(self, x):
        for weight in self.layers[:-1]:
            x = torch.relu(x @ weight)
        return x @ self.layers[-1]


def test_a_check_that_sees_no_activation_is_not_passed(monkeypatch):
    assert [one.layer for one in look(Narrowable(Bare)).slopes] == [""]
    monkeypatch.setattr("penstock.surrogate.examine.coordinates", lambda *given, **named: [])
    found = look()
    assert not surrogate_facts(found)["right"]
    with pytest.raises(ps.StudyError, match="finds no activation of the model"):
        refuse_wrong(found)


class Frozen(Narrowable):
    def model(self, config):
        model = perceptron()
        model[0].weight.requires_grad_(False)
        return model


class Pretrained(Narrowable):
    def model(self, config):
        model = perceptron()
        nn.init.normal_(model[2].weight, generator=torch.Generator().manual_seed(5))
        return model


class Sized(Narrowable):
    def model(self, config):
        return perceptron(config["width"])


class Lazy(Narrowable):
    def model(self, config):
        return nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, 10))


class Failing(Narrowable):
    """Fails at learning rates above ``most``."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def loss(self, model, batch, config):
        if config["lr"] > self.most:
            raise RuntimeError("too fast")
        return super().loss(model, batch, config)


def test_a_config_that_fails_says_nothing_of_the_others():
    low = min(SPACE.draw(0, number)["lr"] for number in range(3))
    found = look(Failing(low))
    assert found.config == {"lr": low}
    with pytest.raises(ps.TaskError, match=r"failed in a dry batch of each of 4 configs.*\n(.*\n)*.*too fast"):
        look(Failing(0.0))


def OldNorm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(32, 64)), nn.ReLU(), nn.Linear(64, 10))


class Other(Narrowable):
    def optimizer(self, params, config):
        return torch.optim.Adadelta(params, lr=config["lr"])


class Sharded(Narrowable):
    shards = 2


class Hidden(nn.Module):
    """A number of the full width that no size is tied to before it runs."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(32, 64), nn.Linear(64, 10), {"width": torch.ones(64)}

    def forward(self, x):
        return self.last(torch.relu(self.first(x)) * self.kept["width"][: x.shape[0] * 64])


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Frozen(), "has frozen parameters, such as 0.weight"),
        (Pretrained(), "has pretrained parameters, such as 2.weight"),
        (Sized(), r"width of the space decides the size of 0.weight, \(\d+, 32\) or"),
        (Lazy(), "lazy modules"),
        (Other(), "got Adadelta"),
        (Narrowable(OldNorm), r"cannot be copied: .* by torch.nn.utils.parametrizations can"),
        (Narrowable(Branching), r"cannot be analysed \(.*test_trace.py:\d+\)"),
        (Narrowable(Written), r"No dimension of the model of Narrowable can shrink: .*test_trace.py:\d+"),
        (Narrowable(lambda: perceptron(16)), "makes 0.weight 4 units wide, .*: the largest scale that works is 2"),
        (Narrowable(lambda: perceptron(8)), "no scale works"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_each_model_without_surrogates_is_refused_in_one_message(task, said):
    space = SPACE if not isinstance(task, Sized) else Space.of({"lr": 0.1, "width": ps.choice([64, 128])})
    with pytest.raises((ps.TaskError, ps.StudyError), match=said):
        look(task, space)


@pytest.mark.parametrize(("given", "said"), [({"scale": 1}, "scale=.*from 2 on, got 1"), ({"scale": "8x"}, "'8x'"),
                                             ({"required": 1}, "required=")])  # fmt: skip
def test_settings_are_checked(given, said):
    with pytest.raises(ps.StudyError, match=said):
        ps.Surrogate(**given)


def test_a_narrow_of_the_users_own_is_parametrized_by_its_sizes():
    class Own(Narrowable):
        def narrow(self, config, scale):
            return perceptron(256 // scale)

    task = Own()
    roles = {name: part.role for name, part in look(task).parts.items()}
    assert list(roles.values()) == ["input", "input", "hidden", "input", "output", "fixed"]
    narrow = narrowed(task, ps.Surrogate(scale=4)).model({"lr": 0.1})
    own = {name: float(p.detach().std()) for name, p in perceptron().named_parameters()}
    wanted = {"0.weight": 1, "2.weight": 2, "4.weight": 4}
    for name, factor in wanted.items():
        assert float(dict(narrow.named_parameters())[name].detach().std()) == pytest.approx(factor * own[name], rel=0.1)


class Loose(Narrowable):
    """A model whose forward depends on values, which the task narrows by itself."""

    def __init__(self, width=64):
        super().__init__(lambda: Unsteady(width))
        self.width = width

    def narrow(self, config, scale):
        return Unsteady(self.width // scale)


class Unsteady(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = perceptron(width)

    def forward(self, x):
        return self.layers(x if x.sum() > 0 else -x)


def test_a_narrow_of_the_users_own_does_for_a_model_that_cannot_be_analysed():
    found = look(Loose())
    assert [part.role for part in found.parts.values()] == ["input", "input", "hidden", "input", "output", "fixed"]
    assert not found.wrong
    with pytest.raises(ps.StudyError, match=r"Surrogate\(scale=16\) makes layers.0.weight 4 units wide"):
        look(Loose(), scale=16)
    with pytest.raises(ps.TaskError, match=r"what layers.0 sums over is not known: hold it in one of torch's own"):
        by_layers(Bare())


class Decaying(nn.Module):
    """Decays that are the same for every channel, as a state space model begins with, are not pretrained."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 10)
        self.decays = nn.Parameter(torch.arange(1.0, 5.0).repeat(64, 1))

    def forward(self, x):
        return self.last((torch.relu(self.first(x))[..., None] * torch.exp(-self.decays)).sum(-1))


def test_values_that_are_the_same_for_every_unit_are_not_pretrained():
    assert look(Narrowable(Decaying)).parts["decays"].role == "input"
