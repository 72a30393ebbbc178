"""Bundle sizes, widths and devices by their cost in time and energy."""

from pathlib import Path

import pytest

import penstock as ps
from penstock.engine.costing import Costs
from penstock.log.events import Placed
from penstock.speed.curve import Curve
from penstock.speed.profiles import Profile, Profiles
from penstock.trial import Usage
from tests.studies import log, studies

TIMES = {1: 1.0, 2: 1.2, 4: 1.6, 8: 2.8}


def test_with_time_alone_nothing_changes():
    costs = Costs(0.0)
    costs.recall("mlp", "H200", {0: 700.0, 1: 100.0, 8: 700.0})
    assert costs.size("mlp", "H200", TIMES, 8) == 8
    assert costs.spread("mlp", "H200", {1: 1.0, 2: 0.6}) == {1: 1.0, 2: 0.6}
    assert costs.on("H200") == 1.0


@pytest.mark.parametrize(("eta", "size"), [(0.0, 8), (0.1, 8), (1.0, 1)])
def test_a_bundle_is_as_large_as_costs_least(eta, size):
    """At eight trials the device draws six times as much, for less than three times the work."""
    costs = Costs(eta)
    for count, watts in ((1, 100.0), (8, 600.0)):
        costs.observed("mlp", "H200", count, Usage(10.0, joules=10 * watts))
    costs.metered("H200", 700.0)
    assert costs.size("mlp", "H200", TIMES, 8) == size
    assert costs.joules("mlp", "H200") == {1: 1000.0, 8: 6000.0}
    assert costs.watts("mlp", "H200") == {0: 700.0, 1: 100.0, 8: 600.0}


def test_several_devices_pay_for_all_their_joules():
    costs = Costs(1.0)
    costs.recall("mlp", "H200", {0: 700.0, 1: 350.0})
    assert costs.spread("mlp", "H200", {1: 1.0, 2: 0.6}) == {1: 0.5, 2: 0.6}


def test_what_a_study_learns_of_power_decides_the_bundles_of_the_next():
    task = ps.TabulatedTask(lambda config: ps.Tabulated({"loss": [1.0] * 2}, seconds=60))
    study = studies(task, {"x": ps.uniform(0, 1)}, trials=8)
    cluster = ps.Simulated(devices=1, watts=500, curve=Curve((1.0, 1.2, 1.4, 1.6, 1.9, 2.2, 2.5, 2.8)))
    study(name="first", objective="energy").run(cluster, progress=False)
    first = [event.mode for event in log("first") if isinstance(event, Placed)]
    assert set(first) == {"fused"}
    (known,) = [one for one in Profiles.open(".penstock/profiles.jsonl")._known.values() if one.kind == "watts"]
    assert known.table[8] == pytest.approx(500)
    text = Path(".penstock/profiles.jsonl")
    profiles = Profiles.open(text)
    profiles.put(Profile(known.task, known.device, known.signature, "watts", {0: 500.0, 1: 50.0, 8: 500.0}))
    study(name="second", objective="energy").run(cluster, progress=False)
    study(name="third", objective="time").run(cluster, progress=False)
    modes = {name: {event.mode for event in log(name) if isinstance(event, Placed)} for name in ("second", "third")}
    assert modes == {"second": {"solo"}, "third": {"fused"}}
