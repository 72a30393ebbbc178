"""What is said about a study's folder, and how tables show it."""

from __future__ import annotations

import json
import os
from io import StringIO
from math import inf, nan
from pathlib import Path

import pytest
from rich.console import Console

from penstock.errors import LogError, StudyError
from penstock.log.events import Devices, Ended, Measured, Opened
from penstock.log.history import History
from penstock.log.ranking import ranked
from penstock.log.writer import Log
from penstock.report import summary, tables
from tests.report.studies import SETTINGS, ended, fused, history, story, write


def shown(renderable: object, width: int = 120) -> str:
    console = Console(file=StringIO(), width=width, markup=False, emoji=False, highlight=False)
    console.print(renderable)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_trials_are_ranked_by_their_best_and_a_diverged_one_never_is() -> None:
    assert [trial.number for trial in ranked(History.of(ended()).trials)] == [0, 3, 4]
    worst_first = History.of(ended(metric="loss", mode="min"))
    assert [trial.number for trial in ranked(worst_first.trials)] == [0, 3, 4]
    assert ranked(worst_first.trials)[0].metrics["loss"] == 0.5


def test_facts_of_a_study(tmp_path: Path) -> None:
    study = write(tmp_path, "digits-1", ended("target"))
    (study / "states").mkdir()
    (study / "states" / "000000-1-6.pt").write_bytes(b"x" * 1500)
    facts = summary.study_facts(study, summary.history_of(study))
    assert facts["trials"] == {"finished": 1, "paused": 3, "failed": 1}
    assert (facts["name"], facts["ended"], facts["seconds"], facts["units"]) == ("digits-1", "target", 5.0, 7)
    assert (facts["state_bytes"], facts["device_seconds"], facts["model"]) == (1500, 3.5, None)
    assert facts["best"]["number"] == 0
    assert facts["best"]["metrics"] == {"accuracy": 0.875, "loss": 0.5}
    done = History.of(ended())
    assert summary.study_facts(study, done)["trials"] == {"finished": 1, "paused": 1, "failed": 1, "stopped": 2}
    assert summary.trial_facts(done.trials[3])["state"] == "stopped"
    text = shown(tables.study_summary(facts))
    for said in ("digits-1", "1.5 kB on disk", "accuracy 0.875 (trial 0)", "target", "3 paused", "7 units", "of 5"):
        assert said in text


def test_modes_and_what_was_measured() -> None:
    facts = summary.study_facts(Path("x"), History.of(fused()))
    assert facts["modes"] == {"fused": 2, "solo": 2}
    assert [(one["way"], one["size"]) for one in facts["measured"]] == [("native", 4), ("solo", 1)]
    assert json.loads(summary.to_json(facts))["measured"][0]["table"] == {"1": 0.5, "2": 0.6}
    assert "2 fused  2 solo" in shown(tables.study_summary(facts))
    head, _, *rows = shown(tables.measured(facts)).splitlines()
    assert head.split() == ["signature", "way", "at", "most", "because"]
    assert rows[0].split() == ["aaaaaaaa", "native", "4", "trials", "2", "trials", "together", "pay"]
    assert "item at [x].py:3" in rows[1]
    alone = summary.study_facts(Path("x"), history())
    assert (alone["measured"], tables.measured(alone)) == ([], None)


def test_what_was_measured_on_each_device_type_is_shown() -> None:
    past = History.of(fused())
    types = {"gpu 0": "h200", "gpu 1": "h200", "old": "k80"}
    past.apply(Devices(tuple({"name": name, "type": type} for name, type in types.items()), 2.0))
    for device, size in (("gpu 0", 8), ("gpu 1", 16), ("old", 2)):
        past.apply(Measured("c" * 24, device, "sharing", {}, size, "pays", "native", 2.0))
    _, _, *rows = shown(tables.measured(summary.study_facts(Path("x"), past))).splitlines()
    assert [row.split()[:-1] for row in rows[-2:]] == [
        ["cccccccc", "h200", "native", "16", "trials"],
        ["cccccccc", "k80", "native", "2", "trials"],
    ]


