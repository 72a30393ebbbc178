"""The records between executors and training: the orders that a worker gets, and the events that it sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.log.events import Limited as Limited
from penstock.log.events import Measured as Measured
from penstock.log.events import Metered as Metered
from penstock.log.states import States
from penstock.task import AnyTask, Task, shards
from penstock.trial import Config, Leg, Metrics, Mode, Report, StateRef, Usage, reached

BundleMode = Literal["solo", "fused", "packed", "processes", "distributed"]


@dataclass(frozen=True)
class Device:
    """One accelerator, or the CPU, with its known properties.

    ``price`` is the price of an hour, ``market`` the market it is bought on, such as "spot". ``threads`` is how many
    threads a worker on a CPU computes with. ``instance`` is the type of its node, as a cloud names it. Each is None
    where it is not known.
    """

    name: str
    type: str
    memory: int
    node: str = "local"
    price: float | None = None
    market: str | None = None
    threads: int | None = None
    instance: str | None = None


@dataclass(frozen=True)
class Node:
    """A machine that is paid for, whether its devices are there yet or not.

    ``price`` is the price of the whole node for an hour. ``since`` is the executor's clock from which on it is paid.
    ``instance`` is its type, as a cloud names it. Price, instance and market are None where they are not known.
    """

    name: str
    instance: str | None = None
    market: str | None = None
    price: float | None = None
    since: float = 0.0


@dataclass(frozen=True)
class Request:
    """A number of devices that could be used; of any ``type``, ``market`` and ``instance`` where these are None.

    Devices of an ``instance`` come and go by whole nodes.
    """

    count: int
    type: str | None = None
    market: str | None = None
    instance: str | None = None


@dataclass(frozen=True)
class Placement:
    """One trial of a bundle: train it to ``budget`` units, beginning with ``state``.

    ``inherited`` says that the state is a donor's, or of another config. ``share`` is how much of the bundle's devices
    the trial gets. ``variant`` names its task, where a study has several. ``legs`` are set where a donor's state is
    lost: the worker trains them first, and begins with the state that they give. The trials of a bundle train in rounds
    of one unit each; ``since`` is the round in which the trial's first unit would have been. So a trial that comes back
    behind its round catches up before the others go on. The parts of a pack have no rounds: there it is None.
    """

    trial: int
    attempt: int
    config: Config
    budget: int
    state: StateRef | None = None
    inherited: bool = False
    share: float = 1.0
    variant: str = ""
    legs: tuple[Leg, ...] = ()
    since: int | None = 0

    @property
    def unit(self) -> int:
        """How many units the trial has behind it where it begins."""
        if self.state is not None:
            return self.state.unit
        return self.legs[-1].unit if self.legs else 0

    def turned_away(self, study: str) -> TrialStopped:
        """The event of a study's trial that leaves before it has begun: it has no newer state."""
        return TrialStopped(self.trial, self.attempt, self.state, study)


@dataclass(frozen=True)
class Bundle:
    """Trials of a ``study`` placed together on the same devices; a bundle without placements is the order to stop.

    The trials of a fused bundle have one ``signature``. ``size`` is how many of them a step computes at once, or None
    where the worker has to measure it, with ``guess`` as the size to time first; ``reason`` says where a size comes
    from. The one trial of a distributed bundle has a worker on each of the devices; ``rank`` is this worker's number.
    All workers come to the ``meeting``, an address that the first worker makes. ``measure`` tells them to time a step
    on 1, 2, 4, … of the devices.
    A packed bundle is made of ``parts``, which are solo and fused bundles; its placements are theirs. The parts of a
    "processes" bundle are solo, and each has a worker process of its own.
    ``threads`` is how many threads a worker on a CPU computes with, None where that is left to torch.
    ``limits`` are the seconds of a step and the watts that were measured by number of trials and power limit.
    """

    name: str
    devices: tuple[str, ...]
    placements: tuple[Placement, ...]
    mode: BundleMode = "solo"
    signature: str = ""
    size: int | None = None
    reason: str = ""
    rank: int = 0
    meeting: str = field(default="", repr=False)  # on a cluster it has the secret of the meeting
    measure: bool = False
    study: str = ""
    parts: tuple[Bundle, ...] = ()
    threads: int | None = None
    guess: int = 0
    limits: Mapping[int, Mapping[int, tuple[float, float]]] = field(default_factory=dict)


