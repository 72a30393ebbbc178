"""The contract of a scheduler: a pure, deterministic function from what is known to who gets what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from penstock.bundle import BundleMode, Device
from penstock.speed.model import Speed
from penstock.trial import Later


@dataclass(frozen=True)
class Demand:
    """A trial that wants devices: ``units`` more units, asked for as part of ``group``.

    - ``asked`` is one more with each asking. Of a group's trials, those of a higher ``priority`` go first. Groups that
      run at once share the devices by ``weight``. ``later`` are the rungs that follow once all of the group are done.
    - ``bytes`` is the device memory that the trial takes, 0 where that is not known.
    - Trials of one ``signature`` can be fused; "" is like no other. Of those, trials at the same ``position`` in the
      data (epoch, step) share a batch. ``load`` is the work of one step, relative to others': its batch size.
    - ``open`` is a group of which others follow one by one. ``type`` is that of the devices which the trial has left to
      be moved. ``width`` is the number of devices of a trial that has no other choice, because none holds it alone.
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


@dataclass(frozen=True)
class Assignment:
    """A trial gets 1/p of one device, or as many whole devices as ``share`` says, and trains there in a ``mode``.

    A policy says devices and share; the mode follows from the company that a trial has there (``grouping.modes``).
    ``measure`` asks its workers to find out what 1, 2, 4, … of the devices give it. Devices that are ``lent`` were idle
    when it was given them, and go back to trials that wait.
    """

    trial: int
    devices: tuple[str, ...]
    share: float = 1.0
    mode: BundleMode = "solo"
    measure: bool = False
    lent: int = 0


@dataclass(frozen=True)
class Holding:
    """A trial that runs: what it still wants, what it has, and the part of its unit that it has ``done`` by now.

    What it wants counts that unit, so that it is never quite done, and at least 1; half of it is where nothing is
    known. ``pace`` is the share that it trains at: what others on its device leave unused is its own, so that it may be
    above the share of its assignment; 0 where nothing is said, and the share holds.
    """

    demand: Demand
    assignment: Assignment
    done: float = 0.5
    pace: float = 0.0

    @property
    def at(self) -> float:
        """The share that it trains at."""
        return self.pace or self.assignment.share


class Room(NamedTuple):
    """What is left of a device."""

    share: float
    bytes: int


Goal = Literal["end", "target"]


@dataclass(frozen=True)
class View:
    """The devices there are, who runs on them, by trial, and what is left of those that are not full.

    ``kinds`` has the signature of the trials on each device that is not empty: only trials of that signature may join
    them, unless ``unlike`` trials can share a device. ``apart`` are sets of devices whose workers did not meet: a trial
    is given all of such a set only where there is no other choice. ``goal`` is what a study is run for: that all of it
    ends soon, or that a target is reached soon.
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

``demands`` are those of trials that wait, in the order of asking. An assignment of one of them starts it; of a running
trial, it moves it: it stops at its next boundary and goes on with what it is given then. Who is not named waits on, or
runs on as it does. What a moved trial gives up is free for others. So no device is given away twice: with everything
carried out, the shares on a device add up to 1 at most, and the bytes to its memory. A device with one whole share is
nobody else's. Trials that share a device are of one signature, and not of none, unless the view says that unlike ones
can.
"""

FULL = 1e-9
"""What is left of a device that has nothing left: shares such as 1/3 do not add up exactly."""


def room(devices: Mapping[str, Device], running: Collection[Holding]) -> dict[str, Room]:
    """What is left of each device that is not full.

    >>> one = {"gpu 0": Device("gpu 0", "h200", memory=8)}
    >>> room(one, [Holding(Demand(0, "g", 1, bytes=2), Assignment(0, ("gpu 0",), 0.5))])
    {'gpu 0': Room(share=0.5, bytes=6)}
    """
    share = dict.fromkeys(devices, 1.0)
    bytes = {name: device.memory for name, device in devices.items()}
    for one in running:
        for name in one.assignment.devices:
            if name in share:  # it may have been lost since
                share[name] -= min(1.0, one.assignment.share)
                bytes[name] -= one.demand.bytes
    return {name: Room(left, bytes[name]) for name, left in share.items() if left > FULL}


def kinds(running: Collection[Holding]) -> dict[str, str]:
    """The signature of the trials that share each device, "" where they are unlike.

    >>> kinds([Holding(Demand(0, "g", 1, signature="a"), Assignment(0, ("gpu 0",), 0.5))])
    {'gpu 0': 'a'}
    """
    found: dict[str, str] = {}
    for one in running:
        for name in one.assignment.devices:
            found[name] = one.demand.signature if found.get(name, one.demand.signature) == one.demand.signature else ""
    return found
