"""Several trials of a signature on one worker, trained as one model."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.bundle import Bundle, Failed, Finished, Gathering, Measured, Placement, Saved, Stopped, WorkerEvent
from penstock.training.runs.base import SAVING, Events, Run, failed, key, out_of_memory, same
from penstock.trial import Report, StateRef, Usage

if TYPE_CHECKING:
    from penstock.training.worker import Worker


@dataclass
class Member:
    """A trial of a fused bundle."""

    placement: Placement
    training: Any
    state: StateRef | None  # the last one written
    first_step: int  # after its last report
    reported: bool = False  # since it came
    seconds: float = 0.0  # of the device, since then


class FusedRun(Run):
    """Several trials, trained as one model."""

    def __init__(self, worker: Worker, bundle: Bundle) -> None:
        super().__init__(worker, bundle)
        self.placements = bundle.placements
        self.seen: set[tuple[int, int]] = set()  # who has been here: a declaration may name those that have left
        self.members: list[Member] = []

    @property
    def over(self) -> bool:
        return not self.members and all(key(placement) in self.seen for placement in self.placements)

    def declare(self, bundle: Bundle) -> bool:
        ours = bundle.name == self.bundle.name or not bundle.placements
        declared = bundle.placements if ours else ()
        for placement in self.placements:  # whoever goes before it began has nothing to save
            if key(placement) not in self.seen and not any(same(placement, other) for other in declared):
                self.seen.add(key(placement))
                self.worker.say(Stopped(placement.trial, placement.attempt, placement.state))
        self.placements = declared
        if ours:
            self.bundle = bundle
        return ours

    def events(self) -> Events:
        from penstock.training.fused.bundle import Fused, Torn
        from penstock.training.fused.stacked import Unfusable

        worker = self.worker
        recipe = worker.recipe(self.bundle)
        self.fused = Fused(recipe, max(1, len(self.placements)))
        self.measuring: Any = None
        self.paced = (0, 0.0)  # steps since the last unit, and their seconds
        self.together: list[Any] = []  # who that was
        saved = time.perf_counter()
        try:
            while True:
                yield from self._change()
                if not self.members:
                    return
                self._expect()
                if self.measuring is not None:  # who has left is not waited for
                    self.measuring.trials = min(self.measuring.trials, len(self.members))
                began = time.perf_counter()
                size = recipe.size
                try:
                    self.fused.step(measuring=self.measuring)
                except Unfusable as error:
                    yield from self._dissolve(str(error))
                    return
                except Torn as error:
                    recipe.size = max(1, len(self.members) // 2)
                    yield self._told(recipe.size, {}, _why_halved(error, recipe.size))
                    if len(self.members) == 1:
                        yield from self._give_up(error, died=True)
                    yield from self._send_back()
                    return
                except Exception:
                    yield from self._one_by_one()
                yield from self._fail_those()
                ended = [trial for trial in self.fused.take_ended() if trial in self.fused.trials]
                self._pace(began, bool(ended))
                rows = (yield from self._evaluate(ended)) if ended else []
                share = (time.perf_counter() - began) / max(1, len(self.members))
                for member in self.members:
                    member.seconds += share
                yield from self._measured(size)
                due = time.perf_counter() - saved > len(self.members) * worker.save_cost / SAVING
                self.fused.take_metrics(ended, rows)
                peak = worker.peak_bytes(sum(step.bytes for step in self.fused.fast.values())) if ended else None
                yield from self._fail_those()
                for trial, metrics in zip(ended, rows, strict=True):
                    if trial not in self.fused.trials:
                        continue
                    yield self._report(trial, metrics, due, peak)
                    if trial.unit >= self._member(trial).placement.budget:
                        yield self._finish(trial)
                if due and not ended:
                    for member in self.members:
                        yield Saved(member.placement.trial, member.placement.attempt, self._save(member))
                if due:
                    saved = time.perf_counter()
                yield None
        except Exception as error:  # nothing of ours should come here; the trials are told rather than lost
            yield from self._give_up(error)

    # Coming and going

    def _change(self) -> Events:
        wanted = {(p.trial, p.attempt): p for p in self.placements}
        for member in list(self.members):
            placement = wanted.get(key(member.placement))
            if placement is None:
                yield self._stop(member)
            else:
                member.placement = placement
        entering = [p for key, p in wanted.items() if key not in self.seen]
        for placement in entering:
            self.seen.add(key(placement))
            try:
                training = self.worker.begin(placement)
            except Exception as error:
                yield failed(placement, error)
                continue
            self.members.append(Member(placement, training, placement.state, training.step))
        if entering and self.fused.recipe.size is None and self.measuring is None and len(self.members) > 1:
            yield from self._measure_alone()
        inside = set(map(id, self.fused.trials))
        for member in [m for m in self.members if id(m.training) not in inside]:
            try:
                self.fused.enter(member.training)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                yield from self._no_room(member, error)

    def _no_room(self, member: Member, error: Exception) -> Events:
        """A trial that does not fit waits for others to leave; one that does not fit alone has failed."""
        self.members.remove(member)
        p, there = member.placement, len(self.fused.trials)
        if not there or member.training.step != (0 if p.state is None else p.state.step):
            yield failed(p, error)
            return
        yield self._told(there, {}, _no_memory(there))
        yield Stopped(p.trial, p.attempt, p.state)

    def _stop(self, member: Member) -> Stopped:
        if any(member.training is trial for trial in self.fused.trials):
            if member.training.step != (0 if member.state is None else member.state.step):
                self._save(member)
            self.fused.leave(member.training)
        self.members.remove(member)
        return Stopped(member.placement.trial, member.placement.attempt, member.state)

    def _dissolve(self, reason: str) -> Events:
        yield Measured(self.bundle.signature, self.worker.device, "sharing", {}, 1, reason, "solo")
        for member in list(self.members):
            if member.reported:
                yield self._stop(member)
            else:  # what it trained meanwhile is trained again, as if it had never been here
                self.members.remove(member)
                yield Stopped(member.placement.trial, member.placement.attempt, member.state)

    def _send_back(self) -> Events:
        """Nobody can go on from here, and it is not known whose error it is: each goes on from its last state."""
        while self.members:
            member = self.members.pop(0)
            yield Stopped(member.placement.trial, member.placement.attempt, member.state)

    def _give_up(self, error: Exception, *, died: bool = False) -> Events:
        """Nobody can go on from here; whoever ``died`` goes on from its last state."""
        while self.members:
            yield replace(failed(self.members.pop().placement, error), died=died)

    def _one_by_one(self) -> Events:
        """After an error, each trial takes its step alone, so that it is known whose error it is."""
        for trial, error in self.fused.step_each():
            yield self._fail(trial, error)

    def _evaluate(self, ended: list[Any]) -> Generator[WorkerEvent | Gathering | None, None, list[Any]]:
        """The metrics of those that have ended a unit; one by one after an error, so that it is known whose it is."""
        try:
            return self.fused.evaluate(ended)
        except Exception as error:
            if out_of_memory(error):
                self.fused.recipe.alone = "a lack of memory"
        rows = []
        for trial in list(ended):
            try:
                rows.append(trial.evaluate())
            except Exception as error:
                ended.remove(trial)
                self.fused.leave(trial)
                yield self._fail(trial, error)
        return rows

    def _fail_those(self) -> Events:
        """Take out the trials whose schedulers raised."""
        for trial, error in self.fused.take_failed():
            if trial in self.fused.trials:
                self.fused.leave(trial)
            yield self._fail(trial, error)

    def _fail(self, trial: Any, error: Exception) -> Failed:
        member = self._member(trial)
        self.members.remove(member)
        return failed(member.placement, error)

    # Measuring

    def _measure_alone(self) -> Events:
        """The first trial takes a few steps alone before it joins the others."""
        from penstock.training.fused.measuring import ALONE, Measuring

        self.measuring = Measuring(len(self.members), self.worker.free_bytes())
        if self.bundle.size is not None:
            self.fused.recipe.size, self.measuring = self.bundle.size, None
            return
        first = self.members[0]
        if any(first.training is trial for trial in self.fused.trials):  # it was here alone until now
            self.fused.leave(first.training)
        for _ in range(ALONE):
            if any(first.training is ended for ended in self.fused.ended):
                break  # a unit has ended, which the next boundary reports
            began = time.perf_counter()
            try:
                self.fused.step_alone(first.training)
                for _, error in self.fused.take_failed():  # its scheduler's
                    raise error
            except Exception as error:
                self.members.remove(first)
                self.measuring = None
                yield failed(first.placement, error)
                if len(self.members) > 1:
                    yield from self._measure_alone()
                return
            self.worker.synchronize()
            self.measuring.took(1, time.perf_counter() - began, None)
            first.seconds += time.perf_counter() - began
            yield None

    def _measured(self, size: int | None) -> Events:
        """Tell what was measured, once it is; and that memory ran out."""
        recipe = self.fused.recipe
        if self.measuring is not None and self.measuring.done:
            found, self.measuring = self.measuring, None
            recipe.size = max(2, found.size)
            yield self._told(found.size, found.seconds, found.reason(self._way()))
        elif recipe.size is not None and (recipe.size != size or recipe.told != (self._way(), recipe.alone)):
            reason = recipe.reason or self.bundle.reason
            if recipe.size != size:
                reason = _no_memory(recipe.size)
            yield self._told(recipe.size, {}, reason)

    def _told(self, size: int, seconds: dict[int, float], reason: str) -> Measured:
        recipe = self.fused.recipe
        recipe.reason = reason
        if recipe.refusals:
            reason += f"; not {'; not '.join(recipe.refusals)}"
        if recipe.alone is not None:
            reason += f"; measured one by one, because of {recipe.alone}"
        recipe.told = (self._way(), recipe.alone)
        return Measured(self.bundle.signature, self.worker.device, "sharing", dict(seconds), size, reason, self._way())

    def _way(self) -> str:
        way = self.fused.recipe.way
        return "solo" if way is None else way.name

    def _expect(self) -> None:
        """When trials have come or gone: a faster step for those here, if it pays by what was seen of others."""
        now = [member.training for member in self.members]
        if now == self.together:
            return
        self.together, self.paced = now, (0, 0.0)
        if self.fused.recipe.pace is not None and self.measuring is None:
            trials, seconds = self.fused.recipe.pace
            self.fused.speeding.consider(self._certain(), seconds * min(1.0, len(now) / trials), known=False)

    def _certain(self, ended: int = 0) -> int:
        """How many steps are left until the first trial leaves, after so many more units."""
        units = ((m.placement.budget - m.training.unit - ended) * m.training.unit_length for m in self.members)
        return int(min(units))

    def _pace(self, began: float, ended: bool) -> None:
        """After each unit, see whether a faster step would pay, or does."""
        if ended:
            self.worker.synchronize()
        speeding = self.fused.speeding
        took, speeding.making = time.perf_counter() - began - speeding.making, 0.0
        self.paced = (self.paced[0] + 1, self.paced[1] + took)
        if not ended or self.measuring is not None:
            return
        (steps, seconds), self.paced = self.paced, (0, 0.0)
        if self.fused.fast and not speeding.timed(seconds / steps):
            self.fused.fast.clear()
            self.fused.recipe.compilable = self.fused.recipe.capturable = False
        elif not self.fused.fast:
            self.fused.recipe.pace = len(self.members), seconds / steps
            speeding.consider(self._certain(1), seconds / steps)

    # What is told of a trial

    def _member(self, trial: Any) -> Member:
        return next(member for member in self.members if member.training is trial)

    def _report(self, trial: Any, metrics: Any, due: bool, peak: int | None) -> Report:
        member = self._member(trial)
        p = member.placement
        state = self._save(member) if due or trial.unit >= p.budget else None
        usage = Usage(member.seconds, trial.step - member.first_step, peak)
        member.seconds, member.first_step, member.reported = 0.0, trial.step, True
        return Report(p.trial, trial.unit, metrics, p.attempt, state, usage)

    def _finish(self, trial: Any) -> Finished:
        member = self._member(trial)
        assert member.state is not None
        self.fused.leave(trial)
        self.members.remove(member)
        self.worker.keep_warm(member.state, trial, None)
        return Finished(member.placement.trial, member.placement.attempt)

    def _save(self, member: Member) -> StateRef:
        member.state = self.worker.save(member.placement, self.fused.state(member.training))
        return member.state


def _no_memory(size: int) -> str:
    return f"memory ran out with more than {size} trials together"


def _why_halved(error: Exception, size: int) -> str:
    cause = error.__cause__
    if isinstance(cause, Exception) and not out_of_memory(cause):
        return f"a step of more than {size} trials failed half-way, with {type(cause).__name__}: {cause}"
    return _no_memory(size)
