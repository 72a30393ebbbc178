"""How a study's part of a Ray cluster grows and shrinks with what it asks for.

Placement groups do it alone: one that waits makes the autoscaler start a node, one that is there holds its node, and a
node that has none is released. ``ray.autoscaler.sdk.request_resources`` is left out: it is one wish for the whole
cluster, which two studies would take from each other, and which holds nodes after the program that wished has died.

An autoscaler does not say what it could make. Its settings do, which lie beside it on the head: without them, as where
it runs in a container of its own, nothing beyond what is there is asked for, as a group that can never be placed would
wait for ever.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

from penstock.errors import StudyError
from penstock.executors.ray.cluster import MARKET, NodeFacts, Offer, nodes_now, offer, on_head, require

if TYPE_CHECKING:
    from penstock.executors.ray.slot import Slot

MARKETS = ("spot", "on-demand")
ANSWER = 30.0  # seconds that the head has to say what the autoscaler could make
GROUP = "ray.io/node-group"  # the label with a node's type, which the second autoscaler sets
MONITORS = ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py")


@dataclass(frozen=True)
class NodeType:
    """A kind of node that an autoscaler can make, and how many of them."""

    name: str
    most: int
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def devices(self, resource: str) -> int:
        """What a node of this type adds; cores beside accelerators are not for workers."""
        if resource == "CPU" and self.resources.get("GPU", 0) >= 1:
            return 0
        return int(self.resources.get(resource, 0))


@dataclass(frozen=True)
class Growth:
    """What an autoscaler can make."""

    types: tuple[NodeType, ...]
    most: int  # nodes in all, the head aside
    labelled: bool  # whether it heeds labels; one that does not makes and drops nodes of the wrong kind in turns

    def of(self, market: str | None) -> Growth:
        """The part that can be asked for on one market."""
        if market is None:
            return self
        types = tuple(one for one in self.types if one.labels.get(MARKET) == market)
        return Growth(types if self.labelled or len(types) == len(self.types) else (), self.most, self.labelled)

    def made(self, node: NodeFacts) -> str | None:
        """The type of a node that is there: by its label, or else the most special one that it could be of."""
        if node.head:
            return None
        names = {one.name for one in self.types}
        if GROUP in node.labels:
            return node.labels[GROUP] if node.labels[GROUP] in names else None
        alike = [
            (len(one.labels), one.name)
            for one in self.types
            if all(node.resources.get(what, 0) == one.resources.get(what, 0) for what in ("CPU", "GPU"))
            and one.labels.items() <= node.labels.items()
        ]
        return max(alike)[1] if alike else None

    def room(self, resource: str, nodes: Collection[NodeFacts], market: str | None = None) -> int:
        """How many devices could come beside those of the nodes that are there."""
        there = Counter(kind for node in nodes if (kind := self.made(node)) is not None)
        left, room = self.most - there.total(), 0
        for one in sorted(self.of(market).types, key=lambda one: -one.devices(resource)):
            count = max(0, min(one.most - there[one.name], left))
            left -= count
            room += count * one.devices(resource)
        return room


class Scaling:
    """What a study asks for, up to ``workers``; without a request, what there is, and ``least`` devices.

    Idle workers beyond the request are kept for ``idle`` seconds, so that a short lull costs no node.
    """

    def __init__(self, workers: int | None, market: str | None, idle: float, least: int = 1) -> None:
        if market is not None and market not in MARKETS:
            raise StudyError(f'Expected market="spot", "on-demand" or None for any, got {market!r}.')
        self.requested: int | None = None
        self._workers, self._market, self._idle, self._least = workers, market, idle, least
        self._resource: str | None = None
        self._growth: Growth | None = None
        self._asked: Any = None  # the head, what the autoscaler could make
        self._waits: list[float] = []

    @property
    def provisioning(self) -> float | None:
        """Seconds from asking for a worker that had no node until it was ready: the median of those seen."""
        return median(self._waits) if self._waits else None

    @property
    def grows(self) -> bool:
        """Whether there is an autoscaler, as far as that is known."""
        return self._growth is not None

    def begin(self) -> Offer:
        """What a study begins with; a StudyError where that is too little and too little can come."""
        needed = self._workers or self._least
        found = self.find()
        if found.devices < needed:
            growth = self._ask(ANSWER)
            if growth is not None and any(one.devices("GPU") for one in growth.of(self._market).types or growth.types):
                self._resource = "GPU"
            found = self.find()
            if found.devices + found.room < needed:
                raise StudyError(_too_few(needed, found, self._market, growth))
        self._resource = found.resource  # from now on: its devices do not become others under a study
        return found

    def find(self, avoid: Collection[str] = ()) -> Offer:
        """The devices there are and, where that is known and wanted, how many could come."""
        nodes = nodes_now()
        found = offer(nodes, avoid, market=self._market, resource=self._resource)
        if self.requested is not None or self.target(found) > found.devices:
            self._ask()
        growth = self._growth
        if growth is None:
            return found
        coming = {
            one.name: int(one.resources.get("CPU", 0)) // devices
            for one in growth.of(self._market).types
            if (devices := one.devices(found.resource))
        }
        return Offer(
            found.resource,
            found.nodes,
            {**found.cores, **coming},
            growth.room(found.resource, nodes, self._market),
            frozenset(node.id for node in nodes if growth.made(node) is not None),
        )

    def target(self, found: Offer) -> int:
        """How many workers the study is to hold, whether they can be had or not."""
        asked = (self._workers or max(self._least, found.devices)) if self.requested is None else self.requested
        return asked if self._workers is None else min(asked, self._workers)

    def at_least_one(self) -> None:
        """Something has to be done that needs a worker, whatever was asked for."""
        if self.requested == 0:
            self.requested = 1

    def surplus(self, slots: Sequence[Slot], found: Offer) -> list[Slot]:
        """The workers to give up now for the request alone: those that never began, and idle ones; none that trains."""
        now, beyond = time.monotonic(), len(slots) - self.target(found)
        for slot in slots:
            slot.spare = inf if slot.running or beyond <= 0 else min(slot.spare, now)
        first = order(slots, found.made)[: max(0, beyond)]
        return [slot for slot in first if slot.phase == "starting" or now - slot.spare >= self._idle]

    def greeted(self, slot: Slot, node: str) -> None:
        """A worker has come: measure how long that took, if its node had to come first."""
        if slot.without is not None and node not in slot.without:
            self._waits.append(time.monotonic() - slot.began)

    def _ask(self, timeout: float = 0.0) -> Growth | None:
        """What the autoscaler can make, asked once; None while that is not known."""
        if self._asked is None:
            self._growth = _reported()
            self._asked = () if self._growth is not None else _question()
        if self._asked:
            ray = require()
            with suppress(ray.exceptions.RayError):
                if ray.wait([self._asked], timeout=timeout)[0]:
                    asked, self._asked = self._asked, ()
                    said = ray.get(asked, timeout=ANSWER)
                    self._growth = None if said is None else _read(*said)
        return self._growth


def order(slots: Sequence[Slot], made: Collection[str]) -> list[Slot]:
    """Workers in the order in which to give them up, so that whole nodes that the autoscaler made come free.

    Those that never began come first, then idle ones, on nodes where none trains and few are, then those that train.
    """
    workers = Counter(slot.node for slot in slots)
    busy = Counter(slot.node for slot in slots if slot.running)

    def cost(slot: Slot) -> tuple[Any, ...]:
        if slot.phase == "starting":
            return (0, -slot.began)
        node = (slot.node not in made, busy[slot.node], workers[slot.node], slot.node)
        return (1 + bool(slot.running), *node, -slot.began)

    return sorted(slots, key=cost)


def _reported() -> Growth | None:
    """What an autoscaler of a provider's own has told the cluster, as Ray's do not."""
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


def _question() -> Any:
    """Ask the head for its autoscaler's settings."""
    return require().remote(_settings).options(num_cpus=0, max_retries=0, scheduling_strategy=on_head()).remote()


