"""How much work a study has left, and how long that will take.

Work is counted in units: those that are granted, and those that the algorithm expects to grant (``Algorithm.outlook``).
The time follows from a small simulation of that work. As many trials run at once as did when others had to wait, and a
unit takes as long as units took while that many trials ran. Each placement costs a start, and a trial without a state
trains all its units again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice, pairwise
from math import ceil, inf

from penstock.log.history import History, TrialRecord
from penstock.trial import Course

JOBS = 2000  # with more jobs than this their sum decides: the order of the last few changes little
PRIOR = 0.05  # the weight of a measurement of sharing, beside 1 of all units that were trained
ALMOST = 0.9  # the part of a unit that a trial may have trained since its last report, at most
FOLLOWED = 256  # running trials whose reports are timed, at most: a look takes place thousands of times a second


@dataclass(frozen=True)
class Mark:
    """A running trial at its placement or its last report."""

    attempt: int
    unit: int
    since: float
    again: int | None  # units that it trains again before its first report; None once that report has come

    @classmethod
    def of(cls, trial: TrialRecord, again: int | None) -> Mark:
        return cls(trial.attempt, trial.reported, trial.since, again)


@dataclass
class Times:
    """Times between two reports, or before a placement's first report, in sums."""

    count: int = 0
    units: int = 0  # the units of these times, with units that were trained again
    again: int = 0  # the units that were trained again
    seconds: float = 0.0


