"""Studies: what is refused, what goes on, and what comes back."""

import json
import os
import subprocess
import sys
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType

import optuna
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.arguments import seconds
from penstock.executors.ray.cluster import code_of
from penstock.log.events import Asked, Opened, Reported
from penstock.settings import RunSettings, TuneOptions
from penstock.stopping import say_how_to_resume
from tests.studies import log, studies, version_2
from tests.tasks import Blobs, trivial

SPACE = {"x": ps.uniform(0, 4)}


study = studies(trivial, SPACE, trials=3, name=None)


def run(*args, **changes):
    return study(*args, **{"name": "s", **changes}).run(progress=False)


BAD = [
    (dict(mode="best"), 'mode must be "min" or "max", got \'best\''),
    (dict(metric=""), "metric must be the name"),
    (dict(algorithm=ps.ASHA), r"algorithm must be one such as ASHA\(max_budget=27\)"),
    (dict(algorithm="asha"), "got 'asha'"),
    (dict(seed="0"), "seed must be a whole number, got '0'"),
    (dict(trials=0), "trials must be a whole number above 0, got 0"),
    (dict(trials=2.5), "got 2.5"),
    (dict(trials=None), "Random needs trials=: how many to try in all"),
    (dict(trials=None, algorithm=ps.ASHA(max_budget=9)), "ASHA needs trials="),
    (dict(name="a/b"), "name must be one folder's name .* got 'a/b': choose the folder above it with dir="),
    (dict(name=".."), "got '..'"),
    (dict(name=""), "got ''"),
    (dict(target=float("nan")), "target must be a finite value of 'loss'"),
    (dict(deadline="soon"), 'deadline must be .*seconds above 0, or text such as "90s", "10m", "2h", got \'soon\''),
    (dict(deadline=-1), "got -1"),
    (dict(sampler="tpe"), "sampler must be an Optuna sampler"),
    (dict(sampler=optuna.samplers.TPESampler(), algorithm=ps.BOHB(max_budget=9)), "BOHB brings its own sampler"),
    (
        dict(space={"x": ps.grid([1])}, algorithm=ps.Grid(budget=1), trials=1, sampler=optuna.samplers.TPESampler()),
        "Grid draws nothing: leave sampler= out",
    ),
    (
        dict(algorithm=ps.Hyperband(max_budget=81), trials=64),
        "runs 143 trials, got trials=64: leave it out or give 143",
    ),
    (dict(algorithm=ps.PBT(population=4, max_budget=4), trials=8), "runs 4 trials, got trials=8"),
    (dict(algorithm=ps.SyncBOHB(max_budget=81), trials=10), "runs 143 trials"),
    (dict(space={"x": ps.grid([1, 2])}, algorithm=ps.Grid(budget=1), trials=3), "runs 2 trials, got trials=3"),
    (dict(space={"x": ps.uniform(0, 1)}, algorithm=ps.Grid(budget=1), trials=None), r"Grid cannot enumerate x"),
    (dict(space={}), "empty|nothing to tune"),
    (dict(name=3), "name must be one folder's name"),
    (dict(target="low"), "target must be a finite value of 'loss', got 'low'"),
    (dict(task=3), "Expected a penstock.Task or a function of one trial, got int"),
    (dict(task=Blobs), r"got the class Blobs: .*, as in Study\(Blobs\(\)"),
]


