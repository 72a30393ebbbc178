"""The one way down, from a waiting trial to a device: what the scheduler assigns becomes bundles.

A trial that is given a part of a device shares a bundle with the other trials there, fused where they are of one
signature and in processes of their own where not. A whole device is solo, several are distributed. Every run goes this
way, real or simulated, whatever its scheduler and its modes (invariant 10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace

from penstock.bundle import BundleMode, Measured, Placement
from penstock.engine.bundling import Bundling, Place
from penstock.engine.clocking import Pace
from penstock.engine.descriptions import Descriptions
from penstock.engine.elastic import Elastic
from penstock.engine.queue import Queue
from penstock.engine.sharded import Shards
from penstock.engine.suspects import Suspects
from penstock.errors import StudyError
from penstock.executors.base import Executor
from penstock.log import events
from penstock.log.events import Event
from penstock.log.history import History, TrialRecord
from penstock.scheduling.base import Assignment, Goal, Holding, Scheduler, View
from penstock.scheduling.grouping import by_position
from penstock.scheduling.growing import Growing
from penstock.scheduling.nodes import together
from penstock.trial import Later, StateRef

MANY = 64  # devices, of which not every change is looked at while trials move


def nothing_later(group: str) -> tuple[Later, ...]:
    """No rungs are known to follow a group."""
    return ()


class Placing:
    """Who waits and who runs, and what the executor is told of it; ``log`` takes a line before it takes effect."""

    def __init__(
        self,
        executor: Executor,
        history: History,
        schedule: Scheduler,
        log: Callable[[Event], None],
        clock: Callable[[], float],
        intact: Callable[[StateRef], bool],
        *,
        pace: Pace | None = None,
        spreads: bool = False,
        growing: Growing | None = None,
        goal: Goal = "end",
        shards: int = 1,
        later: Callable[[str], tuple[Later, ...]] = nothing_later,
    ) -> None:
        self.executor, self.history, self.schedule = executor, history, schedule
        self.log, self.clock, self.intact = log, clock, intact
        self.pace, self.goal = pace or Pace(), goal
        self.suspects = Suspects()
        self.descriptions = Descriptions(
            lambda configs, trials: executor.describe(configs, train=False, trials=trials),
            warns=self.pace.model.sharing != "never",
        )
        self.shards = Shards(shards) if shards > 1 else None
        self.queue = Queue(history, self.descriptions, self.pace, self.suspects, later, shards if shards > 1 else 0)
        self.bundling = Bundling(executor.place, clock, self.pace)
        self.elastic = Elastic(self, growing or Growing(), spreads=spreads)
        self.changed = True

    @property
    def waiting(self) -> bool:
        """Whether a trial waits."""
        return bool(self.queue.waiting)

    @property
    def running(self) -> dict[int, Place]:
        """The bundle of each trial that runs."""
        return self.bundling.running

    # Who comes and who goes

    def ask(self, record: TrialRecord, *, moved: Place | None = None) -> None:
        """A trial waits for devices; one that still leaves its bundle is queued when it has left."""
        if record.number in self.running:
            return
        there = None if moved is None else self.bundling.devices.get(moved.devices[0])
        self.queue.add(record, moved=moved is not None, type="" if there is None else there.type)
        self.changed = True

    def left(self, trial: int) -> Placement:
        """A trial is no longer in its bundle."""
        self.changed = True
        return self.bundling.left(trial)

    def look(self) -> None:
        """See which devices there are, and log it where that changed."""
        devices = {device.name: device for device in self.executor.devices()}
        if devices == self.bundling.devices:
            return
        self.pace.look(devices)
        self.log(events.Devices(tuple(asdict(device) for device in devices.values()), self.clock()))
        self.bundling.look(devices)
        self.changed = True

    def lose(self, device: str) -> None:
        """A device is gone; it may be back already. Trials that run there are told of later.

        A scheduler is not shown them: there is nothing to decide.
        """
        self.bundling.lose(device)
        self.changed = True
        self.look()

    def measured(self, event: Measured) -> list[str]:
        """A worker knows what sharing or spreading costs the trials of a signature; gives what was smoothed or cut."""
        said = self.pace.measured(event)
        self.changed = True
        if event.kind == "scaling":
            self.elastic.settle(event.signature)
        else:
            if event.way == "solo" and event.size == 1:
                self.descriptions.say(event.reason, logged=True)
            size = self.pace.size(event.signature, event.device)
            self.bundling.shrink(event.signature, size or event.size, self.pace.alike(event.device))
        return said

    def blames(self, trial: int, *, died: bool) -> bool:
        """Whether a running trial's failure is its own: not where its device was lost, nor where it died with others.

        Trials that died together are suspects then, until the one that kills its worker is alone with it.
        """
        place = self.running[trial]
        if trial in self.bundling.lost:
            return False
        if not died or place.mode not in ("fused", "packed") or (len(place.members) == 1 and not place.torn):
            return True
        place.torn = True  # the last of them that is told of is alone here by then
        self.suspects.fell(place.name, trial)
        return False

    def acquit(self, trial: int) -> None:
        """A running trial came further: it may be with any other of its signature again."""
        if self.suspects.half(trial):
            self.suspects.acquit(trial)
            self.bundling.relabel(trial, self.descriptions.of(trial).signature or "")
            self.changed = True

    # Placing

    def place(self) -> None:
        """Carry out what the scheduler assigns; without devices every trial waits until one comes."""
        changed = self.changed
        if self.bundling.devices:
            self.elastic.enter()
            if self.changed and (self.waiting or self.running):
                self._decide()
        if changed and self.executor.flexible:
            self.elastic.request()

    def _decide(self) -> None:
        bundling = self.bundling
        if bundling.moving and not self.waiting and len(bundling.devices) > MANY:
            return  # trials that are to move go first; then all is decided anew
        self.changed = False
        if self.shards is not None and self.waiting and not self.shards.enough(bundling.devices, self.executor):
            return
        self.queue.describe(bundling.devices.values())
        for reason in self.descriptions.refusals():
            self.log(events.Measured("", "", "sharing", {}, 1, reason, "solo", self.clock()))
        demands = self.queue.described(but=self.elastic.destined)
        made = self.schedule(self.view(), demands, self.pace.speed())
        made = together(by_position(made, demands), bundling.assigned, bundling.devices)
        moved = [self.running[one.trial] for one in made if one.trial in self.running and bundling.move(one.trial)]
        begun = self._start([one for one in made if one.trial in self.queue.waiting])
        for place in dict.fromkeys([*moved, *begun]):
            bundling.declare(place)
        if self.waiting:
            self.elastic.give_back()
        elif not bundling.moving:
            self.elastic.use_idle()
        if not self.running and self.waiting:
            raise StudyError(
                f"{self.schedule.__name__} gives nothing that fits to any of the {len(self.queue.waiting)} trials that "
                f"wait, although nothing runs on the {len(bundling.devices)} devices."
            )

    def _start(self, made: list[Assignment]) -> Iterator[Place]:
        """Begin the trials that have room now; a trial whose company is still leaving waits."""
        company: dict[str, int] = {}
        for one in made:
            for name in one.devices:
                company[name] = company.get(name, len(self.bundling.on(name))) + 1
        for one in made:
            if self.bundling.fits(one, self.queue.waiting[one.trial].bytes):
                lonely = company[one.devices[0]] == 1 and self._size(one) is None
                # A lone trial shows nothing of fusing: it has its device, until there is company to measure with.
                place = self.enter(replace(one, share=1.0) if one.share < 1 and lonely else one)
                if place is not None:
                    yield place

    def _size(self, one: Assignment) -> int | None:
        return self.pace.size(self.descriptions.of(one.trial).signature or "", one.devices[0])

    def enter(self, one: Assignment) -> Place | None:
        """Let a trial into the bundle that its assignment means; None where its state is gone for good."""
        signature = self.descriptions.of(one.trial).signature or ""
        others = self.bundling.on(one.devices[0])
        if one.share >= 1:
            mode: BundleMode = "solo" if len(one.devices) == 1 else "distributed"
            place = self.bundling.make(one.devices, mode, signature if mode == "distributed" else "")
            place.size = 1
            if one.measure:
                place.measure, few = True, self.descriptions.of(one.trial).batch_size
                place.reason = f"a batch of {few} has no more parts" if few == len(one.devices) else ""
        elif others:
            place = self.running[next(iter(others))]
            if place.signature != signature or not signature:
                place.mode = "processes"
        else:
            place = self.bundling.make(one.devices, "fused" if signature else "processes", signature)
            place.size = self._size(one)
            place.reason = self.pace.reason(signature, one.devices[0])
        return place if self._begin(place, one) else None

    def _begin(self, place: Place, one: Assignment) -> bool:
        """Log that a trial enters a bundle; not where its state is gone for good."""
        demand = self.queue.pop(one.trial)
        self.elastic.destined.pop(one.trial, None)
        record = self.history.trials[one.trial]
        state, attempt = record.state or record.start, record.attempt + 1
        if state is not None and not self.intact(state):
            if record.copied_at >= 0:
                error = f"Its state {state.file} is gone, and it had taken over another trial's: it cannot begin again."
                self.log(events.Failed(one.trial, record.attempt, error, True, self.clock()))
                return False
            state = None  # it begins again and repeats exactly; what it reports again is not logged twice
        self.log(
            events.Placed(one.trial, attempt, place.devices, place.mode, state, self.clock(), one.share, record.variant)
        )
        inherited = state is not None and state == record.start
        placement = Placement(
            one.trial, attempt, record.config, record.granted, state, inherited, one.share, record.variant
        )
        self.bundling.enter(place, demand, placement, one)
        if one.measure:
            self.pace.unlike(one.trial)
        return True

    # For schedulers

    def view(self) -> View:
        """What a scheduler is shown."""
        bundling = self.bundling
        return View(
            bundling.devices,
            _Holdings(self),
            bundling.room,
            bundling.kinds,
            unlike="processes" in self.executor.modes,
            apart=self.elastic.apart,
            goal=self.goal,
        )


class _Holdings(Mapping[int, Holding]):
    """Who runs, with what is left to do now; made when it is looked at."""

    def __init__(self, placing: Placing) -> None:
        self._placing, self._bundling = placing, placing.bundling

    def __getitem__(self, trial: int) -> Holding:
        placing, bundling = self._placing, self._bundling
        record, place = placing.history.trials[trial], bundling.running[trial]
        units = record.granted - record.reported
        done = placing.pace.done(trial, place.share, placing.clock())
        if units < 1:  # it has reported its budget, and is about to leave
            units, done = 1, 0.99
        return Holding(replace(bundling.demands[trial], units=units), bundling.assigned[trial], done, place.share)

    def __iter__(self) -> Iterator[int]:
        return iter(self._bundling.assigned)

    def __len__(self) -> int:
        return len(self._bundling.assigned)
