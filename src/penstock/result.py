"""The result of a study: its trials with their curves, and the best trial with its trained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError, StateError, StudyError, told
from penstock.log.history import History, TrialRecord
from penstock.log.ranking import leading, no_best, ranks
from penstock.log.reader import read
from penstock.log.states import States
from penstock.log.timeline import Row, timeline
from penstock.report.energy import front
from penstock.report.ranks import said_fallback, said_rank
from penstock.surrogate.settings import Surrogate
from penstock.surrogate.task import task_of
from penstock.task import AnyTask, Kind, Task, kind_of
from penstock.trial import Config, Metrics, Status

if TYPE_CHECKING:
    import optuna
    import pandas
    from torch import nn


class Trial:
    """One trial of a result."""

    def __init__(self, record: TrialRecord, task: AnyTask | None, kind: Kind | None, states: States) -> None:
        self._record, self._task, self._given_kind, self._states = record, task, kind, states

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
        """Its status: waiting, running, paused, finished, stopped or failed.

        A trial that was paused when its study was done is stopped: it will not go on unless the study gets more trials.
        """
        return self._record.outcome

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
    def joules(self) -> float | None:
        """The joules that it used of its devices, all that was repeated or killed included; None without a meter."""
        return self._record.joules

    @property
    def error(self) -> str | None:
        """Why it failed, if it did."""
        return self._record.error

    @property
    def scale(self) -> int:
        """How many times narrower its model is than the study's: 1, but for surrogates."""
        return self._record.scale

    def weights(self) -> dict[str, Any]:
        """The ``state_dict`` of its model at its best report."""
        if self._kind == "function":
            raise StudyError(f"Trial {self.number} is a function's: what it saved is in best_state().")
        if self._kind == "table":
            raise StudyError(f"Trial {self.number} was looked up in a table and not trained: it has no model.")
        state = self._load()
        weights: dict[str, Any] = state["model"] if state["best"]["model"] is None else state["best"]["model"]
        return weights

    def best_state(self) -> Any:
        """The state that its function gave with its best report, by ``trial.report(step, state=...)``.

        Where the best report came without a state, it is that of the best report that came with one. A task's trial
        gives its ``weights()``.
        """
        if self._kind != "function":
            return self.weights()
        state = self._load()
        if "best" in state:
            return state["state"] if state["best"]["state"] is None else state["best"]["state"]
        if state["unit"] != self._record.best_unit:
            raise StudyError(
                f"Trial {self.number} has its state of unit {state['unit']}, and reported its best after unit "
                f"{self._record.best_unit}: an earlier version kept last states alone. Ask last_state()."
            )
        return state["state"]

    def last_state(self) -> Any:
        """The last state that its function saved by ``trial.report(step, state=...)``, where the task is a function."""
        state = self._load()
        return state["state"] if self._kind == "function" else state

    @property
    def _kind(self) -> Kind:
        """The kind of its task. A log of an earlier version does not say it, but the state does."""
        return self._given_kind or ("function" if "state" in self._load() else "task")

    def _load(self) -> dict[str, Any]:
        from penstock.training.checkpoint import load

        ref = self._record.best_state
        if ref is None or self._states.size(ref.file) is None:
            raise StudyError(
                f"Trial {self.number} has no saved state: only paused trials, donors and the best keep theirs. "
                "Ask result.best, or train this config again."
            )
        try:
            return load(self._states, ref)
        except StateError as error:
            said = f"{error} Put it back from a copy, or train the config of trial {self.number} again."
            raise StateError(said) from None

    def model(self) -> nn.Module:
        """Its trained model as at its best report: your own module, on the CPU, ready to evaluate."""
        from penstock.training.random.generators import own_randomness

        weights = self.weights()
        if not isinstance(self._task, Task):
            raise StudyError(
                f"The model of trial {self.number} is made by its task, which was not given: give it as in "
                "penstock.load(name, task=Digits()), or take the weights() alone."
            )
        try:
            with own_randomness():
                model = self._task.model(self.config)
            model.load_state_dict(weights)
        except Exception as error:
            raise StudyError(
                f"The model of trial {self.number} cannot be made from its config {self.config} ({told(error)}). "
                "Expected the task that trained it, and values that a log can hold, such as numbers and text: classes "
                "come back as text. Its weights() alone can be had."
            ) from error
        return model.eval()

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={v:.6g}" for k, v in self.metrics.items())
        return f"Trial({self.number}, {self._record.standing}, {self.config}, {shown})"

    def _repr_html_(self) -> str:
        from penstock.report.notebook import trial_html

        return trial_html(self._record)


class Surrogates:
    """The trials of a study's narrower twins: ``result.surrogate``."""

    def __init__(self, settings: dict[str, Any], history: History, task: AnyTask | None, states: States) -> None:
        self._settings, self._history, self._task, self._states = settings, history, task, states

    @property
    def scale(self) -> int:
        """How many times narrower they are than the study's model."""
        return int(self._settings["scale"])

    @property
    def without(self) -> str | None:
        """Why the study went on without surrogates, if it did."""
        return self._settings.get("without")

    @property
    def trials(self) -> list[Trial]:
        """All of them, in the order of their numbers, those of the rank check among them."""
        return [self._trial(record) for record in self._history.surrogates]

    @property
    def best(self) -> Trial:
        """The one with the best report; its ``model()`` is the trained narrow twin."""
        for record in self._history.kept_surrogates:
            return self._trial(record)
        raise StudyError("No surrogate has reported a finite metric, so none is best.")

    @property
    def kept(self) -> list[Trial]:
        """The best ones, in order from the best, as many as ``Study(keep=...)`` keeps the best states of."""
        return [self._trial(record) for record in self._history.kept_surrogates]

    @property
    def rank(self) -> str:
        """How well they foretold twins of twice the width; empty where that was not looked at."""
        return said_rank(self._history)

    @property
    def fallback(self) -> str:
        """That the search began again wider, as surrogates foretold too little; empty where it did not."""
        return said_fallback(self._history)

    def _trial(self, record: TrialRecord) -> Trial:
        task = self._task
        if isinstance(task, Task):
            task = task_of(task, Surrogate.of(self._settings), record.variant)
        return Trial(record, task, "task", self._states)

    def __repr__(self) -> str:
        return f"Surrogates({len(self.trials)} trials, {self.scale} times narrower)"