@pytest.mark.parametrize(("changes", "said"), BAD)
def test_bad_settings_get_one_message_before_anything_is_written(changes, said):
    with pytest.raises(ps.PenstockError, match=said):
        study(**changes)
    assert not Path(".penstock").exists()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ps.uniform(1, 0), "low"),
        (lambda: ps.loguniform(0, 1), "zero|above 0"),
        (lambda: ps.ASHA(max_budget=9, reduction=1), "reduction must be a whole number of at least 2, got 1"),
        (lambda: ps.Hyperband(max_budget=3, min_budget=9), "max_budget must be at least min_budget=9, got 3"),
    ],
)
def test_bad_parts_are_refused_where_they_are_made(make, said):
    with pytest.raises(ps.PenstockError, match=said):
        make()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(on="moon"), 'on must be "local", "ray", .* or penstock.Simulated\\(devices=64\\), got \'moon\''),
        (dict(sharing="apart"), "sharing must be one of auto, solo, fused, packed, processes, distributed, got"),
        (dict(sharing="packed", packing="near"), "packing must be one of nearest, random, batch_size, got 'near'"),
        (dict(sharing="packed", similarity=-1), "similarity must be a number of at least 0, got -1"),
        (dict(sharing="packed", similarity=1, packing="random"), 'similarity= goes with packing="nearest"'),
        (dict(sharing="fused", packing="random"), 'packing= says which .* in a pack, got sharing="fused"'),
        (dict(sharing="solo", similarity=1), 'similarity= says which .* in a pack, got sharing="solo"'),
        (dict(sharing="packed", scheduler="fifo"), 'scheduler="fifo" gives each trial a device of its own'),
        (dict(sharing="processes", scheduler="fifo"), 'of its own: leave sharing="processes" out'),
        (dict(sharing="processes", packing="random"), 'packing= says which .* in a pack, got sharing="processes"'),
        (dict(sharing="processes", on="ray"), "starts worker processes on this machine, and on a Ray cluster each"),
        (dict(sharing="processes", on=ps.Simulated(2)), r"use Simulated\(processes=True\)"),
        (dict(sharing="processes", deterministic=True), "deterministic=True needs reports in one order"),
        (dict(sharing="processes", active_threads=0), "active_threads must be a percentage above 0 .* 100, got 0"),
        (dict(sharing="processes", active_threads=101), "active_threads must be a percentage above 0 .* got 101"),
        (dict(sharing="processes", active_threads="all"), "active_threads must be a percentage .* got 'all'"),
        (dict(sharing="fused", active_threads=25), 'processes that share a GPU, got sharing="fused"'),
        (dict(scheduler="best"), "scheduler must be one of waterfill, dynamic_fluid, static_fluid, fifo, got 'best'"),
        (dict(growing="worst"), 'growing must be "best" or "evenly", got \'worst\''),
        (dict(mixed_types="h200"), "mixed_types must be True or False, got 'h200'"),
        (dict(workers=0), "workers must be a whole number above 0, got 0"),
        (dict(workers=True), "workers must be a whole number above 0, got True"),
        (dict(workers=2, on=ps.Simulated(2)), "workers= is for real devices"),
        (dict(weight=0, on="ray"), "weight must be a number above 0, got 0"),
        (dict(weight=2), "weight= is a study's part of a Ray cluster"),
        (dict(scheduler="fifo", sharing="fused"), 'a device of its own: leave sharing="fused" out'),
    ],
)
def test_bad_ways_to_run(changes, said):
    good = dict(metric="loss", mode="min", algorithm=ps.Random(budget=2), trials=3)
    for run in (study().run, RunSettings, partial(ps.tune, trivial, SPACE, **good)):
        with pytest.raises(ps.StudyError, match=said):
            run(**changes)
    assert not Path(".penstock").exists()


class Halved(Blobs):
    shards = 2


@pytest.mark.parametrize(
    ("task", "states", "changes", "said"),
    [
        (ps.TabulatedTask(lambda config: ps.Tabulated({"loss": [1.0]}, 1)), None, {}, "looked up and not trained"),
        (Blobs(), "memory://s", dict(workers=2), "Expected a place that all workers reach, got states='memory://s'"),
        (Halved(), None, {}, "has shards = 2, .* and without workers= there is one: use workers=2 or more"),
        (Halved(), None, dict(workers=2, sharing="fused"), "got sharing='fused': leave it out"),
        (Halved(), None, dict(workers=2, sharing="processes"), "got sharing='processes': leave it out"),
        (Blobs(), "memory://s", dict(sharing="processes"), "got states='memory://s': use another sharing="),
        (Halved(), None, dict(workers=1), "got workers=1: use workers=2 or more"),
    ],
)
def test_ways_to_run_that_the_task_does_not_allow(task, states, changes, said):
    with pytest.raises(ps.StudyError, match=said):
        study(task, states=states).run(**changes)
    assert not Path(".penstock").exists()


