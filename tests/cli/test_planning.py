"""Plans from a shell: made, saved, followed, shown, and refused with one message."""

import json
from pathlib import Path

import pytest

from tests.programs import run

FILE = """
import penstock as ps

def look_up(config):
    return ps.Tabulated({"loss": [config["x"] / u for u in range(1, 10)]}, 60, curve=ps.Curve(scaling=(1, 0.55, 0.4)))

study = ps.Study(ps.TabulatedTask(look_up), {"x": ps.uniform(1, 2)}, metric="loss",
                 algorithm=ps.SuccessiveHalving(max_budget=9), trials=9, name="s")
"""
FUNCTION = """
import penstock as ps

def train(trial):
    trial.report(1, loss=trial.config["x"])

study = ps.Study(train, {"x": ps.uniform(1, 2)}, metric="loss", algorithm=ps.Random(budget=1), trials=4, name="f")
"""


@pytest.fixture(autouse=True)
def _files():
    Path("tune.py").write_text(FILE)
    Path("function.py").write_text(FUNCTION)
    Path("own.toml").write_text("[[instance]]\nname = 'rack'\nprize = 3")


def test_a_plan_is_made_saved_followed_and_shown():
    made = json.loads(
        run(
            "penstock plan tune.py --deadline 20m --instances p3.8xlarge --save plan.json --page plan.html --json"
        ).stdout
    )
    assert made["chance"] >= 0.95
    assert sum(stage["cost"] for stage in made["stages"]) == pytest.approx(made["cost"])
    assert [stage["trials"] for stage in made["stages"]] == [9, 3, 1]
    assert "a table's units take as long on every instance" in made["assumed"]
    page = Path("plan.html").read_text()
    assert "<svg" in page
    assert "p3.8xlarge" in page
    ran = json.loads(run("penstock run tune.py --plan plan.json --on simulated --json").stdout)
    assert ran["seconds"] <= 1200
    assert ran["cost"]["so_far"] == pytest.approx(made["cost"], rel=0.1)
    assert ran["cost"]["expected"] == pytest.approx(made["cost"])
    shown = run("penstock show s").stdout
    assert f"{ran['cost']['so_far']:.2f} of about {made['cost']:.2f} USD" in shown
    table = run("penstock plan tune.py --deadline 20m --instances p3.8xlarge").stdout
    for word in ("static", "greedy", "cheapest plan for each deadline", "Assumed, not measured", "20:00"):
        assert word in table


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("tune.py --deadline 1m --instances p3.8xlarge", "the quickest takes"),
        ("tune.py --max-cost 0.01 --instances p3.8xlarge", "the cheapest costs"),
        ("tune.py --instances p3.8xlarg", "the nearest are p3.8xlarge"),
        ("function.py --instances p3.8xlarge", "say how long one takes with unit_seconds="),
        ("tune.py --instances p3.8xlarge --unit-seconds p3.8xlarge=fast", "--unit-seconds must be seconds"),
        ("tune.py --instances p3.8xlarge --catalogue none.toml", "The catalogue none.toml cannot be read"),
        ("tune.py --instances p3.8xlarge --catalogue own.toml", "The catalogue own.toml: rack has 'prize' (did you"),
        ("tune.py --instances ,", "There is no instance type to plan with: name at least one"),
        ("tune.py --instances p3.8xlarge --log none", "no study"),
        ("tune.py --instances p3.8xlarge --save none/plan.json", "Cannot write none/plan.json (No such file or"),
    ],
)
def test_each_bad_input_has_one_message(options, said):
    refused = run(f"penstock plan {options}", code=1 if "--save" in options else 2)
    assert said in refused.stderr
    assert refused.stderr.startswith("penstock: ")
    assert "\npenstock: " not in refused.stderr
    assert "Traceback" not in refused.stderr
