"""A study that follows a plan: it asks for each stage's nodes, and plans anew where times or nodes leave the plan.

Nodes are asked for ahead of a barrier, and go when their last trial ends. The plan was made of measured times. Where
units take longer or shorter by more than a tolerance, or nodes are lost or late, the rest is planned anew with the
times that were seen, and the log says why. A trial that runs stays as it is.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from penstock.bundle import Request
from penstock.engine.drift import TOLERANCE, Drift, spreads
from penstock.log import events
from penstock.planning.cloud import Instance
from penstock.planning.plan import Plan, PlannedStage
from penstock.planning.planner import Held, Used, replan
from penstock.planning.spec import Job, Times
from penstock.planning.standing import Course, Kind, Standing, kind, needs, time_left
from penstock.saying import say
from penstock.scheduling.planned import Berth

if TYPE_CHECKING:
    from penstock.engine.placing import Placing

Late = Literal["finish", "stop", "pay"]
LESS = (0.8, 0.5)  # confidences with which a deadline is still kept, before it is said that it cannot be
LEAST = 0.01  # of a unit: what is left of a trial that is about to end
SOON = 1e-3  # seconds: the least time to wait for a moment that has all but come


class _Unit(NamedTuple):
    """A unit that trains: since when, whether it is the first of a placement, and on what part of which devices."""

    since: float
    first: bool
    type: Instance
    share: float


class Following:
    """Keeps a study to its ``plan``, which was made of the ``given`` one; ``late`` says what to do past a deadline."""

    def __init__(self, given: Plan, plan: Plan, late: Late = "finish") -> None:
        self.given, self.plan, self.late = given, plan, late
        # Whether the study is to end, because it cannot keep its deadline.
        self.stopped = late == "stop" and bool(plan.missed)
        self._course = Course(given)
        self._types = {offer.instance.name: offer.instance for offer in given.cloud.offers}
        self._slower = _mean(plan.job) / _mean(given.job)  # than the given plan's times, as the present plan has them
        self._drift = Drift()
        self._since: dict[int, _Unit] = {}  # by trial: the unit that it trains, or has trained last
        self._standing: dict[int, Standing] = {}  # by bracket
        self._nodes: dict[str, Kind] = {}  # the nodes that are paid for
        self._of: dict[str, int] = {}  # the bracket that has each of them
        self._wanted: Counter[Kind] = Counter()
        self._asked: dict[Kind, float] = {}  # the clock at which more nodes of a kind were asked for last
        self._late: set[tuple[Kind, float]] = set()  # such requests that were said to be late
        self._due = math.inf  # the clock at which something is to be decided although nothing happens

    def join(self, placing: Placing) -> None:
        """Take the part of the engine that knows where trials are."""
        self._placing, self._history = placing, placing.history

    def begin(self) -> None:
        """Log the plan, unless the log has it already."""
        known = self._history.given
        if known is None or known.plan != plain(self.given):
            self._log(self.given, "It was given.", given=True)

    def first(self) -> list[Request]:
        """The requests of the plan's first stages, for an executor that is to begin with them."""
        first = {bracket: self._at(bracket, 0) for bracket in {stage.bracket for stage in self.given.stages}}
        return [
            Request(one.nodes * self._types[one.instance].devices, market=one.market, instance=one.instance)
            for one in first.values()
        ]

    @property
    def within(self) -> float | None:
        """Seconds until the next decision, None where that follows from an event."""
        return None if math.isinf(self._due) else max(SOON, self._due - self._placing.clock())

    # What the scheduler asks, and what the engine tells

    def berth(self, trial: int) -> Berth:
        """What the plan gives a trial, and on which nodes."""
        bracket, stage = self._stage(trial)
        return Berth(stage.devices, self._ours(bracket, kind(stage)))

    def entered(self, trial: int) -> None:
        """A trial was placed."""
        place = self._placing.running[trial]
        instance = self._placing.bundling.devices[place.devices[0]].instance or ""
        share = self._placing.bundling.assigned[trial].share
        self._since[trial] = _Unit(self._placing.clock(), True, self._types[instance], share)

    def reported(self, trial: int) -> None:
        """A trial has reported a unit: compare its seconds with the plan's."""
        now, one = self._placing.clock(), self._since[trial]
        self._since[trial] = one._replace(since=now, first=False)
        self._drift.add(trial, now - one.since, self._whole(one))

    def _whole(self, one: _Unit) -> float:
        """The seconds of a unit of a running trial, as the plan has them."""
        return self._unit(one.type, one.share) + one.first * self.plan.job.start.expected

    def _overlong(self, one: _Unit) -> float:
        """The clock at which a unit that does not end will have taken longer by another quarter than planned."""
        whole = self._whole(one)
        quarters = max(4, math.floor(4 * (self._placing.clock() - one.since) / whole + SOON))
        return one.since + whole * (quarters + 1) / 4

    def _under_way(self) -> list[tuple[float, float]]:
        """The seconds so far of each unit that trains, and the seconds that the plan has for it."""
        now, there = self._placing.clock(), [self._since[trial] for trial in self._placing.running]
        return [(now - one.since, self._whole(one)) for one in there]

    def look(self) -> None:
        """See where the study stands, before trials are placed; plan anew where that leaves the plan."""
        lost = self._lost()
        if not (lost or self._placing.changed or self._due <= self._placing.clock() or self._off()):
            return
        self._stand()
        reason = lost or self._off() or self._overdue()
        if reason and self._standing and not self.stopped:
            self._replan(reason)
            self._stand()
        self._deal()

    def request(self, *, changed: bool) -> None:
        """Ask for the nodes that the plan calls for now, and note when it will call for others."""
        if not changed and self._due > self._placing.clock():
            return
        self._stand()
        now, wanted = self._placing.clock(), Counter[Kind]()
        for one in self._standing.values():
            wanted.update(needs(one))
        for here, count in wanted.items():
            if count > self._wanted[here]:
                self._asked[here] = now
        self._wanted = wanted
        sizes = {here: self._types[here[0]].devices for here in wanted}
        self._placing.executor.request(
            [Request(count * sizes[here], market=here[1], instance=here[0]) for here, count in wanted.items()]
        )
        coming = [one.left - one.after.lead for one in self._standing.values() if one.after is not None]
        moments = [now + seconds for seconds in coming if seconds > 0] + [
            self._patience(one) for one in self._missing()
        ]
        moments += [self._overlong(self._since[trial]) for trial in self._placing.running]
        self._due = min(moments, default=math.inf)

    # Where it stands

    def _stage(self, trial: int) -> tuple[int, PlannedStage]:
        """The bracket and the stage in which a trial trains."""
        rung = self._course.of(trial, self._history.trials[trial].granted)
        return rung.bracket, self._at(rung.bracket, rung.number)

    def _at(self, bracket: int, number: int) -> PlannedStage:
        """A stage as it is planned now; a stage that was over when the plan was made is as it was given."""
        stage = self.plan.at(bracket, number) or self.given.at(bracket, number)
        assert stage is not None
        return stage

    def _stand(self) -> None:
        """Find the standing of each bracket that has a trial under way."""
        running, waiting = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        present: dict[int, int] = {}
        for there, trials in ((running, self._placing.running), (waiting, self._placing.queue.waiting)):
            for trial in trials:
                bracket, stage = self._stage(trial)
                there[bracket].append(trial)
                present[bracket] = min(stage.number, present.get(bracket, stage.number))
        self._standing = {
            bracket: self._stands(bracket, self._at(bracket, number), running[bracket], waiting[bracket])
            for bracket, number in sorted(present.items())
        }

    def _stands(self, bracket: int, stage: PlannedStage, running: list[int], waiting: list[int]) -> Standing:
        devices, places = self._placing.bundling.devices, self._placing.running
        nodes = {devices[name].node for trial in running for name in places[trial].devices if name in devices}
        busy = Counter(self._nodes[node] for node in nodes if node in self._nodes)
        type, ours = self._types[stage.instance], self._ours(bracket, kind(stage))
        there = sum(device.node in ours for device in devices.values()) / stage.devices
        planned = round(stage.nodes * type.devices / stage.devices)
        waits = bool(waiting) or self._course.undrawn(bracket, stage.number, len(self._history.trials)) > 0
        left = time_left(
            [self._left(trial) for trial in running],
            [self._units(trial) * self._unit(type, stage.devices) * self._drift.of(trial) for trial in waiting],
            max(0, round(there) - len(running)),
            max(0.0, self._expected(kind(stage)) - self._placing.clock()),
            max(0, planned - round(there)),
        )
        return Standing(stage, self.plan.at(bracket, stage.number + 1), waits, busy, left)

    def _units(self, trial: int) -> int:
        record = self._history.trials[trial]
        return max(0, record.granted - record.reported)

    def _left(self, trial: int, unseen: float = 1.0) -> float:
        """The seconds that a running trial still takes, by its own units so far."""
        one, slower = self._since[trial], self._drift.of(trial, unseen)
        begun = max(0.0, self._whole(one) * slower - (self._placing.clock() - one.since))
        return begun + max(0, self._units(trial) - 1) * self._unit(one.type, one.share) * slower

    def _unit(self, type: Instance, share: float) -> float:
        """The seconds of a unit on so many devices of a type, or on a part of one, as the plan has them."""
        times = self.plan.job.on(type)
        weight = sum(one.weight for one in times)
        return sum(one.weight * one.unit.expected * one.curve.at(share) for one in times) / weight

    # Nodes

    def _ours(self, bracket: int, here: Kind) -> set[str]:
        """The nodes of a kind that a bracket has."""
        return {node for node, one in self._of.items() if one == bracket and self._nodes[node] == here}

    def _lost(self) -> str:
        """Take the nodes that there are now, and say which are gone that the plan did not give up."""
        before, counts = self._nodes, Counter(self._nodes.values())
        self._nodes = {one.name: (one.instance or "", one.market or "") for one in self._placing.nodes}
        self._of = {node: bracket for node, bracket in self._of.items() if node in self._nodes}
        gone = [node for node in before if node not in self._nodes]
        lost = [node for node in gone if counts[before[node]] <= self._wanted[before[node]]]
        for node in lost:
            self._asked[before[node]] = self._placing.clock()  # the executor asks for another at once
        return f"{_many(len(lost), 'node')} of the plan went: {', '.join(lost)}." if lost else ""

    def _deal(self) -> None:
        """Deal the nodes among the brackets: a bracket keeps what it has, and idle nodes go to one that lacks some."""
        lacks = {bracket: needs(one) for bracket, one in self._standing.items()}
        devices, busy = self._placing.bundling.devices, set[str]()
        for place in self._placing.bundling.bundles():
            busy |= {devices[name].node for name in place.devices if name in devices}
        for node in sorted(self._of, key=lambda node: node not in busy):
            bracket, here = self._of[node], self._nodes[node]
            if bracket in lacks and (lacks[bracket][here] > 0 or node in busy):
                lacks[bracket][here] -= 1
            else:
                del self._of[node]
        for node, here in self._nodes.items():
            if node not in self._of and lacks:
                bracket = max(lacks, key=lambda one: (lacks[one][here], -one))
                lacks[bracket][here] -= 1
                self._of[node] = bracket

    def _missing(self) -> list[Kind]:
        """The kinds of nodes of which more were asked for than are there, and were not said to be late."""
        there = Counter(device.node for device in self._placing.bundling.devices.values())
        kinds = Counter(self._nodes[node] for node in there if node in self._nodes)
        return [
            here
            for here, count in self._wanted.items()
            if kinds[here] < count and here in self._asked and (here, self._asked[here]) not in self._late
        ]

    def _expected(self, here: Kind) -> float:
        """The clock at which the nodes of a kind that were asked for last are expected."""
        cloud = self.plan.cloud
        asked = self._asked.get(here, self._placing.clock())
        return asked + cloud.arrival.expected + cloud.preparing.expected

    def _patience(self, here: Kind) -> float:
        """The clock from which on nodes are late by more than chance and the tolerance."""
        cloud = self.plan.cloud
        chance = 3 * math.hypot(cloud.arrival.deviation, cloud.preparing.deviation)
        return self._expected(here) + max(chance, TOLERANCE * self.given.seconds)

    # Planning anew

    def _off(self) -> str:
        """Why units leave the plan, if they do."""
        job = next(iter(self.plan.job.times.values()))
        if not self._drift.left(under_way := self._under_way(), *spreads(job)):
            return ""
        return f"Units take {self._drift.all(under_way):.2f} times as long as planned."

    def _overdue(self) -> str:
        """Which nodes are late, if any are; each request for nodes is said to be late once."""
        now = self._placing.clock()
        late = [here for here in self._missing() if self._patience(here) <= now]
        self._late.update((here, self._asked[here]) for here in late)
        return f"Nodes are late: {', '.join(' '.join(here) for here in late)}." if late else ""

    def _replan(self, reason: str) -> None:
        """Plan what is left with the times that were seen, and log the new plan with the reason."""
        ratio = self._drift.all(self._under_way())
        self._slower *= ratio
        progress, held = {}, {}
        for bracket, one in self._standing.items():
            progress[bracket] = one.now.number, self._rest(bracket, one.now, ratio)
            here = kind(one.now)
            if nodes := len(self._ours(bracket, here)):
                held[bracket] = Held(*here, nodes)
        job = slowed(self.given.job, self._slower).rest(progress)
        if job is None:
            return
        late: Literal["finish", "pay"] = "pay" if self.late == "pay" else "finish"
        made, before = self.given, self.plan
        used = Used(self._placing.clock(), self._history.bill.total(self._placing.clock()))
        for confidence in (made.confidence, *(one for one in LESS if one < made.confidence)):
            self.plan = replan(
                job, made.cloud, held=held, used=used, deadline=made.deadline, max_cost=made.max_cost,
                confidence=confidence, late=late,
            )  # fmt: skip
            if not self.plan.missed:
                break
        self.plan, self._drift = replace(self.plan, frontier=(), baselines=()), Drift()
        if self.plan.missed and not before.missed:
            then = {
                "finish": "it goes on as cheaply as it can",
                "stop": "it stops",
                "pay": "it goes on as fast as the money allows",
            }
            say(f"{self._placing.study}: {reason} {self.plan.missed} By late={self.late!r} {then[self.late]}.")
            self.stopped = self.late == "stop"
        self._log(self.plan, f"{reason} {self.plan.missed}".strip())

    def _rest(self, bracket: int, stage: PlannedStage, ratio: float) -> list[float]:
        """The units that each trial of a stage still has to train. Trials that are yet to be drawn are included."""
        unit, placing = self._unit(self._types[stage.instance], stage.devices) * ratio, self._placing
        running = [trial for trial in placing.running if self._stage(trial) == (bracket, stage)]
        waiting = [trial for trial in placing.queue.waiting if self._stage(trial) == (bracket, stage)]
        left = [max(LEAST, self._left(trial, ratio) / unit) for trial in running]
        undrawn = self._course.undrawn(bracket, stage.number, len(self._history.trials))
        return left + [float(self._units(trial)) for trial in waiting] + [float(stage.budget)] * undrawn

    def _log(self, plan: Plan, reason: str, given: bool = False) -> None:
        cloud = plan.cloud
        prices = {offer.name: offer.price for offer in cloud.offers}
        prices |= {"head": cloud.head, "minimum": cloud.minimum, "data": cloud.data * cloud.data_price}
        if cloud.billing == "function":
            prices["function"] = 1.0
        self._placing.log(events.Planned(plain(plan), prices, reason, self._placing.clock(), given))


def slowed(job: Job, ratio: float) -> Job:
    """A job whose units take so many times as long."""
    times: Mapping[str, tuple[Times, ...]] = {
        name: tuple(
            replace(one, unit=replace(one.unit, mean=one.unit.mean * ratio, std=one.unit.std * ratio)) for one in some
        )
        for name, some in job.times.items()
    }
    return replace(job, times=times)


def plain(plan: Plan) -> dict[str, Any]:
    """A plan as the log keeps it."""
    made: dict[str, Any] = json.loads(plan.to_json())
    return made


def of_log(planned: events.Planned) -> Plan:
    """The plan that a line of the log has."""
    return Plan.from_json(json.dumps(planned.plan))


def _mean(job: Job) -> float:
    """The mean seconds of a unit, of the first type that the job has times of."""
    return next(iter(job.times.values()))[0].unit.mean


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
