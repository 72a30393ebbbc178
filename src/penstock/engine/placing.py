"""What goes down: who waits, who runs where, and the bundles that an executor is told to hold.

Assignments become bundles. Trials with parts of one device are one bundle, fused where they are of one signature and
processes where not; a whole device is solo, several are distributed. On executors whose trials can be fused for real
``scheduling.grouping`` gathers them by signature, in bundles as large as was measured to pay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

from penstock.bundle import Bundle, BundleMode, Description, Device, Placement
from penstock.engine.clocking import Pace
from penstock.engine.fusing import Fusing
from penstock.engine.sharded import Sharding
from penstock.engine.spreading import Spreading, together
from penstock.errors import StudyError
from penstock.executors.base import Executor
from penstock.log import events
from penstock.log.events import Event
from penstock.log.history import History, TrialRecord
from penstock.scheduling import grouping
from penstock.scheduling.base import FULL, Assignment, Demand, Holding, Room, Scheduler, View, room
from penstock.scheduling.company import alike_together
from penstock.scheduling.growing import Growing
from penstock.trial import Config, StateRef

MANY = 64  # devices, of which not every change is looked at while trials move


@dataclass(eq=False)
class Place:
    """A bundle as it should be, and which of its trials are to leave it."""

    name: str
    devices: tuple[str, ...]
    mode: BundleMode
    signature: str
    size: int | None = None
    reason: str = ""
    members: dict[int, Placement] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)
    torn: bool = False  # somebody died here who was not alone
    measure: bool = False  # what several devices give
    lent: int = 0  # of its devices, which go back to who waits

    @property
    def share(self) -> float:
        """What each of its trials has of the devices now: what others do not use is its own."""
        return float(len(self.devices)) if len(self.devices) > 1 else 1 / len(self.members)


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
        fusing: Fusing | None = None,
        pace: Pace | None = None,
        growing: Growing | None = None,
        shards: int = 1,
    ) -> None:
        self.executor, self.history, self.schedule = executor, history, schedule
        self.log, self.clock, self.intact = log, clock, intact
        self.fusing, self.pace = fusing, pace or Pace()
        self.spreading = Spreading(self, growing or Growing())
        self.sharding = Sharding(self, shards) if shards > 1 else None
        self.waiting: dict[int, Demand] = {}
        self.running: dict[int, Place] = {}
        self.asked = 0  # how often a trial was queued
        self.places = 0  # how many bundles there have been
        self.devices: dict[str, Device] = {}
        self.on: dict[str, dict[int, Assignment]] = {}  # who has a part of each device
        self._room: dict[str, Room] = {}
        self._demands: dict[int, Demand] = {}  # of those that run, as they began
        self.assigned: dict[int, Assignment] = {}
        self._begun: dict[int, float] = {}  # the clock when those that run were placed
        self._described: dict[int, tuple[Config, Description]] = {}
        self.moving: set[int] = set()  # trials that are to leave for other devices
        self._lost: set[int] = set()  # trials whose device was lost under them
        self._new: set[int] = set()  # trials that wait and were not described yet
        self._known: dict[int, str] = {}  # the signatures that the speed model was told
        self.changed = True

    # Who waits, who leaves, and which devices there are

    def queue(self, record: TrialRecord, *, moved: Place | None = None) -> None:
        """A trial waits for devices; one that still leaves its bundle is queued when it has left.

        One that is ``moved`` out of a bundle is to have what suits those that are there, whoever may follow, and
        devices of the same type.
        """
        if record.number in self.running:
            return
        self.asked += 1
        units = record.granted - record.reported
        self.waiting[record.number] = Demand(
            record.number,
            record.group,
            units,
            self.asked,
            record.priority,
            self.history.weights.get(record.group, 1.0),
            open=record.open and moved is None,
            type="" if moved is None or moved.devices[0] not in self.devices else self.devices[moved.devices[0]].type,
        )
        if self.pace.learns:
            self._new.add(record.number)
        self.changed = True

    def left(self, trial: int) -> Placement:
        """A trial is no longer in its bundle."""
        place = self.running.pop(trial)
        placement = place.members.pop(trial)
        del self._begun[trial]
        place.leaving.discard(trial)
        self.moving.discard(trial)
        self._lost.discard(trial)
        self.pace.left(trial, place.members, self.clock())
        if self._demands.pop(trial, None) is not None:
            self.assigned.pop(trial, None)
            for name in place.devices:
                self.on[name].pop(trial, None)
                self._measure(name)
        self.changed = True
        return placement

    def look(self) -> None:
        """See which devices there are, and log it where that changed."""
        devices = {device.name: device for device in self.executor.devices()}
        if devices == self.devices:
            return
        self.devices = devices
        self.pace.look(devices)
        if self.fusing is not None:
            self.fusing.look(devices.values())
        self.log(events.Devices(tuple(asdict(device) for device in devices.values()), self.clock()))
        for name in devices:
            self.on.setdefault(name, {})
        for name in self.on:
            self._measure(name)
        self.changed = True

    def lose(self, device: str) -> None:
        """A device is gone; it may be back already. Who runs there has no part of it, and is told of later.

        A scheduler is not shown them: there is nothing to decide.
        """
        for trial in [trial for trial, place in self.running.items() if device in place.devices]:
            self._lost.add(trial)
            self.assigned.pop(trial, None)
            self.on[device].pop(trial, None)
        if device in self.on:
            self._measure(device)
        self.changed = True
        self.look()

    def blames(self, trial: int, *, died: bool) -> bool:
        """Whether a running trial's failure is its own: not where its device was lost, nor where it died with others.

        Those are suspects then, until the one that kills its worker is alone with it.
        """
        place = self.running[trial]
        if trial in self._lost:
            return False
        if not died or self.fusing is None or (len(place.members) == 1 and not place.torn):
            return True
        place.torn = True  # the last of them that is told of is alone here by then
        self.fusing.suspects.fell(place.name, trial)
        return False

    def acquit(self, trial: int) -> None:
        """A trial came further: it may be with anybody again."""
        if self.fusing is not None:
            self.fusing.suspects.acquit(trial)

    def _measure(self, name: str) -> None:
        """What is left of a device, counted anew."""
        there = [Holding(self._demands[trial], one) for trial, one in self.on[name].items()]
        left = room({name: self.devices[name]}, there) if name in self.devices else {}
        if left:
            self._room.update(left)
        else:
            self._room.pop(name, None)

    # Placing

    def place(self) -> None:
        """Carry out what the scheduler assigns; without devices everybody waits until one comes."""
        changed = self.changed
        if self.devices:
            self.spreading.enter()
            if self.sharding is not None:
                self.sharding.place()
            elif self.fusing is None:
                self._place_scheduled()
            else:
                self._place_fused(self.fusing)
        if changed and self.executor.flexible:
            self.spreading.request()

    def _place_scheduled(self) -> None:
        if not self.changed or not (self.waiting or self.running):
            return
        if self.moving and not self.waiting and len(self.devices) > MANY:
            return  # who is to move comes first; then all is decided anew
        self.changed = False
        self._describe()
        told: dict[str, Place] = {}
        made = self.schedule(self.view(), self.waiting.values(), self.pace.speed())
        if self.spreading.on:
            made = together(made, self.assigned, self.devices)
        for one in (one for one in made if one.trial in self.running):
            place = self.running[one.trial]
            if self.move(place, one.trial):
                told[place.name] = place
        for one in self._together([one for one in made if one.trial in self.waiting and self._fits(one)]):
            if self._fits(one) and (entered := self._enter(one)) is not None:
                told[entered.name] = entered
        for place in told.values():
            self.declare(place)
        if self.waiting:
            self.spreading.give_back()
        elif not self.moving:
            self.spreading.use_idle()
        if not self.running and self.waiting and self.devices:
            raise StudyError(
                f"{self.schedule.__name__} gives nothing that fits to any of the {len(self.waiting)} trials that wait, "
                f"although nothing runs on the {len(self.devices)} devices."
            )

    def move(self, place: Place, trial: int) -> bool:
        """A trial is to leave at its next boundary, but not in the instant in which it came: nobody only moves."""
        if trial in place.leaving or self.clock() <= self._begun[trial]:
            return False
        place.leaving.add(trial)
        self.moving.add(trial)
        return True

    def _together(self, made: list[Assignment]) -> list[Assignment]:
        """Trials of one signature share a device, where several start at once."""
        if sum(one.share < 1 for one in made) < 2:
            return made
        signatures = {one.trial: self._signature(one.trial) for one in made}
        bytes = {one.trial: self.waiting[one.trial].bytes for one in made}
        there = {name: self._signature(next(iter(trials))) for name, trials in self.on.items() if trials}
        return alike_together(made, signatures, bytes, self.devices, self._room, there)

    def _fits(self, assignment: Assignment) -> bool:
        """Whether its devices have room already: a trial that is moved leaves them at its next boundary."""
        share, bytes = min(1.0, assignment.share) - FULL, self.waiting[assignment.trial].bytes
        left = [self._room.get(name, Room(0.0, 0)) for name in assignment.devices]
        return all(one.share >= share and one.bytes >= bytes for one in left)

    def _enter(self, assignment: Assignment) -> Place | None:
        """The bundle that a trial enters for an assignment: that of its device where it has a part of one."""
        trial, devices = assignment.trial, assignment.devices
        signature = self._signature(trial)
        if assignment.share >= 1:
            place = self.make(devices, "solo" if len(devices) == 1 else "distributed", signature)
        else:
            others = self.on[devices[0]]
            place = self.running[next(iter(others))] if others else self.make(devices, "fused", signature)
            if place.signature != signature or not signature:
                place.mode = "processes"
        return place if self.begin(place, trial, assignment.share) else None

    def _describe(self) -> None:
        """Learn what those that wait are like, where their config is new."""
        asked = sorted(self._new & self.waiting.keys())
        self._new.clear()
        configs = {trial: self.history.trials[trial].config for trial in asked}
        new = {t: c for t, c in configs.items() if t not in self._described or self._described[t][0] != c}
        descriptions = self.executor.describe(list(new.values()), train=False) if new else []
        for (trial, config), description in zip(new.items(), descriptions, strict=True):
            self._described[trial] = (config, description)
            self.pace.know(trial, description.signature or "")
        for trial in asked:
            bytes = self._described[trial][1].bytes
            if bytes:
                self.waiting[trial] = replace(self.waiting[trial], bytes=bytes)

    def _signature(self, trial: int) -> str:
        return self._described[trial][1].signature or "" if trial in self._described else ""

    def _place_fused(self, fusing: Fusing) -> None:
        """Trials of one signature share a device, in bundles as large as was measured to pay."""
        if self.waiting:
            self._group(fusing)
        if self.changed:
            self.changed = False
            self.spreading.resize(fusing)

    def _group(self, fusing: Fusing) -> None:
        fusing.suspects.bisect()
        there = {place.name: place for place in self.bundles() if place.devices[0] in self.devices}
        taken = {name for place in there.values() for name in place.devices[1:]}
        taken.update(name for destiny in self.spreading.destined.values() for name in destiny.devices)
        devices = [name for name in self.devices if name not in taken]
        running = [
            grouping.Running(p.name, p.devices[0], p.signature or None, len(p.members), fusing.suspects.half(p.members))
            for p in there.values()
        ]
        if len(there) >= len(devices) and not any(self._open(place, fusing) for place in there.values()):
            return
        fusing.describe([self.history.trials[trial] for trial in self.waiting])
        for reason in fusing.refusals():
            self.log(events.Measured("", "", "sharing", {}, 1, reason, "solo", self.clock()))
        destined = self.spreading.destined
        waiting = [self._candidate(demand, fusing) for trial, demand in self.waiting.items() if trial not in destined]
        for gathering in grouping.group(devices, running, waiting, fusing.limit):
            if gathering.bundle is not None:
                place = there[gathering.bundle]
            else:
                signature = gathering.signature or ""
                size = fusing.size(signature, gathering.device) if signature else 1
                fused = len(gathering.trials) > 1 if size is None else size > 1  # a lone trial shows nothing of fusing
                mode: BundleMode = "fused" if fused else "solo"
                place = self.make((gathering.device,), mode, signature if fused else "", size)
                place.reason = fusing.reason(signature, gathering.device) if fused else ""
            share = 1 / (len(place.members) + len(gathering.trials))
            for trial in gathering.trials:
                self._know(trial, fusing.of(trial).signature or "")
                self.begin(place, trial, share)
            self.declare(place)

    def _know(self, trial: int, signature: str) -> None:
        if self.pace.learns and self._known.get(trial) != signature:
            self._known[trial] = signature
            self.pace.know(trial, signature)

    def _candidate(self, demand: Demand, fusing: Fusing) -> grouping.Candidate:
        record, description = self.history.trials[demand.trial], fusing.of(demand.trial)
        state = record.state or record.start
        position = (0, 0) if state is None else (state.unit, state.step)
        half = fusing.suspects.half([demand.trial])
        return grouping.Candidate(
            demand.trial, description.signature, position, description.batch_size, demand.asked, half
        )

    def _open(self, place: Place, fusing: Fusing) -> bool:
        room = fusing.limit(place.signature, place.devices[0]) if place.signature else 1
        return place.mode == "fused" and len(place.members) < room

    def make(self, devices: tuple[str, ...], mode: BundleMode, signature: str, size: int | None = None) -> Place:
        self.places += 1
        return Place(f"bundle {self.places}", devices, mode, signature, size)

    def begin(self, place: Place, trial: int, share: float) -> bool:
        """Log that a trial enters a bundle; not where its state is gone for good."""
        demand = self.waiting.pop(trial)
        self.spreading.destined.pop(trial, None)
        record = self.history.trials[trial]
        state, attempt = record.state or record.start, record.attempt + 1
        if state is not None and not self.intact(state):
            if record.copied_at >= 0:
                error = f"Its state {state.file} is gone, and it had taken over another trial's: it cannot begin again."
                self.log(events.Failed(trial, record.attempt, error, True, self.clock()))
                return False
            state = None  # it begins again and repeats exactly; what it reports again is not logged twice
        self.log(events.Placed(trial, attempt, place.devices, place.mode, state, self.clock(), share))
        inherited = state is not None and state == record.start
        self.running[trial], self._begun[trial] = place, self.clock()
        place.members[trial] = Placement(trial, attempt, record.config, record.granted, state, inherited, share)
        self.pace.entered(trial, place.devices[0], place.members, self.clock())
        self._demands[trial] = demand
        self.hold(trial, Assignment(trial, place.devices, share))
        return True

    def declare(self, place: Place) -> None:
        placements = tuple(one for trial, one in place.members.items() if trial not in place.leaving)
        bundle = Bundle(
            place.name,
            place.devices,
            placements,
            place.mode,
            place.signature,
            place.size,
            place.reason,
            measure=place.measure,
        )
        if placements or place.leaving:
            self.executor.place(bundle)

    # For those who decide

    def description(self, trial: int) -> Description:
        """What is known of a trial."""
        if self.fusing is not None:
            return self.fusing.of(trial)
        return self._described[trial][1] if trial in self._described else Description()

    def demands(self) -> list[Demand]:
        """Of all that wait or run."""
        return [*self.waiting.values(), *self._demands.values()]

    def view(self) -> View:
        """What a scheduler is shown."""
        return View(self.devices, _Holdings(self), self._room)

    def hold(self, trial: int, assignment: Assignment) -> None:
        """A trial has these devices from now on."""
        self.assigned[trial] = assignment
        for name in assignment.devices:
            self.on[name][trial] = assignment
            self._measure(name)

    # Changing bundles that run

    def bundles(self) -> list[Place]:
        """Those that run, but for those whose device was lost, which end by themselves."""
        return list({place.name: place for trial, place in self.running.items() if trial not in self._lost}.values())

    def shrink(self, signature: str, size: int, devices: Collection[str]) -> None:
        """Bundles of a signature on these devices hold no more than ``size``; where 1 is best they are dissolved."""
        for place in self.bundles():
            if place.signature != signature or place.devices[0] not in devices:
                continue
            place.size = size
            if len(place.members) > size:
                place.leaving |= set(list(place.members)[size if size > 1 else 0 :])
                self.declare(place)

    def stop(self) -> None:
        """Everybody leaves."""
        for place in self.bundles():
            place.leaving |= place.members.keys()
            self.declare(place)


class _Holdings(Mapping[int, Holding]):
    """Who runs, with what is left to do now; made when it is looked at."""

    def __init__(self, placing: Placing) -> None:
        self._placing = placing

    def __getitem__(self, trial: int) -> Holding:
        one, record = self._placing, self._placing.history.trials[trial]
        units = record.granted - record.reported
        done = one.pace.done(trial, one.running[trial].share, one.clock())
        if units < 1:  # it has reported its budget, and is about to leave
            units, done = 1, 0.99
        return Holding(replace(one._demands[trial], units=units), one.assigned[trial], done)

    def __iter__(self) -> Iterator[int]:
        return iter(self._placing.assigned)

    def __len__(self) -> int:
        return len(self._placing.assigned)
