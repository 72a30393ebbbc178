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
from typing import TYPE_CHECKING, Any, Literal

from penstock.bundle import Request
from penstock.engine.awaited import Awaited
from penstock.engine.drift import SOON, Units
from penstock.log import events
from penstock.planning.plan import Plan, PlannedStage
from penstock.planning.spec import Job, Times
from penstock.planning.standing import Course, Kind, Standing, kind, needs, time_left
from penstock.saying import say
from penstock.scheduling.planned import Berth

if TYPE_CHECKING:
    from penstock.engine.placing import Placing

Late = Literal["finish", "stop", "pay"]
LESS = (0.8, 0.5)  # confidences with which a deadline is still kept, before it is said that it cannot be


class Following:
    """Keeps a study to its ``plan``, which was made of the ``given`` one; ``late`` says what to do past a deadline."""

    def __init__(self, given: Plan, plan: Plan, late: Late = "finish") -> None:
        self.given, self.plan, self.late = given, plan, late
        # Whether the study is to end, because it cannot keep its deadline.
        self.stopped = late == "stop" and bool(plan.missed)
        self._course = Course(given)
        self._types = {offer.instance.name: offer.instance for offer in given.cloud.offers}
        self._slower = _mean(plan.job) / _mean(given.job)  # than the given plan's times, as the present plan has them
        self._units = Units(plan.job)
        self._standing: dict[int, Standing] = {}  # by bracket
        self._nodes: dict[str, Kind] = {}  # the nodes that are paid for
        self._of: dict[str, int] = {}  # the bracket that has each of them
        self._awaited = Awaited(given)
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
        return Berth(stage.devices, self._ours(bracket, kind(stage)), max(1, round(stage.at_once * stage.devices)))

    def entered(self, trial: int) -> None:
        """A trial was placed."""
        place = self._placing.running[trial]
        instance = self._placing.bundling.devices[place.devices[0]].instance or ""
        share = self._placing.bundling.assigned[trial].share
        self._units.entered(trial, self._placing.clock(), self._types[instance], share)

    def reported(self, trial: int) -> None:
        """A trial has reported a unit."""
        self._units.reported(trial, self._placing.clock())

    def look(self) -> None:
        """See where the study stands, before trials are placed; plan anew where that leaves the plan."""
        lost = self._lost()
        if not (lost or self._placing.changed or self._due <= self._placing.clock() or self._off()):
            return
        self._stand()
        came = self._came()
        reason = lost or came or self._off() or self._awaited.overdue(self._placing.clock())
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
        self._awaited.want(wanted, now)
        sizes = {here: self._types[here[0]].devices for here in wanted}
        self._placing.executor.request(
            [Request(count * sizes[here], market=here[1], instance=here[0]) for here, count in wanted.items()]
        )
        coming = [one.left - one.after.lead for one in self._standing.values() if one.after is not None]
        moments = [now + seconds for seconds in coming if seconds > 0] + self._awaited.moments()
        moments += [self._units.overlong(trial, now) for trial in self._placing.running]
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
        now = self._placing.clock()
        left = time_left(
            [self._units.left(trial, self._togo(trial), now) for trial in running],
            [self._units.waiting(trial, self._togo(trial), type, stage.devices) for trial in waiting],
            max(0, round(there) - len(running)),
            self._awaited.expected(kind(stage), now) - now,
            max(0, planned - round(there)),
        )
        return Standing(stage, self.plan.at(bracket, stage.number + 1), waits, busy, left)

    def _togo(self, trial: int) -> int:
        """The units that a trial still has to train in its stage."""
        record = self._history.trials[trial]
        return max(0, record.granted - record.reported)

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
        lost = [node for node in gone if counts[before[node]] <= self._awaited.wanted[before[node]]]
        for node in lost:
            self._awaited.lost(before[node], self._placing.clock())
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

    # Planning anew

    def _off(self) -> str:
        """Why units leave the plan, if they do."""
        now, slack = self._placing.clock(), math.inf
        if self.plan.deadline is not None and not self.plan.missed and self.plan.late > now:
            slack = (self.plan.deadline - now) / (self.plan.late - now) - 1
        return self._units.off(self._placing.running, now, slack)

    def _came(self) -> str:
        """Why nodes that came leave the plan, if they do."""
        there = {device.node for device in self._placing.bundling.devices.values()}
        return self._awaited.came({n: self._nodes[n] for n in there if n in self._nodes}, self._placing.clock())

    def _replan(self, reason: str) -> None:
        """Plan what is left with the times that were seen, and log the new plan with the reason."""
        from penstock.planning.planner import Held, Used, replan

        ratio = self._units.ratio(self._placing.running, self._placing.clock())
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
        made, before, arrival = self.given, self.plan, self.given.cloud.arrival
        cloud = replace(made.cloud, arrival=replace(arrival, mean=arrival.mean + self._awaited.lag))
        used = Used(self._placing.clock(), self._history.bill.total(self._placing.clock()))
        for confidence in (made.confidence, *(one for one in LESS if one < made.confidence)):
            self.plan = replan(
                job, cloud, held=held, used=used, deadline=made.deadline, max_cost=made.max_cost,
                confidence=confidence, late=late,
            )  # fmt: skip
            if not self.plan.missed:
                break
        self.plan = replace(self.plan, frontier=(), baselines=())
        self._units.planned(self.plan.job)
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
        unit, placing = self._units.seconds(self._types[stage.instance], stage.devices) * ratio, self._placing
        running = [trial for trial in placing.running if self._stage(trial) == (bracket, stage)]
        waiting = [trial for trial in placing.queue.waiting if self._stage(trial) == (bracket, stage)]
        left = [self._units.parts(trial, self._togo(trial), placing.clock(), unit, ratio) for trial in running]
        undrawn = self._course.undrawn(bracket, stage.number, len(self._history.trials))
        ours, devices = self._ours(bracket, kind(stage)), placing.bundling.devices
        taken = {name for trial in running for name in placing.running[trial].devices}
        # A trial that runs stays as it is: where all devices are taken, the others begin once the first of these ends.
        full = bool(taken) and all(name in taken for name, device in devices.items() if device.node in ours)
        late = min(left) if full else 0.0
        return left + [self._togo(trial) + late for trial in waiting] + [stage.budget + late] * undrawn

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
