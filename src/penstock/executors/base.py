"""The contract of an executor, where workers live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from penstock.bundle import (
    Bundle,
    BundleMode,
    Description,
    Device,
    Job,
    Limited,
    Metered,
    Node,
    Request,
    WorkerEvent,
)
from penstock.errors import StudyError
from penstock.executors.metering import Metering
from penstock.trial import Config


@dataclass(frozen=True)
class DeviceAdded:
    """A device has come."""

    device: Device


@dataclass(frozen=True)
class DeviceLost:
    """A device has gone; the trials that ran on it are told as failed."""

    device: Device


@dataclass(frozen=True)
class NodeAdded:
    """A node is paid for from now on; its devices follow."""

    node: Node


@dataclass(frozen=True)
class NodeLost:
    """A node is paid for no longer; its devices have gone."""

    node: Node


ExecutorEvent = WorkerEvent | DeviceAdded | DeviceLost | NodeAdded | NodeLost | Metered | Limited


class Executor(ABC):
    """Trains bundles somewhere and tells what happens.

    - ``place`` declares what a bundle should hold. Called again with the same name, it changes the bundle at the next
      boundary: a larger budget for the same attempt extends its grant, other placements replace the ones that are
      gone, and no placements at all stop the bundle. Every trial that is made to leave is told as ``TrialStopped``,
      with a state where one can be saved.
    - A worker never trains past a grant. It writes a state when a trial reports its budget and when a trial leaves. In
      between it writes states as often as costs under 1% of training.
    - ``wait`` gives events in the order in which they happened on each device: reports in the order of their units,
      then one of finished, stopped or failed per placement, and no event of that attempt after it. An empty list means
      that the timeout has passed or ``wake`` was called.
    - A worker that dies loses no report that was sent; each of its trials is told as ``TrialFailed(died=True)``.
    - An executor is made for one study. Others may ``join`` it where it can serve several. A bundle and the events of
      its trials name their study. A device serves one study at a time: a bundle that is placed where trials of another
      study train is refused.
    - Workers exit when their driver does.
    - ``flexible`` says that requests change which devices there are, and ``scales`` that nodes come and go with them.
      ``provisioning`` is the seconds that a device takes to come once it is asked for: 0 where all devices are there,
      or where none was seen to come yet.
    - ``modes`` are the modes that a bundle can have here. ``processes`` is how many trials may share a device in worker
      processes of their own, 0 where nothing but memory limits them. ``virtual`` says that the clock is not the
      machine's: ``wait`` then moves the clock on to the next event, or by ``timeout``.
    - Where a device is ``metered``, usage has joules, ``Metered`` is told of the device now and then, and ``settle``
      gives what was not told at the end. A device that is not is in ``unmetered``, with the reason.
    """

    modes: frozenset[BundleMode] = frozenset({"solo", "fused", "packed"})
    processes: int = 0
    virtual: bool = False
    flexible: bool = False
    scales: bool = False
    provisioning: float = 0.0

    _meters: Metering | None = None  # what counts the joules of its devices

    @property
    def metered(self) -> bool:
        """Whether a device's joules are told."""
        return self._meters is not None and self._meters.active

    @property
    def unmetered(self) -> Mapping[str, str]:
        """Why devices have no meter, by their names."""
        return {"its devices": "nothing counts their joules"} if self._meters is None else self._meters.unmetered

    def settle(self) -> list[Metered]:
        """The joules of devices that were not told yet; no trial trains any more."""
        return [] if self._meters is None else self._meters.settle()

    @property
    def concurrent(self) -> bool:
        """Whether the bundles of a pack can train at the same time: on accelerators."""
        return any(device.type != "cpu" for device in self.devices())

    def join(self, job: Job) -> None:
        """Serve another study too, before its first bundle is placed."""
        raise StudyError(f"{type(self).__name__} serves one study: use worker processes or a simulated cluster.")

    @abstractmethod
    def devices(self) -> Sequence[Device]:
        """The devices there are now, for all studies together."""

    def nodes(self) -> Sequence[Node]:
        """The nodes that are paid for now; none where devices cost nothing, or where their nodes are not known."""
        return ()

    def instances(self) -> Collection[str]:
        """The instances that a request can name."""
        return ()

    @abstractmethod
    def place(self, bundle: Bundle) -> None:
        """Declare what a bundle should hold."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> list[ExecutorEvent]:
        """The next events, at least one unless ``timeout`` seconds pass or ``wake`` is called."""

    @abstractmethod
    def wake(self) -> None:
        """Make ``wait`` return at the next boundary; may be called from a signal handler."""

    @abstractmethod
    def describe(
        self,
        configs: Sequence[Config],
        *,
        train: bool,
        trials: Sequence[int] = (),
        study: str = "",
        variants: Sequence[str] = (),
    ) -> list[Description]:
        """What a study's trials of these configs are like, found out in a worker.

        ``trials`` are their numbers, where they are known: a worker may then keep what it makes of a trial until the
        trial is placed there. ``variants`` name their tasks, where the study has several.

        With ``train``, each by one dry batch: a task that cannot train raises ``TaskError``. Without, nothing is
        raised: a config whose trial cannot be made has no signature, and says why when it trains.
        """

    def request(self, wanted: Sequence[Request]) -> None:  # noqa: B027 (most executors cannot change)
        """Say which devices could be used from now on: so many of each kind, in place of the last requests.

        An executor that can grows or shrinks to that number, and tells by events which devices come and go. A request
        that names a type, a market or an instance is met by such devices alone; one that names none, by any device that
        is left. Devices of an instance come and go by whole nodes. Devices beyond all requests may go once their node
        is idle; no requests at all mean that no device is of use. No trial is stopped for this: to free devices that
        train, move their trials first. On other executors nothing happens.
        """

    @abstractmethod
    def now(self) -> float:
        """Seconds since the executor was made: the only clock above it."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers at once."""


def refuse_twins(job: Job, there: Collection[str]) -> None:
    """Refuse a study that has the name of another."""
    if job.study in there:
        raise StudyError(f"Expected a study of another name than {job.study!r}, which this executor serves already.")


def refuse_collision(bundle: Bundle, there: Collection[str]) -> None:
    """Refuse a bundle on devices where trials of these studies train, if it is another study's."""
    for study in there:
        if study != bundle.study:
            raise StudyError(
                f"Study {bundle.study!r} places {bundle.name} on {', '.join(bundle.devices)}, where trials of study "
                f"{study!r} train: open each study's engine with devices of its own."
            )
