"""The cost of a study so far, folded from its log: each node for as long as it was paid for, over all drivers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.log.events import Devices, Ended, Event, Opened, Placed, Planned, Reported


@dataclass
class Bill:
    """Takes the events of a log in their order; ``total`` says what they cost up to a time of the study's clock.

    A node costs its price for as long as it was there, and at least for the minimum that the plan says. A node without
    a price has the one that the plan gives for its instance and market. The head node, and the data that each new node
    reads, cost what the plan says. A node that its driver left behind was paid for until the last line that it wrote.
    Where the plan's prices are those of a "function", devices are paid for while they train, and nodes are not.

    >>> bill = Bill()
    >>> bill.apply(Devices((), 0.0, ({"name": "node 0", "price": 36.0, "since": 0.0},)))
    >>> bill.total(100.0), bill.priced
    (1.0, True)
    """

    there: dict[str, dict[str, Any]] = field(default_factory=dict)  # the nodes that are paid for now
    unpriced: set[str] = field(default_factory=set)  # instances that no one gave a price for
    _spent: float = 0.0  # on nodes that have gone
    _clock: float = 0.0
    _prices: Mapping[str, float] = field(default_factory=dict)
    _since: float = 0.0  # from when on the head costs its present price
    _seen: bool = False  # whether a node was there
    _devices: dict[str, float] = field(default_factory=dict)  # the price of each device an hour
    _on: dict[int, str] = field(default_factory=dict)  # by trial: its first device

    @property
    def priced(self) -> bool:
        """Whether the log tells a cost: it has nodes, and a price for each of them."""
        return self._seen and not self.unpriced

    def apply(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, Opened):  # the last driver's nodes went with it
            self._end()
            return
        self._clock = max(self._clock, getattr(event, "clock", 0.0))
        if isinstance(event, Planned):
            self._spent += self._head(self._clock)
            self._since, self._prices = self._clock, event.prices
        elif isinstance(event, Placed):
            self._on[event.trial] = event.devices[0]
        elif isinstance(event, Reported) and "function" in self._prices:
            self._spent += event.usage.device_seconds * self._devices.get(self._on[event.trial], 0.0) / 3600
        elif isinstance(event, Devices):
            self._devices |= {one["name"]: one.get("price") or 0.0 for one in event.devices}
            there = {node["name"]: node for node in event.nodes}
            self._leave([name for name in self.there if name not in there])
            for name, node in there.items():
                if self.there.setdefault(name, node) is node:
                    self._seen, self._spent = True, self._spent + self._prices.get("data", 0.0)
                    if self._price(node) is None:
                        self.unpriced.add(str(node.get("instance") or name))
        elif isinstance(event, Ended):
            self._end()

    def total(self, clock: float) -> float:
        """The cost up to a time that no event is later than; a node's minimum is owed from its first second on."""
        return self._spent + self._head(clock) + sum(self._cost(node, clock) for node in self.there.values())

    def _end(self) -> None:
        self._leave(list(self.there))
        self._spent += self._head(self._clock)
        self._since = self._clock

    def _leave(self, names: list[str]) -> None:
        for name in names:
            self._spent += self._cost(self.there.pop(name), self._clock)

    def _cost(self, node: Mapping[str, Any], clock: float) -> float:
        if "function" in self._prices:
            return 0.0
        seconds = max(self._prices.get("minimum", 0.0), clock - node["since"])
        return (self._price(node) or 0.0) * float(seconds) / 3600

    def _price(self, node: Mapping[str, Any]) -> float | None:
        price = node.get("price")
        return self._prices.get(f"{node.get('instance')} {node.get('market')}") if price is None else float(price)

    def _head(self, clock: float) -> float:
        return self._prices.get("head", 0.0) * (clock - self._since) / 3600