class Pace:
    """The speed of a study by the number of trials that run at once, and the cost of a placement."""

    def __init__(self) -> None:
        self._most = 0  # the most trials that ran at once
        self._full: int | None = None  # the trials that ran at once when others last had to wait
        self._devices = 1
        self._size: int | None = None  # the most trials that pay to share a device, where that was measured
        self._table: Mapping[int, float] = {}  # seconds of a step by the number of trials that share a device
        self._last: tuple[float, int, int] | None = None  # clock, units and running trials at the last look
        self._marks: dict[int, Mark] = {}  # of the trials that are followed
        # By the length of the number of running trials in bits: single numbers would each have few units. It is below 0
        # where there was a device for each trial.
        self._seconds: defaultdict[int, float] = defaultdict(float)
        self._trial_seconds: defaultdict[int, float] = defaultdict(float)
        self._units: Counter[int] = Counter()
        self._first: defaultdict[int, Times] = defaultdict(Times)  # times before the first reports of placements
        self._later: defaultdict[int, Times] = defaultdict(Times)  # times between two reports

    def take(self, history: History) -> None:
        """Take the history as it is once trials were placed: its running trials run from now on."""
        now = (history.clock, history.units, history.counts["running"])
        before, self._last = self._last or now, now
        bits, passed = before[2].bit_length() * (1 if before[2] > self._devices else -1), now[0] - before[0]
        self._seconds[bits] += passed
        self._trial_seconds[bits] += before[2] * passed
        self._units[bits] += now[1] - before[1]
        if now[1:] != before[1:] or not self._marks:
            self._follow(history, bits)
        self._most, self._devices = max(self._most, now[2]), max(history.devices, 1)
        if history.counts["waiting"] and now[2]:
            self._full = now[2]
        measured = [one for one in history.measured.values() if one.kind == "sharing"]
        self._table = next((one.table for one in measured if one.table), {})
        self._size = max((one.size for one in measured), default=None)

    @property
    def slots(self) -> int:
        """How many trials can run at once."""
        count = self._full or self._most
        return max(count if self._size is None else min(count, self._size * self._devices), 1)

    def _follow(self, history: History, bits: int) -> None:
        """Time the reports of the trials that are followed, and follow the trials that run now."""
        for number, mark in list(self._marks.items()):
            trial = history.trials[number]
            if trial.attempt == mark.attempt and trial.reported > mark.unit:
                times, again = (self._later if mark.again is None else self._first)[bits], mark.again or 0
                times.count += 1
                times.units += trial.reported - mark.unit + again
                times.again += again
                times.seconds += trial.since - mark.since
                self._marks[number] = Mark.of(trial, None)
            if trial.status != "running":
                del self._marks[number]
        for number in islice(history.turns.running, FOLLOWED):
            trial, known = history.trials[number], self._marks.get(number)
            if trial.status == "running" and (known is None or known.attempt != trial.attempt):
                self._marks[number] = Mark.of(trial, units_again(trial))

    def again(self, number: int) -> int | None:
        """The units that a running trial trains again before its first report; None once that report has come."""
        return None if (mark := self._marks.get(number)) is None else mark.again

    def start_units(self) -> float:
        """The time of a placement beside its units, as a number of units.

        It is 0 as long as no placement has reported twice: until then a start cannot be told from a unit.
        """
        both = self._first.keys() & self._later.keys()
        first = [self._first[bits] for bits in both] or [_sum(self._first.values())]
        later = [self._later[bits] for bits in both] or [_sum(self._later.values())]
        beside = starts = 0.0  # seconds beside the units, and the seconds that as many units as starts take
        for placed, after in zip(first, later, strict=True):
            unit = after.seconds / max(after.units, 1)
            beside += placed.seconds - placed.units * unit
            starts += placed.count * unit
        return max(beside / starts, 0.0) if starts else 0.0

    def unit_seconds(self, running: int) -> float | None:
        """The seconds of one trial's unit while that many trials run; None where no unit was timed.

        Where trials share devices, the seconds are a + b·p with p trials to a device, by the line that fits best.
        Fewer trials than devices may have several devices each: their seconds are the mean of what such trials took.
        """
        start = self.start_units()
        seen = [one for bits in self._units if (one := self._point(bits, start)) is not None]
        few = [(1.0, seconds, units) for sharing, seconds, units in seen if sharing < 1]
        points = few if running < self._devices and few else [one for one in seen if one[0] >= 1] or few
        if running <= self._devices:
            points = [one for one in points if one[0] == 1] or points
        weight = sum(units for *_, units in points)
        if not weight:
            return None
        sharing = sum(w * p for p, _, w in points) / weight
        seconds = sum(w * s for _, s, w in points) / weight
        prior = (1.0, seconds * self._alone(sharing), PRIOR * weight)
        made = _line([*points, prior], max(running / self._devices, 1.0))
        if running > self._devices:
            return made
        # A trial alone is never slower than beside others, whose starts are in the time of all trials.
        return min([made, *(times.seconds / times.units for bits, times in self._later.items() if bits > 0)])

    def _point(self, bits: int, start: float) -> tuple[float, float, float] | None:
        """Trials to a device, the seconds of a unit, and how many units were timed, while so many trials ran.

        A trial with a device of its own trains all the time. Trials that share one may also wait for each other, so
        there the time of all trials is divided by the units of all trials.
        """
        if not self._trial_seconds[bits]:
            return None
        first, sharing = self._first.get(bits, Times()), self._trial_seconds[bits] / self._seconds[bits] / self._devices
        sharing = round(sharing, 6)
        if bits > 0:
            units = self._units[bits]
            work = units + first.again + start * first.count
            return (sharing, self._trial_seconds[bits] / work, units) if units else None
        times = self._later.get(bits, Times()) if self._later else first
        return (sharing, times.seconds / times.units, times.units) if times.units else None

    def _alone(self, sharing: float) -> float:
        """A step of a trial alone as a part of a step of so many trials together; as if they took turns if unknown."""
        count = max((n for n in self._table if n <= sharing), default=1)
        return self._table.get(1, 1.0) / self._table.get(count, 1.0) * count / sharing


def _sum(times: Iterable[Times]) -> Times:
    made = Times()
    for one in times:
        made.count += one.count
        made.units += one.units
        made.seconds += one.seconds
    return made