def test_what_several_devices_give_is_shown_beside_what_sharing_one_gives() -> None:
    past = History.of(fused())
    for size, letter in ((4, "a"), (1, "c")):
        reason = f"a step takes 4 ms on 1 device, 1 ms on {size}"
        past.apply(Measured(letter * 24, "cpu", "scaling", {1: 0.004, 4: 0.001}, size, reason, clock=2.0))
    facts = summary.study_facts(Path("x"), past)
    _, _, *rows = shown(tables.measured(facts)).splitlines()
    assert [row.split()[:4] for row in rows] == [
        ["aaaaaaaa", "native", "4", "trials"],
        ["bbbbbbbb", "solo", "1", "trial"],
        ["aaaaaaaa", "distributed", "4", "devices"],
        ["cccccccc", "distributed", "1", "device"],
    ]
    said = json.loads(summary.to_json(facts))["measured"][2]
    assert (said["kind"], said["table"], said["size"]) == ("scaling", {"1": 0.004, "4": 0.001}, 4)


def test_of_many_signatures_the_first_are_shown() -> None:
    past = History.of(fused())
    for number in range(30):
        past.apply(Measured(f"{number:024}", "cpu", "sharing", {}, 8, "pays", "native", 2.0))
    text = shown(tables.measured(summary.study_facts(Path("x"), past)))
    assert len(text.splitlines()) == 2 + tables.MEASURED + 1
    assert "and 22 more: see --json" in text


def test_what_is_not_finite_is_null_in_json() -> None:
    value = {"a": nan, "b": [inf, (-inf, 1.5)], 3: {"c": "nan"}, "d": None, "e": True}
    assert json.loads(summary.to_json(value)) == {
        "a": None,
        "b": [None, [None, 1.5]],
        "3": {"c": "nan"},
        "d": None,
        "e": True,
    }


def test_a_study_without_an_end_is_running_or_was_broken_off(tmp_path: Path) -> None:
    study = write(tmp_path, "digits-1", story())

    def ending() -> str:
        return summary.ending(summary.study_facts(study, summary.history_of(study)))

    (study / "lock").write_text(f"{os.getpid()}\n")  # a process of that number runs, and has not the lock
    assert ending() == "broken off"
    log = Log.open(study)
    assert ending() == f"running (process {os.getpid()})"
    log.close()
    assert ending() == "broken off"


def test_unknown_names_are_answered_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"no study 'x', nor any other, .*penstock run FILE.* with --dir\.$"):
        summary.study_dir(tmp_path, "x")
    write(tmp_path, "digits-1", story())
    write(tmp_path, "other", story())
    assert summary.study_dir(tmp_path, "digits-1") == tmp_path / "digits-1"
    with pytest.raises(StudyError, match=r"which has: .*Did you mean 'digits-1'\?"):
        summary.study_dir(tmp_path, "digit-1")
    for name in ("zzz", "", "../" + tmp_path.name, "digits-1/"):
        with pytest.raises(StudyError, match="There is no study") as error:
            summary.study_dir(tmp_path, name)
        assert "digits-1" in str(error.value)


def test_studies_come_latest_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "b", "a")):
        os.utime(write(tmp_path, name, story()) / "log.jsonl", (1e9 - age, 1e9 - age))
    (tmp_path / "no-study").mkdir()
    assert summary.study_names(tmp_path) == ["new", "b", "a"]
    assert summary.study_names(tmp_path / "missing") == []


def test_an_empty_log_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "log.jsonl").touch()
    with pytest.raises(LogError, match="holds no event yet"):
        summary.history_of(tmp_path / "x")


