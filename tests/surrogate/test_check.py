"""The coordinate check: slopes of the right factors, of the standard ones and of another family's."""

import pytest

from penstock.surrogate import check
from penstock.surrogate.check import STEEPEST, coordinates
from penstock.surrogate.parametrize import Part
from tests.surrogate.models import Narrowable, perceptron

WIDTHS = [1, 2, 4, 8, 16]


def steepest(kind, lr):
    task = Narrowable(lambda: perceptron(512))
    return max(abs(one.slope) for one in coordinates(task, {"optimizer": kind, "lr": lr}, WIDTHS, {}))


@pytest.mark.parametrize(("kind", "lr"), [("SGD", 0.1), ("Adam", 1e-3)])
def test_the_right_factors_change_activations_as_much_at_every_width(kind, lr, monkeypatch):
    monkeypatch.setattr(check, "MORE", check.SEEDS)
    assert steepest(kind, lr) <= 0.15
    other = {"SGD": "Adam", "Adam": "SGD"}[kind]
    rate = Part.rate
    monkeypatch.setattr(Part, "rate", lambda part, family: rate(part, other))
    assert steepest(kind, lr) > STEEPEST, "the factors of the other family"
    monkeypatch.setattr(Part, "rate", lambda part, family: 1.0)
    monkeypatch.setattr(Part, "init", property(lambda part: 1 / part.summed**0.5))
    assert steepest(kind, lr) > STEEPEST, "the standard parametrization"


def test_steps_are_small_enough_that_the_loss_falls(monkeypatch):
    """Where a step blows up, or a batch is learnt by one, nothing moves the layers below by what there is to see."""
    task = Narrowable(lambda: perceptron(256))

    def slopes():
        return [abs(one.slope) for one in coordinates(task, {"lr": 30.0}, WIDTHS[:4], {})]

    assert max(slopes()) <= 0.15
    monkeypatch.setattr(check, "TRIES", 1)
    assert max(slopes()) > STEEPEST
