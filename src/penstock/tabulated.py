"""Trials that are looked up in a table rather than trained, for simulations."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError, TaskError
from penstock.numeric import finite, shown, whole
from penstock.speed.curve import Curve
from penstock.trial import Config

if TYPE_CHECKING:
    from penstock.domains import Range

TASKS = ("tasks", "openml_task_ids")  # keys under which a file may name its tasks


@dataclass(frozen=True)
class Tabulated:
    """One trial's table: ``metrics`` by unit, from unit 1 on, and the ``seconds`` of a unit alone on one device.

    ``seconds`` is one number, or one a unit. ``bytes`` is the device memory that the trial takes. ``curve`` is the
    effect of sharing and spreading on its time, where it differs from the simulation's curve. Trials of one
    ``signature`` can be fused. Where devices are ``Simulated(watts=...)``, ``watts`` is what one draws while this trial
    trains there. ``limits`` has, by power limit, the watts and how many times as long a unit takes; the greatest one
    limits nothing.

    >>> Tabulated({"loss": [0.9, 0.5]}, seconds=60).seconds
    (60.0, 60.0)
    """

    metrics: Mapping[str, Sequence[float]]
    seconds: float | Sequence[float]
    bytes: int = 0
    curve: Curve | None = None
    signature: str = "tabulated"
    watts: float | None = None
    limits: Mapping[float, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        watts = finite(self.watts)
        if self.watts is not None and (watts is None or watts < 0):
            raise TaskError(f"Expected the watts of a table as a number from 0 on, got {shown(self.watts)}.")
        object.__setattr__(self, "limits", as_limits(self.limits, TaskError))
        if not isinstance(self.metrics, Mapping) or not all(isinstance(name, str) for name in self.metrics):
            raise TaskError(
                f"Expected a dict of metrics by name, one value a unit, in a table, got {shown(self.metrics)}."
            )
        columns = {name: _numbers(f"the metric {name!r}", values) for name, values in self.metrics.items()}
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise TaskError(
                f"Expected as many units of every metric of a table, got {said}: give each its value a unit."
            )
        units = max(lengths.values(), default=0)
        if not units:
            raise TaskError(f"Expected a metric's values, one a unit, in a table, got {dict(self.metrics)}.")
        seconds: Any = self.seconds
        one = isinstance(seconds, Real) or finite(seconds) is not None
        alone = (float(seconds),) * units if one else _numbers("the seconds", seconds)
        if len(alone) != units:
            raise TaskError(f"Expected the seconds of {units} units, or one number for all, got {len(alone)}.")
        wrong = next((i for i, time in enumerate(alone) if not 0 < time < math.inf), None)
        if wrong is not None:
            raise TaskError(
                f"Expected seconds above 0 for each unit of a table, got {alone[wrong]} for unit {wrong + 1}."
            )
        bytes = whole(self.bytes)
        if bytes is None or bytes < 0:
            raise TaskError(f"Expected the bytes of a table as a whole number from 0 on, got {shown(self.bytes)}.")
        if self.curve is not None and not isinstance(self.curve, Curve):
            raise TaskError(f"Expected the curve of a table as a penstock.Curve, got {shown(self.curve)}.")
        if not isinstance(self.signature, str):
            raise TaskError(f"Expected the signature of a table as a text, got {shown(self.signature)}.")
        object.__setattr__(self, "bytes", bytes)
        object.__setattr__(self, "metrics", columns)
        object.__setattr__(self, "seconds", alone)

    @property
    def units(self) -> int:
        """How many units the table has."""
        return len(next(iter(self.metrics.values())))


def as_limits(limits: object, refuse: type[PenstockError]) -> dict[float, tuple[float, float]]:
    """Power limits with what each does: the watts, and how many times as long a unit takes.

    >>> as_limits({250: (210, 1)}, TaskError)
    {250.0: (210.0, 1.0)}
    """
    try:
        made = {float(limit): (float(watts), float(slower)) for limit, (watts, slower) in limits.items()}  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        made = {0.0: (0.0, 0.0)}
    numbers = [number for limit, both in made.items() for number in (limit, *both)]
    if not all(0 < number < math.inf for number in numbers):
        raise refuse(
            "Expected limits as a dict of (watts, times as long) by limit, all above 0, as in {250: (210, 1.0)}, got "
            f"{shown(limits)}."
        )
    return made


class TabulatedTask:
    """A task of trials that are looked up: ``function(config)`` gives a config's ``Tabulated``.

    It runs where time is simulated: ``Study.run(on=Simulated(...))``.

    >>> task = TabulatedTask(lambda config: Tabulated({"loss": [config["x"] / unit for unit in (1, 2, 3)]}, seconds=60))
    >>> task.look_up({"x": 6}).metrics["loss"]
    (6.0, 3.0, 2.0)
    """

    def __init__(self, function: Callable[[Config], Tabulated]) -> None:
        if not callable(function):
            raise TaskError(f"TabulatedTask expected a function of a config, got {type(function).__name__}.")
        self.function = function

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        task: int | str | None = None,
        seconds: str = "seconds",
        cumulative: bool = False,
        bytes: int = 0,
        curve: Curve | None = None,
    ) -> TabulatedTask:
        """The task of a table in an ``.npz`` file; its configs are ``{"row": i}``, as ``space()`` draws them.

        The file's keys:

        - ``curves``: numbers [configs, units, metrics], or [tasks, configs, units, metrics]. In the latter case
          ``task`` chooses one: by its number, or by its name in the file's ``tasks`` or ``openml_task_ids``;
        - ``metrics``: the names of the metrics;
        - ``configs`` [configs, values] and ``config_names`` (both may be left out): the values that ``config(row)``
          gives;
        - a key or a metric with the name in ``seconds``: the seconds of a unit, [configs] or [configs, units].

        Where the seconds are ``cumulative``, a unit takes the last of them divided by the number of units: the
        cumulative seconds of a surrogate do not always rise. Every trial has these ``bytes`` and this ``curve``.
        """
        return cls(_File(Path(path), task, seconds, cumulative, bytes, curve))

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def identity(self) -> str | None:
        """A text that differs between tables from files; None for a function, whose source is compared instead."""
        return self.function.identity if isinstance(self.function, _File) else None

    def look_up(self, config: Config) -> Tabulated:
        """A config's table."""
        table = self.function(config)
        if not isinstance(table, Tabulated):
            raise TaskError(f"{self.name} must return a penstock.Tabulated for a config, got {type(table).__name__}.")
        return table

    def space(self) -> dict[str, Range]:
        """The space whose configs are the rows of a table from a file."""
        from penstock.domains import randint

        return {"row": randint(0, self._file.rows)}

    def config(self, row: int) -> Config:
        """The config values of a row of a table from a file."""
        return self._file.config(row)

    @property
    def _file(self) -> _File:
        if not isinstance(self.function, _File):
            raise TaskError(
                f"{self.name} is a function and has no rows: write the space that its configs are drawn from."
            )
        return self.function


