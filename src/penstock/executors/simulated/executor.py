"""Any number of devices on a virtual clock, for the same engine, algorithms and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from penstock.bundle import (
    Bundle,
    BundleMode,
    Description,
    Device,
    Job,
    Metered,
    Node,
    Placement,
    Request,
    TrialFailed,
    TrialFinished,
)
from penstock.errors import PenstockError, StudyError
from penstock.executors.base import DeviceAdded, DeviceLost, Executor, ExecutorEvent, refuse_collision, refuse_twins
from penstock.executors.simulated.devices import Devices
from penstock.executors.simulated.power import Power
from penstock.executors.simulated.runs import (
    SimulatedBundle,
    SimulatedTrial,
    Source,
    measured,
    pace,
)
from penstock.executors.simulated.settings import Simulated as Simulated
from penstock.executors.simulated.sources import Sources
from penstock.speed.curve import Curve
from penstock.training.runs.base import explain
from penstock.trial import Config, Report


class SimulatedExecutor(Executor):
    """Trials that are looked up, or really trained one by one, while ``wait`` moves the clock from event to event.

    A unit takes the seconds it takes alone × the curve at its share ÷ the speed of its device. p trials on a device
    have 1/p of it each. When one enters or leaves, the others keep the part of their unit that is done and go on at
    another pace. Trials enter a bundle at once and leave it at the end of a unit; a trial whose unit begins in this
    instant leaves in this instant. There is one bundle on a device: another bundle that is placed there waits until the
    first has left.

    A fused bundle whose size is not known measures the cost of sharing, as a worker does. A distributed bundle that is
    told to measures the gain of spreading. Both measurements happen at once and take no time.
    """

    virtual = True

    def __init__(self, job: Job, settings: Simulated) -> None:
        self._settings = settings
        self.provisioning = settings.provision
        self.modes: frozenset[BundleMode] = frozenset({"solo", "fused", "packed", "distributed"})
        if settings.processes:
            self.modes |= {"processes"}
        self.flexible = self.scales = settings.most is not None or bool(settings.instances)
        self._now, self._woken = settings.opening, False
        self._urgent = False  # a measurement was made: the engine may change bundles before they begin
        self._heap: list[tuple[float, int, Callable[[Any], object], Any, int]] = []
        self._counter = count()
        self._events: list[ExecutorEvent] = []
        self._on: dict[str, SimulatedBundle] = {}  # the bundle on each device
        self._next: dict[str, SimulatedBundle] = {}  # the bundle that waits for each device
        self._studies: dict[str, Sources] = {}
        self._ended: dict[tuple[str, int], int] = {}  # the last attempt of each (study, trial) that has left
        self._unpaced: dict[SimulatedBundle, None] = {}  # bundles whose number of trials has changed in this instant
        self._devices = Devices(settings, self)
        self._power = Power(settings, self._devices.listed, self._now, job)
        self.join(job)

    def join(self, job: Job) -> None:
        refuse_twins(job, self._studies)
        self._studies[job.study] = Sources(job, self._settings)

    @property
    def concurrent(self) -> bool:
        return self._settings.packs > 1

    def devices(self) -> Sequence[Device]:
        return self._devices.listed

    def nodes(self) -> Sequence[Node]:
        return self._devices.nodes.paid()

    def instances(self) -> Collection[str]:
        return self._devices.nodes.instances

    def request(self, wanted: Sequence[Request]) -> None:
        self._devices.request(wanted)

    def now(self) -> float:
        return self._now

    def wake(self) -> None:
        self._woken = True

    def close(self) -> None:
        for run in {**self._on, **self._next}.values():
            for member in run.members.values():
                member.source.close()

    def describe(
        self,
        configs: Sequence[Config],
        *,
        train: bool,
        trials: Sequence[int] = (),
        study: str = "",
        variants: Sequence[str] = (),
    ) -> list[Description]:
        return self._studies[study].describe(configs, train=train, variants=variants)

    # The clock

    def wait(self, timeout: float | None = None) -> list[ExecutorEvent]:
        heap, events = self._heap, self._events
        end = inf if timeout is None else self._now + max(0.0, timeout)
        while not self._woken and not (events and self._urgent):
            if self._unpaced and (not heap or heap[0][0] > self._now):
                self._repace()
            if not heap:
                break
            when = heap[0][0]
            if when > self._now and (events or when > end):
                break
            _, _, action, subject, version = heappop(heap)
            if version < 0 or version == subject.version:
                self._now = when
                action(subject)
        woken, self._woken, self._urgent = self._woken, False, False
        self._events = []
        if not events and not woken:
            if end == inf:
                raise StudyError(self._devices.stuck(self._now))
            self._now = end
        return events + self._power.lines(self._on, self._now)

    @property
    def metered(self) -> bool:
        return self._power.active

    @property
    def unmetered(self) -> Mapping[str, str]:
        return self._power.unmetered

    def settle(self) -> list[Metered]:
        return self._power.settle(self._now)

    def _at(self, when: float, action: Callable[[Any], object], subject: Any, version: int = -1) -> None:
        heappush(self._heap, (when, next(self._counter), action, subject, version))

    def _say(self, event: ExecutorEvent) -> None:  # by the next ``wait``, at this instant
        self._at(self._now, lambda said: self._events.append(said), event)

    # Methods that the devices call (`Surroundings`)

    def after(self, seconds: float, action: Callable[[Any], object], subject: Any) -> None:
        """Call ``action(subject)`` when ``seconds`` have passed on the clock."""
        self._at(self._now + seconds, action, subject)

    def tell(self, event: ExecutorEvent) -> None:
        """Add an event in this instant."""
        if isinstance(event, DeviceAdded):
            self._power.added(event.device, self._now)
        elif isinstance(event, DeviceLost):
            self._power.lost(event.device.name, self._now)
        self._events.append(event)

    def idle(self, device: str) -> bool:
        """Whether no bundle is on a device or waits for it."""
        return device not in self._on and device not in self._next

    def abandon(self, device: str) -> None:
        """Fail the trials on a device that is lost."""
        for runs in (self._next, self._on):
            if device in runs:
                self._fail(runs[device], f"device {device} was lost")

    def _fail(self, run: SimulatedBundle, error: str) -> None:
        for member in run.members.values():
            member.version += 1
            member.source.close()
        for trial, attempt in (*run.members, *run.coming):
            failed = TrialFailed(trial, attempt, error, died=True, study=run.study)
            self._events.append(self._power.charged(run.members.get((trial, attempt)), failed, self._now, left=True))
            self._ended[run.study, trial] = attempt
        run.members.clear()
        run.coming.clear()
        self._vacate(run)

    # Bundles

    def place(self, bundle: Bundle) -> None:
        if unknown := [name for name in bundle.devices if name not in self._devices.known]:
            raise StudyError(f"Expected the names of simulated devices, got {', '.join(unknown)}.")
        here = list(dict.fromkeys(runs[d] for runs in (self._on, self._next) for d in bundle.devices if d in runs))
        refuse_collision(bundle, [run.study for run in here])
        ours = next((run for run in here if (run.name, run.devices) == (bundle.name, bundle.devices)), None)
        entering = self._entering(bundle, ours)
        for run in here:
            if run is not ours or not bundle.placements:
                self._dismiss(run)
        if not entering and (ours is None or not bundle.placements):
            return
        if ours is not None:
            self._change(ours, bundle, entering)
        elif gone := [name for name in bundle.devices if name not in self._devices.there]:
            for trial, attempt in entering:
                self._ended[bundle.study, trial] = attempt
                self._say(TrialFailed(trial, attempt, f"device {gone[0]} was lost", died=True, study=bundle.study))
        else:
            run = SimulatedBundle(
                bundle, min(self._settings.speeds.get(self._devices.there[d].type, 1.0) for d in bundle.devices)
            )
            run.coming = entering
            self._next.update(dict.fromkeys(run.devices, run))
            self._settle(run)

    def _entering(
        self, bundle: Bundle, ours: SimulatedBundle | None
    ) -> dict[tuple[int, int], tuple[Placement, Source, Curve]]:
        """The trials that are new here, ready to begin; a declaration may still name trials that have left."""
        entering = {}
        first = self._devices.there.get(bundle.devices[0])
        for placement in bundle.placements:
            who = placement.trial, placement.attempt
            if placement.attempt <= self._ended.get((bundle.study, placement.trial), -1):
                continue
            if ours is not None and who in ours.members:
                ours.members[who].source.extend(placement.budget)
            elif ours is None or who not in ours.coming:
                try:
                    source, curve = self._studies[bundle.study].of(placement)
                    entering[who] = placement, source, curve or self._settings.curve_of(source.signature, first)
                except PenstockError:
                    raise  # the simulation is set up wrong
                except Exception as error:
                    self._ended[bundle.study, placement.trial] = placement.attempt
                    self._say(TrialFailed(*who, explain(error), study=bundle.study))
        return entering

    def _change(self, run: SimulatedBundle, bundle: Bundle, entering: dict[tuple[int, int], Any]) -> None:
        wanted = {(p.trial, p.attempt): p for p in bundle.placements}
        run.mode, run.size = bundle.mode, bundle.size or run.size
        run.measure = run.measure or (bundle.measure and bundle.mode == "packed")
        for who, member in run.members.items():
            if who not in wanted:
                self._leave(member)
            elif member.phase != "stopping":
                member.placement, member.budget, member.leaving = wanted[who], wanted[who].budget, False
        for who in [who for who in run.coming if who not in wanted]:
            self._turn_away(run, who)
        for who, (_, source, curve) in run.coming.items():
            run.coming[who] = wanted[who], source, curve
        run.coming.update(entering)
        self._unpaced[run] = None
        self._enter(run)

    def _dismiss(self, run: SimulatedBundle) -> None:
        for who in list(run.coming):
            self._turn_away(run, who)
        for member in run.members.values():
            self._leave(member)
        if not run.members:
            self._vacate(run)

    def _turn_away(self, run: SimulatedBundle, who: tuple[int, int]) -> None:
        """Stop a trial that has not begun: there is no new state to save."""
        placement, source, _ = run.coming.pop(who)
        source.close()
        self._ended[run.study, placement.trial] = placement.attempt
        self._say(placement.turned_away(run.study))

    def _settle(self, run: SimulatedBundle) -> None:
        if any(name in self._on for name in run.devices):
            return
        for name in run.devices:
            del self._next[name]
            self._on[name] = run
        self._enter(run)

    def _enter(self, run: SimulatedBundle) -> None:
        if self._on.get(run.devices[0]) is not run or (run.members and not run.together):
            return
        for who, (placement, source, curve) in run.coming.items():
            last = self._ended.get((run.study, placement.trial), -1)
            if placement.attempt > last:  # the trial may have left in the meantime
                member = run.members[who] = SimulatedTrial(placement, source, curve, run, self._now)
                self._at(self._now + self._settings.start, self._begin, member, 0)
        run.coming.clear()
        self._unpaced[run] = None
        self._events += self._power.limit(run)
        self._measure(run)
        if not run.members:
            self._vacate(run)

    def _gone(self, member: SimulatedTrial) -> None:
        run, placement = member.run, member.placement
        del run.members[placement.trial, placement.attempt]
        self._ended[run.study, placement.trial] = placement.attempt
        member.version += 1
        member.source.close()
        self._unpaced[run] = None
        if not run.members:
            if run.coming:
                self._enter(run)
            else:
                self._vacate(run)

    def _vacate(self, run: SimulatedBundle) -> None:
        self._unpaced.pop(run, None)
        for runs in (self._on, self._next):
            for name in run.devices:
                if runs.get(name) is run:
                    del runs[name]
        for name in run.devices:
            if name in self._next:
                self._settle(self._next[name])

    # Trials

    def _begin(self, member: SimulatedTrial) -> None:
        if member.source.unit >= member.budget:
            self._events.append(TrialFinished(member.placement.trial, member.placement.attempt, member.run.study))
            self._gone(member)
            return
        used = (self._now - member.since) * member.share + member.used
        member.pace, member.share = pace(member, self._settings)
        self._unit(member)
        member.used = used

    def _unit(self, member: SimulatedTrial) -> None:
        member.phase = "training"
        member.left = left = member.source.seconds() * self._settings.factor(member.placement.trial, member.source.unit)
        member.since = member.began = now = self._now
        member.used = 0.0
        heappush(self._heap, (now + left * member.pace, next(self._counter), self._end, member, member.version))

    def _end(self, member: SimulatedTrial) -> None:
        """End a unit, or the writing of the state that goes with its report."""
        source, settings = member.source, self._settings
        if settings.save and member.phase == "training" and settings.saves(source.unit + 1, member.budget):
            member.phase = "saving"
            self._at(self._now + settings.save, self._end, member, member.version)
            return
        ended = source.end(member.budget, member.used + (self._now - member.since) * member.share)
        event = self._power.charged(member, ended, self._now, left=type(ended) is not Report)
        member.used, member.since = 0.0, self._now
        self._events.append(event)
        if type(event) is not Report:
            self._gone(member)
        elif event.unit >= member.budget or source.over:
            self._events.append(TrialFinished(event.trial, event.attempt, event.study))
            self._gone(member)
        elif member.leaving:
            self._stop(member, settings.stop)
        else:
            self._unit(member)

    def _leave(self, member: SimulatedTrial) -> None:
        state, source = member.placement.state, member.source
        member.leaving = True
        if member.phase == "starting":
            self._stop(member, 0.0)
        elif member.phase == "training" and member.began == self._now and not source.ahead:
            trained = source.unit != (0 if state is None else state.unit)
            self._stop(member, self._settings.stop if trained else 0.0)

    def _stop(self, member: SimulatedTrial, after: float) -> None:
        member.phase = "stopping"
        member.version += 1
        self._at(self._now + after, self._stopped, member, member.version)

    def _stopped(self, member: SimulatedTrial) -> None:
        self._events.append(self._power.charged(member, member.source.leave(), self._now, left=True))
        self._gone(member)

    def _repace(self) -> None:
        now = self._now
        for run in self._unpaced:
            for member in run.members.values():
                if (ends := member.repace(now, self._settings)) is not None:
                    self._at(ends, self._end, member, member.version)
        self._unpaced.clear()

    def _measure(self, run: SimulatedBundle) -> None:
        """Make the measurement that a worker would make on the first steps of a bundle."""
        if self._on.get(run.devices[0]) is not run or not run.members:
            return
        if (found := measured(run, self._settings)) is not None:
            self._events.append(found)
            self._urgent = True
