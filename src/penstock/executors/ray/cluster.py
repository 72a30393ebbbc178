"""Joining a Ray cluster or starting one, and the connection to it."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from penstock.errors import StudyError
from penstock.executors.ray.address import parse

ANSWER = 8.0  # seconds that a cluster has to answer
GLANCE = 1.0  # seconds that a head has which has answered before
HEADLESS = 30.0  # seconds without the head that a study bears, half of what Ray waits before it ends the program
NAMESPACE = "penstock"
LOOPBACK = "127.0.0.1"  # the address of a cluster that Penstock starts
QUIET = {"logging_level": "ERROR", "namespace": NAMESPACE}
# Files and folders that are large and never code: they are not sent to nodes.
TOO_LARGE = (".git", ".venv", "venv", ".penstock", "__pycache__", "node_modules", "*.pt", "*.ckpt")


def require() -> Any:
    """The ray module; where it is not installed, a StudyError says how to install it."""
    try:
        import ray
    except ImportError:
        raise StudyError('on="ray" needs Ray, which is not installed: pip install "penstock[ray]"') from None
    return ray


_connecting = threading.Lock()  # a program may run several studies at once, in threads


class Connection:
    """This process's connection to a cluster. It ends with the last study that uses it, unless it is the user's own."""

    users = 0
    ours = False  # whether Penstock joined or started the cluster, and not the user's program before it

    def __init__(self, *, new: bool) -> None:
        Connection.ours |= new
        Connection.users += 1
        self._open = True
        self._answered = time.monotonic()
        self.address = str(require().get_runtime_context().gcs_address)

    @property
    def stays(self) -> bool:
        """Whether the connection was there before the study and outlives it; that of a Ray task or actor may not."""
        ray = require()
        return not Connection.ours and bool(ray.get_runtime_context().worker.mode == ray.SCRIPT_MODE)

    def reached(self) -> bool:
        """Whether the head is there. A call to a missing head waits, and Ray ends the whole program after a minute."""
        try:
            _dial(self.address, GLANCE)
        except OSError:
            return False
        return True

    def answers(self) -> bool:
        """Whether the head is there now; raises a StudyError where it has been away for too long."""
        now = time.monotonic()
        if self.reached():
            self._answered = now
            return True
        if now - self._answered > HEADLESS:
            raise StudyError(_headless(self.address, HEADLESS))
        return False

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        with _connecting:
            Connection.users -= 1
            if Connection.users == 0 and Connection.ours:
                Connection.ours = False
                require().shutdown()


def connect(on: str, folder: Path | None) -> Connection:
    """Join the cluster that ``on`` names, or start one on this machine.

    "ray" means the cluster that this process is connected to already, or RAY_ADDRESS, or the cluster that runs on this
    machine, or else a new one. In "ray://host:port", host and port are those that ``ray start --head`` prints.
    """
    with _connecting:
        return _connect(parse(on), on, folder)


def _connect(address: str | None, on: str, folder: Path | None) -> Connection:
    ray = require()
    if ray.is_initialized():
        if ray.util.client.ray.is_connected():
            raise StudyError(
                "This process is connected by the Ray client, which Penstock does not use. Expected a driver on a node "
                'of the cluster, as with `ray job submit`: call ray.shutdown() before, and use on="ray" there.'
            )
        joined = ray.get_runtime_context().gcs_address
        if address is not None and joined not in (address, _as_joined(address)):
            raise StudyError(
                f"This process is connected to the Ray cluster at {joined} and "
                f'on="{on}" asks for another: use on="ray", or call ray.shutdown() before.'
            )
        return Connection(new=False)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        address = _from_environment()
        if address is None:
            with _on_loopback():
                ray.init(address="local", include_dashboard=False, _node_ip_address=LOOPBACK, **QUIET)
            return Connection(new=True)
    hosts = answering(address)
    there = {} if folder is None or _here(hosts) else {"working_dir": str(folder), "excludes": list(TOO_LARGE)}
    try:
        with _on_loopback() if hosts == {LOOPBACK} else nullcontext():
            ray.init(address=address, runtime_env=there or None, **QUIET)
    except Exception as error:
        raise StudyError(_cannot_join(address, folder, error)) from None
    return Connection(new=True)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray take 127.0.0.1 for this machine's address: a cluster that starts here then listens there alone.

    Ray would replace it by the address that other machines reach. Its switch against that is meant for systems where it
    has no clusters of several machines.
    """
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _as_joined(address: str) -> str | None:
    """An address as Ray writes it: for "localhost", this machine's own."""
    from ray._private.services import canonicalize_bootstrap_address

    return canonicalize_bootstrap_address(address)