@pytest.mark.parametrize("dir", ["/proc/penstock", "file"])
def test_a_directory_that_cannot_be_written(dir):
    Path("file").write_text("not a folder")
    with pytest.raises(ps.LogError, match=r"Cannot write the study's folder .*: choose another with dir="):
        run(dir=dir)


def test_a_study_of_an_existing_name_goes_on_and_trials_are_a_total():
    assert len(run(trials=3).trials) == 3
    assert len(run(trials=3).trials) == 3
    more = run(trials=5)
    assert [t.number for t in more.trials] == [0, 1, 2, 3, 4]
    assert sum(isinstance(e, Reported) for e in log()) == 10, "nothing is trained or reported twice"
    with pytest.raises(ps.StudyError, match="has trials=5, a total over all resumes, got trials=4"):
        run(trials=4)


def test_growing_in_steps_equals_running_at_once():
    for trials in (3, 5, 9):
        grown = run(trials=trials, algorithm=ps.ASHA(max_budget=4, reduction=2, concurrency=1), name="grown")
    assert len(grown.trials) == 9
    assert all(t.curve for t in grown.trials)
    configs = [t.config for t in run(trials=9, name="whole").trials]
    assert [t.config for t in grown.trials] == configs


def test_trained_and_simulated_reports_never_share_a_log():
    cluster = ps.Simulated(2, unit_seconds=1.0)
    run()
    study(name="there").run(on=cluster, progress=False)
    logs = [Path(f".penstock/{name}/log.jsonl") for name in ("s", "there")]
    before = [path.read_bytes() for path in logs]
    with pytest.raises(
        ps.StudyError, match=r"^Expected real devices, on which the study 's' has run, got a simulated .*: reh"
    ):
        study(name="s", trials=5).run(on=cluster, progress=False)
    with pytest.raises(
        ps.StudyError, match=r"^Expected a simulated cluster, .* 'there' has run, got on='local': train"
    ):
        run(name="there", trials=5)
    assert [path.read_bytes() for path in logs] == before, "nothing was written"
    assert len(study(name="there", trials=5).run(on=cluster, progress=False).trials) == 5
    assert len(run(trials=5).trials) == 5


def test_a_log_that_does_not_say_where_its_study_ran_goes_on_anywhere():
    run()
    path = Path(".penstock/s/log.jsonl")
    lines = version_2(path)
    lines[0]["settings"].pop("run")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(study(name="s", trials=5).run(on=ps.Simulated(2, unit_seconds=1.0), progress=False).trials) == 5


@pytest.mark.parametrize("setting", [{"unit_steps": 0}, {"batch_size": 0}, {"precision": "fp8"}])
def test_a_setting_of_the_task_that_changed_since_is_checked_when_the_study_runs(setting):
    made = study(Blobs(), {"lr": ps.loguniform(1e-3, 1), "momentum": 0.5})
    for name, value in setting.items():
        setattr(made.task, name, value)
    with pytest.raises(ps.TaskError, match=rf"^Blobs\.{name} must be"):
        made.run(progress=False)
    assert not Path(".penstock").exists()


def test_a_study_is_shown_by_its_name_task_algorithm_and_goal():
    assert repr(study()) == "Study(trivial, Random(budget=2, concurrency=8), loss min)"
    assert (
        repr(study(name="s", mode=None))
        == "Study('s', trivial, Random(budget=2, concurrency=8), loss min (by its name))"
    )


