"""A surrogate on several devices is the surrogate on one: factors go by the names of parameters."""

import pytest

import penstock as ps
from penstock.log.events import Placed
from penstock.surrogate.task import narrowed
from tests.studies import log, studies
from tests.surrogate.models import Doubles, perceptron
from tests.training.together import Trials


class Small(Doubles):
    def __init__(self):
        super().__init__(lambda: perceptron(64))


study = studies(Small, {"lr": ps.loguniform(1e-2, 1e-1), "optimizer": "Adam"}, surrogate=ps.Surrogate(scale=4, best=1))


def test_on_several_workers():
    result = study(trials=1).run(workers=2, sharing="distributed", progress=False)
    spread = {event.variant for event in log() if isinstance(event, Placed) and event.mode == "distributed"}
    assert "surrogate 4" in spread
    (trial,) = result.surrogate.trials
    _, curve = Trials(narrowed(Small(), ps.Surrogate(scale=4))).alone(trial.number, trial.config, 6)
    assert [row["loss"] for row in trial.curve] == pytest.approx([row["loss"] for row in curve], abs=1e-9)
