"""The factors of the parametrization, against the published table and in closed form."""

import pytest
import torch

import penstock as ps
from penstock.surrogate.parametrize import Part, family
from penstock.surrogate.settings import Surrogate
from penstock.surrogate.task import narrowed
from penstock.surrogate.twin import Multiplied
from tests.surrogate.models import KINDS, Narrowable, Tied, draws


@pytest.mark.parametrize("m", [1 / 8, 1 / 3])
def test_the_factors_are_those_of_tensor_programs_v(m):
    """Its table 3: variances and learning rates by fan-in and fan-out, each by the target's; Adam's beside SGD's."""
    input, hidden, output = Part("input", 1, m), Part("hidden", m, m), Part("output", m, 1)
    assert [one.init**2 for one in (input, hidden, output)] == pytest.approx([1, 1 / m, 1 / m**2])
    assert [one.rate("SGD") for one in (input, hidden, output)] == pytest.approx([m, 1, 1 / m])
    assert [one.rate("Adam") for one in (input, hidden, output)] == pytest.approx([1, 1 / m, 1 / m])
    tied, fixed = Part("tied", m, 1), Part("fixed", 1, 1)
    assert (tied.init, tied.rate("SGD"), tied.rate("Adam"), tied.multiplier) == (1, m, 1, 1 / m)  # as an input's
    assert [one.factor("Adam").eps for one in (input, hidden, output)] == pytest.approx([1 / m, 1 / m, 1])
    assert {one.factor("SGD").eps for one in (input, hidden, output)} == {1}
    assert (fixed.init, fixed.rate("SGD"), fixed.rate("Adam"), fixed.multiplier) == (1, 1, 1, 1)


def test_optimizers_are_of_two_families_and_others_are_refused():
    p = [torch.zeros(2, requires_grad=True)]
    assert {name: family(kind(p)) for name, kind in KINDS.items() if name != "LBFGS"} == {
        "SGD": "SGD", **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop"), "Adam")
    }  # fmt: skip
    for other in (torch.optim.LBFGS(p), torch.optim.Adadelta(p), type("Own", (torch.optim.SGD,), {})(p)):
        with pytest.raises(ps.TaskError, match=f"got {type(other).__name__}"):
            family(other)


def test_initial_values_are_the_users_own_rescaled():
    task = Narrowable()
    torch.manual_seed(3)
    target = task.model({})
    torch.manual_seed(3)
    narrow = narrowed(task, Surrogate(scale=4)).model({})
    for layer, factor in ((0, 1.0), (2, 2.0), (4, 0.0)):  # the last layer begins with zeros
        of_target = target[layer].weight[slice(None, None, 4 if layer < 4 else None), :: 4 if layer else None]
        assert torch.equal(narrow[layer].weight, factor * of_target)
        assert torch.equal(narrow[layer].bias, target[layer].bias[:: 4 if layer < 4 else 1])


def test_the_output_of_a_tied_table_is_multiplied():
    class Texts(Narrowable):
        def data(self, config):
            rows = torch.arange(96).view(8, 12) % 33, torch.arange(96).view(8, 12) % 33
            return rows, rows

        def loss(self, model, batch, config):
            return torch.nn.functional.cross_entropy(model(batch[0]), batch[1].flatten())

    narrow = narrowed(Texts(Tied), Surrogate(scale=2)).model({})
    (hook,) = narrow.head._forward_pre_hooks.values()
    assert isinstance(hook, Multiplied)
    assert hook.by == 2
    x = draws(4, 32)
    torch.testing.assert_close(narrow.head(x), 2 * x @ narrow.table.weight.T + narrow.head.bias)


class Scalar(Narrowable):
    """Hydro's equations 2 and 3: f(x) = VᵀUx, with scalar input and output and a loss that is linear in f."""

    batch_size = 1

    def __init__(self, width):
        self.width = width

    def data(self, config):
        one = (torch.ones(4, 1),)
        return one, one

    def model(self, config):
        made = torch.nn.Sequential(
            torch.nn.Linear(1, self.width, bias=False), torch.nn.Linear(self.width, 1, bias=False)
        )
        torch.nn.init.normal_(made[0].weight, std=1.0)
        torch.nn.init.normal_(made[1].weight, std=self.width**-0.5)
        return made

    def loss(self, model, batch, config):
        return model(batch[0]).sum()


def change(task):
    """How far one step of SGD with learning rate 1 takes f(1)."""
    from penstock.training.loop import Training
    from tests.training.together import CPU, Trials

    training = Training(task, 0, {"lr": 1.0}, Trials(task).cache.get({"lr": 1.0}), seed=0, device=CPU, metric="loss",
                        mode="min")  # fmt: skip
    x = torch.ones(1, 1)
    before = training.model(x).item()
    training.train_step((x,))
    return abs(training.model(x).item() - before)


def test_after_a_step_the_output_has_moved_as_far_at_every_width():
    """By eq. 2, the standard parametrization's blows up with w; by eq. 3, this one's is as large as the target's."""
    target = change(Scalar(4096))
    assert target > 2000
    standard = [change(Scalar(4096 // scale)) for scale in (4, 16)]
    assert standard == pytest.approx([target / 4, target / 16], rel=0.3)
    ours = [change(narrowed(Scalar(4096), Surrogate(scale=scale))) for scale in (4, 16)]
    assert ours == pytest.approx([target, target], rel=0.2)