@pytest.mark.parametrize(
    ("settings", "again", "said"),
    [
        ({}, {}, "its 3 trials are done. Give more with trials= (--trials) to go on."),
        ({"algorithm": ps.SuccessiveHalving(max_budget=2, reduction=2)}, {}, "its 3 trials are done."),
        ({"target": 100.0}, {}, "its target is reached. Give a better target= (--target) to go on."),
        ({}, {"deadline": 1e-9}, "its time is used up. Give a later deadline= (--deadline) to go on."),
    ],
)
def test_a_study_with_nothing_left_to_train_says_so(settings, again, said, capsys):
    line = f"Nothing was left to train in s: {said}"
    study(name="s", **settings).run()
    assert "Nothing was left" not in capsys.readouterr().err
    study(name="s", **settings, **again).run()
    assert capsys.readouterr().err.splitlines()[-1] == line
    run(**settings)
    assert capsys.readouterr().err == ""


def test_a_study_without_a_name_is_new_each_time():
    for _ in range(2):
        study().run(progress=False)
    assert sorted(p.name for p in Path(".penstock").iterdir()) == ["trivial-1", "trivial-2"]


def test_halving_cannot_take_more_trials():
    algorithm = ps.SuccessiveHalving(max_budget=4, reduction=2)
    run(algorithm=algorithm, trials=4)
    with pytest.raises(ps.StudyError, match="halves 4 trials, got trials=8"):
        run(algorithm=algorithm, trials=8)


def other(trial):
    trial.report(1, loss=0.0)
    trial.report(2, loss=0.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            dict(space={"x": ps.uniform(0, 5)}),
            r"space was \{'x': 'uniform\(0.*4.*\)'\} and is \{'x': 'uniform\(0.*5.*\)'\}",
        ),
        (dict(algorithm=ps.Random(budget=3)), r"algorithm was Random\(budget=2.*and is Random\(budget=3"),
        (dict(task=other), "task was trivial and is other; the task's code is another"),
        (dict(sampler=optuna.samplers.TPESampler()), "sampler was None and is TPESampler"),
    ],
)
def test_a_changed_study_is_refused_with_what_changed(changes, said):
    run()
    before = log()
    with pytest.raises(ps.StudyError, match=said):
        run(trials=5, **changes)
    assert log() == before


@pytest.mark.parametrize("name", ["metric", "seed"])
def test_another_goal_or_seed_is_another_study(name):
    run()
    with pytest.raises(ps.StudyError, match=f"exists with {name}="):
        run(**{name: {"metric": "other", "seed": 1}[name]})


def test_a_changed_study_goes_on_where_that_is_allowed():
    first = run(trials=3)
    wider = study(space={"x": ps.uniform(0, 9)}, trials=6, name="s").run(progress=False, allow_changes=True)
    assert [t.config for t in wider.trials[:3]] == [t.config for t in first.trials]
    assert any(t.config["x"] > 4 for t in wider.trials[3:])
    again = study(space={"x": ps.uniform(0, 9)}, trials=8, name="s").run(progress=False)  # the change is settled
    assert [t.config for t in again.trials[:6]] == [t.config for t in wider.trials]


def test_a_changed_task_goes_on_where_that_is_allowed():
    run(trials=2)
    result = study(other, trials=3, name="s").run(progress=False, allow_changes=True)
    assert result.trials[2].metrics == {"loss": 0.0}
    assert result.trials[0].metrics != {"loss": 0.0}


def test_a_space_and_a_config_that_disagree_on_resume():
    run(trials=3)
    with pytest.raises(ps.StudyError, match=r"Trial \d of the log does not fit the changed space: .*Widen the space"):
        study(space={"x": ps.uniform(3.99, 4)}, trials=4, name="s").run(progress=False, allow_changes=True)


