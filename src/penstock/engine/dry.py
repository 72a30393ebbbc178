"""One dry batch before a study's first line: whether its task can train, and reports the study's metric."""

from __future__ import annotations

from typing import Any

from penstock.bundle import Measured
from penstock.errors import PenstockError, StudyError, TaskError, trace
from penstock.executors.base import Executor
from penstock.trial import Config


def dry_batch(executor: Executor, study: str, metric: str, configs: list[tuple[Config, str]]) -> Measured | None:
    """Try configs until one trains: an error of one config is its trial's, an error of all is the task's.

    It gives what was found of a CPU's threads.
    """
    errors: list[Exception] = []
    for config, variant in configs:
        try:
            more: dict[str, Any] = {"variants": [variant]} if variant else {}
            (description,) = executor.describe([config], train=True, study=study, **more)
        except Exception as error:
            if isinstance(error, PenstockError) and not isinstance(error, TaskError):
                raise
            errors.append(error)
            continue
        if description.metrics is not None and metric not in description.metrics:
            raise StudyError(unknown_metric(metric, description.metrics))
        return description.threads
    if isinstance(errors[0], TaskError):
        raise errors[0]
    said = f"The task failed in a dry batch of each of the first {len(configs)} configs"
    raise TaskError(f"{said}. With {configs[0][0]}:\n{trace(errors[0])}")


def unknown_metric(metric: str, known: tuple[str, ...]) -> str:
    """The message for a study whose metric its task does not report."""
    return f"The study's metric {metric!r} is not reported by the task, which reports {', '.join(known) or 'nothing'}."