def _line(points: Sequence[tuple[float, float, float]], x: float) -> float:
    """The value at x of the line that fits weighted points (x, y, weight) best; it neither falls nor starts below 0.

    >>> _line([(1.0, 2.0, 1.0), (3.0, 6.0, 1.0)], 2.0)
    4.0
    """
    weight = sum(w for *_, w in points)
    mean_x = sum(w * a for a, _, w in points) / weight
    mean_y = sum(w * b for _, b, w in points) / weight
    spread = sum(w * (a - mean_x) ** 2 for a, _, w in points)
    slope = sum(w * (a - mean_x) * (b - mean_y) for a, b, w in points) / spread if spread else 0.0
    return mean_y + min(max(slope, 0.0), mean_y / mean_x) * (x - mean_x)


def units_left(history: History, courses: Sequence[Course]) -> int:
    """The units that are granted and not trained, and the units that are expected to be granted."""
    granted = sum(trial.granted - trial.reported for trial in history.trials if _under_way(trial))
    return granted + sum(rung.trials * rung.units for course in courses for rung in course.rungs)


def units_again(trial: TrialRecord) -> int:
    """The units that a trial trains again when it is placed: the units since its state, or all where it has none."""
    state = trial.state or trial.start
    return max(trial.reported - (0 if state is None else state.unit), 0)


def time_left(history: History, courses: Sequence[Course], pace: Pace) -> float | None:
    """The expected seconds until the last trial is done; None where no unit was timed."""
    slots = pace.slots
    unit = pace.unit_seconds(slots)
    if not unit:
        return unit
    start, now = pace.start_units(), pace.unit_seconds(history.counts["running"]) or unit
    rest = Rest(history, courses, start)
    asked = history.turns.waiting
    for trial in sorted(filter(_under_way, history.trials), key=lambda trial: asked.get(trial.number, 0)):
        units = trial.granted - trial.reported
        if trial.status == "waiting":
            rest.wait(trial.group, units, start + units_again(trial))
        else:
            beside = 0.0 if (again := pace.again(trial.number)) is None else start + again
            rest.run(trial.group, units + beside - min((history.clock - trial.since) / now, beside + ALMOST))
    return rest.work * unit / slots if rest.jobs > JOBS else rest.seconds(slots, pace)


@dataclass
class Rung:
    """One rung of a course while the rest of a study is simulated."""

    units: float
    beside: float  # work beside the units: the start, and units that are trained again
    after: float  # units of the rungs that follow once all trials of this rung are done
    to_come: float  # trials that have not been asked for
    unfinished: int  # trials that have not reported the rung's budget, the trials to come included
    rate: float = 0.0  # trials that come with each report of the rung before


@dataclass(order=True)
class Job:
    """One trial of a rung, with the work that it still takes, in units."""

    rank: tuple[float, float, int]
    work: float = field(compare=False)
    place: tuple[int, int] | None = field(compare=False)  # its course and rung


