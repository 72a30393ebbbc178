"""Surrogates from a shell: looked at before anything is spent, as a table, as JSON and as a page."""

import json
from pathlib import Path

from tests.programs import run

FILE = """
import penstock as ps
from tests.surrogate.models import Narrowable

study = ps.Study(Narrowable(), {"lr": ps.loguniform(1e-3, 1e-1)}, metric="loss", mode="min",
                 algorithm=ps.Random(budget=2), trials=4, name="s")
"""
FUNCTION = """
import penstock as ps

def train(trial):
    trial.report(1, loss=trial.config["x"])

study = ps.Study(train, {"x": ps.uniform(1, 2)}, metric="loss", algorithm=ps.Random(budget=1), trials=4)
"""


def test_each_layers_role_and_factors_and_the_check_are_shown():
    Path("tune.py").write_text(FILE)
    facts = json.loads(run("penstock surrogate tune.py --scale 4 --page page.html --json").stdout)
    assert facts["right"]
    assert {one["role"] for one in facts["layers"]} == {"input", "hidden", "output", "fixed"}
    hidden = next(one for one in facts["layers"] if one["parameter"] == "2.weight")
    assert (hidden["width"], hidden["narrow"], hidden["init"], hidden["learning_rate"]) == (256, 64, 2, 1)
    assert facts["bytes"]["surrogate"] < facts["bytes"]["target"] / 5
    assert facts["speedup"] > 0
    page = Path("page.html").read_text()
    assert "Narrow twins of Narrowable" in page
    assert all(f">{one} width</text>" in page for one in ("1/4", "1/2", "full"))
    assert "2.weight" in page
    table = run("penstock surrogate tune.py --scale 4 --data 0.5").stdout
    for word in (
        "48 of 96 rows",
        "2.weight",
        "hidden",
        "slope",
        "check is passed",
        "times as fast",
        "Weight decay and dropout",
    ):
        assert word in table
    assert not Path(".penstock").exists(), "nothing is spent"
    refused = run("penstock surrogate tune.py --scale 64", code=1).stderr
    assert "the largest scale that works is 32" in refused
    Path("function.py").write_text(FUNCTION)
    assert "train has no model of its own" in run("penstock surrogate function.py", code=2).stderr
