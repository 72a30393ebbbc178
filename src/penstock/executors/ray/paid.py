"""Since when each node of a study is paid for."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.bundle import Device, Node
from penstock.executors.ray.nodes import Offer
from penstock.executors.ray.slot import Slot


class Paid:
    """The nodes that have a worker of the study, and the clock from which on each is paid for."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def came(self, slot: Slot, began: float) -> None:
        """A worker is ready. A node that came for it is paid for since it was asked for."""
        asked = slot.without is not None and slot.node not in slot.without
        self._since.setdefault(slot.node, (slot.began if asked else slot.came) - began)

    def nodes(self, there: Mapping[str, Device], found: Offer) -> list[Node]:
        """The nodes, each from one of its devices. Its devices' price is the node's, as far as the label gives one."""
        self._since = {node: since for node, since in self._since.items() if node in there}
        prices = {node: None if (one := device.price) is None else one * found.nodes.get(node, 1)
                  for node, device in there.items()}  # fmt: skip
        return [
            Node(device.node, device.instance, device.market, prices[node], self._since.get(node, 0.0))
            for node, device in there.items()
        ]
