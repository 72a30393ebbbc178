"""What a notebook shows, by a real IPython kernel."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import penstock as ps
from penstock.log.history import History
from penstock.log.ranking import ranked
from penstock.report.notebook import in_notebook, result_html, trial_html
from tests.programs import run
from tests.report.studies import ended

CELL = """
import penstock as ps

def train(trial):
    for unit in range(1, 4):
        trial.report(unit, loss=(trial.config["x"] - 2) ** 2 + 1 / unit)

algorithm = ps.ASHA(max_budget=3)
study = ps.Study(train, {"x": ps.uniform(0, 4)}, metric="loss", mode="min", algorithm=algorithm, trials=9)
study.run()
"""
PROGRAM = f"""
import json
from queue import Empty
from ipykernel.inprocess import InProcessKernelManager

manager = InProcessKernelManager()
manager.start_kernel()
client = manager.client()
client.start_channels()
client.execute({CELL!r})
try:
    while True:
        message = client.get_iopub_msg(timeout=0)
        if "data" in message["content"]:
            print(json.dumps([message["msg_type"], message["content"]]))
except Empty:
    pass
"""


def test_a_cell_has_one_line_that_changes_and_then_the_result(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(PROGRAM)
    shown = run("python kernel.py")
    messages = [json.loads(line) for line in shown.stdout.splitlines()]
    kinds = [kind for kind, _ in messages]
    assert kinds == ["display_data", *["update_display_data"] * (len(kinds) - 2), "execute_result"]
    assert len(kinds) > 3
    assert len({content["transient"]["display_id"] for _, content in messages[:-1]}) == 1
    last, result = messages[-2][1]["data"], messages[-1][1]["data"]
    assert last["text/plain"].startswith("ended: done · 9/9 trials · 15 units · best loss ")
    assert last["text/html"].startswith('<div><progress value="1.0000" max="1"></progress> ended: done')
    assert "<b>train-1: 9 trials</b>" in result["text/html"]
    assert "stopped at rung 0" in result["text/html"]
    assert "units" not in shown.stderr


def test_without_a_notebook_nothing_of_one_is_imported() -> None:
    assert not in_notebook()
    assert "ipykernel" not in sys.modules


def test_html_is_escaped_and_small() -> None:
    past = History.of(ended(name="<b>name</b>"))
    past.trials[0].config["[red]act"] = past.trials[0].best_config["[red]act"] = "<script>"  # type: ignore[index]
    html = result_html(past, ranked(past.trials))
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "<b>name" not in html
    assert "stopped at rung 0" in html
    assert "failed: 1, the first: ValueError: too, &quot;large&quot; [bold]" in html
    assert "color" not in html, "the notebook's own colours are right in light and dark"
    assert trial_html(past.trials[2]).startswith("<div><b>Trial 2: failed</b>")


def test_a_mode_that_nobody_gave_is_said_with_its_origin() -> None:
    space, algorithm = {"x": ps.uniform(0, 1)}, ps.Random(budget=1)
    study = ps.Study(lambda trial: None, space, metric="loss", algorithm=algorithm, trials=2)
    assert "<div>metric: loss min (by its name)</div>" in study._repr_html_()
    past = History.of(ended(mode_from="name"))
    assert "<div>metric: accuracy max (by its name)</div>" in result_html(past, ranked(past.trials))


def test_a_study_shows_its_goal_before_it_runs() -> None:
    algorithm = ps.Random(budget=1)
    study = ps.Study(
        lambda trial: None, {"x": ps.choice(["&"])}, metric="loss", mode="min", algorithm=algorithm, trials=2
    )
    assert study._repr_html_() == (
        "<div><b>Study: &lt;lambda&gt;</b><div>space: x = choice([&#x27;&amp;&#x27;])</div>"
        "<div>algorithm: Random(budget=1, concurrency=8)</div><div>metric: loss min</div></div>"
    )
