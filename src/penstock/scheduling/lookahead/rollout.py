"""The outcome of a policy: trials and the rungs that follow them, laid out in time by list scheduling.

Whenever a trial ends, the waiting trials are gone through in order, and each trial that fits starts. When the last
trial of a group ends, the trials of its next rung arrive. While no trial waits, the last trials to end spread over free
devices, as in the engine. A trial at a share takes the time that the speed model says, whichever trials it shares a
device with: the constant-share model of Fluid §4.1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from operator import attrgetter

from penstock.scheduling.base import FULL
from penstock.scheduling.lookahead.layout import BETTER, Occupied, Option, Plan, Policy, Site, Start, Work

PASSED = 64  # without an empty device, a pass ends after so many trials that do not fit, for each signature with room
SPREADING = 3  # how many of the last trials to end may spread when devices are free and no trial waits
WORTH = 2  # a trial with fewer units left does not spread
Key = tuple[float, ...]


def follow(site: Site, jobs: Sequence[Work], policy: Policy, limit: float = math.inf) -> Plan:
    """The plan that a policy leads to for waiting jobs; its makespan is infinite where a job waits for ever.

    Where no trial can move, a plan that is certain to end after the ``limit`` is broken off, and its makespan is
    infinite.
    """
    return _Rollout(site, jobs, policy, limit * (1 + BETTER) if site.moving == math.inf else math.inf).run()


class _Run:
    """A trial under way."""

    __slots__ = ("devices", "end", "job", "seconds", "share")

    def __init__(self, job: Work, share: float, devices: tuple[int, ...], end: float, seconds: float) -> None:
        self.job, self.share, self.devices, self.end = job, share, devices, end
        self.seconds = seconds  # the whole job's time at this share


class _Rollout:
    def __init__(self, site: Site, jobs: Sequence[Work], policy: Policy, limit: float) -> None:
        self.site, self.policy, self.limit = site, policy, limit
        self.now = self.makespan = self.total = 0.0
        self.bytes = list(site.bytes)
        self.kinds = list(site.kinds)
        self.left = list(site.free)
        self.empty = [d for d, share in enumerate(site.free) if share > 1 - FULL]
        self.begun: dict[str, dict[int, float]] = {}  # the room on partly used devices, by the signature that may join
        for d, share in enumerate(site.free):
            self._set(d, share)
        self.out = [crew.out for crew in site.crews]
        self.rung = [0] * len(site.crews)
        self.count = 0
        self.vain = 0 if site.moving < math.inf else len(site.free)  # with so many empty devices no trial would spread
        self.heap: list[tuple[float, int, _Run]] = []
        self.starts: list[Start] = []
        for one in site.held:
            self._push(_under_way(one), one.end)
        order = policy.order or sorted(range(len(jobs)), key=lambda i: (-jobs[i].priority, jobs[i].asked))
        self.waiting: list[tuple[Work, int]] = [(jobs[i], i) for i in order]

    def run(self) -> Plan:
        while True:
            if self.waiting:
                self._start_all()
            if len(self.empty) > self.vain and self.now > 0 and not self.waiting:
                self._spread()
            if not self.heap or self.makespan > self.limit:
                break
            self._advance()
        if self.waiting or self.heap:
            return Plan(math.inf, math.inf, tuple(self.starts))
        return Plan(self.makespan, self.total, tuple(self.starts))

    def _push(self, run: _Run, end: float) -> None:
        run.end = end
        self.count += 1
        heapq.heappush(self.heap, (end, self.count, run))

    def _start_all(self) -> None:
        """Start jobs that fit, in order.

        A second pass fills devices that are still empty: jobs that wait on start at the widest share that fits.
        """
        given, solo, begun = self.policy.given, self.policy.solo, self.begun
        deadline = self.policy.deadline * (1 + BETTER) - self.now
        room = 0.0
        if deadline == math.inf:
            room = len(self.empty) + sum(sum(there.values()) for there in begun.values())
        for fill in (False, True):
            still: list[tuple[Work, int]] = []
            first = -math.inf  # the highest priority of a job that waits on: no job of lower priority overtakes it
            refused: dict[str, float] = {}  # the least share that found no room, by signature
            for i, (job, place) in enumerate(self.waiting):
                joins = "" if self.site.unlike else job.signature
                if self.makespan > self.limit:
                    return
                if not self.empty and (fill or len(still) >= PASSED * len(begun)):
                    still += self.waiting[i:]
                    break
                if job.priority < first or not (self.empty or joins in begun):
                    option = None
                elif fill or solo:
                    option = _widest(job, 1 if solo else len(self.empty))
                elif place in given:
                    option = given[place]
                elif room:
                    fair = room / (len(self.waiting) - i) + FULL
                    option = next((one for one in reversed(job.options) if one.share <= fair), job.options[0])
                    room -= option.share
                else:
                    due = deadline - job.after
                    option = next((one for one in job.options if one.seconds <= due), None)
                if (
                    option is None
                    or option.share >= refused.get(joins, math.inf)
                    or not self._start(job, place, option)
                ):
                    still.append((job, place))
                    first = -math.inf if fill else max(first, job.priority)
                    if option is not None and not job.bytes:
                        refused[joins] = min(option.share, refused.get(joins, math.inf))
            self.waiting = still
            if solo or not still or not self.empty:
                break

    def _start(self, job: Work, place: int, option: Option) -> bool:
        devices = self._places(option.share, job)
        if not devices:
            return False
        for d in devices:
            self.bytes[d] -= job.bytes
        self.starts.append(Start(place, option, devices, self.now))
        end = self.now + option.seconds
        if end + job.after > self.limit:
            self.makespan = math.inf
        self._push(_Run(job, option.share, devices, end, option.seconds), end)
        self.vain = min(self.vain, len(self.empty))
        return True

    def _places(self, share: float, job: Work) -> tuple[int, ...]:
        """Take devices for a job. A part of a device is taken where least is free, so that other devices stay empty."""
        need, empty = job.bytes, self.empty
        if share >= 1:
            if share > len(empty):
                return ()
            able = [d for d in empty if self.bytes[d] >= need] if need else empty
            devices = tuple(able[: round(share)])
            if len(devices) < share:
                return ()
            for d in devices:
                empty.remove(d)
                self.left[d] = 0.0
            return devices
        best, least = -1, math.inf
        for d, left in self.begun.get("" if self.site.unlike else job.signature, {}).items():
            if share - FULL <= left < least and self.bytes[d] >= need:
                best, least = d, left
        if best < 0:
            best = next((d for d in empty if self.bytes[d] >= need), -1)
            if best < 0:
                return ()
            empty.remove(best)
            least = 1.0
            self.kinds[best] = job.signature
        self._set(best, least - share)
        return (best,)

    def _set(self, d: int, left: float) -> None:
        """Note the room on a device, and the signature that may join the trials there."""
        self.left[d] = left
        joins = "" if self.site.unlike else self.kinds[d]
        if FULL < left <= 1 - FULL and (joins or self.site.unlike):
            self.begun.setdefault(joins, {})[d] = left
        elif (there := self.begun.get(joins)) is not None and d in there:
            del there[d]
            if not there:
                del self.begun[joins]

    def _advance(self) -> None:
        """Go on to the next end of a trial, and to all ends at the same time."""
        self.now = now = self.heap[0][0]
        while self.heap and self.heap[0][0] <= now + BETTER * abs(now):
            end, _, run = heapq.heappop(self.heap)
            if end != run.end:
                continue  # the trial has spread since, and ends at another time
            self.total += end
            self.makespan = max(self.makespan, end)
            self._free(run)
            crew = run.job.crew
            self.out[crew] -= 1
            if not self.out[crew]:
                self._arrive(crew)

    def _free(self, run: _Run) -> None:
        share, need = min(1.0, run.share), run.job.bytes
        for d in run.devices:
            self.bytes[d] += need
            left = self.left[d] + share
            self._set(d, left)
            if left > 1 - FULL:
                self.empty.append(d)

    def _arrive(self, crew: int) -> None:
        """The trials of a group's next rung arrive, if there is one."""
        rungs, rung = self.site.crews[crew].rungs, self.rung[crew]
        if rung < len(rungs):
            self.rung[crew] += 1
            self.out[crew] = len(rungs[rung])
            self.waiting += [(job, -1) for job in rungs[rung]]
            if self.policy.order:
                self.waiting.sort(key=lambda one: urgency(one[0]))

    def _spread(self) -> None:
        """Give free devices to the last trials to end, where a trial ends sooner although it has to move."""
        runs = [run for end, _, run in self.heap if end == run.end]
        for run in heapq.nlargest(SPREADING, runs, key=attrgetter("end")):
            if not self.empty:
                break
            if run.job.options[-1].share <= run.share:
                continue  # the trial has no wider option
            rest = run.end - self.now
            unit = run.job.unit * run.seconds / run.job.runtime if run.job.runtime else 0.0
            if rest < WORTH * unit:
                continue
            mine = len(run.devices) if run.share >= 1 else int(self.left[run.devices[0]] + run.share > 1 - FULL)
            most = mine + sum(self.bytes[d] >= run.job.bytes for d in self.empty)
            fits = [option for option in run.job.options if run.share < option.share <= most]
            if not fits:
                continue
            option = fits[-1]
            end = self.now + unit / 2 + (rest - unit / 2) * option.seconds / run.seconds + self.site.moving
            if end >= run.end * (1 - BETTER):
                continue
            self._free(run)
            for d in run.devices:  # the trial's own devices come first
                if d in self.empty:
                    self.empty.remove(d)
                    self.empty.insert(0, d)
            devices = self._places(option.share, run.job)
            for d in devices:
                self.bytes[d] -= run.job.bytes
            run.end = math.nan  # NaN equals no end, so the old entry in the heap is passed over
            self._push(_Run(run.job, option.share, devices, end, option.seconds), end)
        self.vain = len(self.empty)


def urgency(job: Work) -> Key:
    """The order of jobs: the highest priority, the group with most time left, the longest, the first asked for."""
    return -job.priority, -job.left, -job.rank, job.asked


def _under_way(one: Occupied) -> _Run:
    return _Run(one.job, one.share, one.devices, one.end, one.end)


def _widest(job: Work, devices: int) -> Option:
    return next(option for option in reversed(job.options) if option.share <= devices)
