"""Studies with surrogates: narrow twins are searched, and the result is of full width."""

import os
import warnings
from itertools import pairwise
from pathlib import Path

import optuna
import pytest
import torch
import torch.nn.functional as F

import penstock as ps
from penstock.algorithms import transfer
from penstock.log.events import Asked, Opened, Placed, Reported, Wrote
from penstock.log.history import History
from penstock.log.ranking import leading
from penstock.report.page import best_rows, study_page
from penstock.report.progress import Progress
from penstock.surrogate.task import narrowed
from penstock.trial import scale_of
from tests.programs import run
from tests.studies import log, studies
from tests.surrogate.models import Doubles, Narrowable, perceptron
from tests.surrogate.test_trace import Branching
from tests.test_crash import KilledAt, durable_writes, in_a_child
from tests.training.together import Trials

SPACE = {"lr": ps.loguniform(1e-3, 0.3)}
QUIET = {"progress": False, "sharing": "solo", "deterministic": True}


class Small(Doubles):
    def __init__(self):
        super().__init__(lambda: perceptron(64))


study = studies(
    Small,
    SPACE,
    algorithm=ps.ASHA(max_budget=4, reduction=2, concurrency=3),
    trials=8,
    surrogate=ps.Surrogate(scale=4, best=2),
)


def asked(variant):
    return [event for event in log() if isinstance(event, Asked) and event.variant == variant]


def test_the_best_configs_of_narrow_twins_are_trained_at_full_width():
    result = study().run(**QUIET)
    assert {event.variant for event in log() if isinstance(event, Asked | Placed)} == {"", "surrogate 4"}
    assert len(result.surrogate.trials) == 8
    assert {trial.scale for trial in result.surrogate.trials} == {4}
    assert {trial.scale for trial in result.trials} == {1}
    assert result.best.number in {trial.number for trial in result.trials}
    assert len(result.best.curve) == 4, "the winner's budget is whole"
    configs = [trial.config for trial in result.surrogate.trials]
    assert all(trial.config in configs for trial in result.trials)
    model = result.best.model()
    assert [tuple(p.shape) for p in model.parameters()] == [tuple(p.shape) for p in perceptron(64).parameters()]
    assert torch.load(".penstock/s/best.pt").keys() == model.state_dict().keys()
    plain, curve = Trials(Small()).alone(result.best.number, result.best.config, 12)
    assert result.best.metrics["loss"] == pytest.approx(min(row["loss"] for row in curve), abs=1e-9)
    assert plain.rates == {}
    dataframe = result.dataframe()
    assert sorted(dataframe["number"]) == [trial.number for trial in result.trials]
    best = result.surrogate.best
    with pytest.raises(ps.StudyError, match="no saved state"):
        next(one for one in result.surrogate.trials if one.state == "finished" and one.number != best.number).weights()
    narrow, (x, y) = best.model(), Small().data({})[1]
    assert {name: tuple(p.shape) for name, p in narrow.named_parameters()}["2.weight"] == (16, 16)
    assert float(F.cross_entropy(narrow(x), y).detach()) == pytest.approx(best.metrics["loss"], abs=1e-9)
    assert len(result.optuna_study().trials) == 8, "Optuna sees surrogates alone"


def test_a_curve_is_the_same_in_a_bundle(long_enough):
    """As it is on two workers, which ``test_sharded.py`` shows."""
    result = study(algorithm=ps.Random(budget=2), trials=5).run(progress=False, sharing="fused")
    modes = {event.variant: event.mode for event in log() if isinstance(event, Placed)}
    assert modes["surrogate 4"] == "fused"
    tasks = {1: Small(), 4: narrowed(Small(), ps.Surrogate(scale=4))}
    for trial in [*result.trials, *result.surrogate.trials]:
        _, curve = Trials(tasks[trial.scale]).alone(trial.number, trial.config, 3 * len(trial.curve))
        assert [row["loss"] for row in trial.curve] == pytest.approx([row["loss"] for row in curve], abs=1e-9)


def killable(dir):
    return study(dir=dir)


