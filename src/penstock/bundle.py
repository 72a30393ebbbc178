"""What a worker is given, and what it says: the records between executors and training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.task import AnyTask
from penstock.trial import Config, Mode, Report, StateRef

BundleMode = Literal["solo"]


@dataclass(frozen=True)
class Placement:
    """One trial of a bundle: train it to ``budget`` units, beginning with ``state``.

    ``inherited``: the state is a donor's, or that of another config.
    """

    trial: int
    attempt: int
    config: Config
    budget: int
    state: StateRef | None = None
    inherited: bool = False


@dataclass(frozen=True)
class Bundle:
    """Trials placed together on the same devices; without placements, the order to stop."""

    name: str
    devices: tuple[str, ...]
    placements: tuple[Placement, ...]
    mode: BundleMode = "solo"


@dataclass(frozen=True)
class Job:
    """What every worker of a study knows."""

    task: AnyTask
    seed: int
    metric: str
    mode: Mode
    states: Path


@dataclass(frozen=True)
class Description:
    """What one dry batch of a config told: the metrics it reports (None where only training tells) and its bytes."""

    metrics: tuple[str, ...] | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Saved:
    """A state was written between two reports."""

    trial: int
    attempt: int
    state: StateRef


@dataclass(frozen=True)
class Finished:
    """A trial left its bundle: it has reported its budget, or its function returned before that."""

    trial: int
    attempt: int


@dataclass(frozen=True)
class Stopped:
    """A trial left its bundle because it was told to; ``state`` where it could be saved."""

    trial: int
    attempt: int
    state: StateRef | None


@dataclass(frozen=True)
class Failed:
    """A trial left its bundle by an error. ``died``: its worker did, or its memory ran out, so a retry may help."""

    trial: int
    attempt: int
    error: str
    died: bool = False


WorkerEvent = Report | Saved | Finished | Stopped | Failed