def limited_as(signature: str, devices: int) -> str:
    """What power limits of a signature are kept as, where one limit holds for so many devices of a trial.

    >>> limited_as("mlp", 1), limited_as("mlp", 4)
    ('mlp', 'mlp on 4')
    """
    return signature if devices == 1 or not signature else f"{signature} on {devices}"


@dataclass(frozen=True)
class Job:
    """The facts that every worker of a study knows. ``states`` may be given as a path or a URL.

    ``study`` is the name by which the study's bundles and events are known. Trials are numbered within a study, so an
    executor knows a trial by (study, trial).
    ``variants`` are the tasks beside ``task``, by name.
    ``deterministic`` says that nothing which changes a curve's digits is chosen by measured times.
    ``eta`` weighs energy against time, and ``power`` is what to do about power limits: "observe", "limit" or nothing.
    ``until`` is the metric at which a trial that trains alone ends before its budget.
    """

    task: AnyTask
    seed: int
    metric: str
    mode: Mode
    states: States
    study: str = ""
    deterministic: bool = False
    variants: Mapping[str, Task] = field(default_factory=dict)
    eta: float = 0.0
    power: str | None = None
    until: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", States.of(self.states))

    def reached(self, metrics: Metrics) -> bool:
        """Whether a trial has the metric that it trains until, and ends before its budget."""
        return reached(metrics, self.metric, self.mode, self.until)

    def shards(self, variant: str) -> int:
        """How many devices hold one trial of a variant together."""
        return shards(self.variants.get(variant, self.task))


@dataclass(frozen=True)
class Description:
    """The properties of a config's trial.

    ``metrics`` are the names it reports, None where only training tells them. ``bytes`` is the least device memory that
    it takes, and ``beside`` the memory that it should have beside other trials, where that is more. Trials of one
    ``signature`` can be fused; without a signature the trial trains solo, and ``reason`` says why. ``unlike`` names the
    part in which the signature differs from another that the worker has seen, and has a clause with both values.
    ``steps`` is how many a unit has, 0 where that is unknown. ``threads`` is what was found of a CPU's threads.
    """

    metrics: tuple[str, ...] | None = None
    bytes: int | None = None
    signature: str | None = None
    reason: str = ""
    batch_size: int = 1
    beside: int = 0
    unlike: tuple[str, str] = ("", "")
    steps: int = 0
    threads: Measured | None = None


@dataclass(frozen=True)
class StateSaved:
    """A state was written between two reports."""

    trial: int
    attempt: int
    state: StateRef
    study: str = ""


@dataclass(frozen=True)
class TrialFinished:
    """A trial left its bundle: it has reported its budget, or its function returned before that.

    ``usage`` is what it used after its last report, here and in the other ways to leave.
    """

    trial: int
    attempt: int
    study: str = ""
    usage: Usage = field(default_factory=Usage, compare=False)


@dataclass(frozen=True)
class TrialStopped:
    """A trial left its bundle because it was told to; ``state`` is set where it could be saved."""

    trial: int
    attempt: int
    state: StateRef | None
    study: str = ""
    usage: Usage = field(default_factory=Usage, compare=False)


@dataclass(frozen=True)
class TrialFailed:
    """A trial left its bundle by an error. ``died`` says that its worker died or ran out of memory: a retry may help.

    ``unwritten`` says that the place for states cannot be used. No trial is at fault then, and the study ends until
    that place is mended. ``lost`` names the file of a state that is gone or damaged: the trial goes on without it.
    ``alone`` says that the trial died in a process of its own, which no other trial can have ended.
    """

    trial: int
    attempt: int
    error: str
    died: bool = False
    unwritten: bool = False
    lost: str = ""
    study: str = ""
    alone: bool = False
    usage: Usage = field(default_factory=Usage, compare=False)


@dataclass(frozen=True)
class Gathering:
    """The first worker of a distributed bundle is ready: the executor now gives the bundle to the other workers."""

    bundle: Bundle


@dataclass(frozen=True)
class Parted:
    """The workers of a distributed bundle did not meet; an event about its trial follows."""

    devices: tuple[str, ...]
    error: str
    study: str = ""


Left = TrialFinished | TrialStopped | TrialFailed
WorkerEvent = Report | StateSaved | Left | Measured | Parted