def test_a_study_that_is_killed_is_replayed_with_its_targets(tmp_path):
    def decisions(dir):
        events = log(dir=dir)
        told = [e for e in events if isinstance(e, Asked | Reported)]
        return [(e.trial, e.variant, e.budget) if isinstance(e, Asked) else (e.trial, e.unit, e.metrics) for e in told]

    writes, _ = durable_writes(killable, tmp_path / "whole")
    whole = decisions(tmp_path / "whole")
    for n, moment in ((writes // 3, "middle"), (2 * writes // 3, "after"), (writes - 4, "before")):
        dir = tmp_path / str(n)

        def killed(n=n, moment=moment, dir=dir):
            KilledAt(n, moment)
            killable(dir).run(**QUIET)

        assert os.WIFSIGNALED(in_a_child(killed))
        killable(dir).run(**QUIET)
        assert decisions(dir) == whole


def test_the_best_surrogates_keep_their_states_and_others_lose_theirs():
    result = study(keep=2, algorithm=ps.Random(budget=2)).run(**QUIET)
    best = sorted(result.surrogate.trials, key=lambda one: one.metrics["loss"])[:2]
    assert [one.number for one in result.surrogate.kept] == [one.number for one in best]
    assert all(one.weights().keys() == best[0].weights().keys() for one in best)
    numbers = {int(path.name.split("-")[0]) for path in Path(".penstock/s/states").iterdir()}
    assert numbers & {one.number for one in result.surrogate.trials} == {one.number for one in best}


def test_a_study_goes_on_with_more_trials_and_refuses_other_surrogates():
    study().run(**QUIET)
    with pytest.raises(ps.StudyError, match=r"exists with surrogate=Surrogate\(scale=4.*got surrogate=None"):
        study(surrogate=None).run(**QUIET)
    with pytest.raises(ps.StudyError, match="got surrogate=Surrogate\\(scale=2"):
        study(surrogate=ps.Surrogate(scale=2)).run(**QUIET)
    result = study(trials=11).run(**QUIET)
    assert len(result.surrogate.trials) == 11
    assert result.best.state == "finished"


def test_samplers_learn_from_surrogates_alone_and_a_target_value_counts_targets_alone():
    sampler = optuna.samplers.TPESampler(n_startup_trials=2)
    result = study(sampler=sampler, algorithm=ps.Random(budget=2, concurrency=1)).run(**QUIET)
    assert len(result.surrogate.trials) == 8
    reached = max(trial.metrics["loss"] for trial in result.trials)
    again = study(name="t", target=reached + 1e-9, algorithm=ps.Random(budget=2)).run(**QUIET)
    assert again.ended == "target"
    assert again.best.scale == 1


class Writing(optuna.samplers.RandomSampler):
    """Writes an attribute of each trial that it draws, as CMA-ES does."""

    def before_trial(self, study, trial):
        study._storage.set_trial_system_attr(trial._trial_id, "drawn", trial.number)


def test_what_a_sampler_writes_is_about_the_trial_that_it_draws():
    made = study(sampler=Writing(), algorithm=ps.Random(budget=1, concurrency=1), surrogate=ps.Surrogate(4, 1, 0.2))
    made.run(**QUIET)
    numbers = list(dict.fromkeys(event.trial for event in asked("surrogate 4")))
    assert numbers != list(range(8)), "targets came between"
    assert [(event.trial, event.value) for event in log() if isinstance(event, Wrote)] == list(
        zip(numbers, range(8), strict=True)
    )
    assert len(made.replace(trials=9).run(**QUIET).surrogate.trials) == 9


def test_on_a_cluster_targets_begin_on_devices_that_surrogates_leave_idle():
    def makespan(name, eager):
        surrogate = ps.Surrogate(scale=4, best=2, eager=eager)
        made = study(name=name, algorithm=ps.Random(budget=9), trials=11, surrogate=surrogate)
        result = made.run(on=ps.Simulated(devices=8, unit_seconds=10), progress=False, sharing="solo")
        events = log(name)
        last = max(e.clock for e in events if isinstance(e, Reported) and scale_of(_variant(events, e.trial)) == 4)
        begun = min(e.clock for e in events if isinstance(e, Placed) and not e.variant)
        return result.seconds, begun < last

    eager, overlaps = makespan("eager", 0.5)
    late, never = makespan("late", 1.0)
    assert overlaps
    assert not never
    assert eager < late


def _variant(events, trial):
    return next(e.variant for e in events if isinstance(e, Asked) and e.trial == trial)


def test_a_model_that_cannot_be_analysed_is_tuned_directly_and_it_is_said():
    class Odd(Narrowable):
        def __init__(self):
            super().__init__(Branching)

    with pytest.warns(UserWarning, match="cannot be analysed .* goes on without surrogates"):
        result = study(Odd()).run(**QUIET)
    assert len(result.trials) == 8
    assert "cannot be analysed" in result.surrogate.without
    assert "cannot be analysed" in run("penstock show s").stdout
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        study(Odd(), trials=9).run(**QUIET)
    with pytest.raises(ps.TaskError, match="cannot be analysed"):
        study(Odd(), name="r", surrogate=ps.Surrogate(scale=4, required=True)).run(**QUIET)
    assert not Path(".penstock/r").exists()


def train(trial):
    trial.report(1, loss=trial.config["lr"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"surrogate": 8}, r"surrogate must be None or settings such as ps.Surrogate\(scale=8\), got 8"),
        ({"task": train}, "train has no model of its own"),
        ({"task": ps.TabulatedTask(lambda config: None)}, "has no model of its own"),
        ({"algorithm": ps.PBT(population=4, max_budget=4, interval=1), "trials": None}, "PBT changes configs"),
    ],
)
def test_studies_that_have_no_surrogates_are_refused(changes, said):
    with pytest.raises(ps.StudyError, match=said):
        study().replace(**changes)