class Result:
    """The result of a study."""

    def __init__(self, history: History, task: AnyTask | None, dir: Path, states: States) -> None:
        self._history, self._task, self._states = history, task, states
        self.dir = dir

    @property
    def best(self) -> Trial:
        """The trial with the best report.

        A trial that ever reported a metric that is not finite is never the best, nor one that failed without a state.
        """
        if self._history.best is None:
            raise StudyError(no_best(self._history))
        return self._trial(self._history.best)

    @property
    def kept(self) -> list[Trial]:
        """The best trials, in order from the best, as many as ``Study(keep=...)`` keeps the best states of."""
        return [self._trial(record) for record in self._history.kept]

    @property
    def failed(self) -> list[Trial]:
        """The trials that failed; each has its ``error``."""
        return [self._trial(record) for record in self._history.targets if record.status == "failed"]

    @property
    def trials(self) -> list[Trial]:
        """All trials, in the order of their numbers; with ``Study(surrogate=...)`` those of full width alone."""
        return [self._trial(record) for record in self._history.targets]

    @property
    def surrogate(self) -> Surrogates | None:
        """The trials of narrower twins, where the study has ``surrogate=``."""
        settings = self._history.settings.get("surrogate")
        return None if settings is None else Surrogates(settings, self._history, self._task, self._states)

    def _trial(self, record: TrialRecord) -> Trial:
        kind = self._history.settings.get("kind") if self._task is None else kind_of(self._task)
        return Trial(record, self._task, kind, self._states)

    @property
    def ended(self) -> str | None:
        """Why the study ended: done, deadline, target, interrupted or failed."""
        return self._history.ended

    @property
    def seconds(self) -> float:
        """The seconds that the study has used, over all its runs."""
        return self._history.clock

    @property
    def joules(self) -> float | None:
        """The joules of all its devices, idle ones included, over all its runs; None without a meter."""
        return self._history.joules

    @property
    def unmetered(self) -> dict[str, str]:
        """Why devices were not metered, or not to the end, by their names."""
        failed = {name: one.reason for name, one in self._history.meters.devices.items() if one.reason}
        return {**(self._history.settings.get("unmetered") or {}), **failed}

    @property
    def cost(self) -> float | None:
        """What its nodes have cost, over all its runs; None where their prices are not known."""
        return self._history.cost

    def front(self) -> list[Trial]:
        """The trials that no other trial beats in both metric and joules, those of fewest joules first.

        It is empty where nothing was metered.
        """
        return [self._trial(record) for record in front(self._history.targets)]

    def timeline(self) -> list[Row]:
        """Which trial had which share of which device at what time: rows of device, trial, start, end, share, mode."""
        return timeline(read(self.dir / "log.jsonl"))

    def dataframe(self) -> pandas.DataFrame:
        """One row a trial: number, rank, state, budget, config, metrics at its best report, device seconds, joules
        where its devices were metered, error.

        The trial of rank 1 is ``best``. The rank is empty where a trial cannot be the best: it did not report, it
        diverged, or it failed without a state.
        """
        try:
            import pandas
        except ImportError:
            raise StudyError("dataframe() needs pandas: pip install 'penstock[plots]'.") from None
        records = self._history.targets
        rank = ranks(records)
        frame = pandas.DataFrame([record.row(rank=rank.get(record.number)) for record in records])
        return frame.astype({"rank": "Int64"}) if len(frame) else frame  # with None a column would become one of floats

    def optuna_study(self) -> optuna.Study:
        """The study as Optuna sees it, for its plots: ``optuna.visualization.plot_slice(result.optuna_study())``."""
        from penstock.algorithms.seen import read_study

        return read_study(self.dir)

    def save_best(self) -> Path | None:
        """Write the best trial's ``best_state()`` to ``best.pt`` in the study's folder; None where there is no state.

        For a task this is the ``state_dict`` of its best model.
        """
        if self._history.best is None or self._history.best.best_state is None:
            return None
        import torch

        path = self.dir / "best.pt"
        partial = path.with_suffix(".partial")
        try:
            torch.save(self.best.best_state(), partial)
            partial.replace(path)
        except (PenstockError, OSError, RuntimeError):  # torch raises a RuntimeError on a full disk; the result stands
            partial.unlink(missing_ok=True)
            return None
        return path

    def __repr__(self) -> str:
        best = "none" if self._history.best is None else repr(self.best)
        failed = f", {len(self.failed)} failed" if self.failed else ""
        ended = f"{self.ended} (simulated)" if self._history.simulated else self.ended
        return f"Result({len(self._history.targets)} trials{failed}, {ended}, best: {best})"

    def _repr_html_(self) -> str:
        from penstock.report.notebook import result_html

        return result_html(self._history, leading(self._history))
