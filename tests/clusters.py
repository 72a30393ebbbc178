"""A real Ray cluster of several nodes on this machine, to lose nodes, raylets and workers of.

Import this before ray: Ray reads part of its environment when it is imported. Each node is a process of its own that
starts Ray's for that node, in a session of its own, by which they are found whoever became their parent. Nodes, and the
workers on them, are forked from a process that has imported torch. A node ends with its connection, so that
nothing outlives the process that made the cluster, not even when that is killed.

Seconds on two cores: head 2.5, node 1.5, kill 0.03, then marked dead 0.7 to 0.8, notice to drain 0.005, close 0.1.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from penstock.executors.processes.forking import Forked, fork
from penstock.executors.processes.server import fork_on_request
from penstock.executors.processes.worker import NEEDED
from tests import nursery

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),  # read once by each process
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps every address on 127.0.0.1, on Linux too
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or Ray warns of it with every actor without a GPU
}
if "ray" in sys.modules and any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
    raise ImportError("Import tests.clusters before ray: Ray reads its environment when it is imported.")
os.environ.update(ENVIRONMENT)

# A node that is killed is marked dead after about a second, against 13 with Ray's own settings: nothing listens there
# any more. One that only answers late, on cores that are busy, is left alone: a driver on it would end with it.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 3,
    "health_check_timeout_ms": 10_000,
}
SHORT = "/dev/shm"  # the path of a socket has at most 107 characters, and Ray's own part of it takes 80


@dataclass(frozen=True)
class Node:
    """One node: its id for Ray, and its session, which is also the pid of the process that started it."""

    id: str
    session: int
    cpus: int
    gpus: int


class Cluster:
    """A head without devices, and the nodes that ``add_node`` brings; a context manager.

    >>> with Cluster() as cluster:
    ...     node = cluster.add_node(gpus=2)
    ...     ray.init(address=cluster.address)  # the head's node, which is not among those to lose
    ...     cluster.kill_node(node)
    """

    def __init__(self, system_config: Mapping[str, Any] = HEALTH) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="p", dir=SHORT if Path(SHORT).is_dir() else None))
        self.address = ""
        self.nodes: list[Node] = []
        self._started: dict[int, Forked] = {}
        self._ended: list[int] = []
        self._state: Any = None
        try:
            settings = {"include_dashboard": False, "_system_config": dict(system_config)}
            self.head, self.address = self._start(cpus=0, gpus=0, settings=settings)
            self._connect()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def add_node(self, *, cpus: int = 2, gpus: int = 0, labels: Mapping[str, str] | None = None) -> Node:
        """A new node, alive for Ray when this returns."""
        settings = {"gcs_address": self.address, "include_log_monitor": False, "labels": dict(labels or {})}
        node, _ = self._start(cpus, gpus, settings)
        until(lambda: node.id in self.alive(), f"node {node.id} joins")
        self.nodes.append(node)
        return node

    def kill_node(self, node: Node) -> None:
        """SIGKILL to every process of a node, as when a machine loses power; they are gone when this returns."""
        if node in self.nodes:
            self.nodes.remove(node)
        self._end(node.session)

    def kill_raylet(self, node: Node) -> None:
        """SIGKILL to a node's raylet alone; its workers notice by themselves."""
        raylets = [pid for pid, command in processes(node.session) if "/raylet/raylet " in command]
        if not raylets:
            raise ProcessLookupError(f"Node {node.id} has no raylet.")
        os.kill(raylets[0], signal.SIGKILL)
        until(lambda: raylets[0] not in dict(processes(node.session)), f"raylet {raylets[0]} ends")

    def drain(self, node: Node, seconds: float = 30) -> None:
        """Ray's notice that a node is about to be preempted, ``seconds`` ahead: it takes nothing new from now on.

        Ray itself ends a node that drains once it is idle, and does nothing at the deadline: kill it, as a cloud would.
        """
        client: Any = import_module("ray._raylet").GcsClient(address=self.address)
        reasons: Any = import_module("ray.core.generated.autoscaler_pb2").DrainNodeReason
        reason, deadline = reasons.Value("DRAIN_NODE_REASON_PREEMPTION"), int((time.time() + seconds) * 1000)
        taken, why = client.drain_node(node.id, reason, "preempted", deadline)
        if not taken:
            raise RuntimeError(f"Ray refuses to drain node {node.id}: {why}")

    def draining(self) -> set[str]:
        """The ids of nodes that were told to drain and are still alive."""
        return set(self._state.get_draining_nodes())

    def alive(self) -> set[str]:
        """The ids of nodes that Ray holds for alive, the head's included."""
        return {node["NodeID"] for node in self._state.node_table() if node["Alive"]}

    def wait_until_dead(self, node: Node, seconds: float = 60) -> None:
        """Wait until Ray marks a node dead."""
        until(lambda: node.id not in self.alive(), f"node {node.id} is marked dead", seconds)

    def workers(self, node: Node, title: str = "ray::RayWorker") -> list[int]:
        """The pids of a node's actors whose title begins so: ``ray::`` and the class, then maybe a method."""
        return [pid for pid, command in processes(node.session) if command.startswith(title)]

    def leaks(self) -> list[str]:
        """What drivers left behind: actors, placement groups, workers that are not idle; all there is once closed."""
        if self._state is None:
            left = [str(self.dir)] if self.dir.exists() else []
            sessions = [*self._started, *self._ended]
            return left + [f"process {pid} {command}" for one in sessions for pid, command in processes(one)]
        actors = [
            f"actor {actor['ActorClassName']} {actor['ActorID']} {actor['State']}"
            for actor in self._state.actor_table(None, None, None).values()
            if actor["State"] != "DEAD"
        ]
        groups = [
            f"placement group {group['placement_group_id']} {group['state']}"
            for group in self._state.placement_group_table().values()
            if group["state"] != "REMOVED"
        ]
        agents = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
        busy = [
            f"process {pid} {command}"
            for session in [*self._started, *self._ended]
            for pid, command in processes(session)
            if command.startswith("ray::") and not command.startswith(agents)
        ]
        return actors + groups + busy

    def close(self) -> None:
        """Disconnect this process, end every process of every node, and delete the folder."""
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():  # without its cluster, Ray ends the whole process a minute later
            ray.shutdown()
        if self._state is not None:
            self._state.disconnect()
            self._state = None
        for session in list(reversed(self._started)):  # the head last: its end makes the others complain
            self._end(session)
        self.nodes.clear()
        shutil.rmtree(self.dir, ignore_errors=True)

    def _start(self, cpus: int, gpus: int, settings: dict[str, Any]) -> tuple[Node, str]:
        common = {
            "node_ip_address": "127.0.0.1",
            "temp_dir": str(self.dir),
            "num_cpus": cpus,
            "num_gpus": gpus,
            "object_store_memory": 100 * 2**20,
            "min_worker_port": 0,
            "max_worker_port": 0,
            "dashboard_agent_listen_port": None,
        }
        started = fork("tests.clusters")
        assert started.pid is not None
        self._started[started.pid] = started
        started.connection.send(({**common, **settings}, str(self.dir / "starting.log")))
        found = None
        if started.connection.poll(60):
            with suppress(EOFError):
                found = started.connection.recv()
        if found is None:
            said = (self.dir / "starting.log").read_text()[-2000:]
            self._end(started.pid)
            raise RuntimeError(f"A Ray node did not start within 60 seconds: {said}")
        return Node(found["id"], started.pid, cpus, gpus), found["address"]

    def _end(self, session: int) -> None:
        started = self._started.get(session)
        if started is None:
            return
        until(lambda: not killed(session), f"the processes of session {session} end")
        started.wait()  # only now may the number of the session be given to another
        started.close()
        del self._started[session]
        self._ended.append(session)

    def _connect(self) -> None:
        options: Any = import_module("ray._raylet").GcsClientOptions
        self._state = import_module("ray._private.state").GlobalState()
        self._state._initialize_global_state(
            options.create(self.address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
        )


def until(reached: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait for a state; raise where it is not reached in time."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Waited {seconds:g} seconds until {what}.")
        time.sleep(0.02)


def processes(session: int) -> list[tuple[int, str]]:
    """The pids and command lines of a session's processes, those that ended and wait for their parent left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(its_session) == session and state not in "ZX":
                    found.append((int(entry.name), (entry / "cmdline").read_text().replace("\0", " ").strip()))
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                continue
    return found


def killed(session: int) -> int:
    """Send SIGKILL to every process of a session, to this one last if it is among them, and say to how many."""
    pids = sorted((pid for pid, _ in processes(session)), key=lambda pid: pid == os.getpid())
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def serve(driver: Connection[Any, Any]) -> None:
    """Start a node's processes in this one's session, say where, and end with the driver."""
    settings, log = driver.recv()
    _redirect(log)

    def end() -> None:
        killed(os.getsid(0))

    # A nursery ends with its node. The folder stays, as it is the whole cluster's.
    nursery.start(f"{settings['temp_dir']}/{os.getpid()}", end)
    # Only now, as workers read their own environment when they import ray.
    from ray._private.node import Node as RayNode
    from ray._private.parameter import RayParams

    head = "gcs_address" not in settings
    params = RayParams(**settings, worker_path=nursery.__file__)
    node = RayNode(params, head=head, shutdown_at_exit=False, spawn_reaper=False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a raylet that nobody waits for looks alive to its workers
    driver.send({"id": node.node_id, "address": node.gcs_address})
    with suppress(EOFError):
        driver.recv()  # until the driver is gone, as `close` ends this process before
    shutil.rmtree(settings["temp_dir"], ignore_errors=True)
    end()


def _redirect(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


if __name__ == "__main__":
    for name in (*NEEDED, "penstock.executors.ray.worker"):
        import_module(name)
    serve(fork_on_request(int(sys.argv[1])))
