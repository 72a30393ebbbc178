"""Studies on simulated devices count joules, end at their energy, and repeat."""

import pytest

import penstock as ps
from penstock.log.events import Limited, Metered, Opened, Stopped
from penstock.log.history import History
from tests.studies import log, studies

HOUR = 3600


def table(config):
    return ps.Tabulated({"loss": [config["x"] / unit for unit in range(1, 9)]}, seconds=HOUR)


study = studies(
    ps.TabulatedTask(table), {"x": ps.uniform(0, 1)}, trials=16, algorithm=ps.ASHA(max_budget=8, reduction=2)
)
CLUSTER = ps.Simulated(devices=4, per_node=2, watts=500, idle_watts=100, stop=10.0)


def run(on=CLUSTER, **changes):
    return study(**changes).run(on, progress=False)


def test_trials_and_idle_devices_add_up_to_watts_by_seconds():
    result = run()
    used = [trial.joules for trial in result.trials]
    seconds = [trial.device_seconds for trial in result.trials]
    assert used == pytest.approx([500 * one for one in seconds])
    idle = 4 * result.seconds - sum(seconds)
    assert result._history.meters.idle == pytest.approx(100 * idle)
    assert result.joules == pytest.approx(sum(used) + 100 * idle)


def test_a_study_ends_at_its_energy_and_goes_on_with_more():
    whole = run(name="whole").joules
    limited = run(max_energy=f"{whole / 2 / 3.6e6}kWh")
    assert limited.ended == "energy"
    assert whole / 2 <= limited.joules < whole / 2 + 4 * 500 * HOUR
    assert all(event.usage.joules >= 0 for event in log() if isinstance(event, Stopped))
    again = run(max_energy=2 * whole)
    assert again.ended == "done"
    assert again.joules > limited.joules


def test_equal_studies_have_equal_joules_and_replay_repeats_them():
    first, second = (run(dir=dir) for dir in ("a", "b"))
    assert [t.joules for t in first.trials] == [t.joules for t in second.trials]
    assert History.of(log(dir="a")).joules == first.joules


def test_what_is_lost_with_a_device_is_charged():
    lost = ps.Simulated(devices=2, watts=500, losses=[(1.5 * HOUR, "node 0/device 1")])
    result = run(lost, algorithm=ps.Random(budget=8), trials=2)
    assert result.joules == pytest.approx(500 * HOUR * (8 + 1.5 + 8)), "a unit and a half are trained again"


@pytest.mark.parametrize(("objective", "limit"), [("time", 700.0), ("energy", 300.0), (0.4, 500.0)])
@pytest.mark.parametrize("power", ["observe", "limit"])
def test_the_limit_of_least_cost_is_observed_or_set(objective, limit, power):
    limits = {700: (650, 1.0), 500: (480, 1.1), 300: (290, 1.6)}
    result = study(objective=objective, algorithm=ps.Random(budget=8), trials=1).run(
        ps.Simulated(devices=1, limits=limits), progress=False, power=power
    )
    (found,) = [event for event in log() if isinstance(event, Limited)]
    assert (found.limit, found.set) == (limit, power == "limit")
    watts, slower = limits[limit] if power == "limit" else limits[700]
    assert result.seconds == pytest.approx(8 * HOUR * slower)
    assert result.joules == pytest.approx(8 * HOUR * slower * watts)


def test_without_watts_nothing_is_counted_and_an_energy_is_refused():
    result = run(ps.Simulated(devices=1))
    assert result.joules is None
    assert not [event for event in log() if isinstance(event, Metered)]
    assert next(event for event in log() if isinstance(event, Opened)).settings["log"] == 4
    with pytest.raises(ps.StudyError, match=r"max_energy= needs a device whose joules are metered, and simulated"):
        run(ps.Simulated(devices=1), name="refused", max_energy="2kWh")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"objective": 1.5}, r"objective must be a number from 0 to 1, got 1.5"),
        ({"objective": "fast"}, r'objective must be "time", "energy" or a number'),
        ({"max_energy": "2 kilowatts"}, r"max_energy must be a finite number of joules"),
        ({"max_energy": 0}, r"max_energy must be a finite number of joules"),
    ],
)
def test_a_study_refuses_what_is_no_energy(given, said):
    with pytest.raises(ps.StudyError, match=said):
        study(**given)


def test_a_run_refuses_what_is_no_power():
    with pytest.raises(ps.StudyError, match=r'power must be "observe" or "limit", got \'max\''):
        study().run(CLUSTER, power="max")
    with pytest.raises(ps.StudyError, match="dict of"):
        ps.Simulated(devices=1, limits={700: 650})
    with pytest.raises(ps.StudyError, match="watts"):
        ps.Simulated(devices=1, watts=-1)
