"""The arguments of a study: right ones are taken as plain numbers, and each wrong one is one message."""

from __future__ import annotations

import io
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import optuna
import pytest
import torch
from typer.testing import CliRunner

import penstock as ps
from penstock.arguments import seconds
from penstock.cli.app import app
from penstock.log.events import Opened
from tests.studies import log, studies
from tests.tasks import Blobs

SPACE = {"x": ps.uniform(0, 4)}


def once(trial):
    trial.report(1, loss=trial.config["x"])


study = studies(once, SPACE, trials=3, algorithm=ps.Random(budget=1))


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (1e16, 1e16),
        (1e-5, 1e-5),
        ("1e3s", 1000.0),
        ("1e-5", 1e-5),
        ("1.5e1m", 900.0),
        (".5", 0.5),
        ("5.", 5.0),
        (np.float32(0.5), 0.5),
        (torch.tensor(3), 3.0),
        (Fraction(1, 2), 0.5),
        (" 2 h ", 7200.0),
    ],
)
def test_a_deadline_is_any_finite_time(given, made):
    assert seconds(given) == made
    assert type(seconds(given)) is float


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param("9" * 400, id="long"),
        pytest.param(10**400, id="great"),
        "1e400",
        "-1",
        -1,
        0,
        "1e-400",
        "nan",
        np.nan,
        "inf",
        True,
        [],
        "1.2.3",
        "e3",
        "3 y",
    ],
)
def test_a_deadline_that_is_no_time_above_0_is_one_message(wrong):
    with pytest.raises(
        ps.StudyError, match=r'^deadline must be a finite number of seconds above 0, or text such as "90s", .{10,250}$'
    ):
        study(deadline=wrong)


def test_a_study_keeps_numbers_of_numpy_and_torch_as_plain_ones():
    given = study(
        target=np.float32(0.5),
        deadline=np.float64(1e16),
        seed=np.int64(3),
        trials=torch.tensor(2),
        algorithm=ps.Random(budget=np.int8(1)),
    )
    given.run()
    plain = study(name="plain", target=0.5, deadline=1e16, seed=3, trials=2).run()
    assert [trial.config for trial in plain.trials] == [event.config for event in log() if hasattr(event, "config")]
    one, other = (next(e.settings for e in log(name) if isinstance(e, Opened)) for name in ("s", "plain"))
    assert one == {**other, "name": "s", "began": one["began"]}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(name="-x"), "name must not begin with -, which the command line takes for an option, got '-x'"),
        (dict(name="profiles.jsonl"), "name must not be 'profiles.jsonl', the file of measurements beside the studies"),
        (dict(name="a\ud800"), r"name must be one folder's name .* got 'a\\ud800'"),
        (dict(dir=3), "dir must be the path of a folder, such as '.penstock', got 3"),
        (dict(dir=None), "dir must be the path of a folder"),
        (dict(dir=b"x"), "dir must be the path of a folder"),
        (dict(dir=""), "dir must be the path of a folder"),
        (dict(dir="a\0b"), "dir must be the path of a folder"),
        (dict(dir="\ud800"), r"dir must be the path of a folder, such as '.penstock', got '\\ud800'"),
        (dict(dir=Path("a\ud800")), "dir must be the path of a folder"),
        (dict(mode=[]), r'mode must be "min" or "max", got \[\]'),
        (dict(mode=np.ones(2)), 'mode must be "min" or "max", got array'),
        (dict(metric="a\ud800"), "metric must be the name of a metric"),
        (dict(algorithm=ps.Random), "algorithm must be one such as"),
        (dict(seed=10**400), "seed must be a whole number, got a number of over 300 digits, .* a finite number"),
        (dict(trials=10**400), "trials must be a whole number above 0, got a number of over 300 .* a finite number"),
        (dict(trials=10**5000), "trials must be a whole number above 0, got a number of over 300 .* a finite number"),
        (dict(target=-(10**400)), "target must be a finite value of 'loss', got .* too great for a finite number"),
        (dict(deadline=10**400), "deadline must be a finite number of seconds .* too great for a finite number"),
        (dict(target="0.5"), "target must be a finite value of 'loss', got '0.5'"),
        (dict(states=3), "states must be a folder or one URL"),
    ],
)
def test_a_wrong_argument_of_a_study_is_one_message(settings, said):
    with pytest.raises(ps.StudyError, match=said):
        study(**settings)


