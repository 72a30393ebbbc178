"""The one way from a waiting trial to a device: a scheduler is asked, and its assignments are carried out.

Every run goes this way, real or simulated, whatever its scheduler and its modes (invariant 10).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from typing import Protocol

from penstock.bundle import Bundle, BundleMode, Measured, Node, Placement
from penstock.engine.bundling import Bundling, Place
from penstock.engine.clocking import Pace
from penstock.engine.descriptions import Descriptions
from penstock.engine.elastic import Elastic
from penstock.engine.entering import Entering
from penstock.engine.following import Following
from penstock.engine.holdings import Holdings
from penstock.engine.packing import Packs
from penstock.engine.queue import Queue
from penstock.engine.sharded import Shards
from penstock.engine.suspects import Suspects
from penstock.errors import StudyError
from penstock.executors.base import Executor
from penstock.log import events
from penstock.log.events import Event
from penstock.log.history import History, TrialRecord
from penstock.log.turns import Turn
from penstock.scheduling.base import Assignment, Goal, Scheduler, View
from penstock.scheduling.grouping import by_position
from penstock.scheduling.growing import Growing
from penstock.scheduling.nodes import together
from penstock.scheduling.packs import Packing
from penstock.trial import Later, StateRef

SHARED: tuple[BundleMode, ...] = ("fused", "packed", "processes")  # modes in which a trial's death may end others
MANY = 64  # with more devices a decision takes long, so none is made while trials move and none waits


def nothing_later(group: str) -> tuple[Later, ...]:
    """No rungs are known to follow a group."""
    return ()


class Keeper(Protocol):
    """Knows the states that there are."""

    def intact(self, state: StateRef) -> bool:
        """Whether a state is there and whole."""

    def tell(self, record: TrialRecord, lost: StateRef, begins: str) -> None:
        """Say which trial lost its state, and how it goes on."""


class Placing:
    """The waiting and running trials, and the orders to the executor; ``log`` takes an event before it takes effect."""

    def __init__(
        self,
        executor: Executor,
        history: History,
        schedule: Scheduler,
        log: Callable[[Event], None],
        clock: Callable[[], float],
        keeper: Keeper,
        *,
        pace: Pace | None = None,
        spreads: bool = False,
        growing: Growing | None = None,
        goal: Goal = "end",
        shards: int = 1,
        later: Callable[[str], tuple[Later, ...]] = nothing_later,
        study: str = "",
        own: Collection[str] | None = None,
        packing: Packing | None = None,
        following: Following | None = None,
    ) -> None:
        self.executor, self.history, self.schedule = executor, history, schedule
        self.log, self.clock, self.keeper = log, clock, keeper
        self.pace, self.goal, self.study = pace or Pace(), goal, study
        self.following = following  # the plan that decides which nodes there are, and which trials have them
        if following is not None:
            following.join(self)
        self._own = own  # the devices that are this study's, where the executor serves others too
        self.suspects = Suspects()
        self.descriptions = Descriptions(
            lambda configs, trials: executor.describe(
                configs, train=False, trials=trials, study=study, **self._variants(trials)
            ),
            warns=self.pace.model.sharing != "never",
        )
        self.shards = Shards(shards) if shards > 1 else None
        self.packs = Packs(self, packing if packing and packing.mode in executor.modes else None)
        width, features = shards if shards > 1 else 0, self.packs.features
        self.queue = Queue(history, self.descriptions, self.pace, self.suspects, later, width, features)
        self.bundling = Bundling(self._declare, clock, self.pace, study)
        self.running = self.bundling.running  # the bundle of each trial that runs
        self.entering = Entering(self)
        self.elastic = Elastic(self, growing or Growing(), spreads=spreads)
        self.nodes: tuple[Node, ...] = ()  # that are paid for
        self.changed = True
        self._cut_off: dict[int, Turn] = {}  # trials that ran when the last driver ended, until they are placed

    def _variants(self, trials: Sequence[int]) -> dict[str, list[str]]:
        """The variants of some trials, where the study has several."""
        found = [self.history.trials[trial].variant for trial in trials]
        return {"variants": found} if any(found) else {}

    @property
    def waiting(self) -> bool:
        """Whether a trial waits."""
        return bool(self.queue.waiting)

    def _declare(self, bundle: Bundle) -> None:
        self.executor.place(replace(bundle, threads=self.history.threads))

    # Trials and devices that come and go

    def ask(self, record: TrialRecord, *, moved: Place | None = None) -> None:
        """Queue a trial for devices; a trial that is still in its bundle asks again when it leaves."""
        if record.number in self.running:
            return
        there = None if moved is None else self.bundling.devices.get(moved.devices[0])
        self.queue.add(record, moved=moved is not None, type="" if there is None else there.type)
        self.changed = True

    def left(self, trial: int) -> Placement:
        """A trial has left its bundle; gives its placement there."""
        self.changed = True
        return self.bundling.left(trial)

    def look(self) -> None:
        """See which devices and nodes there are, and log them where they have changed."""
        devices = {device.name: device for device in self.executor.devices() if self.owns(device.name)}
        nodes = tuple(self.executor.nodes()) if self._own is None else ()
        if devices == self.bundling.devices and nodes == self.nodes:
            return
        self.pace.look(devices)
        self.nodes = nodes
        used = self.clock() - self.executor.now() if nodes else 0.0  # the seconds that earlier drivers used
        paid = tuple({**vars(node), "since": used + node.since} for node in nodes)
        self.log(events.Devices(tuple(asdict(device) for device in devices.values()), self.clock(), paid))
        self.bundling.look(devices)
        self.changed = True

    def owns(self, device: str) -> bool:
        """Whether the study may use a device: any, unless it was opened with some of them."""
        return self._own is None or device in self._own

    def lose(self, device: str) -> None:
        """A device is gone, or was gone and is back already. Events about the trials that run there follow.

        Until then a scheduler does not see these trials: there is nothing to decide about them.
        """
        self.bundling.lose(device)
        self.changed = True
        self.look()

    def measured(self, event: Measured) -> list[str]:
        """Take a worker's measurement; gives notes on values that were smoothed or cut."""
        said = self.pace.measured(event)
        self.changed = True
        if event.kind == "scaling":
            self.elastic.settle(event.signature)
        elif event.kind == "packing":
            self.packs.measured(event)
        elif event.kind == "sharing":
            if event.way == "solo" and event.size == 1:
                self.descriptions.failed(event.signature, event.reason)
            size = self.pace.size(event.signature, event.device)
            self.bundling.shrink(event.signature, size or event.size, self.pace.alike(event.device))
        return said

    def blames(self, trial: int, *, died: bool, alone: bool = False) -> bool:
        """Whether a failed trial is at fault: it is not where its device was lost, or where it died with other trials.

        Trials that died together are suspects, until the trial that kills its worker is alone in a bundle. A trial that
        died ``alone`` shared its process with none.
        """
        place = self.running[trial]
        if trial in self.bundling.lost:
            return False
        if not died or alone or place.mode not in SHARED or (len(place.members) == 1 and not place.torn):
            return True
        place.torn = True  # by the time the last of these deaths is reported, its trial is alone here
        self.suspects.fell(place.name, trial)
        return False

    def acquit(self, trial: int) -> None:
        """A suspect that reports is no suspect: it may be fused with any other trial of its signature again."""
        if self.suspects.half(trial):
            self.suspects.acquit(trial)
            self.bundling.relabel(trial, self.descriptions.of(trial).signature or "")
            self.changed = True

    def tell_solo(self, *, last: bool = False) -> None:
        """Log how many trials train solo and why, where that is new."""
        if said := self.descriptions.news(last=last):
            self.log(events.Measured(events.SOLO, "", "sharing", {}, 1, said, "solo", self.clock()))

    def take_up(self) -> None:
        """Queue every trial that the log leaves waiting or running."""
        self.queue.take_up()
        self._cut_off = dict(self.history.turns.running)
        self.changed = True

    # Placing

    def place(self) -> None:
        """Carry out the scheduler's assignments; without devices, every trial waits until a device comes."""
        if self.following is not None:
            self.following.look()
        changed = self.changed
        if self.bundling.devices:
            if self._cut_off:
                self._form_again()
            self.elastic.enter()
            while self.changed and (self.waiting or self.running):
                self._decide()
                if self.running:
                    break  # otherwise every trial that was to begin has failed, and others may have come
        if self.following is not None:
            self.following.request(changed=changed)
        elif changed and self.executor.flexible and self._own is None:
            self.elastic.request()

    def _form_again(self) -> None:
        """On one device, form the bundle again that was cut off: the same trials in their order, from their last state.

        So reports come in the order in which they would have come (invariant 4). On several devices that order depends
        on the clock in any case. A trial that has reported its budget is still there when others are placed, and leaves
        then: that is the order of a run that is not cut off.
        """
        cut_off, self._cut_off = self._cut_off, {}
        turns, devices = self.history.turns, self.bundling.devices
        leaving, there, formed = list(turns.leaving), list[int](), dict[str, Place]()
        self.queue.describe(devices.values(), cut_off)
        for trial, turn in cut_off.items():
            one = Assignment(trial, turn.devices, turn.share, packed=self.packs.forced)
            bytes = self.queue.waiting[trial].bytes
            alike = len(devices) == 1 and set(turn.devices) == devices.keys() and self.bundling.fits(one, bytes)
            if trial in leaving:
                demand = self.queue.pop(trial)
                if alike:
                    self.bundling.enter(self.entering.bundle(one), demand, self._done(trial), one)
                    self.running[trial].leaving.add(trial)
                    there.append(trial)
            elif alike and (place := self.entering.enter(one)) is not None:
                formed[place.name] = place
        for place in formed.values():
            self.bundling.declare(place)
        if there:
            self._decide()
        for trial in there:
            self.left(trial)
        turns.settle()
        for trial in leaving:
            if self.history.trials[trial].status == "waiting":
                self.ask(self.history.trials[trial])

    def _done(self, trial: int) -> Placement:
        record = self.history.trials[trial]
        return Placement(trial, record.attempt, record.config, record.reported)

    def _decide(self) -> None:
        bundling = self.bundling
        if bundling.moving and not self.waiting and len(bundling.devices) > MANY:
            return  # once the moving trials have left, all is decided anew
        self.changed = False
        if self.shards is not None and self.waiting:
            wide = [bool(demand.width) for demand in self.queue.waiting.values()]
            if not self.shards.enough(bundling.devices, self.executor, waits=any(wide)) and all(wide):
                return
        self.queue.describe(bundling.devices.values())
        self.tell_solo()
        if bundling.room or (self.waiting and self.packs.any):
            self._assign()
        if self.following is not None:
            return  # the plan's nodes may be yet to come, and it leaves no device to deal
        if self.waiting:
            self.elastic.give_back()
        else:
            self.elastic.use_idle()
        if not self.running and self.waiting and not self.changed:
            raise StudyError(
                f"{self.schedule.__name__} gives nothing that fits to any of the {len(self.queue.waiting)} trials that "
                f"wait, although nothing runs on the {len(bundling.devices)} devices."
            )

    def _assign(self) -> None:
        """Ask the scheduler, and carry out its assignments."""
        bundling, demands = self.bundling, self.queue.described(but=self.elastic.destined)
        view, speed = self.view(), self.pace.speed()
        made = self.schedule(view, demands, speed) if bundling.room else []
        if self.following is None:  # the plan's nodes are not exchanged among trials
            made = together(by_position(made, demands), bundling.assigned, bundling.devices)
            made = self.elastic.on_the_way(view, demands, made, speed)
        made = self.packs.join(view, made, demands, speed)
        moved = [self.running[one.trial] for one in made if one.trial in self.running and bundling.move(one.trial)]
        begun = self.entering.start([one for one in made if one.trial in self.queue.waiting])
        for place in dict.fromkeys([*moved, *begun]):
            bundling.declare(place)

    # For schedulers

    def view(self) -> View:
        """The devices, their room and the running trials, as a scheduler sees them."""
        bundling = self.bundling
        return View(
            bundling.devices,
            Holdings(self),
            bundling.room,
            bundling.kinds,
            unlike="processes" in self.executor.modes and not self.packs.forced,
            apart=self.elastic.apart,
            goal=self.goal,
        )
