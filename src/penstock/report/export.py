"""Exports of a study's log: CSV files or TensorBoard runs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import StudyError
from penstock.log.events import Reported
from penstock.log.history import TrialRecord, apart
from penstock.log.ranking import ranks
from penstock.report.format import OBEYED
from penstock.report.summary import events_of, history_of

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # a formula begins with one of them


def write_csv(study_dir: Path, out: Path) -> list[Path]:
    """Write ``trials.csv``, one row a trial, and ``curves.csv``, one row a report; gives their paths.

    >>> [path.name for path in write_csv(Path(".penstock/digits-1"), Path("out"))]  # doctest: +SKIP
    ['trials.csv', 'curves.csv']
    """
    curves = [
        {"trial": event.trial, "budget": event.unit, **apart(event.metrics, {"trial", "clock"}), "clock": event.clock}
        for event in events_of(study_dir)
        if isinstance(event, Reported)
    ]
    trials = history_of(study_dir).trials
    tables = {
        "trials.csv": trials_csv(trials, ranks(one for one in trials if not one.variant)),
        "curves.csv": _csv(curves, ("trial", "budget"), ("clock",)),
    }
    _make(out)
    for name, text in tables.items():
        with writing(out / name):
            (out / name).write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
    return [out / name for name in tables]


def trials_csv(trials: Iterable[TrialRecord], rank: Mapping[int, int]) -> str:
    """The text of ``trials.csv``, with each trial's ``rank`` among all the study's trials.

    The best trial has rank 1, and a trial that cannot be the best has an empty cell.
    """
    ranked = [trial.row(rank=rank.get(trial.number)) for trial in trials]
    rows = [{name: json.dumps(v) if isinstance(v, list | dict) else v for name, v in row.items()} for row in ranked]
    return _csv(rows, ("number", "rank", "state", "budget"), ("device_seconds", *_joules(rows), "error"))


def _joules(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The column of joules, where a device was metered."""
    return ("joules",) if any("joules" in row for row in rows) else ()


def _csv(rows: list[dict[str, Any]], first: Iterable[str], last: Iterable[str]) -> str:
    seen = dict.fromkeys(name for row in rows for name in row)
    between = sorted((name for name in seen if name not in {*first, *last}), key=lambda n: not n.startswith("config."))
    names, text = [*first, *between, *last], io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow([_cell(name) for name in names])
    writer.writerows([_cell(row.get(name)) for name in names] for row in rows)
    return text.getvalue()


def _cell(one: Any) -> Any:
    """A value for a cell, without the characters that a terminal obeys.

    Before a text that a spreadsheet would take for a formula comes an apostrophe.

    >>> _cell("=1+1"), _cell("-0.5"), _cell(-0.5), _cell("\\x1b[2J")
    ("'=1+1", '-0.5', -0.5, '[2J')
    """
    if not isinstance(one, str):
        return one
    text = one.translate(dict.fromkeys(OBEYED))
    if not one.startswith(FORMULA) and not text.startswith(FORMULA):
        return text
    try:
        float(one)
    except ValueError:
        return f"'{text}"
    return text


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
        with writing(run):
            for old in run.glob("events.out.tfevents.*"):
                old.unlink()
            run.mkdir(exist_ok=True)
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
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)


@contextmanager
def writing(out: Path, option: str = "--out") -> Iterator[None]:
    """Turn a failing write into one message, which names the option that says where."""
    try:
        yield
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        why = error.strerror if isinstance(error, OSError) else error
        raise StudyError(f"Cannot write {out} ({why}): choose another place with {option}.") from None