@pytest.mark.parametrize("name", ["on", "sharing", "scheduler", "growing", "workers", "mixed_types", "weight"])
@pytest.mark.parametrize("wrong", [[], {}, 1.5, np.ones(2), "x\ud800", object()])
def test_a_wrong_argument_of_a_run_is_one_message(name, wrong):
    if name == "weight" and isinstance(wrong, float):
        return
    with pytest.raises(ps.StudyError, match=f"^{name} must be "):
        study().run(**{name: wrong})
    with pytest.raises(ps.StudyError, match=f"^{name} must be "):
        study().run(**{name: "" if name not in ("workers", "weight") else np.nan})


@pytest.mark.parametrize("name", ["progress", "allow_changes"])
def test_a_flag_of_a_run_is_true_or_false(name):
    with pytest.raises(ps.StudyError, match=f"^{name} must be True or False, got 'yes'"):
        study().run(**{name: "yes"})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ps.PBT(population=4, max_budget=3, quantile="x"), "quantile must be above 0 .* got 'x'"),
        (lambda: ps.PBT(population=4, max_budget=3, quantile=np.nan), "quantile must be above 0 .* got nan"),
        (lambda: ps.PBT(population="4", max_budget=3), "population must be a whole number of at least 2, got '4'"),
        (lambda: ps.ASHA(max_budget=[]), r"max_budget must be a whole number of at least 1, got \[\]"),
        (lambda: ps.ASHA(max_budget=9, brackets=None), "brackets must be a whole number of at least 1, got None"),
        (lambda: ps.Hyperband(max_budget=10**400), "max_budget must be a whole number"),
        (lambda: ps.SuccessiveHalving(max_budget=9, additive=1), "additive must be True or False, got 1"),
        (lambda: ps.Grid(budget=True), "budget must be a whole number of at least 1, got True"),
    ],
)
def test_a_wrong_argument_of_an_algorithm_is_one_message(make, said):
    with pytest.raises(ps.StudyError, match=said):
        make()


def test_a_folder_may_have_a_name_that_is_no_text():
    assert study(dir="a\udce9").run(progress=False).dir.parent == Path("a\udce9")


# Spaces and samplers


def late(trial):
    trial.suggest_float("x", 0, 1)
    if trial.number == 2:
        raise KeyError("late")


def leaves(trial):
    sys.exit(3)


class Broken(optuna.samplers.RandomSampler):
    def sample_independent(self, study, trial, name, distribution):
        raise ValueError("no value")


class Far(optuna.samplers.RandomSampler):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def sample_independent(self, study, trial, name, distribution):
        return self.value


class Lost(optuna.samplers.RandomSampler):
    def infer_relative_search_space(self, study, trial):
        raise ValueError("no space")


@pytest.mark.parametrize(
    ("space", "sampler", "said"),
    [
        (late, None, r"^late raised KeyError: 'late' \(.*, line \d+\), .* the config of trial 2: mend it"),
        (leaves, None, r"^leaves raised SystemExit: 3 \(.*, line \d+\), .* the config of trial 0: mend it"),
        (lambda trial: trial.suggest_float(3, 0, 1), None, "A parameter's name must be a string, got 3: write '3'"),
        (lambda trial: trial.suggest_float("\ud800", 0, 1), None, "name must be text that can be printed"),
        (
            SPACE,
            Broken(),
            r"^The sampler Broken raised ValueError: no value \(.*\), .* trial 0: choose another",
        ),
        (
            SPACE,
            Far(77.0),
            r"^The sampler Far must give x from 0.0 to 4.0, got 77.0: choose another sampler, or mend it",
        ),
        (SPACE, Far(4 + 1e-7), r"^The sampler Far must give x from 0.0 to 4.0, got 4.0000001"),
        ({"x": ps.randint(2, 5)}, Far(1), r"^The sampler Far must give x from 2 to 4, got 1"),
        (lambda trial: trial.suggest_float("x", 0, 1) and None, Far(77.0), r"^The sampler Far must give x from 0.0 to"),
        (SPACE, Lost(), r"^The sampler Lost raised ValueError: no space"),
        (lambda trial: trial.suggest_float("x", 0, 1) and None, Broken(), r"^The sampler Broken raised ValueError"),
    ],
)
def test_a_space_or_a_sampler_that_raises_is_one_message(space, sampler, said):
    with pytest.raises(ps.PenstockError, match=said):
        study(once, space, sampler=sampler).run()


@pytest.mark.parametrize(("value", "bound"), [(4 + 1e-12, 4.0), (-1e-12, 0.0)])
def test_a_samplers_value_that_rounding_puts_outside_is_its_bound(value, bound):
    result = study(sampler=Far(value)).run(progress=False)
    assert {trial.config["x"] for trial in result.trials} == {bound}


