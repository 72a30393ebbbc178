"""Tasks: settings of every kind, and methods and functions that return, raise or report wrong things.

Rule: the study is refused with a message, or it ends by its deadline, or with every trial finished, stopped or failed.
A failed trial has an error. A trial whose task does nothing wrong is finished.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.task import METHODS
from tests.fuzzing.cases import Kind, What, Wrong, refused
from tests.fuzzing.values import NAMES, TEXTS, anything, number, value

NUMBERS = ("batch_size", "eval_batch_size", "unit_steps", "clip_grad_norm", "shards")
OTHERS = ("precision", "accumulate", "loader")
ERRORS = (
    *(
        "ValueError('no')",
        "KeyError('x')",
        "SystemExit(3)",
        "RecursionError()",
        "StopIteration(1)",
        "OSError(28, 'full')",
    ),
    *(
        "ValueError('caf\\udce9')",
        "ps.StudyError('own')",
        "ps.TaskError('own')",
        "AssertionError()",
        "Loud()",
        "TypeError",
    ),
)
LOADERS = ("{}", "{'num_workers': 0}", "{'shuffle': True}", "{'no': 1}", "{'timeout': -1}", "{'pin_memory': 3}")
RETURNS = (
    *("torch.zeros(())", "torch.zeros(2)", "torch.tensor(float('nan'))", "{'loss': torch.ones(2)}", "{'loss': 'x'}"),
    *("{'loss': float('nan')}", "{3: 1.0}", "{'\\ud800': 1.0}", "{'budget': 1.0, 'loss': 1.0}", "nn.Sequential()"),
    *(
        "(torch.ones(4, 2), torch.ones(3, 2))",
        "((torch.ones(4, 2),), (torch.ones(0, 2),))",
        "(None, 'step')",
        "(1, 2, 3)",
    ),
)


class Tiny(ps.Task):
    """Two weights and eight rows."""

    batch_size = 4

    def data(self, config: dict[str, Any]) -> tuple[Any, Any]:
        x = torch.linspace(-1, 1, 16).reshape(8, 2)
        return (x, x.sum(1)), (x, x.sum(1))

    def model(self, config: dict[str, Any]) -> nn.Module:
        return nn.Linear(2, 1)

    def optimizer(self, params: Any, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any, config: dict[str, Any]) -> torch.Tensor:
        return F.mse_loss(model(batch[0])[:, 0], batch[1])


def make(random: Random) -> What:
    what: What = {"sharing": random.choice(["solo", "fused"]), "always": random.random() < 0.7}
    if random.random() < 0.3:
        return {**what, "function": [_step(random) for _ in range(random.randint(0, 4))]}
    if random.random() < 0.6:
        name = random.choice([*NUMBERS, *OTHERS])
        drawn = random.choice(LOADERS) if name == "loader" and random.random() < 0.7 else None
        what["settings"] = {name: drawn or (number(random) if name in NUMBERS else anything(random))}
    if random.random() < 0.6:
        wrong = random.choice([*RETURNS, anything(random)])
        does = {"raises": random.choice(ERRORS)} if random.random() < 0.4 else {"returns": wrong}
        what |= {"method": random.choice(METHODS), **does}
    return what


def _step(random: Random) -> str:
    if random.random() < 0.2:
        return f"raise_({random.choice(ERRORS)})"
    step = random.choice(["1", "2", "3", number(random)])
    metric = random.choice(["1.0", "0.5", anything(random)])
    more = random.choice(["", f", state={anything(random)}", f", **{{{random.choice(TEXTS)}: 1.0}}", ", budget=1"])
    return f"trial.report({step}, loss={metric}{more})"


def check(what: What) -> str:
    try:
        study = ps.Study(
            _function(what) if "function" in what else _task(what)(),
            {"lr": ps.uniform(0.01, 0.1)},
            metric="loss",
            algorithm=ps.Random(budget=2),
            trials=3,
            name="s",
            deadline=10,
        )
        result = study.run(sharing=what["sharing"])
    except ps.PenstockError as error:
        return refused(error)
    if result.ended == "deadline":  # of a unit with very many steps
        return "done"
    for trial in result.trials:
        if trial.state not in ("finished", "stopped", "failed"):
            raise Wrong(f"wrong answer: trial {trial.number} ends as {trial.state}")
        if (trial.state == "failed") != bool(trial.error):
            raise Wrong(f"wrong answer: trial {trial.number} ends as {trial.state} with {trial.error!r}")
        if not (what.keys() & {"function", "settings", "method"}) and trial.state != "finished":
            raise Wrong(f"wrong answer: trial {trial.number} of a right task ends as {trial.state}")
    return "done"


def _task(what: What) -> type[Tiny]:
    members: dict[str, Any] = {name: value(text) for name, text in what.get("settings", {}).items()}
    if "method" in what:
        members[what["method"]] = _misbehaving(what)
    return type("Given", (Tiny,), members)


def _misbehaving(what: What) -> Any:
    name = what["method"]

    def method(self: Tiny, *arguments: Any) -> Any:
        lr = arguments[-1]["lr"]
        if not what["always"] and lr < 0.05:
            return getattr(Tiny, name)(self, *arguments)
        if "raises" in what:
            _raise(value(what["raises"]))
        return value(what["returns"])

    return method


def _function(what: What) -> Any:
    def train(trial: Any) -> None:
        if not what["always"] and trial.config["lr"] < 0.05:
            for unit in (1, 2):
                trial.report(unit, loss=1.0)
        for step in what["function"]:
            eval(step, {**NAMES, "trial": trial, "raise_": _raise})

    return train


def _raise(error: Any) -> None:
    raise error


TASKS = Kind("tasks", make, check)