def _settings() -> tuple[dict[str, Any], bool] | None:
    """On the head: what its autoscaler was started with, and whether that is the second one."""
    import psutil  # type: ignore[import-untyped]
    import ray
    import yaml  # type: ignore[import-untyped]

    ours = f"--gcs-address={ray.get_runtime_context().gcs_address}"  # others may run on the same machine
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        files = [one.partition("=")[2] for one in command if one.startswith("--autoscaling-config=")]
        if ours in command and files and any(one.endswith(MONITORS) for one in command):
            with open(files[0]) as file:
                return yaml.safe_load(file), any(one.endswith(MONITORS[1]) for one in command)
    return None


def _read(config: Mapping[str, Any], second: bool) -> Growth:
    most = int(config.get("max_workers") or 0)
    types = [
        NodeType(name, int(one.get("max_workers", most)), one.get("resources") or {}, one.get("labels") or {})
        for name, one in (config.get("available_node_types") or {}).items()
        if name != config.get("head_node_type")
    ]
    return Growth(tuple(types), most, second)


def _too_few(needed: int, found: Offer, market: str | None, growth: Growth | None) -> str:
    kind = "GPUs" if found.resource == "GPU" else "CPUs"
    has = f"whose {market or ''} nodes offer {found.devices} {kind} in all".replace("  ", " ")
    if growth is None:
        todo = "start nodes with `ray start --num-gpus=N` or `--num-cpus=N`"
        if market is not None:
            todo = f"start nodes with `ray start --labels {MARKET}={market}`"
    else:
        has += f" and whose autoscaler can add {found.room}"
        todo = "raise max_workers in the autoscaler's settings"
        if market is not None and not growth.labelled:
            todo = "use the autoscaler's second version, as the first does not heed labels"
    todo += ", or ask for fewer workers or shards"
    return f"Expected a Ray cluster with {needed} devices or more, got one {has}: {todo}."


def nothing_came(found: Offer, seconds: float) -> str:
    """Why a study cannot begin, after it has waited so long for its first device."""
    if found.room:
        return (
            f"No device came within {seconds:.0f} seconds, though the cluster's autoscaler can make {found.room}: see "
            "`ray status` for what keeps it from that, and try again."
        )
    return (
        f"None of the cluster's devices could be had within {seconds:.0f} seconds: others hold them all. See "
        "`ray status`, and try again when they are free."
    )
