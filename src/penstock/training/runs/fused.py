"""Several trials of a signature on one worker, trained as one model."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from penstock.bundle import (
    Bundle,
    Gathering,
    Measured,
    StateSaved,
    TrialFailed,
    TrialFinished,
    TrialStopped,
    WorkerEvent,
)
from penstock.training.runs.base import SAVING, Events, Run, failed, key, out_of_memory, same
from penstock.training.runs.member import FusedMember
from penstock.training.runs.sizing import Sizing, no_memory, why_halved
from penstock.training.runs.solo import SoloRun
from penstock.trial import Metrics, Report, StateRef

if TYPE_CHECKING:
    from penstock.training.loop import Training
    from penstock.training.worker import Worker


class FusedRun(Run):
    """Several trials, trained as one model."""

    def __init__(self, worker: Worker, bundle: Bundle) -> None:
        from penstock.training.fused.bundle import Fused
        from penstock.training.runs.ahead import Ahead

        super().__init__(worker, bundle)
        self.placements = bundle.placements
        self.seen: set[tuple[int, int]] = set()  # placements that began: a declaration may name trials that have left
        self.members: list[FusedMember] = []
        self.fused = Fused(worker.recipe(bundle), max(1, len(bundle.placements)))
        self.fused.recipe.take()
        self.ahead = Ahead(worker.device)
        self.sizing = Sizing(self)

    @property
    def over(self) -> bool:
        return not self.members and all(key(placement) in self.seen for placement in self.placements)

    def declare(self, bundle: Bundle) -> bool:
        ours = bundle.name == self.bundle.name or not bundle.placements
        declared = bundle.placements if ours else ()
        for placement in self.placements:  # a trial that goes before it began has nothing to save
            if key(placement) not in self.seen and not any(same(placement, other) for other in declared):
                self.seen.add(key(placement))
                self.worker.say(placement.turned_away(self.worker.job.study))
        self.placements = declared
        if ours:
            self.bundle = bundle
        return ours

    def events(self) -> Events:
        from penstock.training.fused.audit import Differs
        from penstock.training.fused.stacked import Unfusable
        from penstock.training.fused.step import Torn

        worker, fused, recipe = self.worker, self.fused, self.fused.recipe
        if self.bundle.size is not None and self.bundle.mode == "fused":
            recipe.limit(self.bundle.size)  # the size that was declared last
        saved = time.perf_counter()
        try:
            while True:
                yield from self._change()
                if not self.members:
                    return
                if self.bundle.mode == "solo" and not worker.captures(self.bundle):
                    while self.members:  # alone, a plain step is faster
                        yield self._stop(self.members[0])
                    return
                met = fused.speeding.meet([member.training for member in self.members])
                if self.sizing.measuring is not None:
                    self.sizing.measuring.expect(len(self.members))
                elif met:
                    fused.speeding.expect(min(member.certain() for member in self.members))
                began, count = time.perf_counter(), 0
                size = recipe.size
                self.sizing.begin()
                try:
                    count = self._leap()
                    if not count:
                        fused.step(measuring=self.sizing.measuring)
                except Differs as error:
                    yield from self._not_fused(f"a step together was another than alone: {error}")
                    yield from self._send_back()
                    return
                except Unfusable as error:
                    yield from self._dissolve(str(error))
                    return
                except Torn as error:
                    half = max(1, len(self.members) // 2)
                    recipe.limit(half)
                    yield self.sizing.told(half, {}, why_halved(error, half))
                    if len(self.members) == 1:
                        recipe.refuse()
                        yield from self._give_up(error, died=True)
                    yield from self._send_back()
                    return
                except Exception:
                    yield from self._one_by_one()
                self.sizing.end(len(self.members))
                yield from self._take_out_failed()
                ended = self._in_order(fused.take_ended())
                self.steps += max(1, count) * len(self.members)
                if ended or met or (not count and self.launches):
                    self.interrupted += 1
                self._pace(began, max(1, count), bool(ended))
                rows = (yield from self._evaluate(ended)) if ended else []
                worker.account.charge([member.entry for member in self.members], time.perf_counter() - began)
                yield from self.sizing.look(size)
                due = time.perf_counter() - saved > len(self.members) * worker.trials.save_cost / SAVING
                fused.take_metrics(ended, rows)
                peak = worker.account.peak_bytes(max(fused.fast.bytes, fused.measures.bytes)) if ended else None
                yield from self._take_out_failed()
                for trial, metrics in zip(ended, rows, strict=True):
                    if trial not in fused.trials:
                        continue
                    yield self._report(trial, metrics, due, peak)
                    if trial.unit >= self._member(trial).placement.budget:
                        yield self._finish(trial)
                if due and not ended:
                    for member in self.members:
                        yield StateSaved(member.placement.trial, member.placement.attempt, self._save(member))
                if due:
                    saved = time.perf_counter()
                yield None
        except Exception as error:  # no error of Penstock's should come here; the trials are told rather than lost
            yield from self._give_up(error)
        finally:
            recipe.give_back()

    # Coming and going

    def _change(self) -> Events:
        wanted = {key(p): p for p in self.placements}
        for member in list(self.members):
            placement = wanted.get(key(member.placement))
            if placement is None:
                yield self._stop(member)
            else:
                member.grant(placement)
        entering = [p for p in wanted.values() if key(p) not in self.seen]
        for placement in entering:
            self.seen.add(key(placement))
            try:
                for _ in self.worker.trials.regrow(placement):
                    yield None
                training = self.worker.trials.begin_task(placement)
            except Exception as error:
                yield failed(placement, error)
                continue
            entry = self.worker.account.open(training.step)
            self.members.append(FusedMember(placement, training, entry, placement.state))
        unmeasured = self.fused.recipe.size is None and self.sizing.measuring is None and len(self.members) > 1
        if unmeasured and (entering or not self.fused.recipe.capturable) and not self.sizing.captures:
            yield from self.sizing.measure_alone()  # a captured step is timed as it is made
        inside = set(map(id, self.fused.trials))
        for member in [m for m in self.members if id(m.training) not in inside]:
            try:
                self.fused.enter(member.training)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                yield from self._no_room(member, error)
        if entering:
            self._align()

    def _align(self) -> None:
        """Let trials that are behind the others catch up: the trials of a bundle go on together.

        After a kill, each trial begins again at its own last state. Units of unlike lengths have no common rounds. Nor
        have the parts of a pack, where nobody waits.
        """
        positions = {id(member.training): member.position for member in self.members}
        if positions and None not in positions.values() and len({m.training.unit_length for m in self.members}) == 1:
            first = min(position for position in positions.values() if position is not None)
            self.fused.wait({trial: at - first for trial, at in positions.items() if at is not None})

    def _in_order(self, ended: list[Training]) -> list[Training]:
        """The trials that ended a unit, in the order of entering: decisions depend on the order of reports."""
        there = set(map(id, ended)) & set(map(id, self.fused.trials))
        return [member.training for member in self.members if id(member.training) in there]

    def _no_room(self, member: FusedMember, error: Exception) -> Events:
        """A trial that does not fit waits for others to leave; one that does not fit alone has failed."""
        self.members.remove(member)
        there = len(self.fused.trials)
        if not there or member.moved:
            yield replace(failed(member.placement, error), usage=member.used())
            return
        yield self.sizing.told(there, {}, no_memory(there))
        yield member.stopped()

    def _stop(self, member: FusedMember) -> TrialStopped:
        where = replace(member.placement, state=member.state)
        kept = self.sizing.dissolving and self.worker.trials.keep_begun(where, member.training)
        if any(member.training is trial for trial in self.fused.trials):
            if member.moved and not kept:
                self._save(member)
            self.fused.leave(member.training)
        self.members.remove(member)
        return member.stopped()

    def _not_fused(self, reason: str) -> Events:
        self.fused.recipe.refuse()
        told = Measured(self.bundle.signature, self.worker.device, "sharing", {}, 1, reason, "solo")
        yield replace(told, kind="refusing")  # kept first: what comes of the other ends this bundle
        yield told

    def _dissolve(self, reason: str) -> Events:
        yield from self._not_fused(reason)
        for member in list(self.members):
            if member.reported:
                yield self._stop(member)
            else:  # its steps here are trained again, as if it had never been here
                self.members.remove(member)
                yield member.stopped()

    def _send_back(self) -> Events:
        """No trial can go on from here, nor is it known whose error it is: each goes on from its last state."""
        while self.members:
            yield self.members.pop(0).stopped()

    def _give_up(self, error: Exception, *, died: bool = False) -> Events:
        """No trial can go on from here; if they ``died``, they may go on from their last states."""
        while self.members:
            member = self.members.pop()
            yield replace(failed(member.placement, error), died=died, usage=member.used())

    def _one_by_one(self) -> Events:
        """After an error, each trial takes its step alone, so that it is known whose error it is."""
        for trial, error in self.fused.step_each():
            yield self._fail(trial, error)

    def _evaluate(self, ended: list[Training]) -> Generator[WorkerEvent | Gathering | None, None, list[Metrics]]:
        """The metrics of the trials that ended a unit; after an error one by one, to know whose error it is."""
        try:
            fetch = self.fused.evaluate(ended)
            if self.fused.fast and self.worker.on_gpu:
                self.ahead.launched(0)
                yield None  # the device is still at work: other runs may go on meanwhile
            return fetch()
        except Exception as error:
            if out_of_memory(error):
                self.fused.recipe.measure_alone("a lack of memory")
        rows: list[Metrics] = []
        for trial in list(ended):
            try:
                rows.append(trial.evaluate())
            except Exception as error:
                ended.remove(trial)
                self.fused.leave(trial)
                yield self._fail(trial, error)
        return rows

    def _take_out_failed(self) -> Events:
        """Take out the trials whose schedulers raised."""
        for trial, error in self.fused.take_failed():
            if trial in self.fused.trials:
                self.fused.leave(trial)
            yield self._fail(trial, error)

    def _fail(self, trial: Training, error: Exception) -> TrialFailed:
        member = self._member(trial)
        self.members.remove(member)
        return replace(failed(member.placement, error), usage=member.used())

    def _leap(self) -> int:
        """Launch as many steps at once as can be laid down, ahead of the device; gives how many."""
        if self.sizing.measuring is not None or not self.fused.fast:
            return 0
        self.ahead.wait()
        if count := self.fused.leap(self.ahead.steps):
            self.ahead.launched(count)
        return count

    @property
    def launches(self) -> bool:
        return self.worker.on_gpu and bool(self.fused.fast)

    @property
    def busy(self) -> bool:
        return self.ahead.busy

    @property
    def together(self) -> int:
        return len(self.members)

    @property
    def certain(self) -> int:
        return min((member.certain() for member in self.members), default=0)

    def wait(self) -> None:
        self.ahead.wait()

    def put_off(self, wanted: bool) -> None:
        self.fused.recipe.audits.put_off = wanted
        self.ahead.time_anew(short=wanted)

    def step_seconds(self, launches: int) -> float | None:
        if not self.launches:
            return None
        paces = self.ahead.paces()
        # The host may have come late for one of them, as when another run's step is made.
        return median(paces) / len(self.members) if len(paces) >= launches else math.nan

    def drain(self) -> None:
        self.ahead.drain()

    @property
    def reading(self) -> Sequence[Training]:
        places = {(one.training.epoch, one.training.place): one.training for one in self.members}
        return tuple(places.values())

    @property
    def settled(self) -> bool:
        if not self.members or self.sizing.measuring is not None:
            return False
        return not self.awaits and (bool(self.fused.fast) or not self.sizing.captures)

    @property
    def awaits(self) -> bool:
        return self.fused.speeding.awaits

    @property
    def remade(self) -> int:
        return self.fused.speeding.remade

    def _pace(self, began: float, steps: int, ended: bool) -> None:
        """After each unit, see whether a faster step would pay, or does."""
        fused = self.fused
        if ended and not fused.fast:
            self.worker.synchronize()
        fused.speeding.took(time.perf_counter() - began, steps)
        if not fused.recipe.audits.put_off:  # another step would not be the one that is timed
            fused.speeding.look()
        if not ended or self.sizing.measuring is not None:
            return
        certain = min(member.certain(1) for member in self.members)  # the unit that has just ended is counted later
        paces = self.ahead.paces()
        seen = median(paces) if paces else None
        if not fused.speeding.end_unit(certain, fast=bool(fused.fast), by_device=seen):
            fused.fast.clear()

    # Events of a trial

    def _member(self, trial: Training) -> FusedMember:
        return next(member for member in self.members if member.training is trial)

    def _report(self, trial: Training, metrics: Metrics, due: bool, peak: int | None) -> Report:
        member = self._member(trial)
        p = member.placement
        state = self._save(member) if due or trial.unit >= p.budget else None
        usage = self.worker.account.usage(member.entry, trial.step, peak)
        member.has_reported()
        return Report(p.trial, trial.unit, metrics, p.attempt, state, usage)

    def _finish(self, trial: Training) -> TrialFinished:
        member = self._member(trial)
        assert member.state is not None
        self.fused.leave(trial)
        self.members.remove(member)
        self.worker.trials.keep_warm(member.state, trial, None)
        return TrialFinished(member.placement.trial, member.placement.attempt)

    def _save(self, member: FusedMember) -> StateRef:
        began = time.perf_counter()
        state = self.worker.trials.save(member.placement, self.fused.state(member.training), began=began)
        member.saved(state)
        return state


def alone(worker: Worker, bundle: Bundle) -> Run:
    """The run of a trial alone: as the one row of a fused bundle, where such a step can be captured."""
    return FusedRun(worker, bundle) if worker.captures(bundle) else SoloRun(worker, bundle)
