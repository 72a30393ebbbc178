"""The contract of a scheduler: a pure, deterministic function from the view of a cluster to assignments of devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from penstock.bundle import Device
from penstock.speed.model import Speed
from penstock.trial import Later


@dataclass(frozen=True)
class Demand:
    """A trial that wants devices: ``units`` more units, asked for as part of ``group``.

    - ``asked`` numbers the demands in the order of asking. Of a group's trials, those of a higher ``priority`` go
      first. Groups that run at once share the devices by ``weight``. ``later`` are the rungs that follow once all
      trials of the group are done.
    - ``bytes`` is the device memory that the trial takes, 0 where that is not known.
    - Trials of one ``signature`` can be fused; a trial with "" is like no other. Fused trials at the same ``position``
      in the data (epoch, step) share a batch. ``load`` is the work of one step, relative to other trials: the batch
      size.
    - ``open`` says that further trials join the group one by one. ``type`` is the type of the devices that the trial
      has left to be moved. ``width`` is set where no single device holds the trial: the number of devices it must have.
    - ``features`` is where its config is in the space, for packs.
    """

    trial: int
    group: str
    units: int
    asked: int = 0
    priority: float = 0.0
    weight: float = 1.0
    bytes: int = 0
    open: bool = False
    type: str = ""
    signature: str = ""
    position: tuple[int, int] = (0, 0)
    load: int = 1
    later: tuple[Later, ...] = ()
    width: int = 0
    features: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """A trial gets 1/p of one device, or as many whole devices as ``share`` says.

    The mode follows from this. A trial on one whole device trains solo, a trial on several devices distributed. Trials
    that share a device are fused where they have one signature; where not, they train in processes of their own, or in
    a pack. A ``packed`` trial joins the trials on its device, which divide the device anew.
    ``measure`` asks the trial's workers to time its steps on 1, 2, 4, … of the devices. ``lent`` is how many of the
    devices were idle when the trial got them; they go back to trials that wait.
    """

    trial: int
    devices: tuple[str, ...]
    share: float = 1.0
    measure: bool = False
    lent: int = 0
    packed: bool = False


@dataclass(frozen=True)
class Holding:
    """A trial that runs: the units it still wants, its assignment, and the part of its present unit that is ``done``.

    The demand's units count the present unit, so they are at least 1. ``done`` is a half where nothing is known.
    ``pace`` is the share that the trial really trains at. It is above the assigned share where other trials leave a
    part of the device unused, and 0 where the assigned share holds.
    """

    demand: Demand
    assignment: Assignment
    done: float = 0.5
    pace: float = 0.0

    @property
    def at(self) -> float:
        """The share that the trial really trains at."""
        return self.pace or self.assignment.share


class Room(NamedTuple):
    """The part of a device that is free: its share and its bytes."""

    share: float
    bytes: int


Goal = Literal["end", "target"]


@dataclass(frozen=True)
class View:
    """The devices, the running trials by number, and the room on each device that is not full.

    ``kinds`` has the signature of the trials on each device that is not empty: only trials of that signature may join
    them, unless ``unlike`` trials can share a device. ``apart`` are sets of devices whose workers did not meet: a trial
    gets all devices of such a set only where there is no other choice. ``goal`` is the study's aim: to end soon, or to
    reach a target soon.
    """

    devices: Mapping[str, Device]
    running: Mapping[int, Holding]
    room: Mapping[str, Room]
    kinds: Mapping[str, str] = field(default_factory=dict)
    unlike: bool = False
    apart: Collection[frozenset[str]] = ()
    goal: Goal = "end"


Scheduler = Callable[[View, Collection[Demand], Speed], list[Assignment]]
"""``schedule(view, demands, speed) -> assignments``.

``demands`` are the demands of trials that wait, in the order of asking. An assignment of a waiting trial starts it. An
assignment of a running trial moves it: the trial stops at its next boundary and goes on with its new devices. A trial
without an assignment waits on, or runs on as it does. Devices that a moved trial gives up are free for other trials.
Where no device has room there is nothing to assign, and the engine does not ask.
No device is given away twice: once all assignments are carried out, the shares on a device add up to at most 1, and the
bytes to at most its memory. A trial with a whole device has it alone. Trials that share a device have one signature,
which is not "", unless the view says that ``unlike`` trials can share.
"""

FULL = 1e-9
"""A device with less than this share free counts as full: shares such as 1/3 do not add up exactly."""


def room(devices: Mapping[str, Device], running: Collection[Holding]) -> dict[str, Room]:
    """The room on each device that is not full.

    >>> one = {"gpu 0": Device("gpu 0", "h200", memory=8)}
    >>> room(one, [Holding(Demand(0, "g", 1, bytes=2), Assignment(0, ("gpu 0",), 0.5))])
    {'gpu 0': Room(share=0.5, bytes=6)}
    """
    share = dict.fromkeys(devices, 1.0)
    bytes = {name: device.memory for name, device in devices.items()}
    for one in running:
        for name in one.assignment.devices:
            if name in share:  # the device may have been lost since
                share[name] -= min(1.0, one.assignment.share)
                bytes[name] -= one.demand.bytes
    return {name: Room(left, bytes[name]) for name, left in share.items() if left > FULL}


def kinds(running: Collection[Holding]) -> dict[str, str]:
    """The signature of the trials on each device that is not empty, "" where they are unlike.

    >>> kinds([Holding(Demand(0, "g", 1, signature="a"), Assignment(0, ("gpu 0",), 0.5))])
    {'gpu 0': 'a'}
    """
    found: dict[str, str] = {}
    for one in running:
        for name in one.assignment.devices:
            found[name] = one.demand.signature if found.get(name, one.demand.signature) == one.demand.signature else ""
    return found
