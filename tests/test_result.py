"""Results: the best trial, its state and its model by one rule; the best states that are kept; failures."""

import re
from datetime import datetime
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import penstock as ps
from penstock.cli.app import app
from penstock.log.events import Ended
from penstock.log.history import History
from penstock.log.ranking import ranked
from penstock.report.dashboard import LiveStorage
from penstock.report.summary import history_of, study_facts
from tests.studies import log, studies
from tests.tasks import Blobs

SPACE = {"peak": ps.uniform(3, 6)}


def hill(trial):
    """Its loss falls up to a unit of its own, then rises; its state holds a tensor that it goes on to change."""
    w, first = (torch.zeros(2), 1) if trial.state is None else (trial.state["w"], trial.state["unit"] + 1)
    for unit in range(first, 10):
        w += 1
        trial.report(unit, state={"w": w, "unit": unit}, loss=abs(unit - trial.config["peak"]) + trial.number / 100)


def sparse(trial):
    """A state with every third report alone; the best report, of unit 5, has none."""
    for unit in range(1 if trial.state is None else trial.state["unit"] + 1, 10):
        state = {"unit": unit} if unit % 3 == 0 else None
        trial.report(unit, state=state, loss=abs(unit - 5))


def early(trial):
    """It returns before its grant, and its best report is not its last one."""
    w = torch.zeros(1)
    for unit in (1, 2, 3):
        w += 1
        trial.report(unit, state={"w": w}, loss=abs(unit - 2))
    w += 100


def hopeless(trial):
    raise ValueError("no luck")


def sometimes(trial):
    if trial.number % 2:
        raise ValueError("odd")
    trial.report(1, loss=float(trial.number))


def penstock(command, code=0):
    """What a command shows, which ends with a code."""
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == code, (result.output, result.exception)
    return result


study = studies(hill, SPACE, algorithm=ps.Random(budget=9), trials=4)


def test_the_best_state_of_a_function_is_that_of_its_best_report():
    result = study().run(progress=False)
    best = result.best
    unit = min(best.curve, key=lambda row: row["loss"])["budget"]
    assert 3 <= unit <= 6
    assert best.best_state() == {"w": pytest.approx(torch.full((2,), float(unit))), "unit": unit}
    assert best.last_state()["unit"] == 9
    assert torch.load(result.dir / "best.pt", weights_only=True)["unit"] == unit
    assert study_facts(result.dir, history_of(result.dir))["model"] == str(result.dir / "best.pt")


def test_a_best_state_lasts_over_pauses_and_stops():
    algorithm = ps.SuccessiveHalving(max_budget=9)
    first = study(algorithm=algorithm, target=1.0).run(progress=False)
    assert first.ended == "target"
    result = study(algorithm=algorithm).run(progress=False)
    best = result.best
    assert best.best_state()["unit"] == min(best.curve, key=lambda row: row["loss"])["budget"]


def test_of_reports_without_a_state_the_best_one_that_has_a_state_counts():
    best = study(sparse, trials=1).run(progress=False).best
    assert (best.metrics["loss"], best.best_state()) == (0, {"unit": 6})


def test_the_state_before_the_best_report_is_kept_until_the_next_comes():
    best = study(sparse, algorithm=ps.Random(budget=5), trials=1).run(progress=False).best
    assert (best.metrics["loss"], best.best_state()) == (0, {"unit": 3})


def test_a_function_that_returns_early_leaves_its_best_state():
    best = study(early, trials=1).run(progress=False).best
    assert best.best_state() == {"w": torch.tensor([2.0])}
    assert torch.load(".penstock/s/best.pt", weights_only=True) == {"w": torch.tensor([2.0])}


@pytest.mark.parametrize("task", [hill, Blobs()])
def test_keep_keeps_the_best_states_of_as_many_trials(task):
    space = {"lr": ps.loguniform(1e-3, 1), "peak": ps.uniform(3, 6), "momentum": 0.5}
    algorithm = ps.Random(budget=4)
    result = study(task, space, algorithm=algorithm, trials=6, keep=3).run(progress=False)
    order = sorted(result.trials, key=lambda trial: (trial.metrics["loss"], trial.number))
    assert [trial.number for trial in result.kept] == [trial.number for trial in order[:3]]
    for trial in result.kept:
        assert trial.best_state()
    assert len(list(Path(".penstock/s/states").iterdir())) == 3
    for trial in order[3:]:
        with pytest.raises(ps.StudyError, match="has no saved state"):
            trial.best_state()


def test_one_best_state_is_kept_unless_told_otherwise():
    result = study().run(progress=False)
    assert [trial.number for trial in result.kept] == [result.best.number]
    assert len(list(Path(".penstock/s/states").iterdir())) == 1


@pytest.mark.parametrize(("name", "values"), [("keep", (0, True, 1.5, None)), ("max_failures", (-1, True, 1.5, "3"))])
def test_wrong_numbers_are_refused(name, values):
    for value in values:
        with pytest.raises(ps.StudyError, match=f"^{name} must be a whole number"):
            study(**{name: value})


