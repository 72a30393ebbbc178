"""The nodes that a cluster's autoscaler can make, read from its settings.

An autoscaler does not tell which nodes it can make. Its settings do; they lie beside it on the head. They cannot be
read where the autoscaler runs in a container of its own. A study then asks for no nodes besides the present ones: a
placement group that can never be placed would wait for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.executors.ray.cluster import require
from penstock.executors.ray.nodes import INSTANCE, MARKET, NodeFacts, has, on_head

GROUP = "ray.io/node-group"  # the label with a node's type, which version 2 of the autoscaler sets
MONITORS = ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py")
ANYWHERE: Mapping[str, str] = {}  # the labels that every node has


@dataclass(frozen=True)
class NodeType:
    """A type of node that an autoscaler can make, and the most nodes of that type."""

    name: str
    most: int
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def instance(self) -> str:
        """Its name in the catalogue: the type's own name, unless a label gives another."""
        return self.labels.get(INSTANCE, self.name)

    def devices(self, resource: str) -> int:
        """How many devices a node of this type has; cores beside accelerators are not for workers."""
        if resource == "CPU" and self.resources.get("GPU", 0) >= 1:
            return 0
        return int(self.resources.get(resource, 0))


@dataclass(frozen=True)
class Growth:
    """All nodes that an autoscaler can make."""

    types: tuple[NodeType, ...]
    most: int  # the most nodes in all, without the head
    labelled: bool  # whether the autoscaler heeds labels; otherwise it makes and drops nodes of a wrong type in turns

    def of(self, where: Mapping[str, str]) -> Growth:
        """The part whose nodes can be asked for by these labels."""
        types = tuple(one for one in self.types if has(one.labels, where))
        return Growth(types if self.labelled or len(types) == len(self.types) else (), self.most, self.labelled)

    def labels(self, instance: str, market: str | None) -> Mapping[str, str]:
        """The labels by which nodes of an instance are asked for: those of its type, if they are no other type's.

        >>> spot = NodeType("g5", 2, {"GPU": 1}, {"ray.io/market-type": "spot"})
        >>> Growth((spot, NodeType("p3", 2, {"GPU": 4})), 4, True).labels("g5", "spot")
        {'ray.io/market-type': 'spot'}
        """
        own = {INSTANCE: instance}
        for one in self.types:
            if one.instance == instance and one.labels.get(MARKET) in (None, market):
                return dict(one.labels) if self.of(one.labels).types == (one,) else own
        return own

    def instance(self, labels: Mapping[str, str]) -> str | None:
        """The instance of a node with these labels: that of the type that has most of them."""
        alike = [one for one in self.types if one.labels and has(labels, one.labels)]
        return max(alike, key=lambda one: len(one.labels)).instance if alike else None

    def made(self, node: NodeFacts) -> str | None:
        """The type of a present node: the one its label names, or else the matching type with the most labels."""
        if node.head:
            return None
        names = {one.name for one in self.types}
        if GROUP in node.labels:
            return node.labels[GROUP] if node.labels[GROUP] in names else None
        alike = [
            (len(one.labels), one.name)
            for one in self.types
            if all(node.resources.get(what, 0) == one.resources.get(what, 0) for what in ("CPU", "GPU"))
            and has(node.labels, one.labels)
        ]
        return max(alike)[1] if alike else None

    def room(self, resource: str, nodes: Collection[NodeFacts], where: Mapping[str, str] = ANYWHERE) -> int:
        """How many devices could come with new nodes of these labels, besides the devices of present nodes."""
        there = Counter(kind for node in nodes if (kind := self.made(node)) is not None)
        left, room = self.most - there.total(), 0
        for one in sorted(self.of(where).types, key=lambda one: -one.devices(resource)):
            count = max(0, min(one.most - there[one.name], left))
            left -= count
            room += count * one.devices(resource)
        return room


def reported() -> Growth | None:
    """The nodes that a provider's own autoscaler has told the cluster it can make; Ray's autoscalers tell nothing."""
    from ray._private.state import state

    config = state.get_cluster_config()
    if config is None or not config.node_group_configs:
        return None
    most = 2**31
    types = [
        NodeType(one.name, most if one.max_count < 0 else one.max_count, dict(one.resources))
        for one in config.node_group_configs
    ]
    return Growth(tuple(types), most, labelled=True)


def question() -> Any:
    """Ask the head for its autoscaler's settings; ``read`` takes the answer, which is None without an autoscaler."""
    return require().remote(_settings).options(num_cpus=0, max_retries=0, scheduling_strategy=on_head()).remote()


def _settings() -> tuple[dict[str, Any], bool] | None:
    """The settings that the autoscaler on this head was started with, and whether it is of version 2."""
    import psutil  # type: ignore[import-untyped]
    import ray
    import yaml  # type: ignore[import-untyped]

    ours = f"--gcs-address={ray.get_runtime_context().gcs_address}"  # another cluster may run on the same machine
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        files = [one.partition("=")[2] for one in command if one.startswith("--autoscaling-config=")]
        if ours in command and files and any(one.endswith(MONITORS) for one in command):
            with open(files[0]) as file:
                return yaml.safe_load(file), any(one.endswith(MONITORS[1]) for one in command)
    return None


def read(config: Mapping[str, Any], second: bool) -> Growth:
    """The nodes that an autoscaler can make by its settings; the ``second`` version heeds labels."""
    most = int(config.get("max_workers") or 0)
    types = [
        NodeType(name, int(one.get("max_workers", most)), one.get("resources") or {}, one.get("labels") or {})
        for name, one in (config.get("available_node_types") or {}).items()
        if name != config.get("head_node_type")
    ]
    return Growth(tuple(types), most, second)
