"""The devices of a simulated cluster, and the times at which they come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

from penstock.bundle import Device, Request
from penstock.executors.base import DeviceAdded, DeviceLost, NodeAdded, NodeLost
from penstock.executors.simulated.nodes import Nodes
from penstock.executors.simulated.settings import Simulated
from penstock.seeds import key


class Surroundings(Protocol):
    """The methods of the executor that its devices call."""

    def after(self, seconds: float, action: Callable[[Any], object], subject: Any) -> None:
        """Call ``action(subject)`` when ``seconds`` have passed on the clock."""

    def now(self) -> float:
        """The clock."""

    def tell(self, event: DeviceAdded | DeviceLost | NodeAdded | NodeLost) -> None:
        """Say that a device or a node has come or gone."""

    def abandon(self, device: str) -> None:
        """Fail the trials on a device that is lost."""

    def idle(self, device: str) -> bool:
        """Whether no bundle is on a device or waits for it."""


class Devices:
    """The devices present now. The settings say when devices are lost and arrive; requests add and remove them too."""

    def __init__(self, settings: Simulated, around: Surroundings) -> None:
        self._settings, self._around = settings, around
        self.there = {device.name: device for device in settings.cluster()}
        self.listed = list(self.there.values())
        self.known = {*self.there, *(device.name for _, device in settings.arrivals)}
        self._comings: dict[str, int] = {}  # how often each device came, where losses are drawn
        self._wanted = 0  # how many devices are of use
        self._coming = 0  # how many requested devices are on their way
        self._requested = 0  # how many devices were requested in all
        self.after, self.now, self.tell, self.idle = around.after, around.now, around.tell, around.idle
        self.nodes = Nodes(settings.instances, settings.seed, self)
        for device in self.listed:
            self._await_loss(device)
        for when, name in settings.losses:
            around.after(when, self.lose, name)
        for when, device in settings.arrivals:
            around.after(when + settings.provision, self._add, device)

    def request(self, wanted: Sequence[Request]) -> None:
        """Devices that are missing come ``provision`` seconds later; idle devices beyond the requests go at once."""
        if self._settings.instances:
            self.nodes.request(wanted)
        if self._settings.most is None:
            return
        self._wanted = min(self._settings.most, max(1, sum(one.count for one in wanted)))
        for _ in range(self._wanted - len(self.there) - self._coming):
            self._coming += 1
            self._requested += 1
            spare = self._settings.spare(self._requested)
            self.known.add(spare.name)
            self._around.after(self._settings.provision, self._arrive, spare)
        for device in [one for one in reversed(self.listed) if self._around.idle(one.name)]:
            if len(self.there) > self._wanted:
                self._remove(device.name)

    def stuck(self, now: float) -> str:
        """Why nothing can happen any more, for a person."""
        if self.there:
            return (
                f"Nothing can happen any more at {now:g} simulated seconds: no trial runs on the "
                f"{len(self.there)} devices, and no device comes or goes. Trials that wait must fit on these "
                "devices."
            )
        return (
            f"Nothing can happen any more at {now:g} simulated seconds: the last device is lost and none will "
            "come, but trials wait. Expected fewer losses, arrivals after them, or returns=True."
        )

    def lose(self, name: str) -> None:
        """Take a device away, or a node with all of its devices; trials there fail."""
        if self.nodes.lose(name):
            return
        if ours := [device.name for device in self.listed if device.node == name and name not in self.there]:
            for one in ours:
                self.lose(one)
            return
        device = self._remove(name)
        if device is not None:
            self._around.abandon(name)
            if self._settings.returns:
                self._around.after(self._settings.provision, self._add, device)

    def add(self, devices: Sequence[Device]) -> None:
        """Add the devices of a node."""
        for device in devices:
            self.known.add(device.name)
            self._add(device)

    def remove(self, devices: Sequence[Device]) -> None:
        """Take the devices of a node away; trials on them fail."""
        for device in devices:
            self._remove(device.name)
        for device in devices:
            self._around.abandon(device.name)

    def _remove(self, name: str) -> Device | None:
        device = self.there.pop(name, None)
        if device is not None:
            self.listed = list(self.there.values())
            self._around.tell(DeviceLost(device))
        return device

    def _arrive(self, device: Device) -> None:
        self._coming -= 1
        if len(self.there) < self._wanted:
            self._add(device)

    def _add(self, device: Device) -> None:
        if device.name not in self.there:
            self.there[device.name] = device
            self.listed = list(self.there.values())
            self._around.tell(DeviceAdded(device))
            self._await_loss(device)

    def _await_loss(self, device: Device) -> None:
        rate = self._settings.loss_rate / 3600
        if rate > 0:
            coming = self._comings[device.name] = self._comings.get(device.name, 0) + 1
            drawn = Random(key(self._settings.seed, "loss", device.name, coming)).expovariate(rate)
            self._around.after(drawn, self._lose_coming, (device.name, coming))

    def _lose_coming(self, which: tuple[str, int]) -> None:
        name, coming = which
        if self._comings[name] == coming:
            self.lose(name)
