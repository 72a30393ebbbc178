"""The result of a study: its trials with their curves, and the best trial with its trained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError, StudyError
from penstock.log.events import read
from penstock.log.history import History, TrialRecord
from penstock.log.states import States
from penstock.log.timeline import Row, timeline
from penstock.task import AnyTask, FunctionTask, Task
from penstock.trial import Config, Metrics, Status

if TYPE_CHECKING:
    import optuna
    import pandas
    from torch import nn


class Trial:
    """One trial of a result."""

    def __init__(self, record: TrialRecord, task: AnyTask, states: States) -> None:
        self._record, self._task, self._states = record, task, states

    @property
    def number(self) -> int:
        """Its number, from 0, in the order in which trials were first asked for."""
        return self._record.number

    @property
    def config(self) -> Config:
        """Its config. PBT changes configs; this is the one at the best report."""
        return self._record.measured

    @property
    def state(self) -> Status:
        """Its status: waiting, running, paused, finished, stopped or failed."""
        return self._record.status

    @property
    def metrics(self) -> Metrics:
        """Its metrics at its best report."""
        return self._record.metrics

    @property
    def curve(self) -> Sequence[Metrics]:
        """A row for each report: its metrics and its ``budget``."""
        return self._record.curve

    @property
    def device_seconds(self) -> float:
        """The seconds that it had a device, up to its last report."""
        return self._record.device_seconds

    @property
    def error(self) -> str | None:
        """Why it failed, if it did."""
        return self._record.error

    def weights(self) -> dict[str, Any]:
        """The ``state_dict`` of its model at its best report."""
        if isinstance(self._task, FunctionTask):
            raise StudyError(f"Trial {self.number} is a function's: what it saved is in last_state().")
        if not isinstance(self._task, Task):
            raise StudyError(f"Trial {self.number} was looked up in a table and not trained: it has no model.")
        state = self._load()
        weights: dict[str, Any] = state["model"] if state["best"]["model"] is None else state["best"]["model"]
        return weights

    def last_state(self) -> Any:
        """The last state that its function saved by ``trial.report(step, state=...)``, where the task is a function."""
        state = self._load()
        return state["state"] if isinstance(self._task, FunctionTask) else state

    def _load(self) -> dict[str, Any]:
        from penstock.training.checkpoint import load

        ref = self._record.best_state
        if ref is None or self._states.size(ref.file) is None:
            raise StudyError(
                f"Trial {self.number} has no saved state: only paused trials, donors and the best keep theirs. "
                "Ask result.best, or train this config again."
            )
        return load(self._states, ref)

    def model(self) -> nn.Module:
        """Its trained model as at its best report: your own module, on the CPU, ready to evaluate."""
        from penstock.training.random.generators import own_randomness

        weights = self.weights()
        assert isinstance(self._task, Task)
        with own_randomness():
            model = self._task.model(self.config)
        model.load_state_dict(weights)
        return model.eval()

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={v:.6g}" for k, v in self.metrics.items())
        return f"Trial({self.number}, {self.state}, {self.config}, {shown})"


class Result:
    """The result of a study."""

    def __init__(self, history: History, task: AnyTask, dir: Path, states: States) -> None:
        self._history, self._task, self._states = history, task, states
        self.dir = dir

    @property
    def best(self) -> Trial:
        """The trial with the best report. A trial that ever reported a metric that is not finite is never the best."""
        if self._history.best is None:
            failed = next((t.error for t in self._history.trials if t.error), None)
            why = f" The first error was:\n{failed}" if failed else ""
            raise StudyError(f"No trial reported a finite {self._history.metric!r}, so none is best.{why}")
        return self._trial(self._history.best)

    @property
    def trials(self) -> list[Trial]:
        """All trials, in the order of their numbers."""
        return [self._trial(record) for record in self._history.trials]

    def _trial(self, record: TrialRecord) -> Trial:
        return Trial(record, self._task, self._states)

    @property
    def ended(self) -> str | None:
        """Why the study ended: done, deadline, target, interrupted or failed."""
        return self._history.ended

    def timeline(self) -> list[Row]:
        """Which trial had which share of which device at what time: rows of device, trial, start, end, share, mode."""
        return timeline(read(self.dir / "log.jsonl"))

    def dataframe(self) -> pandas.DataFrame:
        """One row a trial: number, state, budget, config, metrics at its best report, device seconds, error."""
        try:
            import pandas
        except ImportError:
            raise StudyError("dataframe() needs pandas: pip install 'penstock[plots]'.") from None
        return pandas.DataFrame([record.row() for record in self._history.trials])

    def optuna_study(self) -> optuna.Study:
        """The study as Optuna sees it, for its plots: ``optuna.visualization.plot_slice(result.optuna_study())``."""
        from penstock.algorithms.storage import read_study

        return read_study(self.dir)

    def save_best(self) -> Path | None:
        """Write the best model's ``state_dict`` to ``best.pt`` in the study's folder; None where there is no model."""
        if self._history.best is None or not isinstance(self._task, Task):
            return None
        import torch

        path = self.dir / "best.pt"
        partial = path.with_suffix(".partial")
        try:
            torch.save(self.best.weights(), partial)
            partial.replace(path)
        except (PenstockError, OSError, RuntimeError):  # torch raises a RuntimeError on a full disk; the result stands
            partial.unlink(missing_ok=True)
            return None
        return path

    def __repr__(self) -> str:
        best = "none" if self._history.best is None else repr(self.best)
        return f"Result({len(self._history.trials)} trials, best: {best})"