def test_a_config_in_the_log_that_the_space_would_not_have_drawn():
    run(trials=3)
    path = Path(".penstock/s/log.jsonl")
    drawn = next(e for e in log() if isinstance(e, Asked)).config["x"]
    version_2(path)
    path.write_text(path.read_text().replace(repr(drawn), "1.25"))
    with pytest.raises(ps.StudyError, match=r"trial 0 was drawn as {'x': 1.25}, and now comes out as"):
        run(trials=4)


def test_an_algorithm_whose_decisions_differ_cannot_take_over():
    run(algorithm=ps.ASHA(max_budget=4, reduction=2), trials=6)
    changed = study(algorithm=ps.ASHA(max_budget=9, min_budget=3), trials=6, name="s")
    with pytest.raises(ps.StudyError, match="The algorithm and the log disagree"):
        changed.run(progress=False, allow_changes=True)


def test_an_algorithm_that_would_have_decided_the_same_may_take_over():
    run(algorithm=ps.Random(budget=2, concurrency=8), trials=3)
    changed = study(algorithm=ps.Random(budget=2, concurrency=4), trials=4, name="s")
    assert len(changed.run(progress=False, allow_changes=True).trials) == 4


def test_choices_of_any_object_survive_a_resume():
    space = {"act": ps.choice([nn.ReLU, nn.Tanh, len]), "shape": ps.choice([(8, 4), (2, 2)])}

    def train(trial):
        assert trial.config["act"] in (nn.ReLU, nn.Tanh, len)
        assert isinstance(trial.config["shape"], tuple)
        for unit in range(trial.state or 0, 2):
            trial.report(unit + 1, state=unit + 1, loss=1.0)

    run(train, space, trials=3)
    assert all(t.state == "finished" for t in run(train, space, trials=6).trials)