def test_a_study_whose_every_trial_failed_has_failed():
    result = study(hopeless, trials=3).run(progress=False)
    assert result.ended == "failed"
    assert [trial.number for trial in result.failed] == [0, 1, 2]
    assert "no luck" in result.failed[0].error
    assert repr(result) == "Result(3 trials, 3 failed, failed, best: none)"
    assert study(hopeless, trials=3).run(progress=False).ended == "failed", "a further run finds the same"


def test_a_study_with_some_failures_is_done_and_shows_them():
    result = study(sometimes, trials=4).run(progress=False)
    assert (result.ended, len(result.failed)) == ("done", 2)
    assert repr(result).startswith("Result(4 trials, 2 failed, done, best: Trial(0")


@pytest.mark.parametrize(
    ("most", "failed", "ended"), [(0, 1, "failed"), (1, 2, "failed"), (2, 3, "failed"), (3, 3, "done")]
)
def test_a_study_ends_with_one_failure_more_than_may_be(most, failed, ended):
    result = study(sometimes, trials=6, max_failures=most).run(progress=False)
    assert (len(result.failed), result.ended) == (failed, ended)
    (end,) = [event for event in log() if isinstance(event, Ended)]
    assert end.reason == ended
    if most == 1:
        more = study(sometimes, trials=6, max_failures=None).run(progress=False)
        assert (more.ended, len(more.trials)) == ("done", 6)
    assert History.of(log()).counts["failed"] == (3 if most == 1 else failed)


def test_every_view_has_the_same_best_trial():
    """A trial that is best early on and bad at its end, beside one that ends better."""

    def cross(trial):
        for unit in range(1, 5):
            falls = 0.1 + unit / 9 if trial.number == 0 else 1 - unit / 7
            trial.report(unit, state={"unit": unit}, loss=1.0 if trial.number > 1 else falls)

    result = study(cross, algorithm=ps.Random(budget=4), trials=3).run(progress=False)
    best, value = result.best, pytest.approx(0.1 + 1 / 9)
    assert (best.number, best.metrics["loss"]) == (0, value)
    facts = study_facts(result.dir, history_of(result.dir))["best"]
    assert (facts["number"], facts["metrics"]["loss"]) == (0, value)
    assert [record.number for record in ranked(history_of(result.dir).trials)] == [0, 1, 2]
    seen = result.optuna_study()
    assert (seen.best_trial.number, seen.best_value) == (0, value)
    live = LiveStorage(result.dir)
    assert (live.get_best_trial(0).number, live.get_best_trial(0).value) == (0, 0.211111)
    assert torch.load(result.dir / "best.pt", weights_only=True) == {"unit": 1}
    assert penstock("show s --json --top 1").stdout.count('"number": 0') == 2
    penstock("report s --out page.html")
    rows = re.findall(r'<td class="number">(\d+)</td><td>', Path("page.html").read_text())
    assert rows == ["0", "1", "2"]


def test_a_trial_that_failed_without_a_state_is_best_nowhere():
    def fails(trial):
        trial.report(1, loss=float(trial.number))
        if trial.number == 0:
            raise ValueError("after its report")

    result = study(fails, algorithm=ps.Random(budget=2), trials=3).run(progress=False)
    assert result.best.number == result.optuna_study().best_trial.number == 1
    assert [record.number for record in ranked(history_of(result.dir).trials)] == [1, 2]


def test_a_diverged_trial_that_takes_over_a_state_is_not_best_by_what_was_before():
    def diverges(trial):
        for unit in range(1 if trial.state is None else trial.state["unit"] + 1, 10):
            loss = {(0, 2): 0.001, (0, 3): float("nan")}.get((trial.number, unit), trial.config["peak"])
            trial.report(unit, state={"unit": unit}, loss=loss)

    algorithm = ps.PBT(population=4, max_budget=9, interval=3)
    result = study(diverges, algorithm=algorithm, trials=None).run(progress=False)
    assert result.trials[0].curve[1]["loss"] == 0.001
    assert result.best.metrics["loss"] > 3
    assert torch.load(result.dir / "best.pt", weights_only=True) == result.best.best_state()
    assert result.optuna_study().best_trial.number == result.best.number


def test_a_trial_that_took_over_a_state_has_its_own_best_one_still_where_all_others_diverge():
    def diverges(trial):
        for unit in range(1 if trial.state is None else trial.state["unit"] + 1, 10):
            loss = {(1, 2): 0.01, (1, 3): 9.0}.get((trial.number, unit), 1.0 + trial.number)
            if unit >= 8:
                loss = 5.0 if trial.number == 1 else float("nan")
            trial.report(unit, state={"unit": unit, "trial": trial.number}, loss=0.001 if unit == 1 else loss)

    algorithm = ps.PBT(population=4, max_budget=9, interval=3)
    result = study(diverges, algorithm=algorithm, trials=None).run(progress=False)
    assert (result.best.number, result.best.metrics["loss"]) == (1, 0.001)
    assert result.best.best_state()["trial"] == 1


