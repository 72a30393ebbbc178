"""The runs of a recurring job, as `penstock show` lists them."""

import json

from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.report.recurring import summed
from tests.test_recurring import job, on


def test_show_lists_the_runs_with_cost_stake_and_verdict():
    made = job(policy="zeus", batch_sizes=[16, 32], eta=1.0)
    made.run(3, on=on())
    facts = json.loads(CliRunner().invoke(app, ["show", "nightly", "--json"]).stdout)
    runs = [run for one in made.recurrences for run in one.runs]
    assert [(r["recurrence"], r["size"], r["stake"], r["verdict"], r["cost"]) for r in facts["runs"]] == [
        (run.recurrence, run.size, run.stake, run.verdict, run.cost) for run in runs
    ]
    shown = CliRunner().invoke(app, ["show", "nightly"]).stdout
    assert "3 recurrences reached the target in 4 runs, which cost " in " ".join(shown.split())
    rows = [line.split() for line in shown.splitlines() if line.endswith(("reached", "stopped"))]
    assert rows[0] == ["0", "32", "20", "1", "576", "kJ", "none", "576", "kJ", "40:00", "reached"]
    assert [row[-1] for row in rows] == ["reached", "stopped", "reached", "reached"]


def test_costs_are_seconds_where_no_greatest_power_is_known_though_joules_are():
    run = {"recurrence": 0, "size": 32, "units": 3, "best": None, "stake": 90.0, "verdict": "reached"}
    by_time = {**run, "cost": 60.0, "seconds": 60.0, "joules": 7200.0}
    by_both = {**run, "cost": 9000.0, "seconds": 60.0, "joules": 7200.0}
    assert "which cost 1:00, 0.0 s of it" in summed([by_time])
    assert "which cost 9 kJ, 0 kJ of it" in summed([by_both])


def test_resume_says_how_a_recurring_job_goes_on():
    job(batch_sizes=[16, 32]).run(on=on())
    told = CliRunner().invoke(app, ["resume", "nightly"])
    assert told.exit_code == 2
    assert "nightly is a recurring job" in " ".join(told.output.split())
