"""Surrogates with fewer blocks, rows and pixels: what they see, which models have them, and which are admitted."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import penstock as ps
from penstock.algorithms import transfer
from penstock.log.events import Asked, Measured, Opened, Placed
from penstock.space import Space
from penstock.surrogate.examine import examine
from penstock.surrogate.reduce import reduced, shallower
from penstock.surrogate.task import narrowed, task_of
from penstock.training.check import describe
from penstock.trial import variant_of
from tests.studies import log, studies
from tests.surrogate.models import Narrowable, draws, perceptron
from tests.training.together import Trials


class Block(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.place, self.rate = place, 0.1 * place
        self.inner = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())

    def forward(self, x):
        return x + self.inner(x)


class Net(nn.Module):
    """Four equal blocks, and any number of pixels; or as many as a linear layer has inputs for."""

    def __init__(self, pixels=None):
        super().__init__()
        self.first = nn.Conv2d(2, 64, 1)
        self.blocks = nn.ModuleList(Block(place) for place in range(4))
        self.last = nn.Linear(64 * (pixels or 1), 10)
        self.pixels = pixels

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x.flatten(1) if self.pixels else x.mean((2, 3)))


class Images(Narrowable):
    def __init__(self, make=Net):
        super().__init__(make)

    def data(self, config):
        x = draws(96, 2, 4, 4)
        return (x, x.mean((2, 3)).argmax(1)), (x[:32], x[:32].mean((2, 3)).argmax(1))


class Wide(Narrowable):
    def __init__(self):
        super().__init__(lambda: perceptron(128, layers=3))


SPACE = {"lr": ps.loguniform(1e-3, 0.1)}
FEWER = ps.Surrogate(scale=8, best=2, depth=2, data=0.5, resolution=0.5)
study = studies(Images, SPACE, algorithm=ps.Random(budget=1), trials=16, surrogate=FEWER)
REDUCED = variant_of(8, reduced=True)


def test_a_surrogate_has_fewer_blocks_rows_and_pixels_and_the_rows_of_the_others(monkeypatch, long_enough):
    monkeypatch.setattr(transfer, "ASSUMED", -1.0)  # any order is good enough
    made = study(keep=40)
    result = made.run(progress=False, sharing="fused")
    events = log()
    (settings,) = [event.settings["surrogate"] for event in events if isinstance(event, Opened)]
    assert settings["admissible"]
    assert {event.variant for event in events if isinstance(event, Asked)} == {REDUCED, "surrogate 4", ""}
    assert {event.mode for event in events if isinstance(event, Placed) and event.variant == REDUCED} == {"fused"}
    assert len({event.signature for event in events if isinstance(event, Measured) and event.size > 1}) == 3
    task = task_of(Images(), FEWER, REDUCED)
    for trial in (trial for trial in result.surrogate.trials if trial.scale == 8):
        trained, curve = Trials(task).alone(trial.number, trial.config, 2)
        assert trained.data.train.length == 48, "two steps are a unit"
        assert next(iter(trained.data.train.batches(0, 0, 32)))[0].shape == (32, 2, 2, 2)
        assert len(trained.model.blocks) == 2
        assert trial.metrics["loss"] == pytest.approx(curve[0]["loss"], abs=1e-5)
    assert len(result.best.model().blocks) == 4
    best = next(trial for trial in result.surrogate.kept if trial.scale == 8)
    model, (_, (x, y)) = best.model(), task.data({})
    assert len(model.blocks) == 2
    assert float(F.cross_entropy(model(x), y).detach()) == pytest.approx(best.metrics["loss"], abs=1e-5)
    with pytest.raises(ps.StudyError, match=r"exists with surrogate=.*data=0.5.* got surrogate=.*data=0.25"):
        study(surrogate=ps.Surrogate(scale=8, best=2, depth=2, data=0.25, resolution=0.5)).run(progress=False)


def test_where_the_rank_check_does_not_admit_that_surrogates_are_narrower_alone(monkeypatch):
    monkeypatch.setattr(transfer, "ASSUMED", 1.1)  # no order is good enough
    monkeypatch.setattr(transfer, "LEAST", -1.0)
    made = study(Wide(), trials=40, surrogate=ps.Surrogate(scale=8, best=2, data=0.5))
    result = made.run(progress=False, sharing="solo")
    searched = [event.variant for event in log() if isinstance(event, Asked) and event.group == "random"]
    assert searched == [REDUCED] * 40 + ["surrogate 8"] * 40
    said = "8 times narrower and with fewer rows foretold too little: begun again 8 times narrower alone"
    assert result.surrogate.fallback == said
    assert result.surrogate.rank.startswith("the order of ")
    with pytest.warns(UserWarning, match="Only a rank check can admit the fewer rows .* none is cheap enough for 4"):
        few = made.replace(name="few", trials=4).run(progress=False, sharing="solo")
    assert {trial.scale for trial in few.surrogate.trials} == {8}
    assert not [event for event in log("few") if isinstance(event, Asked) and event.variant == REDUCED]


def test_rows_are_keyed_by_the_seed_alone_and_pixels_are_means_in_every_kind_of_data():
    x, y = draws(20, 3, 4, 4), torch.arange(20)
    half = ps.Surrogate(data=0.5, resolution=0.5)
    (a, b), (valid, _) = reduced(((x, y), (x, y)), half, 7)
    assert torch.equal(a, torch.nn.functional.avg_pool2d(x, 2)[b])
    assert len(set(b.tolist())) == 10
    assert len(valid) == 20, "validation keeps its rows"
    named, _ = reduced(({"x": x, "y": y}, None), half, 7)
    assert torch.equal(named["x"], a)
    listed, _ = reduced((TensorDataset(x, y), TensorDataset(x, y)), half, 7)
    assert all(torch.equal(listed[i][0], a[i]) and listed[i][1] == b[i] for i in range(10))
    assert not torch.equal(reduced(((x, y), (x, y)), half, 8)[0][1], b)
    whole = (x * 9).round().to(torch.uint8)
    assert reduced((whole, whole), half, 7)[1].dtype == torch.uint8


def test_equal_blocks_are_those_whose_sizes_are_and_a_number_that_is_their_place_may_differ():
    model = Net()
    assert shallower(model, 3) == (4, 2)
    assert [(name, block.place) for name, block in model.blocks.named_children()] == [("0", 0), ("1", 3)]
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Tanh()))
    model[1].stride = 2
    assert shallower(model, 2) == (0, 0)


@pytest.mark.parametrize(
    ("task", "settings", "said"),
    [
        (Narrowable(), {"depth": 2}, "needs equal blocks .* has no two that follow each other: leave depth= out"),
        (Narrowable(), {"resolution": 0.5}, "needs images, .* Narrowable.data has none: leave resolution= out"),
        (
            Images(lambda: Net(16)),
            {"resolution": 0.5},
            r"resolution=0.5\) does not go with Images: .*Leave resolution=",
        ),
        (Narrowable(), {"data": 0.1}, r"data=0.1\) does not go with Narrowable: The batch size .* is 32, above its 10"),
    ],
)
def test_what_a_task_has_none_of_or_does_not_take_is_refused(task, settings, said):
    with pytest.raises(ps.StudyError, match=said):
        examine(task, Space.of(SPACE), ps.Surrogate(scale=4, **settings))


@pytest.mark.parametrize("given", [{"depth": 0}, {"depth": 1.5}, {"data": 0}, {"data": 1.1}, {"resolution": "half"}])
def test_settings_are_checked(given):
    with pytest.raises(ps.StudyError, match=rf"Surrogate\({next(iter(given))}=\) must be"):
        ps.Surrogate(**given)


def test_a_narrow_of_the_users_own_has_fewer_blocks_too():
    class Own(Images):
        def narrow(self, config, scale):
            model = Net()
            model.last = nn.Linear(64, 10)
            return model

    model = narrowed(Own(), ps.Surrogate(scale=4, depth=2)).model({"lr": 0.1})
    assert len(model.blocks) == 2


def test_trials_of_other_rows_are_never_fused():
    tasks = [narrowed(Narrowable(), ps.Surrogate(scale=4, data=part)) for part in (1.0, 0.5, 0.4)]
    signatures = {describe(Trials(task).make(0, {"lr": 0.1}), [], train=False).signature for task in tasks}
    assert None not in signatures
    assert len(signatures) == 3
