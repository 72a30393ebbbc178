"""What a study tells Python's logging."""

from __future__ import annotations

import logging

import pytest

import penstock as ps
from penstock.log.messages import LOGGER
from penstock.report.console import warnings_shown
from tests.studies import studies


def train(trial: ps.FunctionTrial) -> None:
    if trial.number == 1:
        raise ValueError("too large")
    for unit in range(1, 3):
        trial.report(unit, loss=trial.config["x"])


study = studies(train, {"x": ps.uniform(0, 1)}, trials=3)


def test_begin_and_end_are_infos_failures_are_warnings_and_the_rest_is_for_debugging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG, "penstock"):
        study().run(progress=False)
    said = {level: [r.getMessage() for r in caplog.records if r.levelno == level] for level in (10, 20, 30)}
    assert {record.name for record in caplog.records} == {"penstock"}
    assert said[logging.WARNING] == ["s: trial 1 failed: ValueError: too large"]
    begun, ended = said[logging.INFO]
    assert begun == "s begins: Random(budget=2, concurrency=8), 3 trials, loss min"
    assert ended.startswith("s ended: done after ")
    assert ", 3 trials, 1 failed, best trial " in ended
    assert "s: trial 0, attempt 1 on cpu, solo" in said[logging.DEBUG]
    assert "s: devices are cpu" in said[logging.DEBUG]


def test_a_study_that_goes_on_says_so(caplog: pytest.LogCaptureFixture) -> None:
    study().run(progress=False)
    caplog.clear()
    with caplog.at_level(logging.INFO, "penstock"):
        study(trials=4).run(progress=False)
    assert caplog.messages[0] == "s goes on after 4 units: Random(budget=2, concurrency=8), 4 trials, loss min"


def test_without_configured_logging_only_warnings_are_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's own
    handlers = list(LOGGER.handlers)
    study().run(progress=False)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "s: trial 1 failed: ValueError: too large\n")
    assert LOGGER.handlers == handlers


def test_a_program_that_configures_logging_has_each_warning_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler()])
    study().run(progress=False)
    assert capfd.readouterr().err.count("trial 1 failed") == 1


def test_the_warnings_of_a_run_are_shown_up_to_a_number_and_command_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    with warnings_shown():
        for number in range(30):
            LOGGER.warning("\x1b[2Jwarning %d", number)
    said = capsys.readouterr().err.splitlines()
    assert said[:-1] == [f"[2Jwarning {number}" for number in range(20)]
    assert said[-1].startswith("More warnings are not shown")


def test_a_mode_that_nobody_gave_is_said_with_its_origin(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock"):
        study(mode=None).run(progress=False)
    assert caplog.messages[0] == "s begins: Random(budget=2, concurrency=8), 3 trials, loss min (by its name)"
