"""Nodes of a simulated cloud: they come some time after they are asked for, are paid for, go by requests, and are lost.

A node that is asked for waits in the cloud's queue first, which costs nothing. Then it is paid for, and starts. Its
devices come once it has started. A standing request is kept: a node that is lost is asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, Protocol

from penstock.bundle import Device, Node, Request
from penstock.errors import StudyError
from penstock.executors.base import NodeAdded, NodeLost
from penstock.numeric import finite, shown, whole
from penstock.seeds import key

GIB = 2**30
Seconds = float | tuple[float, float]
"""Seconds that never vary, or their mean and standard deviation: then they are drawn from a gamma distribution."""


@dataclass(frozen=True)
class NodeType:
    """A type of node that a simulated cloud can make.

    ``price`` is the price of a node for an hour, on ``market``. A node waits ``queueing`` seconds unpaid and takes
    ``starting`` seconds to start. ``loss_rate`` is how often it is lost an hour.

    >>> NodeType("p3.8xlarge", devices=4, price=12.24, starting=(15.0, 3.0)).kind
    ('p3.8xlarge', 'on-demand')
    """

    instance: str
    devices: int = 1
    type: str = "simulated"
    memory: int = 16 * GIB
    price: float | None = None
    market: str = "on-demand"
    queueing: Seconds = 0.0
    starting: Seconds = 0.0
    loss_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("instance", "type", "market"):
            if not isinstance(given := getattr(self, name), str) or not given:
                raise StudyError(f"{name} of a NodeType must be a text, got {shown(given)}.")
        for name in ("devices", "memory"):
            if (count := whole(given := getattr(self, name))) is None or count < 1:
                raise StudyError(f"{name} of a NodeType must be a whole number from 1 on, got {shown(given)}.")
        for name in ("queueing", "starting", "loss_rate"):
            numbers = given if isinstance(given := getattr(self, name), tuple) else (given,)
            wrong = any((number := finite(one)) is None or number < 0 for one in numbers)
            if wrong or len(numbers) > 1 + (name != "loss_rate"):
                pair = "" if name == "loss_rate" else ", or the mean and the deviation of such"
                raise StudyError(f"{name} of a NodeType must be a number from 0 on{pair}, got {shown(given)}.")

    @property
    def kind(self) -> tuple[str, str]:
        """The instance and the market: what a request names."""
        return self.instance, self.market

    def named(self, node: str) -> list[Device]:
        """The devices of a node."""
        share = None if self.price is None else self.price / self.devices
        return [
            Device(f"{node}/device {i}", self.type, self.memory, node, share, self.market, instance=self.instance)
            for i in range(self.devices)
        ]


def draw(seconds: Seconds, *what: object) -> float:
    """Seconds of a distribution, by a key."""
    mean, deviation = seconds if isinstance(seconds, tuple) else (seconds, 0.0)
    if not mean or not deviation:
        return mean
    return Random(key(*what)).gammavariate((mean / deviation) ** 2, deviation**2 / mean)


class Surroundings(Protocol):
    """The methods of the devices and of the executor that nodes call."""

    def after(self, seconds: float, action: Callable[[Any], object], subject: Any) -> None:
        """Call ``action(subject)`` when ``seconds`` have passed on the clock."""

    def now(self) -> float:
        """The clock."""

    def tell(self, event: NodeAdded | NodeLost) -> None:
        """Say that a node has come or gone."""

    def add(self, devices: Sequence[Device]) -> None:
        """Add the devices of a node that has started."""

    def remove(self, devices: Sequence[Device]) -> None:
        """Take the devices of a node away; trials on them fail."""

    def idle(self, device: str) -> bool:
        """Whether no bundle is on a device or waits for it."""


@dataclass(eq=False)
class Machine:
    """A node from the moment it is asked for until it goes."""

    node: Node
    type: NodeType
    devices: list[Device]
    phase: Literal["queueing", "starting", "there", "gone"] = "queueing"


class Nodes:
    """The nodes of the types that the settings name, as the last request wants them."""

    def __init__(self, types: Sequence[NodeType], seed: int, around: Surroundings) -> None:
        self._types, self._seed, self._around = {one.kind: one for one in types}, seed, around
        self._machines: list[Machine] = []
        self._wanted: dict[tuple[str, str], int] = {}
        self._made = 0

    @property
    def instances(self) -> set[str]:
        """The instances that can be asked for."""
        return {instance for instance, _ in self._types}

    def paid(self) -> list[Node]:
        """The nodes that are paid for now, in the order of asking."""
        return [one.node for one in self._machines if one.phase in ("starting", "there")]

    def request(self, wanted: Sequence[Request]) -> None:
        """Ask for nodes that are missing; nodes beyond the requests go, as soon as they are idle when asked."""
        self._wanted = dict.fromkeys(self._types, 0)
        for one in wanted:
            kind = next((kind for kind in self._types if _names(one, kind)), None)
            if kind is None:
                raise StudyError(f"Expected a request for one of {', '.join(map(str, self._types))}, got {one}.")
            self._wanted[kind] += -(-one.count // self._types[kind].devices)
        self._fill()
        order = ("queueing", "starting", "there")
        for kind, most in self._wanted.items():
            ours = sorted(self._of(kind), key=lambda one: order.index(one.phase))
            beyond = len(ours) - most
            for machine in [one for one in ours if all(self._around.idle(device.name) for device in one.devices)]:
                if beyond > 0:
                    beyond -= 1
                    self._drop(machine)

    def lose(self, node: str) -> bool:
        """Lose a node with all of its devices; False where there is none of that name."""
        machine = next((one for one in self._machines if one.node.name == node), None)
        if machine is not None:
            self._drop(machine)
            self._fill()
        return machine is not None

    def _of(self, kind: tuple[str, str]) -> list[Machine]:
        return [one for one in self._machines if one.type.kind == kind]

    def _fill(self) -> None:
        for kind, most in self._wanted.items():
            for _ in range(most - len(self._of(kind))):
                self._ask(self._types[kind])

    def _ask(self, type: NodeType) -> None:
        name = f"{type.instance} {self._made}"
        self._made += 1
        machine = Machine(Node(name, type.instance, type.market, type.price), type, type.named(name))
        self._machines.append(machine)
        self._around.after(draw(type.queueing, self._seed, "queueing", name), self._pay, machine)

    def _pay(self, machine: Machine) -> None:
        if machine.phase == "gone":
            return
        type, name = machine.type, machine.node.name
        machine.phase = "starting"
        machine.node = Node(name, type.instance, type.market, type.price, self._around.now())
        self._around.tell(NodeAdded(machine.node))
        self._around.after(draw(type.starting, self._seed, "starting", name), self._start, machine)
        if type.loss_rate:
            seconds = Random(key(self._seed, "losing", name)).expovariate(type.loss_rate / 3600)
            self._around.after(seconds, self.lose, name)

    def _start(self, machine: Machine) -> None:
        if machine.phase == "starting":
            machine.phase = "there"
            self._around.add(machine.devices)

    def _drop(self, machine: Machine) -> None:
        self._machines.remove(machine)
        before, machine.phase = machine.phase, "gone"
        if before == "there":
            self._around.remove(machine.devices)
        if before != "queueing":
            self._around.tell(NodeLost(machine.node))


def _names(one: Request, kind: tuple[str, str]) -> bool:
    return one.instance in (None, kind[0]) and one.market in (None, kind[1])
