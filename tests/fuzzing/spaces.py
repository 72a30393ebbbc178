"""Spaces: domains with good and bad bounds, constants of every kind, and define-by-run functions that misbehave.

Rule: a space is refused with a message, or every config that is drawn from it lies in it, is drawn again by the same
seed and number, and comes back from the log as it was.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import optuna

import penstock as ps
from penstock.domains import mark
from penstock.space import Space
from penstock.trial import plain
from tests.fuzzing.cases import Kind, What, Wrong, refused
from tests.fuzzing.values import NAMES, OTHERS, TEXTS, anything, number, value

GOOD = ("1", "0.5", "'a'", "None", "(1, 2)", "nn.ReLU", "np.float32(0.5)", "True", "{'a': [1]}", "float('nan')")


def make(random: Random) -> What:
    if random.random() < 0.15:
        return {"function": [_call(random) for _ in range(random.randint(0, 3))], "returns": anything(random)}
    if random.random() < 0.03:
        return {"space": anything(random)}
    good = random.random() < 0.6  # most spaces are right, so that draws are tried too
    names = ["'x'", "'y'", "'lr'"] if good else [random.choice(["'x'", *TEXTS, "3", "None"]) for _ in range(3)]
    parts = [f"{name}: {_part(random, good)}" for name in names[: random.randint(1, 3)]]
    return {"space": f"{{{', '.join(parts)}}}", "sampler": random.random() < 0.05, "grid": random.random() < 0.2}


def _part(random: Random, good: bool) -> str:
    if not good and random.random() < 0.2:
        return anything(random)
    if random.random() < 0.25:
        values = ", ".join(random.choice(GOOD) if good else anything(random) for _ in range(random.randint(good, 4)))
        return f"ps.{random.choice(['choice', 'grid'])}([{values}])"
    if random.random() < 0.2:
        low = random.choice([0, 1, -5, 2**31, -(2**63), 10**20])
        return f"ps.randint({low}, {low + random.choice([1, 2, 100, 2**53 + 1, 2**64])})"
    least, width = 10.0 ** random.randint(-300, 300), random.choice([0.0, 1e-9, 1.0, 7.0, 1e9])
    bounds = [repr(least), repr(least * (1 + width))] if good else [number(random), number(random)]
    if random.random() < 0.5:
        return f"ps.{random.choice(['uniform', 'loguniform'])}({', '.join(bounds)})"
    step = repr(least * random.choice([0.1, 0.3, 1.0, 1e-3])) if good else number(random)
    return f"ps.{random.choice(['quniform', 'qloguniform'])}({', '.join(bounds)}, {step})"


def _call(random: Random) -> str:
    name = random.choice(["'x'", "'y'", *TEXTS, "3"])
    if random.random() < 0.2:
        return f"trial.suggest_categorical({name}, {random.choice(['[1, 2]', *OTHERS])})"
    if random.random() < 0.1:
        return random.choice(
            ["trial.no_such()", "1 / 0", "exec('import sys; sys.exit(1)')", "{}['x']", "next(iter([]))"]
        )
    bounds = ("0", "1") if random.random() < 0.6 else (number(random), number(random))
    return f"trial.suggest_{random.choice(['float', 'int'])}({name}, {', '.join(bounds)})"


def check(what: What) -> str:
    try:
        given = _function(what) if "function" in what else value(what["space"])
        space = Space.of(given)
        study = ps.Study(
            _train,
            given,
            metric="loss",
            algorithm=ps.Grid(budget=1) if what.get("grid") else ps.Random(budget=1),
            trials=None if what.get("grid") else 2,
            sampler=optuna.samplers.TPESampler(n_startup_trials=1) if what.get("sampler") else None,
            name="s",
        )
        _check_draws(space)
        if (study.trials or 0) <= 4:
            first = [trial.config for trial in study.run(progress=False).trials]
            again = [trial.config for trial in study.run(progress=False).trials]
            if mark(first) != mark(again):
                raise Wrong(f"wrong answer: {first} is {again} after a resume")
    except ps.PenstockError as error:
        return refused(error)
    return "done"


def _train(trial: Any) -> None:
    trial.report(1, loss=float(trial.number))


def _check_draws(space: Space) -> None:
    for drawn in range(3):
        config = space.draw(0, drawn)
        if mark(config) != mark(space.draw(0, drawn)):
            raise Wrong(f"wrong answer: {config} is another when it is drawn again")
        logged = json.loads(json.dumps(config, default=plain))
        for name, domain in space.domains.items():
            if not domain.holds(logged[name]):
                raise Wrong(f"wrong answer: {config[name]!r} is not in {name}={domain!r}")
        if mark(space.restore(logged)) != mark(config):
            raise Wrong(f"wrong answer: {config} comes back from the log as {space.restore(logged)}")
        if not isinstance(space.function, type(None)):
            continue
        space.check(logged)


def _function(what: What) -> Any:
    def space(trial: Any) -> Any:
        for call in what["function"]:
            eval(call, {**NAMES, "trial": trial})
        return value(what["returns"])

    return space


SPACES = Kind("spaces", make, check)
