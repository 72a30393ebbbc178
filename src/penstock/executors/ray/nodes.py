"""The nodes of a Ray cluster and their devices, as the head knows them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

MARKET = "ray.io/market-type"  # the label that says whether a node is "spot" or "on-demand"
ACCELERATOR = "ray.io/accelerator-type"  # the label that names a node's accelerators, such as "H200"
PRICE = "penstock.io/price"  # the label by which a node's owner gives the price of a device an hour
INSTANCE = "penstock.io/instance"  # the label by which a node's owner gives its instance, as the catalogue names it


@dataclass(frozen=True)
class NodeFacts:
    """A node that Ray holds for alive."""

    id: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    leaving: bool  # whether the node is about to go

    @property
    def head(self) -> bool:
        return "node:__internal_head__" in self.resources


@dataclass(frozen=True)
class Offer:
    """The devices of a cluster: all its accelerators, or the cores of all its nodes where it has none."""

    resource: str  # "GPU" or "CPU"
    nodes: dict[str, int]  # how many devices each node has, by its id
    cores: dict[str, int]  # cores per device, by the node's id or, for nodes that could come, by their type's name
    room: int = 0  # how many devices could come with nodes that the autoscaler can make
    made: frozenset[str] = frozenset()  # nodes that the autoscaler made, and releases when they are empty
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # the labels of each node

    @property
    def devices(self) -> int:
        return sum(self.nodes.values())

    def on(self, where: Mapping[str, str]) -> int:
        """How many devices the nodes with these labels have."""
        return sum(count for node, count in self.nodes.items() if has(self.labels.get(node, {}), where))


def has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a node's labels include all the wanted ones.

    >>> has({"zone": "a", "market": "spot"}, {"market": "spot"}), has({"zone": "a"}, {"market": "spot"})
    (True, False)
    """
    return wanted.items() <= labels.items()


def nodes_now() -> list[NodeFacts]:
    """The nodes that Ray holds for alive."""
    import ray
    from ray._private.state import state

    going = state.get_draining_nodes()
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [
        NodeFacts(node["NodeID"], node["Resources"], node["Labels"], node["NodeID"] in going)
        for node in found
        if node["Alive"]
    ]


def offer(
    alive: Collection[NodeFacts],
    avoid: Collection[str] = (),
    *,
    where: Mapping[str, str] | None = None,
    resource: str | None = None,
) -> Offer:
    """The devices of nodes that are not about to go, are not to be avoided, and have the labels in ``where``."""
    if resource is None:
        resource = "GPU" if any(node.resources.get("GPU", 0) >= 1 for node in alive) else "CPU"
    able = [
        (node, count)
        for node in alive
        if not node.leaving and node.id not in avoid and has(node.labels, where or {})
        if (count := int(node.resources.get(resource, 0)))
    ]
    cores = {node.id: int(node.resources.get("CPU", 0)) // count for node, count in able}
    labels = {node.id: node.labels for node, _ in able}
    return Offer(resource, {node.id: count for node, count in able}, cores, labels=labels)


def living() -> dict[str, bool]:
    """The nodes that Ray holds for alive, and whether each is about to go."""
    return {node.id: node.leaving for node in nodes_now()}


def on_head() -> Any:
    """The head as the place of actors that are no workers: they would keep an autoscaler from releasing any other node.

    The affinity is not soft: with a soft one Ray puts an actor that needs no resources anywhere.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    head = next((node.id for node in nodes_now() if node.head), None)
    return "DEFAULT" if head is None else NodeAffinitySchedulingStrategy(head, soft=False)
