"""Workers on a Ray cluster: one actor a device, kept warm for any bundle of any trial, on nodes that come and go.

A worker has a placement group of its own and is asked for its events all the time. A call that fails, or stays
unanswered, is the one sign of a death, whether a process or a node died. A process that died is replaced. Where its
node may have died with it, the node is avoided for a while, because Ray places actors on dead nodes for some time. The
executor looks at the nodes and at the study's part of the cluster every half second. Where the program itself is
connected to Ray, a worker that is idle when its study ends rests for the program's next study.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
import warnings
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from penstock.bundle import Bundle, Description, Device, Gathering, Job, Left, Limited, Measured, Metered, Node, Request
from penstock.errors import StudyError
from penstock.executors.base import DeviceAdded, DeviceLost, Executor, ExecutorEvent
from penstock.executors.processes.executor import pickled
from penstock.executors.ray.cluster import Connection, connect, require
from penstock.executors.ray.doubts import DOUBT, Doubts
from penstock.executors.ray.held import contents, leave_token, take_token
from penstock.executors.ray.meters import RayMetering, Reading
from penstock.executors.ray.nodes import living
from penstock.executors.ray.paid import Paid
from penstock.executors.ray.requesting import Requesting, nothing_came, order
from penstock.executors.ray.slot import BEAT, Slot, answered, begin, fault, hold, how, kin, patience, rested
from penstock.executors.ray.studies import Company
from penstock.executors.ray.worker import Hello
from penstock.task import Task
from penstock.trial import Config, Report

LOOK = 0.5  # seconds between two looks at the cluster
SILENT = 60.0  # seconds without an answer after which a worker has hung
STARTING = 120.0  # seconds within which the first worker of a study must start
COMING = 900.0  # the same where the autoscaler has to make its node
SLICE = 0.1  # seconds after which a wait looks whether it was woken


class RayExecutor(Executor):
    """One worker for each device that this study may have: at most ``workers``, and at least ``least`` to begin.

    ``weight`` is the study's part of the cluster beside other studies. ``folder`` is the code that nodes need. After a
    ``request``, idle workers beyond it are kept for ``idle`` seconds; where the cluster has an autoscaler, their nodes
    go with them. ``market`` limits the study to nodes that are labelled "spot" or "on-demand".
    ``first`` is the request that the study begins with.
    """

    flexible = True

    def __init__(
        self,
        job: Job,
        on: str = "ray",
        *,
        workers: int | None = None,
        least: int = 1,
        weight: float = 1.0,
        folder: Path | None = None,
        idle: float = 60.0,
        market: str | None = None,
        first: Sequence[Request] = (),
    ) -> None:
        self._ray = require()
        self._requesting, self._doubts = Requesting(workers, market, idle, least, first), Doubts()
        data = pickled(job, "workers on other machines")
        self._connection: Connection = connect(on, folder)
        self._began, self._looked = time.monotonic(), -inf
        self._events: deque[ExecutorEvent] = deque()
        self._slots: list[Slot] = []
        self._paid = Paid()
        self._meters: RayMetering = RayMetering()
        self._begun = self._closed = self._woken = False
        self._studies = Company(uuid.uuid4().hex, weight)
        self._states, self._token, self._name = job.states, leave_token(job.states), job.study
        if isinstance(job.task, Task):
            self.modes = self.modes | {"distributed"}
        try:
            self._found = self._requesting.begin()
            token = "" if self._token is None else self._token.name
            self._study = (self._ray.put(data), [os.getcwd(), *filter(os.path.isdir, sys.path)], token)
            self._kin = kin(job, market)
            self._rested = rested(self._kin)
            self._quota = self._requesting.target(self._found)
            self._fill()
            self._start()
            self._begun = True
            self._meters.begin()
            self._events.clear()  # the caller asks `devices` which devices there are at first
        except BaseException:
            self.close()
            raise

    # The contract

    def devices(self) -> Sequence[Device]:
        return [slot.device for slot in self._slots if slot.phase == "ready" and slot.device is not None]

    def place(self, bundle: Bundle) -> None:
        slots = [self._slot(device) for device in bundle.devices]
        first = slots[0]
        new = [p for p in bundle.placements if first is None or (p.trial, p.attempt) not in first.running]
        if first is None or (new and any(slot is None or slot.phase == "leaving" for slot in slots)):
            self._events += [p.turned_away(bundle.study) for p in new]  # a device went in the meantime
            return
        self._meters.placed(bundle)
        self._give(first, bundle)

    def _give(self, slot: Slot, bundle: Bundle) -> None:
        new = [p for p in bundle.placements if (p.trial, p.attempt) not in slot.running]
        states = {} if slot.shared else contents(self._states, [p.state for p in new if p.state is not None])
        slot.running += [(p.trial, p.attempt) for p in new]
        slot.place(bundle, states)

    def wait(self, timeout: float | None = None) -> list[ExecutorEvent]:
        end = None if timeout is None else time.monotonic() + timeout
        while not self._events and not self._woken:
            left = SLICE if end is None else min(SLICE, end - time.monotonic())
            self._listen(max(0.0, left))
            self._look()
            if self._meters.within == 0 or (end is not None and time.monotonic() >= end):
                break
        events, self._woken = [self._meters.took(event) for event in self._events], False
        self._events.clear()
        return [*events, *self._meters.due()]

    def wake(self) -> None:
        self._woken = True

    def describe(
        self,
        configs: Sequence[Config],
        *,
        train: bool,
        trials: Sequence[int] = (),
        study: str = "",
        variants: Sequence[str] = (),
    ) -> list[Description]:
        died = ""
        while True:
            there = [slot for slot in self._slots if slot.phase == "ready"]
            slot = next((slot for slot in there if slot.node != died), there[0] if there else None)
            if slot is None:
                if self._woken and not train:
                    return [Description()] * len(configs)
                self._requesting.at_least_one()
                self._start()
                continue
            asked = slot.actor.describe.remote(list(configs), train, list(trials), list(variants))
            while not self._ray.wait([asked], timeout=SLICE)[0]:
                self._listen(0.0)
                self._look()
                if slot not in self._slots:
                    break
            try:
                answer = self._ray.get(asked, timeout=SLICE)
            except self._ray.exceptions.RayError as error:
                if train and died:
                    raise StudyError(f"The workers that tried a dry batch died: {how(error)}") from None
                self._lose(slot, error)
                died = slot.node
                if train:  # try once more, on another node if there is one
                    continue
                if len(configs) == 1:
                    return [Description()]  # without a signature it trains alone, and kills no other trial's worker
                pairs = zip(configs, variants or [""] * len(configs), strict=True)
                return [self.describe([config], train=False, variants=[own])[0] for config, own in pairs]
            if isinstance(answer, Exception):
                raise answer
            return list(answer)

    def nodes(self) -> Sequence[Node]:
        return self._paid.nodes({slot.node: slot.device for slot in self._slots if slot.device}, self._found)

    def instances(self) -> Collection[str]:
        return self._requesting.instances()

    def request(self, wanted: Sequence[Request]) -> None:
        self._requesting.request(wanted)
        self._looked = -inf  # the next wait looks at once, and acts on the request

    @property
    def scales(self) -> bool:  # type: ignore[override]
        return self._requesting.grows

    @property
    def provisioning(self) -> float:  # type: ignore[override]
        """The measured seconds until a worker is ready where its node has to come first."""
        return self._requesting.provisioning or 0.0

    def now(self) -> float:
        return time.monotonic() - self._began

    def settle(self) -> list[Metered]:
        self._meters.look({slot.device.name: slot.actor for slot in self._slots if slot.device is not None})
        return super().settle()

    def close(self) -> None:
        if self._closed:  # a call without a connection would make Ray start a cluster of its own
            return
        self._closed = True
        keep = False
        with suppress(Exception):
            keep = not self._studies.leave() and self._connection.stays
        for slot in list(self._slots):
            if keep and slot.phase == "ready" and not slot.running:
                slot.rest(self._kin)
            else:
                self._remove(slot)
        take_token(self._token)
        self._connection.close()

    # Workers

    def _fill(self) -> None:
        """Ask for workers until there are as many as this study may have."""
        found, avoided = self._found, self._doubts.avoided
        kept = [slot for slot in self._slots if slot.phase != "leaving"]
        more = max(0, min(self._quota, found.devices + found.room) - len(kept))
        for where, later in self._requesting.missing(kept, found)[:more]:
            beyond = {*found.nodes, *avoided} if later else None
            # The labels of a resting worker's node are not known, so it serves only a request for any node.
            rested = self._rested if where == self._requesting.anywhere else []
            self._slots.append(begin(found, avoided, where, self._study, rested, beyond))

    def _start(self) -> None:
        """Wait until all workers that can start have started: a study's first bundles are made for so many devices.

        Workers whose nodes are yet to come are only waited for where there are no others.
        """
        began = time.monotonic()
        while True:
            ready = [slot for slot in self._slots if slot.phase == "ready"]
            if ready and len(ready) >= min(len(self._slots), self._found.devices):
                break
            if ready and time.monotonic() > max(slot.came for slot in ready) + patience(ready):
                break  # other studies hold the rest of the cluster; more workers come when they can
            seconds = COMING if self._found.room else STARTING
            if time.monotonic() - began > seconds:
                raise StudyError(nothing_came(self._found, seconds))
            self._listen(SLICE)
            self._look()

    def _slot(self, device: str) -> Slot | None:
        return next((s for s in self._slots if s.device is not None and s.device.name == device), None)

    def _listen(self, timeout: float) -> None:
        """Take in the events that workers have told."""
        for slot in answered(self._slots, timeout):
            if slot not in self._slots:
                continue
            try:
                said = self._ray.get(slot.asked, timeout=SILENT)
            except self._ray.exceptions.RayError as error:
                self._lose(slot, error)
                continue
            if isinstance(said, Hello):
                self._greet(slot, said)
            else:
                self._hear(slot, said)

    def _greet(self, slot: Slot, hello: Hello) -> None:
        """A worker is ready: its device is one of the study's."""
        if (why := fault(hello)) is not None:
            self._refuse(slot, hello.node, why)
            return
        slot.greet(hello, {s.device.name for s in self._slots if s.device is not None})
        self._doubts.born()
        self._requesting.greeted(slot)
        assert slot.device is not None
        self._meters.add(slot.device.name, hello.meter)
        self._paid.came(slot, self._began)
        self._events.append(DeviceAdded(slot.device))

    def _hear(self, slot: Slot, said: list[Any]) -> None:
        slot.asked = None
        assert slot.device is not None
        for event, state in said:
            if isinstance(event, Reading):
                self._meters.tell(slot.device.name, event)
                continue
            if state is not None:
                self._states.write(event.state.file, state)  # a state is written before any event names it
            if isinstance(event, Gathering):
                for rank, device in enumerate(event.bundle.devices[1:], 1):
                    if (other := self._slot(device)) is not None:  # where it has gone, the first one's wait times out
                        self._give(other, replace(event.bundle, rank=rank))
                continue
            if isinstance(event, Left):
                self._left((event.trial, event.attempt))
            elif isinstance(event, Measured | Limited):
                event = replace(event, device=slot.device.name)  # every worker names its own device "cuda:0" or "cpu"
            elif isinstance(event, Report):
                self._doubts.reported(slot.node)
            self._events.append(event)
        if slot.running:
            slot.listen()
        elif slot.phase == "leaving":
            self._remove(slot)

    def _left(self, trial: tuple[int, int]) -> None:
        for slot in self._slots:
            slot.running = [one for one in slot.running if one != trial]

    # Deaths

    def _lose(self, slot: Slot, error: Exception | None) -> None:
        """Account for a worker that is gone: its process alone, which is replaced, or perhaps its node."""
        if slot not in self._slots:
            return
        if slot.device is None:
            if self._doubts.hopeless(slot, error):
                self._refuse(slot, "", f"Workers could not start on the cluster: {error}")
            else:
                self._remove(slot)
            return
        self._remove(slot)
        self._looked = -inf  # the next look replaces the worker at once
        self._events += self._doubts.died(slot, error, self._name)
        for trial in slot.running:  # the other workers of a trial that spans devices notice its loss themselves
            self._left(trial)

    def _refuse(self, slot: Slot, node: str, fault: str) -> None:
        """Refuse a worker that cannot be used: a study that has begun goes on without it, any other ends."""
        self._remove(slot)
        if not self._begun:
            raise StudyError(fault)
        warnings.warn(fault, stacklevel=2)
        if node:
            self._doubts.doubt(node)
        self._looked = time.monotonic() + DOUBT - LOOK

    def _remove(self, slot: Slot) -> None:
        if slot in self._slots:
            self._slots.remove(slot)
            if slot.device is not None:
                self._meters.remove(slot.device.name)
        hold(slot.actor)
        if self._connection.reached():
            slot.remove()

    # The cluster

    def _look(self) -> None:
        """Look at the nodes, at this study's part of the cluster, and at whether all workers answer."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        for slot in [s for s in self._slots if s.phase != "starting"]:
            if slot.asked is None and now - slot.since > BEAT:
                slot.listen(0.0)  # an idle worker says that it lives
            elif slot.asked is not None and now - slot.since > SILENT:
                self._lose(slot, None)
        if not self._connection.answers():
            return  # trials go on without the head, and the next look asks it again
        try:
            nodes = living()
            self._doubts.trust(now)
            self._found = found = self._requesting.find(self._doubts.avoided)
            for slot in self._slots:
                slot.begin()
        except Exception:  # the head answers with an error
            return
        for slot in [s for s in self._slots if s.node]:
            if slot.node not in nodes:
                self._lose(slot, self._ray.exceptions.NodeDiedError(f"node {slot.node[:6]} is dead"))
            elif nodes[slot.node] and slot.phase == "ready":
                self._retire(slot)  # the node is about to be taken away: its trials move first
        kept = [slot for slot in self._slots if slot.phase != "leaving"]
        for slot in self._requesting.surplus(kept, found):
            self._retire(slot)
            kept.remove(slot)
        # Workers that train, or are kept for a while, count as used: only other studies may cost a trial its device.
        reach = found.devices + found.room
        most = min(reach, max(self._requesting.target(found), sum(slot.phase == "ready" for slot in kept)))
        self._quota = min(most, self._studies.quota(most, reach))
        for slot in order(kept, found.made)[: max(0, len(kept) - self._quota)]:
            self._retire(slot)
        self._fill()

    def _retire(self, slot: Slot) -> None:
        """Give a device up in good order: its trials stop at their next boundary, and then the worker goes."""
        if slot.phase == "ready" and slot.device is not None:
            slot.phase = "leaving"
            self._events.append(DeviceLost(slot.device))
            if slot.running:
                for other in [one for one in self._slots if set(one.running) & set(slot.running)]:
                    other.place(Bundle("", (slot.device.name,), ()), {})  # the first of a trial's workers stops it
                return
        self._remove(slot)
