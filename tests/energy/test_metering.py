"""Every joule of a device is charged, in every mode: to a trial, or as idle."""

import os
import signal

import pytest

import penstock as ps
from penstock.energy.account import Ledger
from penstock.energy.meter import CHOSEN
from penstock.log.events import VERSION, Asked, Charged, Failed, Metered, Opened, Placed, Stopped
from penstock.log.history import History
from tests.energy.nvml import fake
from tests.studies import log, studies
from tests.tasks import Blobs

study = studies(Blobs, {"lr": ps.loguniform(1e-3, 1)}, trials=2)


@pytest.fixture
def metered(gpus, monkeypatch):
    """This machine's CPU is metered by the fake device."""
    monkeypatch.setenv(CHOSEN, "nvml:GPU-fake")
    return gpus


def adds_up(result):
    """Whether trials and what was idle add up to the joules of the devices."""
    meters = result._history.meters
    used = [trial.joules for trial in result.trials]
    assert meters.joules == pytest.approx(sum(used) + meters.idle, rel=1e-9)
    assert min(used) >= 0
    assert meters.idle >= -50, "of the last tenth of a second, which may have been foreseen too high"
    assert sum(used) > 0
    return used


@pytest.mark.parametrize("sharing", ["solo", "fused", "packed", "processes"])
def test_parts_and_what_is_idle_are_the_devices_joules_in_every_mode(metered, sharing, long_enough):
    before = fake._joules(fake.look(metered))
    result = study().run(sharing=sharing, progress=False)
    after = fake._joules(fake.look(metered))
    used = adds_up(result)
    assert result.joules <= after - before
    assert result.joules > 0
    assert {event.mode for event in log() if isinstance(event, Placed)} <= {sharing, "solo"}
    if sharing == "fused":
        assert max(used) - min(used) <= 0.5 * max(used), "they had equal parts, but for what each took to begin"
    opened = next(event for event in log() if isinstance(event, Opened))
    assert opened.settings["log"] == VERSION


class Tells(Blobs):
    """One of its trials keeps the device busy."""

    def model(self, config):
        if config["lr"] == 0.1:
            fake.change(os.environ["FAKE_NVML"], busy={str(os.getpid()): 80})
        return super().model(config)


def test_processes_that_share_a_device_divide_it_by_what_nvml_says_of_each(metered, monkeypatch):
    weights, weigh = [], Ledger.weigh
    monkeypatch.setattr("penstock.executors.metering.EVERY", 0.001)
    monkeypatch.setattr(Ledger, "weigh", lambda ledger, told: weights.append(told) or weigh(ledger, told))
    result = studies(Tells, {"lr": ps.grid([0.1, 0.2])}, algorithm=ps.Grid(budget=3))().run(
        sharing="processes", progress=False
    )
    adds_up(result)
    busy = result.trials[0].number if result.trials[0].config["lr"] == 0.1 else 1
    told = [{trial: work for (_, trial, _), work in one.items()} for one in weights if one]
    assert any(one.get(busy) == 80 for one in told)


def kills_itself(trial):
    if trial.state is None and trial.config["kill"]:
        trial.report(1, state={"unit": 1}, loss=1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    trial.report(2, state={"unit": 2}, loss=0.5)


def test_work_that_was_killed_is_charged(metered):
    kill = studies(kills_itself, {"kill": ps.grid([True, False])}, algorithm=ps.Grid(budget=2))
    result = kill().run(workers=2, progress=False)
    adds_up(result)
    died = [event for event in log() if isinstance(event, Failed)]
    assert died
    assert all(event.usage.joules is not None and event.usage.device_seconds > 0 for event in died)


def test_work_that_is_trained_again_or_trained_after_the_last_report_is_charged(metered):
    def trains_on(trial):
        for unit in (1, 2):
            trial.report(unit, loss=1.0)
        fake.change(metered)  # some work

    result = studies(trains_on, {"x": ps.uniform(0, 1)}, algorithm=ps.Random(budget=3), trials=1)().run(progress=False)
    adds_up(result)
    (charged,) = [event for event in log() if isinstance(event, Charged)]
    assert charged.usage.device_seconds > 0


def test_a_stopped_trial_is_charged_with_its_stop(metered):
    result = study(algorithm=ps.ASHA(max_budget=4, reduction=2, concurrency=2)).run(progress=False, sharing="solo")
    adds_up(result)
    assert all(event.usage is not None for event in log() if isinstance(event, Stopped))


def test_a_meter_that_fails_midway_is_said_once_and_the_study_goes_on(metered):
    class Breaks(Blobs):
        def model(self, config):
            fake.change(metered, broken=True)
            return super().model(config)

    result = study(Breaks()).run(progress=False, sharing="solo")
    assert len([event for event in log() if isinstance(event, Metered) and event.reason]) == 1
    assert {trial.state for trial in result.trials} == {"finished"}
    assert all(trial.joules is None for trial in result.trials)
    assert "GPU is lost" in result.unmetered["cpu"]


def test_without_a_meter_nothing_is_zero_and_the_log_is_one_that_earlier_readers_understand(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.energy.meter.RAPL", tmp_path / "nowhere")
    result = study().run(progress=False)
    assert (result.joules, result.trials[0].joules) == (None, None)
    assert "no RAPL" in result.unmetered["cpu"]
    text = (result.dir / "log.jsonl").read_text()
    assert "joules" not in text
    assert next(event for event in log() if isinstance(event, Opened)).settings["log"] == 4


def test_replay_finds_the_same_joules(metered):
    result = study().run(progress=False)
    again = ps.load("s")
    assert [trial.joules for trial in again.trials] == [trial.joules for trial in result.trials]
    assert again.joules == result.joules


def test_joules_that_a_killed_driver_left_behind_are_charged_to_the_trials_that_trained():
    settings = {"metric": "loss", "mode": "min", "trials": 2, "max_budget": 2}
    past = [Opened(settings), *(Asked(trial, {}, 2, "all") for trial in (0, 1))]
    past += [Placed(trial, 1, ("cpu",), "fused", None, 0.0) for trial in (0, 1)]
    history = History.of([*past, Metered("cpu", 100.0, 20.0), Opened(settings)])
    assert [record.joules for record in history.trials] == [40.0, 40.0]


def test_a_study_that_was_begun_without_a_meter_goes_on_with_one_and_back(gpus, monkeypatch):
    """The first log is of version 4; reports without joules stand beside reports with them."""
    monkeypatch.setattr("penstock.energy.meter.RAPL", gpus / "nowhere")
    study(trials=1).run(progress=False, sharing="solo")
    monkeypatch.setenv(CHOSEN, "nvml:GPU-fake")
    result = study(trials=2).run(progress=False, sharing="solo")
    assert [trial.joules is None for trial in result.trials] == [True, False]
    monkeypatch.delenv(CHOSEN)
    again = study(trials=3).run(progress=False, sharing="solo")
    assert [trial.joules is None for trial in again.trials] == [True, False, True]
    assert [trial.joules for trial in ps.load("s").trials] == [trial.joules for trial in again.trials]
    versions = [event.settings["log"] for event in log() if isinstance(event, Opened)]
    assert versions == [4, VERSION, 4]
