"""A real Ray cluster whose autoscaler makes nodes on this machine and releases them, of either version of it.

Import this before ray, as tests.clusters. The autoscaler and its nodes are processes of the head's session, and end
with it.

Seconds on two cores: head 2.5, a node 2 to 4 after it is asked for, released 2 to 5 after it is idle, close 0.3.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.clusters import Cluster, Node

PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider"
HEAD = "f" * 51 + "00000"  # the id that the provider gives to the head
IDLE = 0.5  # seconds after which the autoscaler releases an idle node
UPDATE = 1  # second between two looks of the autoscaler, which takes no less
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")


@dataclass(frozen=True)
class NodeType:
    """What the autoscaler can make, and how many of them."""

    most: int
    gpus: int = 1
    cpus: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        resources = {"CPU": self.cpus, "GPU": self.gpus, "object_store_memory": 80 * 2**20}
        return {
            "resources": resources, "labels": dict(self.labels), "node_config": {}, "min_workers": 0,
            "max_workers": self.most,
        }  # fmt: skip


class AutoscalingCluster(Cluster):
    """A head without devices, and an autoscaler that makes nodes of these types; a context manager.

    >>> with AutoscalingCluster({"small": NodeType(most=2)}, v2=True) as cluster:
    ...     ray.init(address=cluster.address)
    """

    def __init__(self, types: Mapping[str, NodeType], *, v2: bool, most: int = 16) -> None:
        self.v2, self._types, self._most = v2, types, most
        super().__init__()

    def made(self) -> set[str]:
        """The ids of the nodes that are alive and were made by the autoscaler."""
        return self.alive() - {self.head.id}

    def groups(self, state: str) -> int:
        """How many placement groups are in a state."""
        return sum(group["state"] == state for group in self._state.placement_group_table().values())

    def labels(self) -> dict[str, Mapping[str, str]]:
        """The labels of the nodes that are alive."""
        return {node["NodeID"]: node["Labels"] for node in self._state.node_table() if node["Alive"]}

    def actors(self, kind: type) -> dict[str, str]:
        """The actors of a class that are alive, by their ids, and the id of the node of each."""
        alive = [one for one in self._state.actor_table(None, None, None).values() if one["State"] == "ALIVE"]
        return {one["ActorID"]: one["Address"]["NodeID"] for one in alive if one["ActorClassName"] == kind.__name__}

    def _start(self, cpus: int, gpus: int, settings: dict[str, Any]) -> tuple[Node, str]:
        port = _free_port()
        file = self.dir / "autoscaling.json"  # which is YAML as well
        file.write_text(json.dumps(self._config(f"127.0.0.1:{port}")))
        environment = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": str(UPDATE), "HOME": str(self.dir)}
        if self.v2:
            environment |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD}
            environment |= {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD}
            environment |= {"RAY_enable_infeasible_task_early_exit": "true"}  # as Ray says that it will be by default
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            settings = {**settings, "autoscaling_config": str(file), "gcs_server_port": port}
            return super()._start(cpus, gpus, settings)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def _config(self, address: str) -> dict[str, Any]:
        head: dict[str, Any] = {"resources": {"CPU": 0}, "node_config": {}, "min_workers": 0, "max_workers": 0}
        provider = {
            "type": "external",
            "module": f"{PROVIDER}.FakeMultiNodeProvider",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": address,
            "launch_multiple": True,
            "head_node_id": HEAD,
        }
        return {
            "cluster_name": "fake",
            "max_workers": self._most,
            "provider": provider,
            "available_node_types": {name: type.config() for name, type in self._types.items()}
            | {"ray.head.default": head},
            "head_node_type": "ray.head.default",
            "upscaling_speed": 100.0,
            "idle_timeout_minutes": IDLE / 60,
            "file_mounts_sync_continuously": False,
            **{name: {} for name in ("auth", "docker", "file_mounts")},
            **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
            **{f"{name}_commands": [] for name in COMMANDS},
        }


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