def code_of(file: Path) -> Path:
    """The folder where a file's imports begin: its own, or the current one if it runs as `python -m package.file`."""
    main = sys.modules["__main__"]
    package = getattr(main, "__package__", None) or ""
    here = file == Path(getattr(main, "__file__", None) or "").absolute()
    inside = file.parent == Path.cwd().joinpath(*package.split("."))
    return Path.cwd() if package and here and inside else file.parent


def _from_environment() -> str | None:
    """The address of the cluster in RAY_ADDRESS, or else of this machine's cluster; None for a new cluster."""
    given = os.environ.get("RAY_ADDRESS", "")
    if given in ("", "auto"):
        return _on_this_machine()
    try:
        return None if given == "local" else parse(given if "://" in given else f"ray://{given}")
    except StudyError:
        raise StudyError(
            f'Expected RAY_ADDRESS to be "host:port", as in "10.0.0.1:6379", got {given!r}: change it or unset it.'
        ) from None


def _on_this_machine() -> str | None:
    """The address that ``ray start`` left here, if its cluster still answers: the file outlives the cluster."""
    from ray._private.utils import read_ray_address

    address = read_ray_address()
    if address is None:
        return None
    try:
        answering(address)
    except StudyError:
        return None
    return str(address)


def _dial(address: str, timeout: float) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=timeout).close()


def answering(address: str) -> set[str]:
    """The hosts of a cluster's nodes; raises a StudyError within seconds where nothing answers."""
    try:
        _dial(address, ANSWER / 2)
    except OSError as error:
        raise StudyError(
            f"No Ray cluster answers at {address} ({error}). Expected the address that `ray start --head` printed, and "
            "a way to it from here: check `ray status --address=...`, or leave the address and RAY_ADDRESS out, which "
            "starts one here."
        ) from None
    found: list[set[str]] = []

    def ask() -> None:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        with suppress(Exception):  # any program may listen there, so any error may come
            nodes = GcsClient(address=address).get_all_node_info(timeout=ANSWER / 2)
            found.append({node.node_manager_address for node in nodes.values() if node.state == 0})

    asking = threading.Thread(target=ask, daemon=True)  # the client itself may wait for most of a minute
    asking.start()
    asking.join(ANSWER / 2)
    if not found:
        raise StudyError(
            f"Something listens at {address}, but not as the head of a Ray cluster does. Expected the address that "
            "`ray start --head` printed, usually with port 6379 (10001 is the Ray client's, which Penstock does not "
            "use), of the same version of Ray and with the same token."
        )
    return found[0]


def _here(hosts: Collection[str]) -> bool:
    """Whether all nodes are this machine, so that they see its files."""
    own = {LOOPBACK, "localhost"}
    try:
        own |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
        from ray.util import get_node_ip_address

        own.add(get_node_ip_address())  # type: ignore[no-untyped-call]
    except OSError:
        pass
    return set(hosts) <= own


def _cannot_join(address: str, folder: Path | None, error: Exception) -> str:
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "ersion" in said:
        return (
            f"The Ray cluster at {address} cannot be joined. {' '.join(str(error).split())} Expected the same versions "
            "of Python and Ray on the driver and all nodes."
        )
    if "working_dir" in str(error) or "exceeds" in str(error):
        return (
            f"The folder {folder} cannot be sent to the nodes: {said}. Expected a folder of code: move data out of it, "
            "or name it in a .gitignore or .rayignore there."
        )
    return f"The Ray cluster at {address} cannot be joined ({type(error).__name__}: {said})."


def _headless(address: str, seconds: float) -> str:
    """The message for a study that cannot go on, because its cluster's head was away for so long."""
    return (
        f"The head of the Ray cluster at {address} has not answered for {seconds:.0f} seconds. What was reported is in "
        "the study's log: `penstock resume`, or the same study with the same name, goes on from there, on a cluster or "
        "on this machine."
    )
