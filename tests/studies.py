"""How tests make studies, and what these leave in their logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.log.events import Event
from penstock.log.reader import read


def studies(task: Any, space: Any, **usual: Any) -> Callable[..., ps.Study]:
    """What makes a file's studies: of its usual task, space and settings, but for those that a test gives.

    A task that is given as a class is made anew for each study. Without an algorithm it is one of two units, without
    a name it is "s"; the metric is the least loss.
    """
    common = {"metric": "loss", "mode": "min", "algorithm": ps.Random(budget=2), "name": "s", **usual}

    def study(*task_and_space: Any, **settings: Any) -> ps.Study:
        fresh = task() if isinstance(task, type) else task
        said = dict(zip(("task", "space"), task_and_space, strict=False))
        given = {"task": fresh, "space": space, **common, **said, **settings}
        return ps.Study(given.pop("task"), given.pop("space"), **given)

    return study


def version_2(path: Path) -> list[dict[str, Any]]:
    """Rewrite a log as version 2 wrote it, without sums, so that a test may change it; gives its lines."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("sum")
        if line["event"] == "opened":
            line["settings"]["log"] = 2
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return lines


def log(name: str = "s", dir: str | Path = ".penstock") -> list[Event]:
    """Every event of a study."""
    return list(read(Path(dir) / name / "log.jsonl"))
