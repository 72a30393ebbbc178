"""Logs: cut at a byte, or with bytes changed, added or left out.

Rule: a log that is cut goes on to the same trials as the undisturbed study. A log that is changed is refused with a
message, or tells the same as before; looking at it changes nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import optuna
from typer.testing import CliRunner

import penstock as ps
from penstock.cli.app import app
from penstock.result import Result
from tests.fuzzing.cases import Kind, What, Wrong, refused

LOOKS = (["show", "s", "--json"], ["list", "--json"], ["export", "s", "--to", "csv"], ["report", "s"], ["show", "s"])
STUDIES = ("halving", "population", "sampled")
SPACE = {"x": ps.uniform(0, 4), "y": ps.choice(["a", "b"])}


def train(trial: Any) -> None:
    """Goes on from its state."""
    for unit in range(trial.state or 0, 9):
        trial.report(unit + 1, state=unit + 1, loss=(trial.config["x"] - 2) ** 2 / (unit + 1))


def study(name: str, dir: Path) -> ps.Study:
    """One of the studies whose logs are disturbed."""
    if name == "halving":
        settings: dict[str, Any] = {"algorithm": ps.SuccessiveHalving(max_budget=4, reduction=2), "trials": 4}
    elif name == "population":
        settings = {"algorithm": ps.PBT(population=4, max_budget=3)}
    else:
        sampler = optuna.samplers.TPESampler(n_startup_trials=2)
        settings = {"algorithm": ps.Random(budget=2, concurrency=2), "trials": 5, "sampler": sampler}
    return ps.Study(train, SPACE, metric="loss", name="s", dir=dir, **settings)


def make(random: Random) -> What:
    name = random.choice(STUDIES)
    length = len(_whole(name)[0])
    what: What = {"study": name, "look": random.choice(LOOKS)}
    if random.random() < 0.4:
        return {**what, "cut": random.randint(0, length)}
    edits = []
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        at = random.randint(0, length)
        marks = random.choice('0123456789-"{}[],:\n\r ntf').encode()
        put = random.choice([b"", random.randbytes(random.randint(1, 3)), marks]).hex()
        edits.append([at, random.choice([0, 1, 1, 2]), put])
    return {**what, "edits": edits}


def cuts() -> Iterator[tuple[str, What]]:
    """Every log cut at every byte, each with the words that repeat all of them."""
    for name in STUDIES:
        for at in range(len(_whole(name)[0]) + 1):
            yield "--cuts", {"study": name, "look": LOOKS[at % len(LOOKS)], "cut": at}


def check(what: What) -> str:
    whole, answer = _whole(what["study"])
    dir = Path(".penstock")
    (dir / "s").mkdir(parents=True)
    log = dir / "s" / "log.jsonl"
    log.write_bytes(changed(whole, what))
    shutil.copytree(_made(what["study"]) / "s" / "states", dir / "s" / "states", dirs_exist_ok=True)
    looked = CliRunner().invoke(app, [str(word) for word in what["look"]])
    if looked.exception is not None and not isinstance(looked.exception, SystemExit):
        raise looked.exception
    if looked.exit_code and not looked.stderr.strip():
        raise Wrong(f"no message: exit code {looked.exit_code} of {what['look']}")
    if log.read_bytes() != changed(whole, what):
        raise Wrong(f"wrong answer: {what['look']} changed the log")
    try:
        result = study(what["study"], dir).run(progress=False)
    except ps.PenstockError as error:
        if "cut" in what:
            raise Wrong(f"wrong answer: a log that was cut off is refused: {error}") from None
        return refused(error)
    summed = "sum" in json.loads(whole.splitlines()[0])  # without sums a changed number cannot be noticed
    if ("cut" in what or summed) and facts(result) != answer:
        raise Wrong(f"wrong answer: {facts(result)} instead of {answer}")
    return "done"


def changed(whole: bytes, what: What) -> bytes:
    """A log with the case's cut or edits."""
    if "cut" in what:
        return whole[: what["cut"]]
    made = bytearray(whole)
    for at, gone, put in what["edits"]:
        made[at : at + gone] = bytes.fromhex(put)
    return bytes(made)


def facts(result: Result) -> str:
    """What a result says about its trials, without times."""
    return json.dumps([[one.number, one.config, one.state, one.curve] for one in result.trials])


@cache
def _made(name: str) -> Path:
    dir = Path(mkdtemp(prefix="fuzz-log-"))
    study(name, dir).run(progress=False)
    return dir


@cache
def _whole(name: str) -> tuple[bytes, str]:
    """The log of an undisturbed study, and what its result says."""
    dir = _made(name)
    whole = (dir / "s" / "log.jsonl").read_bytes()
    result = study(name, dir).run(progress=False)
    return whole, facts(result)


LOGS = Kind("logs", make, check)
