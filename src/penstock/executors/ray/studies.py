"""Several studies on one Ray cluster: how many devices each may hold, by weight, agreed on through one small actor.

Each driver tells the actor now and then that it is there and how many devices it could use; the answer says how many it
may hold. A driver that falls silent is forgotten, and an actor that no driver calls ends itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.executors.ray.cluster import NAMESPACE, require
from penstock.executors.ray.nodes import on_head

FORGOTTEN = 5.0  # seconds after which a silent driver is forgotten
TURN = 10.0  # seconds that a study keeps a device, where there are fewer devices than studies
LONELY = 10.0  # seconds after which an actor that no driver calls ends
NAME = "penstock studies"


def shares(devices: int, wanted: Mapping[str, tuple[float, int]]) -> dict[str, int]:
    """How many devices each study gets, by its weight and the most it can use; others have the ones that it leaves.

    Every study gets one device before any gets two; ties go by name.

    >>> shares(4, {"a": (1.0, 64), "b": (1.0, 64)}), shares(4, {"a": (3.0, 64), "b": (1.0, 64)})
    ({'a': 2, 'b': 2}, {'a': 3, 'b': 1})
    >>> shares(4, {"a": (1.0, 1), "b": (1.0, 64)})
    {'a': 1, 'b': 3}
    """
    given = dict.fromkeys(sorted(wanted), 0)
    for _ in range(devices):
        able = [name for name in given if given[name] < wanted[name][1]]
        if not able:
            break
        # The study that is furthest below its part: one with no device first, then by devices for a unit of weight.
        poorest = min(able, key=lambda name: (given[name] > 0, (given[name] + 1) / wanted[name][0]))
        given[poorest] += 1
    return given


@dataclass
class _Driver:
    weight: float
    most: int
    seen: float
    used: float = 0.0  # turns that the driver had, per unit of weight


class Studies:
    """The actor. It uses its own machine's clock."""

    def __init__(self) -> None:
        self._drivers: dict[str, _Driver] = {}
        self._turn: tuple[str, ...] = ()  # the drivers that hold a device now, where devices are fewer
        self._turned = self._spoken = time.monotonic()
        threading.Thread(target=self._end, daemon=True).start()

    def here(self, name: str, weight: float, most: int, devices: int) -> int:
        """Say that a driver is there; gives how many of the cluster's devices it may hold."""
        now = self._spoken = time.monotonic()
        known = self._drivers.setdefault(name, _Driver(weight, most, now, self._least()))
        known.weight, known.most, known.seen = weight, most, now
        self._forget(now)
        if devices < len(self._drivers):
            return int(name in self._whose_turn(devices, now))
        return shares(devices, {n: (one.weight, one.most) for n, one in self._drivers.items()})[name]

    def _whose_turn(self, devices: int, now: float) -> tuple[str, ...]:
        """The drivers that had least for their weight; they keep the turn for a while, as moving trials takes time."""
        here = [name for name in self._turn if name in self._drivers]
        if len(here) != devices or now - self._turned > TURN:
            ordered = sorted(self._drivers, key=lambda name: (self._drivers[name].used, name))
            self._turn, self._turned = tuple(ordered[:devices]), now
            for name in self._turn:
                self._drivers[name].used += 1 / self._drivers[name].weight
        return self._turn

    def _least(self) -> float:
        """The least that any driver has had: one that comes begins with as much, not with nothing."""
        return min((one.used for one in self._drivers.values()), default=0.0)

    def gone(self, name: str) -> int:
        """A driver leaves; gives how many are left."""
        self._spoken = time.monotonic()
        self._drivers.pop(name, None)
        self._forget(self._spoken)
        return len(self._drivers)

    def _forget(self, now: float) -> None:
        self._drivers = {name: one for name, one in self._drivers.items() if now - one.seen < FORGOTTEN}

    def _end(self) -> None:
        while time.monotonic() - self._spoken < LONELY:
            time.sleep(LONELY / 10)
        os._exit(0)


@cache  # Ray keeps every class that it has made of ours
def _actor() -> Any:
    return require().remote(Studies)


class Company:
    """The other studies on this cluster, asked for in the background."""

    def __init__(self, name: str, weight: float) -> None:
        self._ray, self._name, self._weight = require(), name, weight
        self._actor: Any = None
        self._asked: Any = None
        self._known: int | None = None

    def quota(self, most: int, devices: int) -> int:
        """How many devices this study may hold, as last heard."""
        try:
            if self._asked is not None and self._ray.wait([self._asked], timeout=0)[0]:
                self._known, self._asked = self._ray.get(self._asked), None
            if self._asked is None:
                if self._actor is None:
                    named = {"name": NAME, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
                    made = _actor().options(**named, num_cpus=0, scheduling_strategy=on_head())
                    self._actor = made.remote()
                self._asked = self._actor.here.remote(self._name, self._weight, most, devices)
        except Exception:  # the actor ended as the last study left, or its node died: another is made
            self._actor = self._asked = None
        return devices if self._known is None else self._known

    def leave(self) -> bool:
        """Leave; gives whether other studies are left."""
        if self._actor is None:
            return False
        if self._ray.get(self._actor.gone.remote(self._name), timeout=FORGOTTEN) > 0:
            return True
        self._ray.kill(self._actor)
        return False


def others() -> bool:
    """Whether any study is under way; a resting worker asks this."""
    try:
        require().get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return False
    return True
