"""A worker on a Ray cluster, seen from the driver, and the place it has there."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any, Literal

from penstock import __version__
from penstock.bundle import Bundle, Device, Job
from penstock.executors.ray.cluster import require
from penstock.executors.ray.nodes import MARKET, PRICE, Offer
from penstock.executors.ray.worker import Hello, RayWorker
from penstock.task import FunctionTask

BEAT = 2.0  # seconds after which a worker answers even if it has no event
RESTING = 30.0  # seconds that a worker outlives its study

Kin = tuple[str, ...]  # connection, module and name of the task, market: equal for studies that may share workers
Kept = tuple[Any, Any]  # a placement group, and the actor in it
_resting: dict[Kin, list[Kept]] = {}  # resting workers; some may have ended by themselves
_held: list[Any] = []  # the actors of workers that have gone: see `hold`


@dataclass(eq=False)
class Slot:
    """A worker, seen from the driver, and the place it has on the cluster."""

    group: Any
    actor: Any
    asked: Any  # the call that the worker has yet to answer
    began: float
    rested: bool = False  # whether the worker served another study before
    phase: Literal["starting", "ready", "leaving"] = "starting"
    since: float = 0.0  # when the call in `asked` was made
    came: float = 0.0  # when the worker first answered
    labels: Mapping[str, str] = field(default_factory=dict)  # labels that its node has, or must have
    node: str = ""
    pid: int = 0
    shared: bool = True
    device: Device | None = None
    running: list[tuple[int, int]] = field(default_factory=list)  # the trials that it was given and that have not left
    placed: int = 0  # bundles that it was given so far
    without: Collection[str] | None = None  # the nodes there were when it was asked for, none of which had a place
    start: Callable[[], tuple[Any, Any]] | None = None  # starts it once it has a place: gives the actor, and the call
    spare: float = inf  # since when it is idle while there are more workers than are asked for

    def begin(self) -> None:
        """Start a worker that had no place, if it has one now: Ray refuses an actor whose placement group waits."""
        from ray.util.placement_group import placement_group_table

        if self.start is not None and placement_group_table(self.group)["state"] == "CREATED":
            (self.actor, self.asked), self.start = self.start(), None

    def greet(self, hello: Hello, taken: Collection[str]) -> Device:
        """Take the hello of a worker that is ready; gives its device, under a name of its own."""
        self.asked, self.phase, self.came = None, "ready", time.monotonic()
        self.node, self.pid, self.shared, self.labels = hello.node, hello.pid, hello.shared, hello.labels
        kind, node = "cpu" if hello.number is None else "gpu", hello.node[:6]
        numbers = range(len(taken) + 1) if hello.number is None else [hello.number]
        names = [f"{node}/{kind}:{i}" for i in numbers]
        name = next((name for name in names if name not in taken), f"{node}/{hello.pid}")
        price = _price(hello.labels.get(PRICE))
        whole = node + hello.node[-6:]  # some providers' ids differ at their ends alone
        self.device = Device(name, hello.type, hello.memory, whole, price, hello.labels.get(MARKET))
        return self.device

    def place(self, bundle: Bundle, states: dict[str, bytes]) -> None:
        """Send a bundle, together with a request for events where none is under way."""
        self.placed += 1
        if self.asked is None:
            self.since = time.monotonic()
            call = self.actor.place_and_listen.options(concurrency_group="listening")
            self.asked = call.remote(self.placed, bundle, states, BEAT)
        else:
            self.actor.place.remote(self.placed, bundle, states)

    def listen(self, timeout: float = BEAT) -> None:
        """Ask for events."""
        self.since = time.monotonic()
        self.asked = self.actor.events.options(concurrency_group="listening").remote(timeout)

    def rest(self, kin: Kin) -> None:
        """Keep the worker for the next study."""
        self.actor.rest.remote(RESTING)
        _resting.setdefault(kin, []).append((self.group, self.actor))

    def remove(self) -> None:
        """Kill the worker, if it still lives, and give its place back."""
        _remove(self.group, self.actor)


def answered(slots: Sequence[Slot], timeout: float) -> list[Slot]:
    """The workers that have answered, as soon as there is one; none after the timeout."""
    asked = {slot.asked: slot for slot in slots if slot.asked is not None}
    if not asked:
        time.sleep(timeout)
        return []
    ray = require()
    ready, _ = ray.wait(list(asked), num_returns=1, timeout=timeout)
    if ready and len(asked) > 1:
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
    return [asked[one] for one in ready]


def kin(job: Job, market: str | None) -> Kin:
    """The studies that may have this one's workers after it."""
    import ray

    task = job.task.function if isinstance(job.task, FunctionTask) else type(job.task)
    return ray.get_runtime_context().get_job_id(), task.__module__, getattr(task, "__qualname__", ""), market or ""


