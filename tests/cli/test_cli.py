"""The command line: every command, every exit code, and what is said about bad input."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from textwrap import dedent
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner, Result

from penstock import __version__
from penstock.cli.app import app
from penstock.cli.options import Growing, Scheduler, Sharing
from penstock.executors.local import LocalExecutor
from penstock.log.events import Asked, Opened
from penstock.log.history import History
from penstock.log.reader import read
from penstock.scheduling.growing import FIRST
from penstock.settings import SCHEDULERS, SHARING, RunSettings
from tests.programs import PENSTOCK, run
from tests.report.studies import ended, fused, story, write

FUNCTION = """
    import penstock as ps

    def train(trial):
        for unit in range(1, 4):
            trial.report(unit, loss=trial.config["x"] / unit)

    study = ps.Study(train, {"x": ps.uniform(1, 2)}, metric="loss", mode="min", algorithm=ps.Random(budget=3), trials=6)
"""
TASK = """
    import torch
    from torch import nn
    import penstock as ps
    from sizes import WIDTH

    class Line(ps.Task):
        def data(self, config):
            x = torch.linspace(-1, 1, 128)[:, None]
            return (x, 2 * x), (x, 2 * x)

        def model(self, config):
            return nn.Linear(WIDTH, 1)

        def optimizer(self, params, config):
            return torch.optim.SGD(params, lr=config["lr"])

        def loss(self, model, batch, config):
            print("training", flush=True)
            return ((model(batch[0]) - batch[1]) ** 2).mean()

    study = ps.Study(Line(), {"lr": ps.loguniform(0.01, 1), "note": "a long text " * 12}, metric="loss", mode="min",
                     algorithm=ps.ASHA(max_budget=3), trials=4)
"""


def file(code: str, name: str = "tuned.py") -> Path:
    path = Path(name)
    path.write_text(dedent(code))
    return path


def penstock(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def answer(*arguments: object, code: int = 0) -> Any:
    """The one JSON value on stdout."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(penstock(*arguments, "--json", code=code).stdout, parse_constant=refuse)


def history(study: str | Path) -> History:
    return History.of(read(Path(study) / "log.jsonl"))


# run


def test_run_ends_with_a_table_and_how_to_look_further() -> None:
    result = penstock("run", file(FUNCTION))
    done = history(".penstock/train-1")
    assert (done.ended, len(done.trials)) == ("done", 6)
    assert re.match(r"\s*trial\s+loss\s+x\s+budget\s+state\s+device s", result.stdout)
    assert str(done.best and done.best.number) == result.stdout.splitlines()[3].split()[0]
    assert "penstock show train-1 --curves" in result.stdout
    assert "penstock dashboard train-1" in result.stdout
    assert "penstock export train-1" in result.stdout
    assert "torch.load" not in result.stdout  # a function has no model
    assert "ended: done · 6/6 trials · 18 units · best loss" in result.stderr  # plain lines, not on stdout


def test_a_simulated_run_says_where_the_curves_of_its_trials_come_from() -> None:
    said = "Simulated: of a function nothing is measured"
    result = penstock("run", file(FUNCTION), "--on", "simulated", "--devices", 3, "--name", "there")
    assert said in result.stderr
    assert len(history(".penstock/there").types) == 3
    again = penstock("resume", "there", "--on", "simulated", "--devices", 2, "--json")
    assert said in again.stderr
    assert json.loads(again.stdout)["ended"] == "done"
    assert len(history(".penstock/there").types) == 3, "of which it had two then"
    assert "Simulated" not in penstock("run", file(FUNCTION)).output
    assert "--devices says how many are simulated" in penstock("run", file(FUNCTION), "--devices", 3, code=2).stderr


