"""Whether whole studies try to fuse: only where their steps repay the attempt."""

import json
from pathlib import Path

import pytest
import torch.nn.functional as F

import penstock as ps
from penstock.executors.local import LocalExecutor
from penstock.log import events
from penstock.training.fused.measuring import Measuring
from tests.studies import log, studies
from tests.tasks import Blobs
from tests.training.recorded import accelerate

study = studies(Blobs, {"lr": ps.loguniform(1e-3, 0.5)}, algorithm=ps.Random(budget=3), trials=6)


@pytest.fixture(autouse=True)
def _steps_take_a_second(monkeypatch):
    """Whatever a step takes, it is said to take a second for any number of trials: fusing pays."""
    took = Measuring.took
    monkeypatch.setattr(Measuring, "took", lambda self, size, _, bytes: took(self, size, 1.0, bytes))


def run(name="s", sharing="auto", **settings):
    return study(name=name, **settings).run(progress=False, sharing=sharing)


def modes(name="s"):
    return [event.mode for event in log(name) if isinstance(event, events.Placed)]


def said(name="s"):
    return [event for event in log(name) if isinstance(event, events.Measured)]


def kept():
    """The tables that the next study finds, by kind."""
    lines = map(json.loads, Path(".penstock/profiles.jsonl").read_text().splitlines())
    return {line["kind"]: line["table"] for line in lines}


def test_a_short_study_trains_solo_and_its_log_says_why():
    found = run()
    assert modes() == ["solo"] * 6
    (line,) = said()
    assert (line.size, line.way, line.table) == (1, "solo", {})
    assert line.reason == "108 steps of 6 trials do not repay an attempt to fuse before 1600"
    assert "sharing" not in kept()
    alone = run("alone", "solo")
    assert not said("alone")
    assert [trial.curve for trial in found.trials] == [trial.curve for trial in alone.trials], "to the bit"


class Smoothed(Blobs):
    """Each trial has a label smoothing of its own."""

    def loss(self, model, batch, config):
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=config["smoothing"])


def test_trials_with_numbers_of_their_own_are_captured_together_from_their_first_steps(monkeypatch):
    accelerate(monkeypatch, reading=False)
    space = {"lr": ps.loguniform(1e-3, 0.5), "smoothing": ps.uniform(0, 0.2)}
    made = studies(Smoothed, space, algorithm=ps.Random(budget=50), trials=6)
    made().run(progress=False, sharing="auto")
    assert modes() == ["fused"] * 6
    (line,) = said()
    assert line.size == 512
    assert line.reason == "6 trials together train at 6000 steps/s, 6.0 times those of one alone (native, captured)"


def test_a_long_study_is_fused():
    run(trials=8, algorithm=ps.Random(budget=34))
    assert modes() == ["fused"] * 8
    assert [line.size for line in said()] == [512]


def test_a_study_that_grows_long_enough_is_fused_from_then_on():
    run(trials=108, algorithm=ps.SuccessiveHalving(max_budget=27))
    assert modes()[:156] == ["solo"] * 156, "1512 steps: 108 trials of a unit, 36 of 3 and 12 of 9"
    assert modes()[156:] == ["fused"] * 4, "432 more, as 4 of them get 27 units"


def test_what_an_earlier_study_measured_lets_a_shorter_one_fuse():
    run("long", trials=8, algorithm=ps.Random(budget=34))
    assert kept()["trying"] == {"0": 0.0, "1": 1.0}
    run("short")
    assert modes("short") == ["fused"] * 6


@pytest.mark.parametrize("settings", [{"sharing": "fused"}, {"deterministic": True}])
def test_a_mode_that_is_asked_for_is_taken_however_short_the_study(settings):
    study(name="s").run(progress=False, **settings)
    assert modes() == ["fused"] * 6


def test_trials_that_are_alone_in_their_signature_are_not_told_to_be_too_short(monkeypatch):
    described = LocalExecutor.describe

    def each_its_own(self, configs, *, train, trials=(), study=""):
        made = described(self, configs, train=train, trials=trials, study=study)
        return made if train else [type(one)(one.metrics, one.bytes, f"{n}", steps=6) for n, one in enumerate(made)]

    monkeypatch.setattr(LocalExecutor, "describe", each_its_own)
    with pytest.warns(ps.SoloWarning, match="signature of its own"):
        run()
    assert {line.signature for line in said()} == {events.SOLO}