def test_a_space_is_named_without_its_hash():
    with pytest.raises(ps.SpaceError, match=r"^<lambda> raised ZeroDivisionError: division by zero"):
        study(once, lambda trial: 1 / 0).run()
    with pytest.raises(ps.SpaceError, match=r"^Grid needs a dict, got the function late: write the space as a dict"):
        study(once, late, algorithm=ps.Grid(budget=1), trials=None)


def itself():
    values = []
    values.append(values)
    return values


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (lambda: {"a\ud800": ps.uniform(0, 1)}, r"name must be text that can be printed, got 'a\\ud800'"),
        (lambda: {"a": ps.choice(["\ud800", "b"])}, r"choice has a value that the log cannot keep, '\\ud800'"),
        (lambda: SPACE | {"c": "\ud800"}, r"c has a value that the log cannot keep, '\\ud800'"),
        (lambda: SPACE | {"c": {(1, 2): 3}}, "c has a value that the log cannot keep"),
        (lambda: SPACE | {"c": itself()}, "a value that contains itself"),
        (lambda: SPACE | {"c": 10**5000}, "c has a value that the log cannot keep"),
        (lambda: SPACE | {3: 1}, "A parameter's name must be a string, got 3: write '3'"),
    ],
)
def test_a_space_that_the_log_cannot_keep_is_refused(space, said):
    with pytest.raises(ps.SpaceError, match=said):
        study(once, space())


# Text that is half of a surrogate pair


def test_an_error_with_half_a_surrogate_pair_fails_its_trial_and_can_be_shown():
    def fails(trial):
        if trial.number == 1:
            raise ValueError("caf\udce9")
        once(trial)

    result = study(fails).run()
    assert [trial.state for trial in result.trials] == ["finished", "failed", "finished"]
    for command in (["show", "s"], ["show", "s", "--json"], ["export", "s", "--to", "csv"], ["report", "s"]):
        assert CliRunner().invoke(app, command).exit_code == 0
    assert "caf\\udce9" in Path(".penstock/s/csv/trials.csv").read_text()


def test_a_metric_with_half_a_surrogate_pair_fails_its_trial():
    def names(trial):
        trial.report(1, loss=1.0, **({"\ud800": 1.0} if trial.number == 1 else {}))

    result = study(names).run()
    assert [trial.state for trial in result.trials] == ["finished", "failed", "finished"]
    assert "expected a metric's name that can be printed, got '\\ud800'" in result.trials[1].error


def test_a_metric_of_a_task_is_named_by_text():
    class Named(Blobs):
        def metrics(self, model, batch, config):
            return {3: 1.0}

    with pytest.raises(ps.TaskError, match=r"Named\.metrics must name its scalars by text that can be printed, got 3"):
        study(Named(), {"lr": ps.uniform(0, 1)}).run()


# Standard error and exports


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_study_runs_without_standard_error(monkeypatch, stream):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed if stream else None)
    study().run()
    study(name="shown").run(progress=True)
    file = Path("tuned.py")
    file.write_text(
        "import penstock as ps\ndef train(trial): trial.report(1, loss=1.0)\n"
        "study = ps.Study(train, {'x': ps.uniform(0, 1)}, metric='loss', mode='min', algorithm=ps.Random(budget=1), "
        "trials=2)\n"
    )
    assert CliRunner().invoke(app, ["run", str(file), "--name", "cli", "--json"]).exit_code == 0


@pytest.mark.parametrize("target", ["file", "file/below", "/proc/nowhere", "/dev/null/x"])
@pytest.mark.parametrize("to", ["csv", "tensorboard"])
def test_an_export_to_a_place_that_cannot_be_written_is_one_message(to, target):
    study().run()
    Path("file").write_text("")
    result = CliRunner().invoke(app, ["export", "s", "--to", to, "--out", target])
    assert result.exit_code == 1
    assert result.stderr.startswith("penstock: Cannot write ")
    assert result.stderr.count("\n") == 1


def test_an_export_over_a_file_that_is_read_only_is_one_message():
    study().run()
    Path("out/trials.csv").mkdir(parents=True)  # even root cannot write a folder as a file
    result = CliRunner().invoke(app, ["export", "s", "--to", "csv", "--out", "out"])
    assert (result.exit_code, result.stderr) == (
        1,
        "penstock: Cannot write out/trials.csv (Is a directory): choose another place with --out.\n",
    )