def test_the_table_of_trials_has_a_column_a_value_where_there_is_room() -> None:
    past = History.of(ended())
    wide = Console(file=StringIO(), width=120, markup=False, emoji=False)
    table = shown(tables.best_trials(past, ranked(past.trials), wide))
    head, _, first, *rest = table.splitlines()
    assert head.split() == ["trial", "accuracy", "loss", "lr", "widths", "[red]act", "budget", "state", "device", "s"]
    assert first.split() == ["0", "0.875", "0.5", "0.1", "[64,", "32]", ":smile:", "3", "finished", "1.50"]
    assert len(rest) == 2

    middle = Console(file=StringIO(), width=80, markup=False, emoji=False)
    head = shown(tables.best_trials(past, ranked(past.trials), middle), 80).splitlines()[0]
    assert head.split() == ["trial", "accuracy", "loss", "lr", "widths", "[red]act", "budget", "state"]

    narrow = Console(file=StringIO(), width=60, markup=False, emoji=False)
    table = shown(tables.best_trials(past, ranked(past.trials), narrow), 60)
    assert table.splitlines()[0].split() == ["trial", "accuracy", "loss", "config", "budget", "state", "device", "s"]
    assert "lr=0.1" in table
    assert all(len(line) <= 60 for line in table.splitlines())


def test_a_table_of_no_trials_says_so() -> None:
    past = History.of([Opened(SETTINGS)])
    console = Console(file=StringIO())
    assert "No trial has reported a finite accuracy yet." in shown(tables.best_trials(past, [], console))
    facts = summary.study_facts(Path("x"), past)
    assert "none has reported a finite result" in shown(tables.study_summary(facts))
    over = shown(tables.best_trials(History.of([Opened(SETTINGS), Ended("deadline", 9.0)]), [], console))
    assert "No trial reported a finite 'accuracy', so none is best: the study ended at its deadline before" in over
    assert "yet" not in over
    assert "accuracy none" in shown(tables.study_list([facts]))


def test_the_first_failure_is_named_by_the_last_line_of_its_error() -> None:
    text = tables.failures(history())
    assert text is not None
    assert text.plain == '1 of 5 trials failed; trial 2: ValueError: too, "large" [bold]'
    assert tables.failures(History.of([Opened(SETTINGS)])) is None


def test_curves_share_one_scale() -> None:
    past = History.of(ended())
    text = shown(tables.curves(past, [past.trials[number] for number in (0, 1, 4)]))
    assert "accuracy, 0.125 to 0.99" in text
    assert [line.split()[:2] for line in text.splitlines()[2:]] == [["0", "▄▇▆"], ["1", "█×"], ["4", "▁"]]
    flat = [0.5] * 100
    assert tables.spark(flat, 0.5, 0.5) == "▁" * 40
    assert tables.spark([0.0] * 99 + [1.0], 0, 1)[-1] == "█"


def test_how_to_go_on_can_be_copied() -> None:
    facts = summary.study_facts(Path(".penstock/my study"), History.of(ended()))
    facts["model"], facts["file"] = ".penstock/my study/best.pt", "/x/digits.py"
    text = tables.how_to_go_on(facts, {"lr": 0.1}).plain
    assert "    import torch; from digits import study\n    model = study.task.model({'lr': 0.1})\n" in text
    assert "    model.load_state_dict(torch.load('.penstock/my study/best.pt'))\n" in text
    assert "penstock show 'my study' --curves " in text
    assert "--dir" not in text
    assert "resume" not in text
    facts |= {"dir": "/data/a b/x", "ended": "deadline", "deadline": 90.0, "model": None}
    text = tables.how_to_go_on(facts, {"lr": 0.1}).plain
    assert "torch.load" not in text
    assert "penstock resume 'my study' --dir '/data/a b' --deadline 180s" in text
    facts |= {"ended": "target"}
    assert "--target VALUE" in tables.how_to_go_on(facts, {"lr": 0.1}).plain