def test_the_ranks_of_a_dataframe_begin_with_the_best_trial():
    def diverges(trial):
        trial.report(1, loss=trial.number)
        if trial.number % 2 == 0:
            trial.report(2, loss=float("nan"))

    frame = study(diverges, algorithm=ps.Random(budget=2), trials=4).run(progress=False).dataframe()
    assert list(frame)[:4] == ["number", "rank", "state", "budget"]
    assert frame["rank"].isna().tolist() == [True, False, True, False]
    assert frame["rank"].dropna().to_list() == [1, 2]
    assert str(frame["rank"].dtype) == "Int64", "whole numbers, not 1.0"


def test_a_trial_that_was_stopped_at_a_rung_is_stopped_everywhere():
    result = study(algorithm=ps.ASHA(max_budget=9), trials=9).run(progress=False)
    assert {trial.state for trial in result.trials} == {"finished", "stopped"}
    assert set(result.dataframe()["state"]) == {"finished", "stopped"}
    assert "paused" not in penstock("show s --json --top 9").stdout
    assert "stopped at rung 0" in penstock("show s --top 9").stdout
    penstock("export s --to csv --out csv")
    assert "paused" not in Path("csv/trials.csv").read_text()


def test_a_deadline_before_any_report_is_told_where_the_best_trial_is_asked_for():
    result = study(deadline=5).run(on=ps.Simulated(devices=1, unit_seconds=10.0), progress=False)
    assert result.ended == "deadline"
    with pytest.raises(ps.StudyError, match="the study ended at its deadline before any report"):
        _ = result.best
    assert result.dataframe()["rank"].isna().all()
    assert "ended at its deadline before any report" in penstock("show s").stdout


def test_dates_are_of_the_real_clock():
    before = datetime.now()
    result = study(trials=2).run(progress=False)
    trials = result.optuna_study().trials
    assert all(before <= trial.datetime_start <= trial.datetime_complete <= datetime.now() for trial in trials)
    middle = datetime.now()
    study(trials=3).run(progress=False)
    last = LiveStorage(result.dir).get_all_trials(0)[2]
    assert middle <= last.datetime_start <= last.datetime_complete <= datetime.now()


def test_numbers_of_the_dashboard_are_rounded_within_their_range():
    storage = LiveStorage(study(space={"peak": ps.uniform(1 / 3, 1 / 3 + 1e-9)}).run(progress=False).dir)
    for trial in storage.get_all_trials(0):
        assert 1 / 3 <= trial.params["peak"] <= 1 / 3 + 1e-9
        assert trial.value == float(f"{trial.value:.6g}")


def test_a_simulated_study_is_labelled_everywhere():
    def look_up(config):
        return ps.Tabulated({"loss": [config["peak"]] * 9}, seconds=60)

    there = study(ps.TabulatedTask(look_up)).run(ps.Simulated(devices=2), progress=False)
    here = study(name="real", trials=2).run(progress=False)
    for result, label in ((there, True), (here, False)):
        assert ("done (simulated)" in repr(result)) == label
        assert ("simulated: " in result._repr_html_()) == label
    simulated, real = "done (simulated)", "done"
    shown = {line.split()[0]: line for line in penstock("list").stdout.splitlines() if line}
    assert shown["s"].rstrip().endswith(simulated)
    assert "simulated" not in shown["real"]
    assert shown["real"].rstrip().endswith(real)
    assert "simulated: " in penstock("show s").stdout
    assert "simulated" not in penstock("show real").stdout
    for name, label in (("s", True), ("real", False)):
        penstock(f"report {name} --out {name}.html")
        assert ("simulated" in Path(f"{name}.html").read_text()) == label
    assert '"simulated": true' in penstock("show s --json").stdout


FAILING = """
import penstock as ps

def train(trial):
    if trial.number in BAD:
        raise ValueError("no luck")
    trial.report(1, loss=float(trial.number))

study = ps.Study(train, {"x": ps.uniform(0, 1)}, metric="loss", algorithm=ps.Random(budget=1), trials=4, name="s")
"""


def test_the_exit_code_says_that_a_study_failed():
    Path("all.py").write_text(FAILING.replace("BAD", "range(9)"))
    assert "no luck" in penstock("run all.py", code=1).stderr
    assert penstock("list --dir .penstock").stdout.rstrip().endswith("failed")
    Path("some.py").write_text(FAILING.replace("BAD", "(1, 2)"))
    penstock("run some.py --name some --deterministic")
    failed = penstock("run some.py --name few --max-failures 1", code=1)
    assert "2 of its trials failed, and at most 1 may. Go on with a larger --max-failures" in failed.stderr
    penstock("resume few", code=1)
    assert '"ended": "done"' in penstock("resume few --max-failures 2 --json").stdout