class _File:
    """The tables of a file, by row."""

    def __init__(
        self, path: Path, task: int | str | None, seconds: str, cumulative: bool, bytes: int, curve: Curve | None
    ) -> None:
        import numpy

        self.path, self.bytes, self.curve = path, bytes, curve
        self.__name__ = path.stem
        try:
            with numpy.load(path, allow_pickle=False) as file:
                arrays = dict(file)
            digest = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
        except (OSError, ValueError) as error:
            raise TaskError(f"The table {path} cannot be read ({error}): expected an .npz file of arrays.") from None
        self.identity = f"{digest} task={task} seconds={seconds} cumulative={cumulative} {curve}"
        for key in ("curves", "metrics"):
            if key not in arrays:
                raise TaskError(f"Expected the key {key!r} in {path}, found {', '.join(arrays)}.")
        curves = self._of_task(arrays, task)
        names = [str(name) for name in arrays["metrics"]]
        if curves.ndim != 3 or curves.shape[2] != len(names):
            raise TaskError(
                f"Expected curves [configs, units, {len(names)} metrics] in {path}, got the shape {curves.shape}."
            )
        self.rows = len(curves)
        times = arrays.get(seconds)
        if times is None and seconds in names:
            times = curves[:, :, names.index(seconds)]
        if times is None or times.shape not in (curves.shape[:1], curves.shape[:2]):
            known = ", ".join([*arrays, *names])
            raise TaskError(f"Expected the seconds of {self.rows} configs as {seconds!r} in {path}, found {known}.")
        if cumulative:
            times = times.reshape(self.rows, -1)[:, -1] / curves.shape[1]
        self._times, self._curves = times, curves
        self._columns = {name: i for i, name in enumerate(names) if name != seconds}
        self._configs, self._config_names = arrays.get("configs"), [str(n) for n in arrays.get("config_names", ())]
        self._row = cache(self._read)

    def _of_task(self, arrays: Mapping[str, Any], task: int | str | None) -> Any:
        curves = arrays["curves"]
        if curves.ndim == 3 and task is None:
            return curves
        if curves.ndim != 4:
            raise TaskError(f"{self.path} has the curves of one task {curves.shape}: leave out task={task!r}.")
        names = next(([str(name) for name in arrays[key]] for key in TASKS if key in arrays), [])
        number = names.index(task) if isinstance(task, str) and task in names else task
        if not isinstance(number, int) or not 0 <= number < len(curves):
            known = f", or one of {', '.join(names)}" if names else ""
            raise TaskError(f"{self.path} has {len(curves)} tasks: expected task= from 0 on{known}, got {task!r}.")
        return curves[number]

    def _read(self, row: int) -> Tabulated:
        curve = self._curves[row]
        metrics = {name: curve[:, i].tolist() for name, i in self._columns.items()}
        return Tabulated(metrics, self._times[row].tolist(), self.bytes, self.curve, self.path.stem)

    def __call__(self, config: Config) -> Tabulated:
        return self._row(self._check(config.get("row")))

    def config(self, row: int) -> Config:
        if self._configs is None:
            return {"row": self._check(row)}
        return dict(zip(self._config_names, self._configs[self._check(row)].tolist(), strict=True))

    def _check(self, row: object) -> int:
        if not isinstance(row, int) or not 0 <= row < self.rows:
            raise TaskError(f"{self.path} has the rows 0 to {self.rows - 1}, got row {row!r}: use its space().")
        return row


def _numbers(what: str, values: Any) -> tuple[float, ...]:
    try:
        return tuple(map(float, values))
    except (TypeError, ValueError, OverflowError):
        raise TaskError(f"Expected {what} of a table as numbers, one a unit, got {shown(values)}.") from None
