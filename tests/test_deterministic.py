"""``deterministic=True``: one seed gives one log, whatever was measured here or before."""

from pathlib import Path

import pytest

import penstock as ps
from penstock.bundle import Bundle, Job
from penstock.engine.clocking import Shelf
from penstock.executors.local import find_devices
from penstock.log.events import Asked, Dropped, Measured, Placed, Reported, Stopped
from penstock.speed.profiles import Profiles
from penstock.speed.sizes import FIXED_SIZE
from penstock.task import fingerprint
from penstock.training.fused.measuring import Measuring
from penstock.training.worker import Worker
from tests.studies import log, studies
from tests.tasks import Blobs

SPACE = {"lr": ps.loguniform(1e-3, 1), "momentum": ps.uniform(0, 0.9)}
study = studies(Blobs, SPACE, algorithm=ps.ASHA(max_budget=4, reduction=2), trials=24)


def decisions(dir):
    """All that happened but for its times: decisions, placements, and reports with their metrics."""
    story = []
    for event in log(dir=dir):
        if isinstance(event, Asked | Dropped):
            story.append(event)
        elif isinstance(event, Placed | Stopped):
            story.append((type(event), event.trial, event.attempt, getattr(event, "mode", "")))
        elif isinstance(event, Reported):
            story.append((event.trial, event.unit, event.metrics))
    return story


@pytest.fixture
def measured(monkeypatch):
    """Lets bundles measure the size given, however fast this machine is."""

    def size(size):
        monkeypatch.setattr(Measuring, "size", property(lambda self: size))

    return size


def test_other_measurements_change_nothing(measured):
    measured(2)
    first = study(dir="one").run(progress=False, deterministic=True)
    measured(8)
    second = study(dir="two").run(progress=False, deterministic=True)
    assert decisions("one") == decisions("two")
    assert (first.best.number, first.best.metrics) == (second.best.number, second.best.metrics)
    assert {e.mode for e in log(dir="one") if isinstance(e, Placed)} == {"fused"}
    assert {e.size for e in log(dir="one") if isinstance(e, Measured)} == {FIXED_SIZE}
    assert not any(e.table for e in log(dir="one") if isinstance(e, Measured))


@pytest.mark.usefixtures("long_enough")
def test_without_it_they_do(measured):
    measured(2)
    study(dir="one").run(progress=False)
    measured(8)
    study(dir="two").run(progress=False)
    assert decisions("one") != decisions("two")


def test_profiles_of_an_earlier_study_are_neither_read_nor_written():
    study(dir="one").run(progress=False, deterministic=True)
    assert not Profiles.open("one/profiles.jsonl").of(fingerprint(Blobs()), "")
    (signature,) = {e.signature for e in log(dir="one") if isinstance(e, Measured)}
    Shelf(Profiles.open("two/profiles.jsonl"), fingerprint(Blobs())).measured(
        Measured(signature, "cpu", "sharing", {1: 1.0, 2: 1.0, 4: 4.0}, 2, "two pay", "native"), find_devices()[0]
    )
    before = Path("two/profiles.jsonl").read_bytes()
    study(dir="two").run(progress=False, deterministic=True)
    assert decisions("one") == decisions("two")
    assert Path("two/profiles.jsonl").read_bytes() == before


def test_no_step_is_compiled():
    for wanted in (True, False):
        worker = Worker(Job(Blobs(), 0, "loss", "min", "states", deterministic=wanted), "cpu")
        recipe = worker.recipe(Bundle("bundle 1", ("cpu",), (), "fused", "like"))
        assert (recipe.compilable, recipe.capturable) == (not wanted, not wanted)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"workers": 2}, "needs one worker.*leave workers= out"),
        ({"on": "ray"}, "needs one worker.*leave on= out"),
        ({"sharing": "distributed"}, "measures nothing"),
        ({"on": ps.Simulated(devices=2)}, "unit_seconds"),
    ],
)
def test_runs_that_cannot_repeat_are_refused(how, said):
    with pytest.raises(ps.StudyError, match=said):
        study().run(progress=False, deterministic=True, **how)
    with pytest.raises(ps.StudyError, match="deterministic must be True or False, got 1"):
        study().run(progress=False, deterministic=1)
