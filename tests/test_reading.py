"""``ps.load``: a study is looked at and nothing changes."""

import os
import sys
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock.log.events import Opened
from penstock.log.writer import Log
from tests.programs import run
from tests.studies import log, studies
from tests.tasks import Blobs

SPACE = {"lr": ps.loguniform(1e-3, 1), "momentum": ps.uniform(0, 0.9)}
study = studies(Blobs, SPACE, algorithm=ps.ASHA(max_budget=4, reduction=2), trials=6, keep=2)
FILE = """
import sys
import penstock as ps
from tests.tasks import Blobs

space = {"lr": ps.loguniform(1e-3, 1), "momentum": 0.5}
study = ps.Study(Blobs(), space, metric="loss", algorithm=ps.Random(budget=2), trials=3, name="s")
if __name__ == "__main__":
    study.run(progress=False)
"""
ANALYSIS = """
import pathlib
import penstock as ps
from tune import study

pathlib.Path("analysed").write_text("ran")
print(study.run(progress=False).best.number)
"""


def snapshot(folder):
    """Every file's bytes and times, and every folder's times."""
    found = sorted(Path(folder).rglob("*"))
    return [(str(one), one.is_file() and one.read_bytes(), os.stat(one).st_mtime_ns) for one in found]


def look(result, model):
    """All that a result shows."""
    best = result.best
    return (
        [(t.number, t.config, t.state, dict(t.metrics), list(t.curve), t.error) for t in result.trials],
        (best.number, {name: value.tolist() for name, value in best.weights().items()}),
        [trial.number for trial in result.kept],
        result.timeline(),
        result.dataframe().to_dict(),
        result.optuna_study().best_trial.number,
        (result.ended, result.failed, repr(result)),
        {name: value.tolist() for name, value in best.model().state_dict().items()} if model else None,
    )


def test_a_loaded_study_shows_all_and_not_a_byte_changes():
    ran = study().run(progress=False)
    before = snapshot(".penstock")
    assert look(ps.load("s", task=Blobs()), model=True) == look(ran, model=True)
    assert look(ps.load("s", dir=Path(".penstock").absolute()), model=False) == look(ran, model=False)
    assert snapshot(".penstock") == before


def test_it_works_while_a_driver_holds_the_study():
    study().run(progress=False)
    held = Log.open(Path(".penstock/s"))
    try:
        before = snapshot(".penstock")
        assert len(ps.load("s").trials) == 6
        assert snapshot(".penstock") == before
    finally:
        held.close()


def test_a_torn_last_line_is_not_cut():
    study().run(progress=False)
    with Path(".penstock/s/log.jsonl").open("a") as file:
        file.write('{"n":')
    before = snapshot(".penstock")
    assert len(ps.load("s").trials) == 6
    assert snapshot(".penstock") == before


def test_a_function_and_states_elsewhere():
    def descend(trial):
        trial.report(1, state={"w": torch.ones(2)}, loss=trial.config["lr"])

    study(descend, algorithm=ps.Random(budget=1), states="elsewhere").run(progress=False)
    assert ps.load("s").best.best_state()["w"].tolist() == [1, 1]
    assert ps.load("s", task=descend).best.best_state()["w"].tolist() == [1, 1]


def test_a_model_that_the_log_cannot_make_is_one_message():
    class Activated(Blobs):
        def model(self, config):
            return torch.nn.Sequential(super().model(config), config["act"]())

    space = {"lr": ps.uniform(0, 0.1), "act": ps.choice([torch.nn.ReLU])}
    assert study(Activated(), space).run(progress=False).best.model()
    with pytest.raises(ps.StudyError, match=r"cannot be made from its config .*classes come back as text"):
        ps.load("s", task=Activated()).best.model()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda: ps.load("t"), "There is no study 't' in .penstock, which has: s"),
        (lambda: ps.load("s", task=len), "trains Blobs, got task=len: give that task"),
        (lambda: ps.load("s").best.model(), r"give it as in penstock.load\(name, task=Digits\(\)\)"),
        (lambda: ps.load(3), "name must be a study's name"),
    ],
)
def test_wrong_questions_are_one_message(how, said):
    study().run(progress=False)
    with pytest.raises(ps.StudyError, match=said):
        how()


def test_the_folder_is_named_as_python_gives_it(tmp_path):
    with pytest.raises(ps.StudyError, match=r"give the folder that holds it with dir=\.$"):
        ps.load("s", dir=tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ps.StudyError, match=r"give the one that holds the studies with dir=\.$"):
        ps.load("s", dir=tmp_path / "file")


def test_the_tasks_file_is_not_imported(tmp_path):
    Path("tune.py").write_text(FILE)
    run("python tune.py")
    Path("tune.py").write_text("raise SystemExit('imported')")
    before = set(sys.modules)
    assert len(ps.load("s").best.weights()) > 1
    assert "tune" not in set(sys.modules) - before


def test_resume_never_runs_an_analysis_script():
    Path("tune.py").write_text(FILE)
    Path("analysis.py").write_text(ANALYSIS)
    run("python tune.py")
    run("python analysis.py")  # the old way to look: it takes the study up
    Path("analysed").unlink()
    opened = [event for event in log() if isinstance(event, Opened)]
    assert [Path(event.settings["file"]).name for event in opened] == ["tune.py", "tune.py"]
    run("penstock resume s --trials 4")
    assert not Path("analysed").exists()


def test_resume_refuses_a_file_without_a_study_before_it_runs():
    Path("script.py").write_text((FILE + ANALYSIS.replace("from tune import study", "")).replace("study", "mine"))
    run("python script.py")
    Path("analysed").unlink()
    assert "it has no `study`: it is not run" in run("penstock resume s", code=2).stderr
    assert not Path("analysed").exists()