def rested(kin: Kin) -> list[Kept]:
    """The workers that rest for such a study; workers that rest for other studies of this program go."""
    _held.clear()
    found = _resting.pop(kin, [])
    for other in [one for one in _resting if one[0] == kin[0]]:
        for group, actor in _resting.pop(other):
            _remove(group, actor)
    _resting.clear()  # workers of a connection that was closed have gone with it
    return found


def hold(actor: Any) -> None:
    """Keep the handle of a worker that has gone until the program's next study begins.

    Ray reports each dropped handle from a thread of its own, and crashes the whole program where the connection is
    closed before that thread had its turn.
    """
    _held.append(actor)


def _remove(group: Any, actor: Any) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    with suppress(Exception):
        ray.kill(actor)
    with suppress(Exception):
        remove_placement_group(group)


def begin(
    found: Offer,
    avoided: Collection[str],
    where: Mapping[str, str],
    study: Sequence[Any],
    rested: list[Kept],
    without: Collection[str] | None = None,
) -> Slot:
    """Wake a resting worker, or ask for a new one on any node with these labels but the avoided ones.

    The worker says hello when it is ready. It starts later where it has no place on the present nodes, ``without``.
    """
    cores = min(found.cores.values(), default=1)
    if rested:
        group, actor = rested.pop()
        return Slot(group, actor, actor.begin.remote(*study, max(1, cores)), time.monotonic(), rested=True)
    needs = {"CPU": 1} if found.resource == "CPU" else {"GPU": 1, "CPU": min(1, cores)}
    group = _place(needs, avoided, where)

    def start() -> tuple[Any, Any]:
        actor = _new(needs, group)
        return actor, actor.begin.remote(*study, max(1, cores))

    if without is not None:
        return Slot(group, None, None, time.monotonic(), labels=where, without=without, start=start)
    return Slot(group, *start(), time.monotonic(), labels=where)


def _place(needs: Mapping[str, int], avoided: Collection[str], where: Mapping[str, str]) -> Any:
    from ray.util.placement_group import placement_group

    selected = {**where, "ray.io/node-id": f"!in({','.join(avoided)})"} if avoided else dict(where)
    selectors = [selected] if selected else None
    return placement_group([dict(needs)], strategy="STRICT_PACK", bundle_label_selector=selectors)


def _price(label: str | None) -> float | None:
    """The price of a device an hour, as a label gives it.

    >>> _price("2.49"), _price("free"), _price(None)
    (2.49, None, None)
    """
    try:
        return None if label is None else float(label)
    except ValueError:
        return None


@cache  # Ray keeps every class that it has made of ours
def _actor() -> Any:
    return require().remote(concurrency_groups={"listening": 1})(RayWorker)  # other methods run in the order of calls


def _new(needs: Mapping[str, int], group: Any) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options = _actor().options(
        num_cpus=needs["CPU"],
        num_gpus=needs.get("GPU", 0),
        max_restarts=0,  # a restarted actor would have lost its study; the executor makes a new worker instead
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=False),
    )
    return options.remote()


def fault(hello: Hello) -> str | None:
    """Why a worker cannot be used; None where it can."""
    where = f"{hello.host} (node {hello.node[:6]})"
    python = platform.python_version()
    if hello.python.split(".")[:2] != python.split(".")[:2]:
        return f"{where} has Python {hello.python} and the driver has {python}: expected the same on all nodes."
    if hello.penstock != __version__:
        return (
            f"{where} has Penstock {hello.penstock} and the driver has {__version__}: expected the same on all nodes. "
            f"Install that there: pip install penstock=={__version__}"
        )
    return f"A worker could not start on {where}:\n{hello.broken.strip()}" if hello.broken else None


def patience(ready: Sequence[Slot]) -> float:
    """Seconds to wait for the next worker once some are ready: about as long as the fastest of them took."""
    return max(1.0, min(slot.came - slot.began for slot in ready))


def how(error: Exception) -> str:
    """The cause of a death as Ray has it, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("The actor is dead because")]
    said = (told or lines or [type(error).__name__])[0].removeprefix("The actor is dead because ")
    return said.partition(" Some common causes")[0]


def alone(error: Exception | None) -> bool:
    """Whether only the worker's process hung, died or was killed for its memory, and not its node."""
    if error is None or isinstance(error, require().exceptions.OutOfMemoryError):
        return True
    return "worker process has died" in how(error)
