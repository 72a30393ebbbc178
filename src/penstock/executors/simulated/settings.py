"""The settings of a simulation: its devices, the times that they take, and when devices come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from penstock.bundle import Device
from penstock.errors import StudyError
from penstock.executors.simulated.nodes import GIB, NodeType, draw
from penstock.numeric import finite, shown, whole
from penstock.speed.curve import Curve
from penstock.tabulated import as_limits

MOST = 1_000_000  # more devices are a mistake, and would not fit in memory


class Rehearsed(Protocol):
    """A plan, as far as it is known here."""

    def simulation(self) -> dict[str, Any]:
        """The settings of a cloud on which it can be followed."""


@dataclass(frozen=True)
class Simulated:
    """A cluster on a virtual clock: ``study.run(on=Simulated(devices=64))``.

    Trials of a ``TabulatedTask`` are looked up. Trials of any other task really train, one after the other in this
    process, and only their time is simulated.

    >>> [device.name for device in Simulated(devices=3, per_node=2).cluster()]
    ['node 0/device 0', 'node 0/device 1', 'node 1/device 0']

    Args:
        devices: the number of devices, or the devices themselves. With ``instances`` there may be none at first.
        per_node: devices of a node, where ``devices`` is a number.
        type: the type of each device, where ``devices`` is a number.
        memory: the bytes of each device, where ``devices`` is a number.
        curve: the true effect of sharing and spreading on a unit's time; a table's own curve goes before it. Beyond its
            end more devices gain nothing, and more trials on a device take longer by its last ratio. Where it has only
            one entry, p trials take p times as long.
        curves: the curves of single signatures, by (signature, device type); they go before ``curve``. Where there are
            any, trials of several signatures on a device take turns.
        speeds: how many times as fast a device type is; 1 for a type that is not named.
        opening: seconds that have passed when the first trial can be placed.
        start: seconds from a trial's placement until its first unit begins.
        stop: seconds that a trial takes to leave after its last unit, in which its state is saved.
        save: seconds by which saving a state delays the report that it goes with.
        saving_every: a tabulated trial also saves after this many units. With 0 it saves only at its budget and when it
            leaves.
        provision: seconds before a device that arrives is there.
        losses: the times at which devices or whole nodes are lost: (seconds, name).
        arrivals: the times at which devices are asked for: (seconds, device); each comes ``provision`` seconds later.
        loss_rate: further losses of each device an hour, drawn from ``seed``.
        returns: whether a lost device comes back after ``provision`` seconds.
        seed: the seed of those draws.
        most: the most devices that there can be. A study that can use more devices than there are gets them
            ``provision`` seconds later, and devices that it cannot use go. With None the number does not change.
        instances: the types of nodes that can be requested, as ``NodeType``; each comes when it is asked for.
        varying: the deviation of a trial's seconds from the mean, and of a unit's from its trial's, as parts of the
            mean: each is drawn, by a gamma distribution.
        processes: whether unlike trials may share a device, in processes of their own, as with sharing="processes".
        packs: how many times as fast the bundles of a pack train as in turn; 1.0 where they take turns.
        watts: what a device draws while trials train there: one number, or one by device type; with None nothing counts
            joules. A table's own watts go before it.
        idle_watts: what a device draws while it is there and no trial trains.
        limits: the power limits of a device, each with the watts that it draws and how many times as long a unit takes;
            the greatest one limits nothing. A table's own limits go before them.
        kept: whether the next study on simulated devices of these types knows what was measured on them.
        fixed_shares: every trial has the time of its placement's share, whatever other trials are there.
        unit_seconds: the seconds of a unit of a task that really trains, alone on a device of speed 1; one number, or
            one by signature. With None they are the real seconds of a trial's first unit, so two runs differ.
    """

    devices: int | Sequence[Device]
    per_node: int = 8
    type: str = "simulated"
    memory: int = 16 * GIB
    curve: Curve = field(default_factory=Curve)
    curves: Mapping[tuple[str, str], Curve] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)
    opening: float = 0.0
    start: float = 0.0
    stop: float = 0.0
    save: float = 0.0
    saving_every: int = 0
    provision: float = 0.0
    losses: Sequence[tuple[float, str]] = ()
    arrivals: Sequence[tuple[float, Device]] = ()
    loss_rate: float = 0.0
    returns: bool = False
    seed: int = 0
    most: int | None = None
    instances: Sequence[NodeType] = ()
    varying: tuple[float, float] = (0.0, 0.0)
    processes: bool = False
    packs: float = 1.0
    watts: float | Mapping[str, float] | None = None
    idle_watts: float = 0.0
    limits: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    kept: bool = True
    fixed_shares: bool = False
    unit_seconds: float | Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for name in ("per_node", "memory"):
            self._set(name, _whole(name, getattr(self, name), 1))
        for name in ("saving_every", "seed"):
            self._set(name, _whole(name, getattr(self, name), 0 if name == "saving_every" else None))
        if isinstance(self.devices, Sequence) and not isinstance(self.devices, str):
            for device in self.devices:
                _check_device("devices", device)
        else:
            self._set("devices", count := _whole("devices", self.devices, 0 if self.instances else 1))
            if count > MOST:
                raise StudyError(f"devices of Simulated must be at most {MOST}, got {count}.")
        for name in ("opening", "start", "stop", "save", "provision", "loss_rate", "idle_watts"):
            self._set(name, _time(name, getattr(self, name)))
        self._set("packs", _positive("packs", self.packs))
        for name in ("returns", "processes", "kept", "fixed_shares"):
            if not isinstance(value := getattr(self, name), bool):
                raise StudyError(f"{name} of Simulated must be True or False, got {shown(value)}.")
        if not isinstance(self.type, str):
            raise StudyError(f"type of Simulated must be a text such as 'H200', got {shown(self.type)}.")
        if self.most is not None:
            self._set("most", _whole("most", self.most, 1))
        self._check_nodes()
        self._check_power()
        self._check_curves()
        self._check_changes()
        self._check_names()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_nodes(self) -> None:
        """Refuse types of nodes that are none or are there twice, and deviations that are none."""
        if not isinstance(self.instances, Sequence) or not all(isinstance(one, NodeType) for one in self.instances):
            raise StudyError(f"instances of Simulated must be a list of NodeType, got {shown(self.instances)}.")
        kinds = [one.kind for one in self.instances]
        if twice := sorted({" ".join(kind) for kind in kinds if kinds.count(kind) > 1}):
            raise StudyError(f"Expected each instance and market once in instances, got {', '.join(twice)} twice.")
        if self.most is not None and self.instances:
            raise StudyError("most= is for devices that come one by one: with instances= leave it out.")
        if not isinstance(self.varying, tuple) or len(self.varying) != 2:
            raise StudyError(f"varying of Simulated must be two numbers from 0 on, got {shown(self.varying)}.")
        self._set("varying", tuple(_time("varying", one) for one in self.varying))

    def _check_power(self) -> None:
        """Refuse watts and limits that are none."""
        self._set("limits", as_limits(self.limits, StudyError))
        if isinstance(self.watts, Mapping):
            self._set("watts", {kind: _time(f"the watts of {shown(kind)}", one) for kind, one in self.watts.items()})
        elif self.watts is not None:
            self._set("watts", _time("watts", self.watts))
        elif self.limits:
            self._set("watts", self.limits[max(self.limits)][0])

    def watts_of(self, type: str) -> float:
        """What a device of a type draws while trials train there."""
        if isinstance(self.watts, Mapping):
            return self.watts.get(type, 0.0)
        return self.watts or 0.0

    def _check_curves(self) -> None:
        """Refuse curves, speeds and seconds that are none, and make their numbers plain."""
        if not isinstance(self.curve, Curve):
            raise StudyError(f"curve of Simulated must be a penstock.Curve, got {shown(self.curve)}.")
        curves = self.curves if isinstance(self.curves, Mapping) else None
        if curves is None or not all(isinstance(one, Curve) for one in curves.values()):
            raise StudyError(
                f"curves of Simulated must be a dict of penstock.Curve by (signature, type), got {shown(self.curves)}."
            )
        if not isinstance(self.speeds, Mapping):
            raise StudyError(f"speeds of Simulated must be a dict such as {{'H200': 2.0}}, got {shown(self.speeds)}.")
        self._set("speeds", {kind: _positive(f"the speed of {shown(kind)}", v) for kind, v in self.speeds.items()})
        if isinstance(self.unit_seconds, Mapping):
            units = {kind: _positive(f"the unit_seconds of {shown(kind)}", v) for kind, v in self.unit_seconds.items()}
            self._set("unit_seconds", units)
        elif self.unit_seconds is not None:
            self._set("unit_seconds", _positive("unit_seconds", self.unit_seconds))

    def _check_changes(self) -> None:
        """Refuse losses and arrivals that are no pairs of a time and a device."""
        for name, what in (("losses", "a name"), ("arrivals", "a device")):
            pairs = getattr(self, name)
            if not isinstance(pairs, Sequence) or not all(
                isinstance(one, tuple | list) and len(one) == 2 for one in pairs
            ):
                raise StudyError(f"{name} of Simulated must be a list of (seconds, {what}), got {shown(pairs)}.")
            self._set(name, tuple((_time("the time of a loss or an arrival", when), one) for when, one in pairs))
        for _, lost in self.losses:
            if not isinstance(lost, str):
                raise StudyError(f"losses of Simulated must have the names of devices, got {shown(lost)}.")
        for _, device in self.arrivals:
            _check_device("arrivals", device)

    @classmethod
    def of(cls, plan: Rehearsed, **changes: Any) -> Simulated:
        """A cloud on which a plan can be rehearsed: its nodes, with their prices and delays, and its trials' times.

        ``changes`` are settings that are to differ, such as ``seed``: another seed has other delays and losses.
        """
        return cls(**{"devices": 0, **plan.simulation(), **changes})

    def cluster(self) -> list[Device]:
        """The devices that are there at first."""
        if not isinstance(self.devices, int):
            return list(self.devices)
        places = [divmod(i, self.per_node) for i in range(self.devices)]
        return [Device(f"node {n}/device {i}", self.type, self.memory, f"node {n}") for n, i in places]

    def curve_of(self, signature: str, device: Device | None) -> Curve:
        """The true curve of a signature's trials on a device."""
        return self.curve if device is None else self.curves.get((signature, device.type), self.curve)

    def spare(self, number: int) -> Device:
        """The ``number``-th device that comes on request."""
        return replace(self.cluster()[0], name=f"spare {number}", node=f"spare node {number // self.per_node}")

    def factor(self, trial: int, unit: int) -> float:
        """How many times as long as its mean a trial's unit takes."""
        trials, units = self.varying
        made = draw((1.0, trials), self.seed, "trial", trial) if trials else 1.0
        return made * draw((1.0, units), self.seed, "unit", trial, unit) if units else made

    def saves(self, unit: int, budget: int) -> bool:
        """Whether a trial writes a state with the report of a unit."""
        return unit >= budget or (self.saving_every > 0 and unit % self.saving_every == 0)

    def _check_names(self) -> None:
        """Refuse a device that is there twice, or lost when it is not there; losses come first in an instant."""
        cluster = [device.name for device in self.cluster()]
        if not cluster and not self.instances:
            raise StudyError("Expected at least one device, got devices=[]: give a number, or the devices.")
        there = set(cluster)
        if len(there) < len(cluster):
            twice = sorted({name for name in cluster if cluster.count(name) > 1})
            raise StudyError(f"Expected every device by a name of its own, got {', '.join(twice)} more than once.")
        known = there | {device.name for _, device in self.arrivals}
        nodes = {device.node for device in self.cluster()}
        made = tuple(f"{one.instance} " for one in self.instances)
        single = [(when, name) for when, name in self.losses if name not in nodes and not name.startswith(made)]
        changes = [(when, 0, name) for when, name in single]
        changes += [(when + self.provision, 1, device.name) for when, device in self.arrivals]
        for when, comes, name in sorted(changes):
            if name not in known:
                raise StudyError(f"Expected losses of devices that there are, got {name!r}: choose of {_some(known)}.")
            if comes and name in there:
                raise StudyError(f"Expected new names of arrivals, but {name!r} is there at {when:g} seconds already.")
            if not comes and name not in there:
                raise StudyError(f"Expected losses of devices that are there, but {name!r} is not at {when:g} seconds.")
            if comes:
                there.add(name)
            elif not self.returns:  # with returns=True the device comes back
                there.remove(name)


