"""What several devices give a trial, through the command line and real worker processes."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.bundle import Device, Job
from penstock.cli import profile as profiling
from penstock.cli.app import app
from penstock.cli.loading import load
from penstock.cli.rehearse import one_of
from penstock.engine.clocking import Shelf
from penstock.executors.local import LocalExecutor
from penstock.executors.processes.executor import ProcessExecutor
from penstock.log.states import States
from penstock.report.scaling import verdict
from penstock.speed.profiles import Profile, Profiles
from penstock.task import fingerprint

TASK = """
    import torch
    from torch import nn
    import penstock as ps

    class Line(ps.Task):
        batch_size = 16

        def data(self, config):
            x = torch.linspace(-1, 1, 128)[:, None]
            return (x, 2 * x), (x, 2 * x)

        def model(self, config):
            return nn.Linear(1, 1)

        def optimizer(self, params, config):
            return torch.optim.SGD(params, lr=config["lr"])

        def loss(self, model, batch, config):
            print("training", flush=True)
            return ((model(batch[0]) - batch[1]) ** 2).mean()

    study = ps.Study(Line(), {"lr": ps.loguniform(0.01, 1)}, metric="loss", mode="min",
                     algorithm=ps.ASHA(max_budget=3), trials=4, seed=7)
"""
FUNCTION = """
    import penstock as ps

    def train(trial):
        trial.report(1, loss=trial.config["x"])

    study = ps.Study(train, {"x": ps.uniform(1, 2)}, metric="loss", mode="min", algorithm=ps.Random(budget=1), trials=2)
