"""The log as CSV files and as TensorBoard runs."""

from __future__ import annotations

import csv
import sys
from math import isnan
from pathlib import Path

import pytest

from penstock.errors import StudyError
from penstock.log.events import Asked, Event, Failed, Opened
from penstock.report.export import write_csv, write_tensorboard
from tests.report.studies import SETTINGS, ended, reported, write


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return write(tmp_path, "digits-1", ended())


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_row_a_trial(study: Path, tmp_path: Path) -> None:
    trials, _ = write_csv(study, tmp_path / "out" / "deep")
    assert trials == tmp_path / "out" / "deep" / "trials.csv"
    first, second, third, *_ = found = rows(trials)
    assert len(found) == 5
    assert list(first) == [
        *("number", "rank", "state", "budget", "config.lr", "config.widths", "config.[red]act"),
        *("accuracy", "loss", "device_seconds", "error"),
    ]
    assert list(first.values()) == ["0", "1", "finished", "3", "0.1", "[64, 32]", ":smile:", "0.875", "0.5", "1.5", ""]
    assert (second["accuracy"], second["state"]) == ("0.99", "paused")
    assert [row["rank"] for row in found] == ["1", "", "", "2", "3"], "trial 1 diverged after its 0.99"
    assert found[3]["state"] == "stopped"
    assert (third["accuracy"], third["state"]) == ("", "failed")
    assert third["error"] == 'Traceback:\n  File "x.py"\nValueError: too, "large" [bold]'


def test_csv_has_a_row_a_report(study: Path, tmp_path: Path) -> None:
    _, curves = write_csv(study, tmp_path / "out")
    found = rows(curves)
    assert list(found[0]) == ["trial", "budget", "accuracy", "loss", "clock"]
    assert [(row["trial"], row["budget"]) for row in found] == [
        *(("0", "1"), ("0", "2"), ("1", "1"), ("0", "3"), ("1", "2"), ("3", "1"), ("4", "1")),
    ]
    assert found[1] == {"trial": "0", "budget": "2", "accuracy": "0.875", "loss": "0.5", "clock": "2.0"}
    assert isnan(float(found[4]["accuracy"]))


def test_csv_of_configs_and_metrics_that_differ(tmp_path: Path) -> None:
    events = [Opened(SETTINGS), Asked(0, {"a": ["x"]}, 1, "r"), Asked(1, {"b": 2}, 1, "r")]
    events += [reported(0, 1, 1.0, accuracy=0.5), reported(1, 1, 1.0, accuracy=0.5, extra=3.0)]
    trials, curves = write_csv(write(tmp_path, "x", iter(events)), tmp_path / "out")
    assert [(row["config.a"], row["config.b"], row["extra"]) for row in rows(trials)] == [
        ('["x"]', "", ""),
        ("", "2", "3.0"),
    ]
    assert [row["extra"] for row in rows(curves)] == ["", "3.0"]


def test_csv_has_no_cell_that_a_spreadsheet_computes(tmp_path: Path) -> None:
    texts = ["=cmd|' /C calc'!A0", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1+1"]
    events: list[Event] = [Opened(SETTINGS)]
    events += [Asked(n, {"a": text, "rate": -0.5, "text": "-0.5"}, 1, "r") for n, text in enumerate(texts)]
    events += [reported(0, 1, 1.0, **{"accuracy": -1.5, "=1+1": 1.0}), Failed(1, 1, "=1+1\nmore", True, 2.0)]
    trials, curves = write_csv(write(tmp_path, "x", iter(events)), tmp_path / "out")
    found = rows(trials)
    assert [row["config.a"] for row in found] == [f"'{text.lstrip(chr(13))}" for text in texts]
    assert (found[0]["config.rate"], found[0]["config.text"], found[0]["accuracy"]) == ("-0.5", "-0.5", "-1.5")
    assert (found[0]["'=1+1"], found[1]["error"]) == ("1.0", "'=1+1\nmore")
    assert rows(curves)[0]["'=1+1"] == "1.0"


def test_csv_has_no_character_that_a_terminal_obeys(tmp_path: Path) -> None:
    events: list[Event] = [Opened(SETTINGS), Asked(0, {"a": "\x1b[31mred", "\x1bb": "\x1b=1+1"}, 1, "r")]
    events += [Failed(0, 1, "two\nlines\x07", True, 2.0)]
    trials, _ = write_csv(write(tmp_path, "x", iter(events)), tmp_path / "out")
    (row,) = rows(trials)
    assert (row["config.a"], row["config.b"], row["error"]) == ("[31mred", "'=1+1", "two\nlines")


def test_csv_takes_any_text(tmp_path: Path) -> None:
    events = [Opened(SETTINGS), Asked(0, {"a": "\ud800 世界"}, 1, "r")]
    trials, _ = write_csv(write(tmp_path, "x", iter(events)), tmp_path / "out")
    assert rows(trials)[0]["config.a"] == "\\ud800 世界"


def test_a_folder_that_cannot_be_made_is_named(study: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StudyError, match=r"Cannot write .*file/out .*--out"):
        write_csv(study, tmp_path / "file" / "out")


def test_tensorboard_has_a_run_a_trial(study: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    for _ in range(2):  # the second export replaces the first
        runs = write_tensorboard(study, tmp_path / "tb")
    assert [run.name for run in runs] == [f"trial-0000{n}" for n in range(5)]
    assert len(list(runs[0].iterdir())) == 1

    first = EventAccumulator(str(runs[0])).Reload()
    assert sorted(first.Tags()["scalars"]) == ["accuracy", "best/accuracy", "best/loss", "loss"]
    assert [(e.step, e.value, e.wall_time) for e in first.Scalars("accuracy")] == [
        (1, 0.5, 1),
        (2, 0.875, 2),
        (3, 0.75, 3),
    ]
    assert [(e.step, e.value) for e in first.Scalars("best/accuracy")] == [(2, 0.875)]
    start = first.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(start).session_start_info.hparams
    assert hparams["lr"].number_value == 0.1
    assert hparams["widths"].string_value == "[64, 32]"

    second = EventAccumulator(str(runs[1])).Reload()
    assert [isnan(e.value) for e in second.Scalars("accuracy")] == [False, True]
    assert EventAccumulator(str(runs[2])).Reload().Tags()["scalars"] == []


def test_tensorboard_that_is_not_installed(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[:3] == ["torch", "utils", "tensorboard"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(StudyError, match=r"pip install 'penstock\[tensorboard\]'"):
        write_tensorboard(study, tmp_path / "tb")
    assert not (tmp_path / "tb").exists()