@pytest.mark.parametrize("command", ["run", "profile"])
def test_a_cluster_comes_with_settings(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("sizes.py").write_text("WIDTH = 1")
    monkeypatch.setitem(sys.modules, "ray", None)
    result = penstock(command, file(TASK), "--on", "ray?market=spot&idle=30", code=1)
    assert 'on="ray" needs Ray, which is not installed' in result.stderr


def test_run_says_where_the_trained_model_is_and_how_to_load_it() -> None:
    Path("sizes.py").write_text("WIDTH = 1")
    result = penstock("run", file(TASK))
    block = re.search(r"to load it:\n((?:    .*\n)+)", result.stdout)
    assert block is not None
    script = "import torch\n" + dedent(block[1]) + "print(model(torch.ones(1, 1)).item())"
    Path("script.py").write_text(script)
    ran = run("python script.py")
    best = history(".penstock/line-1").best
    assert best is not None
    weights = torch.load(".penstock/line-1/best.pt", weights_only=True)
    assert float(ran.stdout) == pytest.approx((weights["weight"] + weights["bias"]).item(), rel=1e-5)


def test_options_of_run_go_before_those_of_the_file() -> None:
    said = answer(
        "run", file(FUNCTION), "--name", "mine", "--dir", "there", "--trials", 2, "--seed", 7, "--target", "0.01"
    )
    settings = history("there/mine").settings
    assert {key: settings[key] for key in ("name", "trials", "seed", "target")} == {
        **{"name": "mine", "trials": 2, "seed": 7, "target": 0.01},
    }
    assert settings["file"] == str(Path("tuned.py").resolve())
    assert (said["name"], said["dir"], said["ended"], said["trials"]) == ("mine", "there/mine", "done", {"finished": 2})
    assert set(said["best"]) >= {"number", "config", "metrics"}
    assert said["seconds"] > 0
    assert penstock("run", "tuned.py", "--name", "late", "--deadline", "1h", "--target", "5").exit_code == 0
    assert history(".penstock/late").settings["deadline"] == 3600
    assert history(".penstock/late").ended == "target"


def test_run_and_resume_take_how_trials_share_a_device() -> None:
    Path("sizes.py").write_text("WIDTH = 1")
    code = TASK.replace('print("training", flush=True)', "pass")
    modes = [answer("run", file(code), "--name", "one", "--sharing", sharing)["modes"] for sharing in ("solo", "fused")]
    assert modes == [{"solo": 4}, {"solo": 4}]  # the second time there is nothing left to do
    assert answer("run", "tuned.py", "--name", "two", "--sharing", "fused")["modes"] == {"fused": 4}
    assert answer("resume", "two", "--trials", 6, "--sharing", "solo")["modes"]["solo"] >= 2


def test_a_file_that_runs_its_study_while_it_is_imported_is_told_so() -> None:
    code = FUNCTION + "\n    study.run(progress=False)\n"
    assert "and it ran it too, as train-1: put study.run() under" in penstock("run", file(code), code=2).stderr
    assert [path.name for path in Path(".penstock").iterdir() if path.is_dir()] == ["train-1"]


def test_run_on_an_existing_name_goes_on() -> None:
    penstock("run", file(FUNCTION), "--name", "mine", "--trials", 2)
    penstock("run", "tuned.py", "--name", "mine", "--trials", 5)
    assert len(history(".penstock/mine").trials) == 5


def test_a_deadline_is_an_end_like_another(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(LocalExecutor, "now", lambda self: float(next(ticks)))
    said = answer("run", file(FUNCTION), "--trials", 100, "--deadline", "20s")
    assert said["ended"] == "deadline"
    assert said["trials"]["finished"] < 100
    assert (
        "resume train-1 --deadline 40s"
        in penstock("run", "tuned.py", "--name", "train-1", "--trials", 100, "--deadline", "20s").stdout
    )


def test_with_json_stdout_holds_one_object_whatever_tasks_print_and_wherever() -> None:
    Path("sizes.py").write_text("WIDTH = 1\nprint('imported')")
    command = [PENSTOCK, "run", str(file(TASK)), "--json", "--workers", "2"]
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=buffered)
    said = json.loads(ran.stdout)
    assert sum(said["trials"].values()) == 4
    assert said["model"] == ".penstock/line-1/best.pt"
    assert "imported" in ran.stderr
    assert "training" in ran.stderr
    assert "units" not in ran.stderr  # no progress


def test_metrics_that_are_not_finite_are_null_and_no_finite_one_is_a_failure() -> None:
    code = FUNCTION.replace('trial.config["x"] / unit', 'float("nan")')
    said = answer("run", file(code), code=1)
    assert said["best"] is None
    assert said["ended"] == "done"
    shown = answer("show", "train-1", "--curves")
    assert shown["best"] is None
    assert shown["top"] == []
    result = penstock("run", "tuned.py", code=1)
    assert "No trial reported a finite 'loss'" in result.stderr
    assert "none is best: all 6 trials diverged" in " ".join(result.stdout.split())
    assert "torch.load" not in result.stdout


def test_when_all_trials_fail_the_first_error_is_told() -> None:
    code = FUNCTION.replace("for unit", "raise ValueError('[x] is odd')\n        for unit")
    result = penstock("run", file(code), code=1)
    assert "ValueError: [x] is odd" in result.stderr
    assert "6 of 6 trials failed; trial 0: ValueError: [x] is odd" in result.stdout


def test_a_study_that_cannot_run_is_one_message() -> None:
    result = penstock("run", file(FUNCTION.replace('metric="loss"', 'metric="accuracy"')), code=1)
    assert re.search(r"penstock: .*'accuracy' is not reported by the task, which reports loss", result.stderr)


def test_a_changed_study_is_refused_and_told_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    penstock("run", file(FUNCTION), "--name", "mine")
    then = Path("tuned.py").stat().st_mtime_ns
    changed = file(FUNCTION.replace("uniform(1, 2)", "uniform(1, 3)"))
    os.utime(changed, ns=(then, then))  # by its time and length it is the file that was compiled
    result = penstock("run", changed, "--name", "mine", "--trials", 8, code=1)
    assert "--allow-changes" in result.stderr
    assert "space" in result.stderr
    penstock("resume", "mine", "--trials", 8, code=1)
    penstock("resume", "mine", "--trials", 8, "--allow-changes")
    assert len(history(".penstock/mine").trials) == 8
    penstock("run", changed, "--name", "mine", "--trials", 9, "--allow-changes")


# interruptions


def test_interrupted_by_ctrl_c_exits_with_130_and_resume_goes_on() -> None:
    code = FUNCTION.replace(
        "for unit",
        "import os, signal, pathlib\n"
        "        if len(list(pathlib.Path('.').glob('*.seen'))) == 2: os.kill(os.getpid(), signal.SIGINT)\n"
        "        pathlib.Path(f'{trial.config[\"x\"]}.seen').touch()\n"
        "        for unit",
    )
    ran = run(f"penstock run {file(code)} --mixed-types", code=130)
    assert "penstock resume train-1 --mixed-types\n" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert history(".penstock/train-1").ended == "interrupted"
    penstock("resume", "train-1")
    done = history(".penstock/train-1")
    assert done.ended == "done"
    assert [len(trial.curve) for trial in done.trials] == [3] * 6


def test_interrupted_while_a_file_is_imported() -> None:
    assert penstock("run", file("raise KeyboardInterrupt"), code=130).stdout == ""


# resume


def test_resume_keeps_what_the_log_has_unless_told_otherwise() -> None:
    penstock("run", file(FUNCTION), "--name", "mine", "--dir", "there", "--trials", 3, "--seed", 5, "--deadline", "10m")
    first = [trial.config for trial in history("there/mine").trials]
    penstock("resume", "mine", "--dir", "there")
    settings = history("there/mine").settings
    assert (settings["trials"], settings["seed"], settings["deadline"]) == (3, 5, 600.0)
    said = answer("resume", "mine", "--dir", "there", "--trials", 4, "--target", "0.001", "--deadline", "20m")
    settings = history("there/mine").settings
    assert (settings["trials"], settings["target"], settings["deadline"]) == (4, 0.001, 1200.0)
    assert said["trials"] == {"finished": 4}
    assert [trial.config for trial in history("there/mine").trials][:3] == first
    assert sum(isinstance(event, Opened) for event in read(Path("there/mine/log.jsonl"))) == 3
    assert sum(isinstance(event, Asked) for event in read(Path("there/mine/log.jsonl"))) == 4


def test_resume_without_its_file_says_what_to_do() -> None:
    write(Path(".penstock"), "typed", story())
    result = penstock("resume", "typed", code=2)
    assert "begun without a file" in result.stderr
    assert "name='typed' from Python" in result.stderr
    write(Path(".penstock"), "gone", story(file="/nowhere/tuned.py"))
    result = penstock("resume", "gone", code=2)
    assert "begun by /nowhere/tuned.py, which is gone" in result.stderr
    assert "name='gone' from Python" in result.stderr


# bad usage


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("", r"Expected tuned.py to have a `study`, and it has no class or function of its own\. .*\n +study = ps\."),
        ("study = 3", r"its `study` is of type int.*\n +study = ps.Study\(task"),
        ("def train(trial): ...", r"and it has train\."),
        ("import penstock as ps\nclass Net(ps.Task): ...", r"and it has Net\. (?s:.*)study = ps.Study\(Net\(\), space"),
        (FUNCTION.replace("study =", "mine ="), r"has no `study`, but mine: write `study = mine`"),
        ("x = 1\nimport nothing_at_all", r'File ".*tuned.py", line 2, in <module>\n.*\nModuleNotFoundError: No module'),
        ("def f():\n  return 1 / 0\nf()", r'line 2, in f\n(?s:.*)ZeroDivisionError: division by zero$'),
        ("import json\njson.loads('{')", r'tuned.py", line 2(?s:.*)decoder.py(?s:.*)JSONDecodeError'),
        ("x = (", r"line 1(?s:.*)SyntaxError: '\(' was never closed"),
        ("raise SystemExit('no data')", r"SystemExit: no data"),
        (FUNCTION.replace("uniform(1, 2)", "uniform(2, 1)"), r'tuned.py", line 8(?s:.*)SpaceError: '),
    ],
)  # fmt: skip
def test_a_file_without_a_usable_study(code: str, said: str) -> None:
    result = penstock("run", file(code), code=2)
    assert re.search(said, result.stderr.strip()), result.stderr
    assert result.stdout == ""
    assert not Path(".penstock").exists()