"""


def file(code: str) -> Path:
    path = Path("tuned.py")
    path.write_text(dedent(code))
    return path


def profile(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["profile", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def answer(*arguments: object) -> Any:
    return json.loads(profile(*arguments, "--json").stdout)


def kept(dir: str = ".penstock") -> list[Profile]:
    return list(Profiles.open(Path(dir) / "profiles.jsonl")._known.values())


def test_a_table_says_what_each_number_of_devices_gives_and_how_many_pay() -> None:
    result = profile(file(TASK), "--workers", 2, "--dir", "there")
    lines = [line for line in result.stdout.splitlines() if line.strip() not in ("", "training")]
    study = load(Path("tuned.py"))
    assert lines[0] == f"Line, trial 0 on cpu: lr={study.space.draw(7, 0)['lr']:.4g}"
    assert re.fullmatch(r"devices +ms a step +steps a second +speedup +efficiency", lines[1])
    assert re.fullmatch(r" +1 +\S+ +\S+ +1\.00 +100%", lines[3])
    assert re.fullmatch(r" +2 +\S+ +\S+ +\d+\.\d\d +\d+%", lines[4])
    assert re.match(r"(1 device is best|Up to 2 devices pay): a step takes .* on 1 device, .* on 2 devices", lines[5])
    assert lines[6].startswith("Kept in there/profiles.jsonl")
    assert lines[7] == "A unit alone on a device, with its evaluation and saving:"
    assert re.fullmatch(r"  4 configs  16\.[0-9a-f]{9}: \S+ ms, ±\d+% from unit to unit and ±\d+% .*", lines[8])
    assert lines[9] == "Of 4 configs, 4 can be fused with others, in 1 group:"
    assert re.fullmatch(r"  4 configs  16\.[0-9a-f]{9}", lines[10])
    assert "1, 2, 4, … devices" in result.stderr
    found = {one.kind: sorted(one.table) for one in kept("there") if one.task == fingerprint(study.task)}
    assert found == {"scaling": [1, 2], "unit": [1], "spread": [0, 1, 2], "moving": [0, 1]}
    assert [path.name for path in Path("there").iterdir()] == ["profiles.jsonl"]  # no study was begun


def test_with_json_stdout_holds_one_object_and_a_study_finds_what_was_kept() -> None:
    said = answer(file(TASK), "--workers", 2)
    study = load(Path("tuned.py"))
    assert said["config"] == study.space.draw(7, 0)
    assert (said["task"], said["type"], said["kept"]) == ("Line", "cpu", ".penstock/profiles.jsonl")
    assert [row["devices"] for row in said["rows"]] == [1, 2]
    for row in said["rows"]:
        assert row["steps_per_second"] == pytest.approx(1 / row["seconds"])
        assert row["speedup"] == pytest.approx(said["rows"][0]["seconds"] / row["seconds"])
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["devices"])
    assert said["pays"] == min(said["rows"], key=lambda row: row["seconds"])["devices"]
    executor = LocalExecutor(Job(study.task, 7, "loss", "min", States.of("states")))
    (description,) = executor.describe([study.space.draw(7, 0)], train=False)
    executor.close()
    shelf = Shelf(Profiles.open(".penstock/profiles.jsonl"), fingerprint(study.task))
    found = shelf.get(description.signature or "", one_of(2), "scaling")
    assert found is not None
    assert found.table == {row["devices"]: row["seconds"] for row in said["rows"]}


def test_no_more_devices_than_a_batch_has_samples_and_nothing_kept_where_nothing_can_be_written() -> None:
    Path("there").touch()
    said = answer(file(TASK.replace("batch_size = 16", "batch_size = 2")), "--workers", 3, "--dir", "there")
    assert [row["devices"] for row in said["rows"]] == [1, 2]
    assert "a batch has 2 samples, so it has no more devices" in said["reason"]
    assert said["kept"] is None
    assert "could not be kept" in verdict(said)


def test_a_trial_that_cannot_be_spread_has_no_times_and_says_why() -> None:
    result = profile(file(TASK.replace("** 2).mean()", "** 2).sum()")), "--workers", 2)
    assert "1 device is best: never on several devices: the loss of a batch is" in result.stdout
    assert "steps a second" not in result.stdout
    assert [one.table for one in kept() if one.kind == "scaling"] == [{1: 1.0}]  # which a study does not try again


def test_units_of_one_step_end_with_a_message_and_not_never() -> None:
    result = profile(file(TASK.replace("batch_size = 16", "batch_size = 128")), "--workers", 2, code=1)
    assert "unit_steps = 20" in result.stderr
    assert kept() == []


def test_a_task_that_fails_is_one_message() -> None:
    code = TASK.replace("return nn.Linear(1, 1)", "raise ValueError('no such width')")
    result = profile(file(code), "--workers", 2, code=1)
    assert "ValueError: no such width" in result.stderr


@pytest.mark.parametrize(
    ("code", "options", "said"),
    [
        (FUNCTION, (), "train is a function, which has a loop of its own"),
        (TASK, ("--workers", "1", "--on", "ray"), "got --workers 1: use --on local to profile one"),
        (TASK, ("--on", "simulated"), "--on must be local, ray or ray://host:port"),
        ("study = 3", (), "its `study` is of type int"),
    ],
)
def test_what_cannot_be_profiled(code: str, options: tuple[str, ...], said: str) -> None:
    result = profile(file(code), *options, code=2)
    assert said in result.stderr
    assert result.stdout == ""
    assert not Path(".penstock").exists()


WIDE = (
    TASK.replace("nn.Linear(1, 1)", "nn.Sequential(nn.Linear(1, 1 + (w := config['wide'])), nn.Linear(1 + w, 1))")
    .replace('{"lr"', '{"wide": ps.choice([True, False]), "lr"')
    .replace("trials=4", "trials=6")
    .replace('print("training", flush=True)', "pass")
)


def test_on_one_device_it_says_what_each_way_of_sharing_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    lines = [line for line in profile(file(WIDE)).stdout.splitlines() if line.strip() not in ("", "training")]
    assert lines[0] == "Line on cpu, one device"
    assert re.fullmatch(r"mode +trials +ms a step +model steps a second +memory +σ +IMPV", lines[1])
    assert re.match(r"solo, in turn +2 +\S+ +\S+ *$", lines[3])
    assert re.match(r"fused, in turn +6 +\S+ +\S+ +\d\.\d\d +-?\d+%", lines[4])
    assert re.match(r"packed +\d +\S+ +\S+ +\d\.\d\d +-?\d+%", lines[5])
    assert re.match(
        r'(No pack pays|Packs of 2 bundles pay): 2 bundles together train .* "auto" packs nothing', lines[6]
    )
    assert re.fullmatch(r"A change from trial to trial takes \S+ ms\.", lines[7])
    assert lines[8] == "A unit alone on a device, with its evaluation and saving:"
    assert [re.match(r"  (\d) configs  16.*ms, ±", line).group(1) for line in lines[9:11]] == ["3", "3"]
    assert lines[11] == "Of 6 configs, 6 can be fused with others, in 2 groups:"
    reasons = [line.split(": ", 1)[1] for line in lines[12:] if ": " in line]
    assert len(reasons) == 1
    assert re.fullmatch(r"0\.out_features is [12] in one trial and [12] in another", reasons[0])


def test_every_signature_of_the_first_draws_is_measured_and_a_plan_is_made_of_it() -> None:
    said = answer(file(WIDE), "--workers", 2)
    study = load(Path("tuned.py"))
    wides = [study.space.draw(7, number)["wide"] for number in range(6)]
    assert [[one["configs"], one["reason"]] for one in said["units"]] == [
        [wides.count(w), ""] for w in dict.fromkeys(wides)
    ]
    assert [one["config"]["wide"] for one in said["others"]] == [not wides[0]]
    assert [[row["devices"] for row in one["rows"]] for one in said["others"]] == [[1, 2]]
    tables = {(one.signature, one.kind): one.table for one in kept()}
    for one in said["units"]:
        signature = one["signature"]
        assert tables[signature, "unit"] == {1: one["seconds"]}
        assert tables[signature, "spread"][2] == one["configs"], "as frequent as in the sample"
        assert sorted(tables[signature, "scaling"]) == [1, 2]
    Path("own.toml").write_text('[[instance]]\nname = "rack"\ntype = "cpu"\ndevices = 2\nmemory = 4\nprice = 1.0')
    plan = study.replace(trials=6).plan(catalogue="own.toml", instances=["rack"])
    (times,) = plan.job.times.values()
    assert {(one.signature, one.unit.mean) for one in times} == {(o["signature"], o["seconds"]) for o in said["units"]}


def test_units_of_one_config_of_many_that_fails_leave_the_others_timed() -> None:
    code = WIDE.replace("return torch.optim", "1 / (not config['wide'])\n            return torch.optim")
    study = load(file(code))
    assert study.space.draw(7, 0)["wide"] is False, "trial 0 is well"
    said = answer(file(code), "--workers", 2)
    timed = {one["reason"][:40]: one["seconds"] for one in said["units"]}
    assert len(timed) == 2
    assert timed.pop("")
    ((why, seconds),) = timed.items()
    assert seconds is None
    assert "fail" in why


def test_with_json_the_ways_of_sharing_are_one_object_and_the_papers_measures_follow_from_it() -> None:
    said = answer(file(WIDE), "--workers", 1)
    solo, fused, packed = said["rows"]
    assert [row["mode"] for row in said["rows"]] == ["solo, in turn", "fused, in turn", "packed"]
    assert solo["steps_per_second"] == pytest.approx(1 / solo["seconds"])
    assert packed["steps_per_second"] == pytest.approx(packed["trials"] / packed["seconds"])
    for row in (fused, packed):
        assert row["improvement"] == pytest.approx(1 - 1 / row["sigma"])
    assert (solo["sigma"], solo["improvement"], said["cpu"]) == (None, None, True)
    assert said["sigmas"].keys() == {"2"}
    assert said["pays"] == (2 if said["sigmas"]["2"] >= 1.05 else 1)
    assert sum(one["configs"] for one in said["groups"]) == sum(said["bundles"]) == 6


def test_one_signature_that_trains_as_one_bundle_leaves_nothing_to_pack() -> None:
    said = answer(file(TASK.replace('print("training", flush=True)', "pass")), "--workers", 1)
    assert [row["mode"] for row in said["rows"]] == ["solo, in turn", "fused, in turn"]
    assert (said["sigmas"], said["pays"]) == ({}, 1)
    assert "nothing to pack" in said["reason"]


def test_a_trial_that_fails_on_one_device_is_one_message() -> None:
    code = TASK.replace("return ((model", "raise ValueError('no such loss'); return ((model")
    result = profile(file(code), "--workers", 1, code=1)
    assert "The trial failed with {'lr'" in result.stderr
    assert "ValueError: no such loss" in result.stderr
    assert not Path(".penstock").exists()


def test_all_devices_unless_told_and_on_a_cpu_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    study = load(file(TASK))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert profiling.count_workers(study, "local", None) == 3
    assert profiling.count_workers(study, "local", 5) == 5
    assert profiling.count_workers(study, "ray", None) is None
    gpus = [Device(f"cuda:{i}", "H200", 2**30) for i in range(4)]
    monkeypatch.setattr("penstock.executors.local.find_devices", lambda: gpus)
    assert profiling.count_workers(study, "local", None) == 4


def test_of_several_types_the_one_with_most_devices_is_measured() -> None:
    devices = [Device("a", "old", 1), Device("b", "new", 1), Device("c", "new", 1)]
    alike, said = profiling._alike(devices)
    assert [device.name for device in alike] == ["b", "c"]
    assert said == ["of 3 devices, 2 are alike and were used"]


def test_ctrl_c_closes_the_executor_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[ProcessExecutor] = []
    wait = ProcessExecutor.wait

    def interrupted(self: ProcessExecutor, timeout: float | None = None) -> Any:
        waited.append(self)
        signal.raise_signal(signal.SIGINT)
        return wait(self, timeout)

    monkeypatch.setattr(ProcessExecutor, "wait", interrupted)
    monkeypatch.setattr(tempfile, "tempdir", str(Path.cwd()))
    result = profile(file(TASK), "--workers", 2, code=130)
    assert "Traceback" not in result.stderr
    (executor,) = waited
    assert all(worker.connection.closed for worker in executor._workers.values())
    assert [path.name for path in Path.cwd().iterdir() if path.is_dir() and path.name != "__pycache__"] == []