class Rest:
    """The rest of a study: jobs that can run, and the rungs of each course that follow them.

    On several devices the trial goes first whose group has most units left, and then the longest trial, as schedulers
    have it (``scheduling/waterfill.py``). On one device trials run in the order of asking.
    """

    def __init__(self, history: History, courses: Sequence[Course], start: float) -> None:
        self._waits = [course.waits for course in courses]
        done = [trial for trial in history.trials if trial.curve and trial.reported >= trial.granted]
        again = sum(map(units_again, done)) / max(sum(trial.reported for trial in done), 1)
        self._rungs = [
            [
                Rung(
                    rung.units,
                    start + again * below,
                    sum(later.units for later in course.rungs[k + 1 :]) if course.waits else 0,
                    rung.trials,
                    rung.trials,
                )
                for k, (rung, below) in enumerate(zip(course.rungs, _reached(history, course), strict=True))
            ]
            for course in courses
        ]
        self._place = {name: (c, k) for c, course in enumerate(courses) for k, name in enumerate(course.groups)}
        self._in_order = history.devices <= 1
        self._running: list[tuple[float, int, Job]] = []
        self._ready: list[Job] = []
        self._count = 0

    @property
    def jobs(self) -> float:
        """How many jobs run, wait and are expected."""
        return len(self._running) + len(self._ready) + sum(rung.to_come for rungs in self._rungs for rung in rungs)

    @property
    def work(self) -> float:
        """The work of all jobs."""
        under_way = sum(job.work for job in [*self._ready, *(job for *_, job in self._running)])
        return under_way + sum(rung.to_come * (rung.units + rung.beside) for rungs in self._rungs for rung in rungs)

    def run(self, group: str, work: float) -> None:
        """Add a trial that runs."""
        self._count += 1
        heappush(self._running, (work, self._count, Job((0.0, 0.0, self._count), work, self._member(group))))

    def wait(self, group: str, units: float, beside: float) -> None:
        """Add a trial that waits."""
        self._push(units, beside, self._member(group))

    def _member(self, group: str) -> tuple[int, int] | None:
        """The place of a trial that is under way."""
        place = self._place.get(group)
        if place is not None:
            self._rungs[place[0]][place[1]].unfinished += 1
        return place

    def seconds(self, slots: int, pace: Pace) -> float:
        """The seconds until all jobs are done, with at most ``slots`` of them at a time."""
        for course, rungs in enumerate(self._rungs):
            for before, rung in pairwise(rungs):
                rung.rate = rung.to_come / max(before.unfinished, 1)
            self._begin(course)
        running = self._running
        seconds = trained = 0.0
        units = {count: pace.unit_seconds(count) or 0.0 for count in range(1, max(slots, len(running)) + 1)}
        while self._ready or running:
            while self._ready and len(running) < slots:
                job = heappop(self._ready)
                heappush(running, (trained + job.work, job.rank[-1], job))
            count = len(running)
            end, _, job = heappop(running)
            seconds += (end - trained) * units[count]
            trained = end
            if job.place is not None:
                self._report(*job.place)
        return seconds

    def _report(self, course: int, k: int) -> None:
        """A trial has reported its rung's budget: the trials that follow from it come."""
        rungs = self._rungs[course]
        rungs[k].unfinished -= 1
        if k + 1 < len(rungs) and not self._waits[course]:
            self._come(course, k + 1, rungs[k + 1].rate)
        self._begin(course)

    def _begin(self, course: int) -> None:
        """Let all trials of a rung come whose rungs before are done."""
        rungs = self._rungs[course]
        for k, rung in enumerate(rungs):
            self._come(course, k, rung.to_come)
            if rung.unfinished:
                break

    def _come(self, course: int, k: int, trials: float) -> None:
        rung = self._rungs[course][k]
        before, rung.to_come = rung.to_come, max(rung.to_come - trials, 0.0)
        # Trials come evenly: the only trial to come, for one, comes with the middle report of the rung before.
        for _ in range(ceil(before - 0.5) - ceil(rung.to_come - 0.5)):
            self._push(rung.units, rung.beside, (course, k))

    def _push(self, units: float, beside: float, place: tuple[int, int] | None) -> None:
        self._count += 1
        after = 0.0 if place is None else self._rungs[place[0]][place[1]].after
        first = (0.0, 0.0) if self._in_order else (-units - after, -units)
        heappush(self._ready, Job((*first, self._count), units + beside, place))


def _reached(history: History, course: Course) -> list[int]:
    """The units that the trials of each rung to come have reached before it."""
    budgets = {trial.group: trial.granted for trial in history.trials}
    members = Counter(trial.group for trial in history.trials)
    names = course.groups or ("",) * len(course.rungs)
    found, below, before = list[int](), 0, inf
    for name, rung in zip(names, course.rungs, strict=True):
        trials = members[name] + rung.trials
        if name in budgets:
            below = max(budgets[name] - rung.units, 0)
        elif course.waits and trials > before:  # of two brackets that follow one another, the second begins
            below = 0
        found.append(below)
        below, before = below + rung.units, trials
    return found


def _under_way(trial: TrialRecord) -> bool:
    return trial.status in ("waiting", "running") and trial.granted > trial.reported
