"""Simulated clusters of devices like this machine's, with what was measured here."""

from pathlib import Path

import pytest

import penstock as ps
from penstock.bundle import Job
from penstock.cli.rehearse import one_of, rehearsal
from penstock.engine.clocking import device_kind
from penstock.log.events import Measured, Placed
from penstock.log.reader import read
from penstock.speed.curve import Curve, measured
from penstock.speed.profiles import Profile, Profiles
from penstock.speed.sizes import best_size
from penstock.task import fingerprint
from penstock.training.worker import Worker
from tests.studies import studies
from tests.tasks import Blobs, trivial

HERE = one_of(3)
SECONDS = {1: 1.0, 2: 1.1, 4: 1.2, 8: 4.0}


study = studies(Blobs, {"lr": ps.loguniform(1e-2, 1)}, trials=40)


def signature(task):
    return Worker(Job(task, 0, "loss", "min", Path("states")), HERE.name).describe({"lr": 0.1}, train=False).signature


def keep(task="", device="", of="a", seconds=SECONDS, scaling=None):
    """Put a profile where real runs do."""
    profiles = Profiles.open(Path(".penstock/profiles.jsonl"))
    key = (task or fingerprint(Blobs()), device or device_kind(HERE))
    profiles.put(Profile(*key, of, "sharing", seconds, best_size(seconds, 4), "native", "so"))
    if scaling is not None:
        profiles.put(Profile(*key, of, "scaling", scaling, max(scaling), "distributed", "so"))


def test_where_nothing_was_measured_nothing_is_shared():
    cluster, said = rehearsal(study(), 3)
    assert (cluster.curves, cluster.curve, len(cluster.cluster())) == ({}, Curve(), 3)
    assert {device_kind(device) for device in cluster.cluster()} == {device_kind(HERE)}
    assert said == (
        "Simulated: .penstock/profiles.jsonl has nothing that was measured of this task on this machine's "
        f"{HERE.type}, so no device is shared and no trial has several. To measure it, run the study here first, "
        "without --on simulated."
    )


def test_what_was_measured_of_another_task_or_elsewhere_is_not_taken():
    keep(task="another")
    keep(device="an h200")
    keep(device=device_kind(ps.Simulated(1, memory=HERE.memory).cluster()[0]))
    cluster, said = rehearsal(study(), 3)
    assert not cluster.curves
    assert "nothing that was measured" in said


def test_each_signature_has_the_curve_that_was_measured_last():
    keep(of="a", seconds={1: 1.0, 2: 1.0})
    keep(of="a")
    keep(of="b", seconds={1: 2.0, 2: 8.0}, scaling={1: 2.0, 2: 1.2})
    cluster, said = rehearsal(study(), 3)
    assert cluster.curves.keys() == {("a", HERE.type), ("b", HERE.type)}
    assert cluster.curves["a", HERE.type].sharing == measured(SECONDS, {})[0].sharing
    assert cluster.curves["b", HERE.type].sharing == (1.0,)
    assert cluster.curves["b", HERE.type].scaling == (1.0, 0.6)
    assert cluster.cluster()[0].memory == HERE.memory
    assert said == (
        f"Simulated: as .penstock/profiles.jsonl has it of 2 kinds of trial on this machine's {HERE.type}, up to 4 "
        "trials share a device and a trial has up to 2 devices."
    )


def test_one_of_a_thing_is_said_as_one():
    keep(seconds={1: 1.0, 2: 9.0})
    assert "1 kind of trial on" in rehearsal(study(), 3)[1]
    assert rehearsal(study(), 3)[1].endswith("up to 1 trial share a device and a trial has up to 1 device.")


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (trivial, "of a function nothing is measured, so no device is shared and no trial has several."),
        (ps.TabulatedTask(lambda config: ps.Tabulated({"loss": [1.0]}, 1)), "as their tables' own curves say"),
    ],
    ids=["function", "table"],
)
def test_what_is_not_measured_is_said(task, said):
    assert said in rehearsal(study(task), 3)[1]


def test_trials_share_there_as_was_measured_here():
    keep(of=signature(Blobs()))
    before = Path(".penstock/profiles.jsonl").read_bytes()
    cluster, _ = rehearsal(study(), 3)
    result = study().run(on=cluster, progress=False)
    events = list(read(result.dir / "log.jsonl"))
    assert min(event.share for event in events if isinstance(event, Placed)) == 0.25
    told = [event for event in events if isinstance(event, Measured) and event.kind == "sharing"]
    assert told == [], "it is known, as it would be here"
    assert Path(".penstock/profiles.jsonl").read_bytes() == before, "what was really measured stays as it was"


def test_a_rehearsal_takes_the_time_that_was_measured():
    keep(of=signature(Blobs()))
    profiles = Profiles.open(Path(".penstock/profiles.jsonl"))
    key = (fingerprint(Blobs()), device_kind(HERE))
    profiles.put(Profile(*key, signature(Blobs()), "unit", {1: 10.0}))
    profiles.put(Profile(*key, signature(Blobs()), "moving", {0: 2.0, 1: 1.0}))
    profiles.put(Profile(*key, "", "opening", {0: 100.0}))
    cluster, _ = rehearsal(study(), 3)
    assert (cluster.start, cluster.stop, cluster.opening) == (2.0, 1.0, 100.0)
    result = study(trials=3, algorithm=ps.Random(budget=2)).run(on=cluster, sharing="solo", progress=False)
    assert list(read(result.dir / "log.jsonl"))[-1].clock == pytest.approx(100 + 2 + 2 * 10)