def test_plans_and_surrogates_exclude_each_other():
    with pytest.raises(ps.StudyError, match="cannot be planned"):
        study().plan(deadline="1h")


class Wide(Narrowable):
    def __init__(self):
        super().__init__(lambda: perceptron(128, layers=3))


wide = studies(Wide, SPACE, trials=40, algorithm=ps.Random(budget=1), surrogate=ps.Surrogate(scale=8))


def test_a_rank_check_is_of_ordinary_logged_trials(monkeypatch):
    monkeypatch.setattr(transfer, "LEAST", -1.0)  # any order is good enough
    result = wide().run(progress=False, sharing="fused")
    (opened,) = [event.settings["surrogate"] for event in log() if isinstance(event, Opened)]
    pairs = opened["pairs"]
    assert 8 <= pairs <= 16
    assert [trial.scale for trial in result.surrogate.trials].count(4) >= pairs
    assert result.surrogate.rank.startswith(f"the order of {pairs} at twice the width: Spearman ")
    assert result.surrogate.fallback == ""
    page = study_page("s", log(), best_rows(leading(History.of(log()))[-2:]))
    counted = f"{len(result.surrogate.trials)}, 8 times narrower; {len(result.trials)} targets"
    assert f"<dt>surrogates</dt><dd>{counted}</dd>" in page
    assert result.surrogate.rank in page
    assert result.surrogate.rank in (shown := run("penstock show s").stdout)
    assert "<th>width</th>" in page
    assert "40 of 40, 8 times narrower" in shown, "those of the check are not counted"
    assert "40/40" in run("penstock list").stdout
    shown = " ".join(run("penstock show s").stdout.split())
    assert f"40 of 40, 8 times narrower; {len(result.trials)} targets; {result.surrogate.rank}" in shown
    said = Progress(40, lambda: None)._shown(History.of(log())).trials
    assert said.startswith(f"40/40 surrogates, {pairs} of the rank check, ")


def test_surrogates_that_foretell_too_little_are_given_up_and_the_target_is_tuned(monkeypatch):
    monkeypatch.setattr(transfer, "LEAST", 1.1)  # no order is good enough
    sampler = optuna.samplers.TPESampler(n_startup_trials=2)
    result = wide(sampler=sampler).run(progress=False, sharing="fused")
    assert len(result.trials) == 40
    assert result.surrogate.fallback == "8 and 4 times narrower foretold too little: the target is tuned"
    assert len(result.optuna_study().trials) == 40
    changed = {"space": {"lr": ps.loguniform(1e-3, 0.4)}, "trials": 41}
    again = wide(sampler=sampler, **changed).run(progress=False, sharing="fused", allow_changes=True)
    assert len(again.trials) == len(again.optuna_study().trials) == 41
    configs = [[trial.config for trial in one.trials][:40] for one in (result, again)]
    assert configs[0] == configs[1], "each search has the configs of its own trials"


FILE = """
import penstock as ps
from tests.surrogate.test_study import Small, SPACE

study = ps.Study(Small(), SPACE, metric="loss", mode="min", algorithm=ps.Random(budget=2), trials=4, name="s")
"""


def test_the_command_line_runs_resumes_and_shows_surrogates():
    Path("tune.py").write_text(FILE)
    shown = run("penstock run tune.py --surrogate 4")
    assert "4/4 surrogates" in shown.stderr
    assert "1/4" in shown.stdout
    assert "full" in shown.stdout
    assert "4 of 4, 4 times narrower" in run("penstock show s").stdout
    run("penstock resume s --trials 6")
    rows = Path(run("penstock export s --to csv").stdout.split()[1]).read_text().splitlines()
    head = rows[0].split(",")
    table = [dict(zip(head, row.split(","), strict=True)) for row in rows[1:]]
    assert sum(row["scale"] == "4" for row in table) == 6
    assert all((row["rank"] != "") == (row["scale"] == "") for row in table)
    assert "times narrower" in run("penstock show s").stdout
    numbers = [int(row["number"]) for row in table]
    assert all(one + 1 == other for one, other in pairwise(numbers))
