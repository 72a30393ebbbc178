"""The energy of a study, as people are shown it."""

import json

import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock.cli.app import app
from penstock.log.history import History, TrialRecord
from penstock.report.energy import energy_facts, front, picture, said
from tests.studies import log, studies

study = studies(
    ps.TabulatedTask(lambda config: ps.Tabulated({"loss": [config["x"]] * 4}, seconds=3600 * config["x"])),
    {"x": ps.grid([1.0, 2.0, 3.0])},
    algorithm=ps.Grid(budget=4),
)


@pytest.fixture
def result():
    cluster = ps.Simulated(devices=1, watts=500, idle_watts=100, limits={700: (500, 1.0), 400: (300, 1.2)})
    return study(max_energy="50kWh", objective="energy").run(cluster, power="observe", progress=False)


def test_show_tells_energy_idle_power_limits_and_carbon(result):
    shown = CliRunner().invoke(app, ["show", "s", "--carbon", "400"]).stdout
    assert "12 kWh of 50 kWh, of it 0 J idle; 1.44e+04 kJ a trial" in shown
    assert "4.8 kg of CO2, at 400 g for a kWh" in shown
    assert "node 0/device 0: 500 W on average" in shown
    assert "400 W would be best" in shown
    facts = json.loads(CliRunner().invoke(app, ["show", "s", "--json"]).stdout)
    assert facts["joules"] == result.joules == 12 * 3.6e6
    assert facts["best"]["joules"] == result.best.joules == 2 * 3.6e6


def test_progress_tells_the_energy_so_far(capsys):
    study().run(ps.Simulated(devices=1, watts=500), progress=True)
    assert "12 kWh" in capsys.readouterr().err


def test_without_a_meter_the_reason_is_shown():
    study().run(ps.Simulated(devices=1), progress=False)
    lines = said(energy_facts(History.of(log())))
    assert lines == [("not metered", "simulated: simulated devices count joules with Simulated(watts=...)")]


def trial(number, loss, joules):
    record = TrialRecord(number, {}, joules=joules, best_score=-loss, best_unit=1)
    record.curve.append({"budget": 1, "loss": loss})
    return record


def test_the_front_has_the_trials_that_no_other_beats_in_both():
    trials = [trial(0, 3.0, 10.0), trial(1, 2.0, 20.0), trial(2, 2.5, 30.0), trial(3, 1.0, 30.0), trial(4, 0.0, None)]
    assert [one.number for one in front(trials)] == [0, 1, 3]


def test_the_report_draws_the_metric_against_joules_and_the_result_has_its_front(result):
    assert [one.number for one in result.front()] == [result.best.number]
    drawn = picture(History.of(log()))
    assert drawn.count("<circle") == 3
    assert drawn.count('class="front"') == 1
    CliRunner().invoke(app, ["report", "s"])
    page = (result.dir / "report.html").read_text()
    assert "loss against joules" in page
    assert "12 kWh" in page


def test_optuna_and_tables_have_the_joules_of_each_trial(result):
    joules = [one.joules for one in result.trials]
    assert [one.user_attrs["joules"] for one in result.optuna_study().trials] == joules
    assert list(result.dataframe()["joules"]) == joules
    CliRunner().invoke(app, ["export", "s", "--to", "csv"])
    header = (result.dir / "csv" / "trials.csv").read_text().splitlines()[0]
    assert header.endswith("device_seconds,joules,error")