def _some(names: set[str]) -> str:
    first = sorted(names)[:4]
    return ", ".join(first) + (", …" if len(names) > len(first) else "")


def _check_device(name: str, value: object) -> None:
    if not isinstance(value, Device):
        raise StudyError(f"{name} of Simulated must have devices as penstock.bundle.Device, got {shown(value)}.")
    _whole(f"the memory of the device {shown(value.name)}", value.memory, 1)
    if not all(isinstance(text, str) for text in (value.name, value.type, value.node)):
        raise StudyError(f"A device of Simulated must have its name, type and node as text, got {shown(value)}.")


def _whole(name: str, value: object, least: int | None) -> int:
    made = whole(value)
    if made is None or (least is not None and made < least):
        bound = "" if least is None else f" from {least} on"
        raise StudyError(f"{name} of Simulated must be a whole number{bound}, got {shown(value)}.")
    return made


def _time(name: str, value: object) -> float:
    made = finite(value)
    if made is None or made < 0:
        raise StudyError(f"{name} of Simulated must be a finite number from 0 on, got {shown(value)}.")
    return made


def _positive(name: str, value: object) -> float:
    made = finite(value)
    if made is None or made <= 0:
        raise StudyError(f"{name} of Simulated must be a finite number above 0, got {shown(value)}.")
    return made
