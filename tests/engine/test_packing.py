"""Packs of a whole study: forced, chosen by measurement, refused, resumed, and retried apart after a death."""

import io
import itertools
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn

import penstock as ps
from penstock.bundle import Device, Placement
from penstock.engine.bundling import Bundling
from penstock.engine.clocking import Pace
from penstock.log.events import Measured, Placed
from penstock.log.timeline import packs, timeline
from penstock.report.summary import device_facts, history_of, study_facts
from penstock.report.tables import study_summary
from penstock.scheduling.base import Assignment, Demand
from tests.studies import log, studies
from tests.tasks import Blobs, trivial


class Widths(Blobs):
    """Trials of three signatures."""

    def model(self, config):
        return nn.Sequential(nn.Linear(6, config["width"]), nn.ReLU(), nn.Linear(config["width"], 2))


SPACE = {"lr": ps.loguniform(1e-2, 1), "width": ps.choice([3, 5, 8]), "batch_size": ps.choice([16, 30])}
study = studies(Widths, SPACE, trials=8, algorithm=ps.Random(budget=2, concurrency=8))


def _shown(facts):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(study_summary(facts))
    return console.export_text()


def modes(name="s"):
    return Counter(event.mode for event in log(name) if isinstance(event, Placed))


def curves(result):
    return [[row["loss"] for row in trial.curve] for trial in result.trials]


def test_packed_trials_find_what_they_find_alone():
    alone = study(name="alone").run(sharing="solo", progress=False)
    packed = study(name="packed").run(sharing="packed", progress=False)
    assert modes("packed") == {"packed": 8}
    for one, other in zip(curves(packed), curves(alone), strict=True):
        assert one == pytest.approx(other, rel=1e-3)
    rows = timeline(log("packed"))
    assert sorted(trial for bundle in packs(rows)["cpu"] for trial in bundle) == list(range(8))
    facts = {**study_facts(where := Path(".penstock") / "packed", history_of(where)), **device_facts(where)}
    assert "bundles at once on cpu: trials " in _shown(facts)
    assert min(row.end for row in rows) > max(row.start for row in rows), "all were on the device at once"


@pytest.mark.parametrize("packing", ["nearest", "random", "batch_size"])
def test_every_packing_trains_every_trial(packing):
    result = study().run(sharing="packed", packing=packing, progress=False)
    assert [len(trial.curve) for trial in result.trials] == [2] * 8


def test_a_similarity_of_nothing_leaves_trials_alone():
    study().run(sharing="packed", similarity=0, progress=False)
    rows = sorted(timeline(log()), key=lambda row: row.start)
    assert all(before.end <= after.start for before, after in itertools.pairwise(rows))


def test_functions_are_packed_too():
    task = studies(trivial, {"x": ps.uniform(0, 1)}, trials=5, algorithm=ps.Random(budget=1))
    task().run(sharing="packed", progress=False)
    assert modes() == {"packed": 5}


def test_a_packed_study_goes_on_in_another_mode_and_back():
    whole = study(name="whole", algorithm=ps.Random(budget=3)).run(sharing="solo", progress=False)
    parts = study(algorithm=ps.Random(budget=3), trials=3).run(sharing="packed", progress=False)
    for trials, sharing in ((5, "solo"), (8, "packed")):
        parts = study(algorithm=ps.Random(budget=3), trials=trials).run(sharing=sharing, progress=False)
    for one, other in zip(curves(parts), curves(whole), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def simulated(packs, **how):
    there = ps.Simulated(devices=1, packs=packs, unit_seconds=1.0)
    result = study().run(on=there, progress=False, **how)
    return result, [event for event in log() if isinstance(event, Measured) and event.kind == "packing"]


def test_where_packs_gain_auto_packs_as_many_bundles_as_pay():
    result, measured = simulated(3.0)
    assert measured[0].size == 3
    assert modes()["packed"] > 0
    assert [len(trial.curve) for trial in result.trials] == [2] * 8
    assert log()[-1].clock < 8, "units in turn take 16 seconds"


def test_where_packs_gain_nothing_auto_does_not_try():
    _, measured = simulated(1.0)
    assert not measured
    assert "packed" not in modes()


def test_where_a_pack_gains_nothing_its_bundles_stay_and_take_turns():
    result, measured = simulated(1.02)
    assert [event.size for event in measured] == [1]
    assert [len(trial.curve) for trial in result.trials] == [2] * 8
    assert all(trial.state == "finished" for trial in result.trials)
    assert Counter(event.trial for event in log() if isinstance(event, Placed)) == dict.fromkeys(range(8), 1)
    assert log()[-1].clock == pytest.approx(16 / 1.02)


def test_on_a_cpu_auto_packs_nothing():
    study().run(progress=False)
    assert "packed" not in modes()


def test_simulated_processes_share_a_device_as_real_ones_do():
    there = ps.Simulated(devices=1, processes=True, unit_seconds=1.0, curve=ps.Curve(sharing=(1.0,) * 8))
    result = study().run(on=there, sharing="processes", progress=False)
    assert modes() == {"processes": 8}
    assert [len(trial.curve) for trial in result.trials] == [2] * 8
    assert log()[-1].clock == 2, "all at once, in the time of one"
    assert not Path(".penstock/profiles.jsonl").exists(), "such seconds are not those of a trial alone"


@pytest.mark.parametrize("mode", ["packed", "processes"])
def test_the_trials_that_are_there_divide_their_device_equally(mode):
    there, pace = {"gpu 0": Device("gpu 0", "h200", 8)}, Pace()
    bundling = Bundling(lambda bundle: None, lambda: 0.0, pace, "s")
    pace.look(there)
    bundling.look(there)
    place = bundling.make(("gpu 0",), mode, "")
    for trial, share in ((0, 1.0), (1, 0.5)):
        one = Assignment(trial, place.devices, share, packed=True)
        bundling.enter(place, Demand(trial, "g", 1), Placement(trial, 1, {}, 1), one)
    assert {trial: one.share for trial, one in bundling.assigned.items()} == {0: 0.5, 1: 0.5}
    bundling.left(0)
    assert bundling.assigned[1].share == 1