def test_a_file_that_is_none() -> None:
    assert "found nothing at missing.py" in penstock("run", "missing.py", code=2).stderr
    assert "found a folder at ." in penstock("run", ".", code=2).stderr
    Path("notes.txt").write_text("study")
    assert "name ends in .py, got notes.txt" in penstock("run", "notes.txt", code=2).stderr


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--name", "a/b"), "name must be one folder's name"),
        (("--deadline", "soon"), 'text such as "90s", "10m", "2h", got \'soon\''),
        (("--target", "nan"), "target must be a finite value"),
        (("--trials", "0"), "--trials"),
        (("--trials", "many"), "--trials"),
        (("--workers", "0"), "--workers"),
        (("--sharing", "apart"), "--sharing"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_options_that_cannot_be(option: tuple[str, ...], said: str) -> None:
    result = penstock("run", file(FUNCTION), *option, code=2)
    assert said in result.stderr
    assert not Path(".penstock").exists()


def test_a_cluster_is_named_as_in_python() -> None:
    said = penstock("run", file(FUNCTION), "--on", "ray?nonsense=1", code=1).stderr
    assert 'a market of "spot" or "on-demand"' in said


@pytest.mark.parametrize("command", [("resume",), ("show",), ("export", "--to", "csv"), ("dashboard",)])
def test_unknown_names_are_answered_with_those_there_are(command: tuple[str, ...]) -> None:
    assert "penstock run FILE" in penstock(*command, "digits-1", code=2).stderr
    write(Path(".penstock"), "digits-12", story())
    result = penstock(*command, "digits-1", code=2)
    assert "no study 'digits-1' in .penstock, which has: digits-12. Did you mean 'digits-12'?" in result.stderr


@pytest.mark.parametrize("command", [("resume",), ("show",), ("export", "--to", "csv"), ("dashboard",)])
def test_a_damaged_log_is_named_with_its_line(command: tuple[str, ...]) -> None:
    log = write(Path(".penstock"), "digits-1", ended()) / "log.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:3], "{", *lines[3:]]) + "\n")
    assert "Line 4 of .penstock/digits-1/log.jsonl is damaged" in penstock(*command, "digits-1", code=1).stderr


# show, list, export


def test_show_gives_the_study_and_its_best_trials() -> None:
    write(Path("there"), "digits-1", ended())
    text = penstock("show", "digits-1", "--dir", "there", "--top", 2, "--curves").stdout
    for said in (
        "[red]act",
        ":smile:",
        "ASHA(max_budget=3, reduction=3), seed 0",
        "accuracy 0.875 (trial 0)",
        "ended",
        "done",
        "▄",
    ):
        assert said in text
    assert re.search(r"^trial +accuracy +loss +lr +widths +\[red\]act +budget", text, re.MULTILINE)
    assert len(re.findall(r"^ +\d+ .*(?:finished|stopped at rung 0)", text, re.MULTILINE)) == 2
    assert '1 of 5 trials failed; trial 2: ValueError: too, "large" [bold]' in text


def test_show_tells_how_trials_share_devices() -> None:
    write(Path(".penstock"), "digits-1", fused())
    text = penstock("show", "digits-1", "--top", 0).stdout
    assert re.search(r"^modes +2 fused  2 solo", text, re.MULTILINE)
    assert re.search(r"^aaaaaaaa +native +4 trials +2 trials together pay", text, re.MULTILINE)
    assert re.search(r"^bbbbbbbb +solo +1 trial +native: item at \[x\].py:3: it depends on one", text, re.MULTILINE)
    said = answer("show", "digits-1")
    assert said["modes"] == {"fused": 2, "solo": 2}
    assert said["measured"][1]["reason"].startswith("native: item at [x].py:3")
    write(Path(".penstock"), "digits-2", story())
    assert "signature" not in penstock("show", "digits-2").stdout


def test_show_in_json() -> None:
    write(Path(".penstock"), "digits-1", ended())
    said = answer("show", "digits-1", "--top", 2)
    assert [trial["number"] for trial in said["top"]] == [0, 3]
    assert "curve" not in said["top"][0]
    assert said["best"]["config"]["widths"] == [64, 32]
    write(Path(".penstock"), "all", ended(metric="loss", mode="min"))
    assert [row["budget"] for row in answer("show", "all", "--curves")["top"][0]["curve"]] == [1, 2, 3]


def test_show_works_before_the_first_report() -> None:
    write(Path(".penstock"), "new", iter(list(story())[:6]))
    assert "No trial has reported a finite accuracy yet." in penstock("show", "new", "--curves").stdout
    assert answer("show", "new")["best"] is None


def test_list_gives_all_studies_even_when_one_cannot_be_read() -> None:
    assert "penstock run FILE" in penstock("list").stdout
    assert answer("list") == []
    assert "no folder elsewhere" in penstock("list", "--dir", "elsewhere", code=2).stderr
    for age, name in enumerate(("one", "two", "bad")):
        log = write(Path(".penstock"), name, ended()) / "log.jsonl"
        if name == "bad":
            log.write_text("{\n")
        os.utime(log, (1e9 - age, 1e9 - age))
    text = penstock("list").stdout
    assert [line.split()[0] for line in text.splitlines()[2:5]] == ["one", "two", "bad"]
    assert "accuracy 0.875" in text
    assert " 5/5 " in text
    assert "damaged" in text
    said = answer("list")
    assert [one["name"] for one in said] == ["one", "two", "bad"]
    assert said[0]["best"]["number"] == 0
    assert "damaged" in said[2]["error"]


def test_studies_that_cannot_be_read_hide_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path(".penstock")
    write(home, "good", ended())
    for name in ("folder", "pipe", "junk", "loop", "states", "locked"):
        (home / name).mkdir()
    (home / "folder" / "log.jsonl").mkdir()
    os.mkfifo(home / "pipe" / "log.jsonl")
    (home / "junk" / "log.jsonl").write_bytes(bytes(range(256)) * 9)
    (home / "loop" / "log.jsonl").symlink_to("log.jsonl")
    (write(home, "states", ended()) / "states").touch()

    def refusing(call: Any) -> Any:
        """Refuse a folder as to other users: the superuser, whom tests may run as, reads all folders."""

        def refused(path: Any, *more: Any, **named: Any) -> Any:
            if "locked" in str(path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *more, **named)

        return refused

    monkeypatch.setattr("os.open", refusing(os.open))
    monkeypatch.setattr("os.lstat", refusing(os.lstat))
    said = {one["name"]: one.get("error", "") for one in answer("list")}
    why = {
        "good": "",
        "folder": "Is a directory",
        "pipe": "it is no file",
        "junk": "Line 1 of .penstock/junk/log.jsonl is damaged",
        "loop": "Too many levels of symbolic links",
        "states": "Not a directory",
        "locked": "Permission denied",
    }
    assert said.keys() == why.keys()
    for name, reason in why.items():
        assert reason in said[name]
    assert "accuracy 0.875" in penstock("list").stdout
    for name in why.keys() - {"good"}:
        (message,) = penstock("show", name, code=1).stderr.splitlines()
        assert why[name] in message


def test_a_folder_of_studies_that_is_a_file_is_one_message() -> None:
    Path("file").touch()
    assert "no folder file" in penstock("list", "--dir", "file", code=2).stderr
    (message,) = penstock("show", "s", "--dir", "file", code=2).stderr.splitlines()
    assert "Cannot read the folder file (Not a directory)" in message


def test_list_counts_trials_once_they_have_reported() -> None:
    write(Path(".penstock"), "early", story())
    assert " 3/5 " in penstock("list").stdout  # one failed, two have only been asked for or started


def test_export_to_csv_and_tensorboard() -> None:
    study = write(Path(".penstock"), "digits-1", ended())
    said = penstock("export", "digits-1", "--to", "csv").stdout
    assert said.splitlines() == [f"Wrote {study}/csv/trials.csv", f"Wrote {study}/csv/curves.csv"]
    assert len((study / "csv" / "curves.csv").read_text().splitlines()) == 8
    assert "tensorboard --logdir runs" in penstock("export", "digits-1", "--to", "tensorboard", "--out", "runs").stdout
    assert len(list(Path("runs").glob("trial-*/events*"))) == 5
    assert "--logdir 'my runs'" in penstock("export", "digits-1", "--to", "tensorboard", "--out", "my runs").stdout
    assert "--to" in penstock("export", "digits-1", code=2).stderr
    assert "'csv'" in penstock("export", "digits-1", "--to", "excel", code=2).stderr


def test_a_page_that_cannot_be_written_is_one_message() -> None:
    write(Path(".penstock"), "digits-1", ended())
    said = penstock("report", "digits-1", "--out", "nowhere/page.html", code=1).stderr
    assert "Cannot write nowhere/page.html (No such file or directory): choose another place with --out." in said


def test_a_page_of_an_empty_log_is_refused_as_by_other_commands() -> None:
    Path(".penstock/x").mkdir(parents=True)
    Path(".penstock/x/log.jsonl").touch()
    assert "holds no event yet" in penstock("report", "x", code=1).stderr
    assert not Path(".penstock/x/report.html").exists()


# dashboard, version, start


def test_the_dashboard_serves_the_latest_study_until_ctrl_c() -> None:
    for age, name in enumerate(("new", "old")):
        os.utime(write(Path(".penstock"), name, story()) / "log.jsonl", (1e9 - age, 1e9 - age))
    command = [PENSTOCK, "dashboard", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said.startswith("new is at http://127.0.0.1:")
            url = said.split()[3].split("/dashboard")[0]
            with urlopen(f"{url}/api/studies", timeout=30) as reply:
                (study,) = json.load(reply)["study_summaries"]
            assert study["study_name"] == "new"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
            assert process.returncode == 0
            assert "Traceback" not in errors
        finally:
            process.kill()


def test_a_full_device_as_standard_output_is_one_message() -> None:
    write(Path(".penstock"), "digits-1", ended())
    with open("/dev/full", "w") as full:
        ran = subprocess.run([PENSTOCK, "list", "--json"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 1
    assert ran.stderr == "penstock: Cannot write to standard output (No space left on device).\n"


def test_a_dashboard_that_is_not_installed_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path(".penstock"), "digits-1", story())
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    assert "pip install 'penstock[dashboard]'" in penstock("dashboard", code=1).stderr


@pytest.mark.parametrize("name", ["run", "resume"])
def test_a_command_has_an_option_for_each_setting_of_a_run(name: str) -> None:
    options = {option.name: option for option in get_command(app).commands[name].params}  # type: ignore[attr-defined]
    defaults = {one.name: one.default for one in fields(RunSettings)}
    assert {setting: options[setting].default for setting in defaults} == defaults
    for enum, known in ((Sharing, SHARING), (Scheduler, SCHEDULERS), (Growing, FIRST)):
        assert [one.value for one in enum] == list(known)


def test_version() -> None:
    assert penstock("--version").stdout == f"penstock {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom penstock.cli.app import app\n"
        "try: app(['--help'])\nexcept SystemExit: print(*sys.modules, sep='\\n')"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Usage" in ran.stdout
    assert not {"torch", "optuna", "numpy", "rich.live", "cloudpickle"} & set(ran.stdout.splitlines())


ENDS = """
import gc, os
from penstock.cli import ending

ending.end_at_once()

class Cycle:
    def __init__(self):
        self.itself, self.file = self, open("left.txt", "w")

    def __del__(self, write=os.write):
        write(1, b"found")

gc.disable()
Cycle().file.write("all of it")
"""


def test_a_command_ends_without_a_search_for_cycles_and_what_was_written_is_there() -> None:
    ran = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert ran.stdout == ""
    assert Path("left.txt").read_text() == "all of it"