def test_values_read_the_same_however_a_file_is_run():
    made = "class Own: pass\nvalue = [Own, Own(), {'one', 'two', 'three', 'four'}, frozenset((2, 'b'))]"
    code = "import sys; exec(sys.argv[1], space := {'__name__': sys.argv[2]}); "
    code += "from penstock.log.events import plain; print(plain(space['value']))"
    texts = [
        subprocess.run(
            [sys.executable, "-c", code, made, name],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name, seed in (("__main__", "1"), ("penstock_file_tune", "2"))
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "sampler",
    [
        optuna.samplers.TPESampler(n_startup_trials=2),
        optuna.samplers.GPSampler(n_startup_trials=2),
        optuna.samplers.CmaEsSampler(n_startup_trials=1),
        optuna.samplers.QMCSampler(),
        optuna.samplers.NSGAIISampler(population_size=3),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
@pytest.mark.parametrize(
    "algorithm",
    [
        ps.Random(budget=1),
        ps.SuccessiveHalving(max_budget=2, reduction=2),
        ps.Hyperband(max_budget=2, reduction=2),
        ps.ASHA(max_budget=2, reduction=2),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_any_sampler_serves_any_of_these_algorithms_and_resumes(sampler, algorithm):
    space = {"x": ps.uniform(0, 4), "y": ps.loguniform(0.1, 1)}
    trials = None if isinstance(algorithm, ps.Hyperband) else 6
    settings = dict(algorithm=algorithm, sampler=sampler, trials=trials)
    whole = run(trivial, space, **settings)
    again = run(trivial, space, **settings)  # replays every draw and checks it against the log
    assert [t.config for t in again.trials] == [t.config for t in whole.trials]


def test_a_result_has_what_a_user_looks_for():
    result = run(Blobs(), {"lr": ps.loguniform(1e-3, 1), "kind": ps.choice(["a", "b"])}, trials=4)
    best = result.best
    assert best.metrics["loss"] == min(t.metrics["loss"] for t in result.trials)
    assert set(best.config) == {"lr", "kind"}
    assert [row["budget"] for row in best.curve] == [1, 2]
    assert best.device_seconds > 0
    assert best.error is None
    assert isinstance(best.model(), nn.Sequential)
    frame = result.dataframe()
    assert list(frame["number"]) == [0, 1, 2, 3]
    assert {"state", "budget", "config.lr", "config.kind", "loss", "accuracy", "device_seconds"} <= set(frame.columns)
    weights = torch.load(result.dir / "best.pt", weights_only=True)
    assert all(torch.equal(weights[k], v) for k, v in best.model().state_dict().items())
    assert "4 trials" in repr(result)


@pytest.mark.parametrize("sharing", ["solo", "fused"])
def test_a_metric_is_averaged_over_the_batches_that_have_it(sharing):
    class Rare(Blobs):
        def metrics(self, model, batch, config):
            full = {"full": torch.ones(())} if len(batch[0]) == self.eval_batch_size else {}
            return {"loss": self.loss(model, batch, config), **full}

    settings = {"metric": "loss", "mode": "min", "algorithm": ps.Random(budget=1), "trials": 2}
    result = ps.tune(Rare(), {"lr": ps.loguniform(1e-3, 1e-1)}, sharing=sharing, **settings)
    assert [trial.metrics["full"] for trial in result.trials] == [1.0, 1.0]


def test_optunas_plots_of_a_result():
    result = run(space={"x": ps.uniform(0, 4), "y": ps.loguniform(0.1, 1)}, trials=8)
    seen = result.optuna_study()
    assert seen.best_trial.number == result.best.number
    for plot in ("optimization_history", "intermediate_values", "slice", "parallel_coordinate", "param_importances"):
        figure = getattr(optuna.visualization, f"plot_{plot}")(seen)
        assert figure.data, plot


def test_define_by_run_spaces():
    def space(trial):
        kind = trial.suggest_categorical("kind", ["near", "far"])
        return {"x": trial.suggest_float("near", 1.9, 2.1) if kind == "near" else trial.suggest_float("far", 3, 4)}

    for sampler in (None, optuna.samplers.TPESampler(n_startup_trials=4)):
        name = "tpe" if sampler else "none"
        result = run(trivial, space, sampler=sampler, trials=12, name=name)
        assert result.best.config["kind"] == "near"
        assert [t.config for t in run(trivial, space, sampler=sampler, trials=12, name=name).trials] == [
            t.config for t in result.trials
        ]


def test_tune_is_a_study_run():
    result = ps.tune(trivial, SPACE, metric="loss", mode="min", algorithm=ps.Random(budget=2), trials=3)
    assert len(result.trials) == 3


def test_tune_shows_and_types_every_option_of_a_study_and_of_its_run():
    options = {**signature(ps.Study).parameters, **signature(ps.Study.run).parameters}
    del options["self"]
    shown = signature(ps.tune).parameters
    assert {name: (one.annotation, one.default) for name, one in shown.items()} == {
        name: (one.annotation, one.default) for name, one in options.items()
    }
    texts = {name: one.__forward_arg__ for name, one in TuneOptions.__annotations__.items()}
    assert ["task", "space", *texts] == list(shown)
    for name, text in texts.items():
        needed = shown[name].default is Parameter.empty
        assert text == (f"Required[{shown[name].annotation}]" if needed else shown[name].annotation)


def test_tune_hands_each_option_on():
    settings = dict(metric="loss", mode="min", algorithm=ps.Random(budget=2), trials=3)
    ps.tune(trivial, SPACE, name="s", sharing="solo", progress=False, **settings)
    (opened,) = [e for e in log() if isinstance(e, Opened)]
    assert opened.settings["run"]["sharing"] == "solo"


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ({"worker": 2}, "got worker=: use workers=."),
        ({"zz": 2}, "got zz=: leave it out."),
        ({"num_samples": 2}, "got num_samples=: use trials=."),
        ({"direction": "min"}, "got direction=: use mode=."),
    ],
)
def test_an_option_that_tune_does_not_have_is_one_message(option, advice):
    with pytest.raises(TypeError, match=f"^tune expected options among metric, mode, .*, progress, {advice}$"):
        ps.tune(trivial, SPACE, metric="loss", algorithm=ps.Random(budget=2), trials=3, **option)
    assert not Path(".penstock").exists()


def test_replace_makes_an_equal_study_with_changes():
    other = study(name="a").replace(trials=7, seed=2)
    assert (other.trials, other.seed, other.metric, other.name) == (7, 2, "loss", "a")


@pytest.mark.parametrize(
    ("text", "value"), [("90s", 90), ("10m", 600), ("2h", 7200), (5, 5), ("1.5d", 129600), (None, None)]
)
def test_deadlines_are_read(text, value):
    assert seconds(text) == value


def test_the_log_says_what_was_run():
    run()
    (opened,) = [e for e in log() if isinstance(e, Opened)]
    assert opened.settings["algorithm"].startswith("Random(budget=2")
    assert opened.settings["trials"] == 3
    assert opened.settings["run"] == RunSettings().plain()
    study(name="s").run(sharing="solo", progress=False)
    *_, opened = [e for e in log() if isinstance(e, Opened)]
    assert opened.settings["run"] == {**RunSettings().plain(), "sharing": "solo"}
    assert [e.trial for e in log() if isinstance(e, Asked)] == [0, 1, 2]
    study(name="there").run(on=ps.Simulated(3), progress=False)
    (opened,) = [e for e in log("there") if isinstance(e, Opened)]
    assert opened.settings["run"] == {**RunSettings().plain(), "on": "Simulated(devices=3)"}


def test_importing_penstock_imports_nothing_heavy():
    heavy = ("torch", "optuna", "ray", "rich", "numpy", "fsspec")
    code = f"import sys, penstock; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_public_name_resolves_and_has_a_docstring():
    for name in ps.__all__:
        assert getattr(ps, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'Asha'; it has ASHA"):
        _ = ps.Asha


def test_the_code_of_a_file_is_its_folder_or_that_of_the_package_it_runs_in(monkeypatch):
    file = Path("package/inner/tuned.py").absolute()
    assert code_of(file) == file.parent
    main = ModuleType("__main__")
    main.__file__, main.__package__ = str(file), "package.inner"
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert code_of(file) == Path.cwd()
    assert code_of(file.with_name("other.py")) == file.parent
    monkeypatch.setattr(main, "__package__", "elsewhere")
    assert code_of(file) == file.parent


def test_how_to_resume_says_where_and_how(capsys):
    say_how_to_resume(Path(".penstock/s"), RunSettings(), "tune.py")
    say_how_to_resume(Path("here/s"), RunSettings("ray?idle=30", workers=2, mixed_types=True), "tune.py")
    say_how_to_resume(Path(".penstock/s"), RunSettings(ps.Simulated(4), scheduler="fifo"), "tune.py")
    say_how_to_resume(Path(".penstock/s"), RunSettings(), None)
    here, there, nowhere, notebook = capsys.readouterr().err.splitlines()
    assert here.endswith("penstock resume s")
    assert there.endswith("penstock resume s --dir here --on 'ray?idle=30' --workers 2 --mixed-types")
    assert nowhere.endswith("penstock resume s --on simulated --devices 4 --scheduler fifo")
    assert notebook == "Interrupted; go on by running this Study with name='s' again."


def test_ctrl_c_while_the_task_is_tried_names_no_study_to_go_on_with(capsys):
    class Interrupted(Blobs):
        def loss(self, model, batch, config):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(Interrupted(), {"lr": ps.uniform(0, 0.1)}, name="early").run()
    assert not Path(".penstock/early").exists()
    assert capsys.readouterr().err.splitlines()[-1] == "Interrupted before the study began: nothing is left of it."
