"""Several bundles on one worker, solo or fused: a pack (Pack §2.2).

Each part of a pack is a run of its own, and no part waits for another, where Pack §3.1 has a barrier at every step. On
an accelerator each part has a stream. A part whose work is enqueued ahead is left alone until it needs the next call.
Elsewhere the parts take turns, each for as many seconds of the device as the others. So they do on an accelerator
where it was measured that fewer of them at once are as fast: all stay, and some rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.bundle import Bundle, Gathering, Measured, TrialFailed, TrialFinished, TrialStopped, WorkerEvent
from penstock.speed.packing import reason
from penstock.task import FunctionTask
from penstock.training.random.generators import Standing
from penstock.training.runs.base import Events, Run, key
from penstock.training.runs.ledger import FIRST, Ledger
from penstock.training.runs.weighing import Weighing

if TYPE_CHECKING:
    from penstock.training.keeping import Kept
    from penstock.training.worker import Worker

TURN = 0.005  # seconds that a part has the device at least: each change of parts brings values back
SPELL = 0.25  # seconds for which parts train where not all do so at once
CHANGED = 2  # how many times fewer or more trials there are when a pack is timed again: a few fill no device


class _Part:
    """A bundle of a pack: its run, its stream, its seconds, and what it finds again when its turn comes."""

    def __init__(self, run: Run, events: Events, seconds: float, stream: Any) -> None:
        self.run, self.events, self.stream = run, events, stream
        self.seconds = seconds  # of the device; a part that comes later begins with as many as the others have
        self.called = 0  # the number of its last turn
        self.begun = run.steps
        self._uncharged = 0.0
        self._standing: Standing | None = None
        self._kept: Kept | None = None

    def add(self, seconds: float) -> None:
        """Count seconds of the device."""
        self.seconds += seconds
        self._uncharged += seconds

    def charged(self) -> float:
        """The seconds since the last call."""
        seconds, self._uncharged = self._uncharged, 0.0
        return seconds

    def call(self, turn: int) -> None:
        """Note its turn."""
        self.called = turn

    def leave_off(self, kept: Kept | None) -> None:
        """Keep where the random generators stand, and what its task keeps outside of models, until its next turn."""
        self._standing, self._kept = Standing(), kept

    def take_up(self) -> Kept | None:
        """Let all of that be there again."""
        if self._standing is not None:
            self._standing.bring_back()
        if self._kept is not None:
            self._kept.bring_back()
        return self._kept


def grows_into(bundle: Bundle, run: Run) -> bool:
    """Whether a bundle that trains alone becomes the first part of a pack."""
    return bundle.mode == "packed" and bundle.name == run.bundle.name and not isinstance(run, PackedRun)


class PackedRun(Run):
    """Several bundles on one worker; ``first`` is one that trains there already, and goes on undisturbed."""

    def __init__(self, worker: Worker, bundle: Bundle, first: tuple[Run, Events | None] | None = None) -> None:
        super().__init__(worker, bundle)
        self._parts: dict[str, _Part] = {}  # by name
        self._left: set[tuple[int, int]] = set()  # placements that have left: a declaration may still name them
        self._now: _Part | None = None  # the part that had the last turn
        self._held = False  # whether it must have the next one too: a function goes on until it reports
        self._turns = 0
        self._began = self._since = time.perf_counter()  # of its turn, and of the seconds that no part has yet
        self._weighing: Weighing | None = None
        self._weighed: tuple[int, int, int] | None = None  # how many parts pay, found with so many trials and steps
        self._spell: tuple[float, list[_Part]] = (0.0, [])  # the parts that train while the others rest, and since when
        self._ledger = Ledger()
        self._new: tuple[str, int] | None = None  # the part whose memory is found out, and what was in use before it
        if first is not None:
            run, events = first
            assert events is not None
            self._now = self._parts[run.bundle.name] = _Part(run, events, 0.0, self._stream())
            self._now.add(worker.account.since())
        self.declare(bundle)

    @property
    def over(self) -> bool:
        return not self._parts

    @property
    def runs(self) -> Mapping[str, Run]:
        """The runs of its parts, by name."""
        return {name: part.run for name, part in self._parts.items()}

    @property
    def settled(self) -> bool:
        return all(run.settled for run in self.runs.values())

    @property
    def alike(self) -> tuple[str, int]:
        parts = sorted(run.alike for run in self.runs.values())
        known = self._weighing is None and all(all(one) for one in parts)  # while parts are timed, some of them rest
        return " + ".join(f"{name} x{count}" for name, count in parts) if known else "", self._trials

    @property
    def progress(self) -> Mapping[tuple[str, int], float]:
        taken: dict[tuple[str, int], float] = {}
        for run in self.runs.values():
            for kind, steps in run.progress.items():
                taken[kind] = taken.get(kind, 0.0) + steps
        return taken

    @property
    def certain(self) -> int:
        return min((run.certain for run in self.runs.values()), default=0)

    def wait(self) -> None:
        for run in self.runs.values():
            run.wait()

    def declare(self, bundle: Bundle) -> bool:
        ours = bundle.name == self.bundle.name or not bundle.placements
        wanted = {part.name: part for part in bundle.parts} if ours else {}
        for name, part in self._parts.items():
            part.run.declare(wanted.pop(name, replace(part.run.bundle, placements=())))
        least = min((part.seconds for part in self._parts.values()), default=0.0)
        for name, new in wanted.items():
            if coming := tuple(one for one in new.placements if key(one) not in self._left):
                run = self.worker.run(replace(new, placements=coming))
                self._parts[name] = _Part(run, run.events(), least, self._stream())
                if self._weighing is not None:
                    self._weighing.join(run)
        if ours:
            self.bundle = bundle
            if bundle.measure:
                self._weigh()
        return ours

    @property
    def _trials(self) -> int:
        return sum(run.together for run in self.runs.values())

    @property
    def _remade(self) -> int:
        return sum(run.remade for run in self.runs.values())

    def _outdated(self) -> bool:
        """Whether there are far more or fewer trials than when the pack was timed, or their steps are faster now."""
        if self._weighed is None:
            return False
        _, trials, remade = self._weighed
        if not (trials < CHANGED * self._trials and self._trials < CHANGED * trials):
            return True
        return self._remade > remade and not any(run.awaits for run in self.runs.values())

    def _weigh(self) -> None:
        """Time what the pack gains."""
        if self._weighing is None and len(self._parts) > 1:
            self._weighing = Weighing(self.runs.values())

    def _weighing_ends(self) -> Measured:
        """Tell what was found."""
        assert self._weighing is not None
        found, self._weighing = self._weighing, None
        self._weighed = found.size, self._trials, self._remade
        why = reason(found.sigmas) if found.sigmas else ""  # all others have left
        return Measured("pack", self.worker.device, "packing", found.sigmas, found.size, why, "packed")

    def events(self) -> Events:
        self.worker.trials.train_beside(lambda: [one for part in self._parts.values() for one in part.run.reading])
        try:
            while self._parts:
                yield self._advance(self._next())
                if self._new is not None and (told := self._enter_ledger()) is not None:
                    yield told
                if self._weighing is not None:
                    self._weighing.look()
                    if self._weighing.done and (told := self._weighing_ends()).table:
                        yield told
                elif self._outdated():
                    self._weigh()
        finally:
            self.worker.account.charge_by(None)
            if self._weighing is not None:
                self._weighing.rest()
            self.worker.trials.train_beside(tuple)
            self.worker.trials.runs = 1
            for part in self._parts.values():
                part.events.close()

    def _advance(self, part: _Part) -> WorkerEvent | Gathering | None:
        """Train a part to its next event or boundary."""
        event, ended, before = None, False, part.run.steps
        with self._turn(part):
            try:
                event = next(part.events)
            except StopIteration:  # the run gave up: trials that were to enter have not begun
                ended = True
                part.run.declare(replace(part.run.bundle, placements=()))
        self.steps += part.run.steps - before
        self.worker.trials.runs = max(1, len(self._parts))
        if isinstance(event, TrialFinished | TrialStopped | TrialFailed):
            self._left.add((event.trial, event.attempt))
        self._held = event is None and isinstance(self.worker.job.task, FunctionTask)
        if ended or part.run.over:
            part.events.close()
            self._parts = {name: one for name, one in self._parts.items() if one is not part}
            for name in self._ledger.peaks.keys() - self._parts.keys():
                self._ledger.leave(name)
            self._now, self._held = None, False
            if self._weighing is not None:
                self._weighing.leave(part.run)
        return event

    # Memory

    def _newcomer(self) -> _Part | None:
        """The part that takes its first steps while the others rest, so that its memory is known by itself.

        A part that is like one before it takes as much.
        """
        unknown = [name for name in self._parts if name not in self._ledger.peaks] if self.worker.on_gpu else []
        for name in unknown if self._new is None else ():
            if self._ledger.enter_alike(name, self._parts[name].run.kind, self.worker.free_bytes()):
                continue
            for part in self._parts.values():
                part.run.wait()
            self._new = name, self.worker.account.watch_peak()
            break
        return None if self._new is None else self._parts[self._new[0]]

    def _enter_ledger(self) -> Measured | None:
        """Once a newcomer's memory is known, it stays, or leaves where all parts at once would not fit."""
        assert self._new is not None
        name, before = self._new
        part = self._parts.get(name)
        if part is None:
            self._new = None
            return None
        if part.run.steps - part.begun < FIRST:
            return None
        self._new = None
        self._ledger.enter(name, self.worker.account.peak_since(before), part.run.kind)
        if len(self._parts) == 1 or self._ledger.fits(self.worker.free_bytes()):
            return None
        part.run.declare(replace(part.run.bundle, placements=()))
        size = len(self._parts) - 1
        why = f"memory has no room for more than {size} bundles at once"
        return Measured("pack", self.worker.device, "packing", {}, size, why, "packed")

    # Turns

    def _next(self) -> _Part:
        """The part to advance: of the parts that are not busy, the one that had the fewest seconds of the device.

        Parts that only launch go first, or the device would wait while another part computes on the host.
        """
        if self._now is not None and self._held:
            return self._now
        parts = list(self._parts.values())
        if (newcomer := self._newcomer()) is not None:
            return newcomer
        if self._weighing is not None:
            parts = [part for part in parts if part.run in self._weighing.active]
        elif self._weighed is not None and self._weighed[0] < len(parts):
            parts = self._spelled(self._weighed[0])
        free = [part for part in parts if not part.run.busy]
        if not free:
            first = min(parts, key=lambda part: part.called)
            first.run.wait()
            return first
        if self.worker.job.deterministic:  # by turns and not by times, so that the order of reports repeats
            return min(free, key=lambda part: part.called)
        if quick := [part for part in free if part.run.launches]:
            return min(quick, key=lambda part: part.called)
        if self._now in free and time.perf_counter() - self._began < TURN:
            return self._now
        return min(free, key=lambda part: part.seconds)

    def _spelled(self, count: int) -> list[_Part]:
        """The parts that train now, where so many at once pay: those that had the device least."""
        since, chosen = self._spell
        now = time.perf_counter()
        there = list(self._parts.values())
        if now - since > SPELL or len(chosen) != count or any(part not in there for part in chosen):
            chosen = sorted(there, key=lambda part: part.seconds)[:count]
            self._spell = now, chosen
        return chosen

    @contextmanager
    def _turn(self, part: _Part) -> Iterator[None]:
        self._divide()
        if part is not self._now:
            if self._now is not None:
                self._now.leave_off(self.worker.trials.kept)
            self.worker.trials.outside(part.take_up())
            self._now, self._began = part, time.perf_counter()
        self.worker.account.charge_by(partial(self._charged, part))
        self._turns += 1
        part.call(self._turns)
        with self._on(part.stream):
            yield
        self._divide()

    def _charged(self, part: _Part) -> float:
        self._divide()
        return part.charged()

    def _divide(self) -> None:
        """Divide the seconds since the last call among the parts that had work on the device."""
        there = [part for part in self._parts.values() if part is self._now or part.run.busy]
        if not there:
            return  # the part that comes next has them
        now = time.perf_counter()
        for part in there:
            part.add((now - self._since) / len(there))
        self._since = now

    # Streams of an accelerator

    def _stream(self) -> Any:
        if not self.worker.device.startswith("cuda"):
            return None
        import torch

        return torch.cuda.Stream(self.worker.torch_device)  # type: ignore[no-untyped-call]

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """Enqueue on a part's own stream, after all that was enqueued outside of parts, such as a model's making."""
        if stream is None:
            yield
            return
        import torch

        stream.wait_stream(torch.cuda.default_stream(self.worker.torch_device))
        with torch.cuda.stream(stream):
            yield
