"""Exports of a study's log: CSV files or TensorBoard runs."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.errors import StudyError
from penstock.log.events import Reported
from penstock.log.history import TrialRecord, apart
from penstock.report.summary import events_of, history_of


def write_csv(study_dir: Path, out: Path) -> list[Path]:
    """Write ``trials.csv``, one row a trial, and ``curves.csv``, one row a report; gives their paths.

    >>> [path.name for path in write_csv(Path(".penstock/digits-1"), Path("out"))]  # doctest: +SKIP
    ['trials.csv', 'curves.csv']
    """
    trials = [_row(trial) for trial in history_of(study_dir).trials]
    curves = [
        {"trial": event.trial, "budget": event.unit, **apart(event.metrics, {"trial", "clock"}), "clock": event.clock}
        for event in events_of(study_dir)
        if isinstance(event, Reported)
    ]
    _make(out)
    return [
        _write(out / "trials.csv", trials, ("number", "state", "budget"), ("device_seconds", "error")),
        _write(out / "curves.csv", curves, ("trial", "budget"), ("clock",)),
    ]


def _row(trial: TrialRecord) -> dict[str, Any]:
    return {name: json.dumps(v) if isinstance(v, list | dict) else v for name, v in trial.row().items()}


def _write(path: Path, rows: list[dict[str, Any]], first: Iterable[str], last: Iterable[str]) -> Path:
    seen = dict.fromkeys(name for row in rows for name in row)
    between = sorted((name for name in seen if name not in {*first, *last}), key=lambda n: not n.startswith("config."))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*first, *between, *last])
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_tensorboard(study_dir: Path, out: Path) -> list[Path]:
    """Write one run a trial: a scalar per metric and unit, and the config as hparams; gives the runs' folders.

    Look at them with ``tensorboard --logdir out``. An earlier export in the same folder is replaced.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams
    except ImportError:
        raise StudyError("TensorBoard's package is not installed: pip install 'penstock[tensorboard]'.") from None
    trials = history_of(study_dir).trials
    reports: dict[int, list[Reported]] = {trial.number: [] for trial in trials}
    for event in events_of(study_dir):
        if isinstance(event, Reported):
            reports[event.trial].append(event)
    _make(out)
    runs = [out / f"trial-{trial.number:05}" for trial in trials]
    for trial, run in zip(trials, runs, strict=True):
        for old in run.glob("events.out.tfevents.*"):
            old.unlink()
        best = {f"best/{name}": value for name, value in trial.metrics.items()}
        with SummaryWriter(str(run)) as writer:  # add_hparams would make a second run for each trial
            config = {name: _hparam(value) for name, value in trial.measured.items()}
            for summary in hparams(config, best):  # type: ignore[no-untyped-call]
                writer.file_writer.add_summary(summary)
            for report in reports[trial.number]:  # times are of the study's clock; TensorBoard shows them as relative
                for name, value in report.metrics.items():
                    writer.add_scalar(name, value, report.unit, walltime=report.clock)
                if report.unit == trial.best_unit:
                    for name, value in best.items():
                        writer.add_scalar(name, value, report.unit, walltime=report.clock)
    return runs


def _hparam(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else json.dumps(value)


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StudyError(f"Cannot write {out} ({error.strerror}): choose another folder with --out.") from None
