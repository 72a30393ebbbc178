"""The runs of a recurring job: which batch size the next one has, how far it goes, and when it is stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite, sqrt
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.algorithms.base import Granting, check_count, needed_trials
from penstock.energy.batch_size import Choice, Default, Grid, Past, Policy, Run, Terms
from penstock.energy.cost import Objective, fraction
from penstock.energy.staked import Staked
from penstock.energy.zeus import Zeus
from penstock.errors import StudyError
from penstock.log.events import Wrote
from penstock.numeric import shown
from penstock.seeds import key
from penstock.trial import Config, Member, Report, StartFrom, TrialGroup, score

if TYPE_CHECKING:
    from penstock.algorithms.sampling import Search

PolicyName = Literal["staked", "zeus", "grid", "default"]
Scaling = Literal["sqrt", "linear"]
Verdict = Literal["reached", "stopped", "missed", "failed"]
TRIES = 20  # runs of a recurrence that may be stopped, before one of the default that may not
WROTE = "run"  # the attribute of a trial in which the log has its run


@dataclass(frozen=True)
class Phase:
    """What is known from recurrence ``since`` on: it was found when a driver took the job up, and the log keeps it.

    ``overlap`` recurrences are under way at once. ``unit_costs`` has the cost of a unit of each size, and
    ``default_cost`` that of the default size at the greatest power limit; they are empty and None where only runs tell
    it. With ``dry`` they are the seconds of a unit's steps, without its evaluation. ``device`` is the type of device.
    """

    since: int = 0
    overlap: int = 1
    unit_costs: Mapping[int, float] | None = None
    default_cost: float | None = None
    max_power: float | None = None
    device: str = ""
    dry: bool = False

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Phase:
        """A phase from the log, where JSON made text of the sizes."""
        costs = kept.get("unit_costs")
        return cls(**{**kept, "unit_costs": costs and {int(size): cost for size, cost in costs.items()}})


@dataclass(frozen=True)
class Ended:
    """A run that has ended, as the log has it; ``stake`` is None where it could not be stopped."""

    trial: int
    recurrence: int
    size: int
    units: int
    seconds: float
    joules: float | None
    cost: float
    stake: float | None
    verdict: Verdict
    best: float | None

    @classmethod
    def of(cls, wrote: Wrote) -> Ended:
        """The run that a line of the log tells of."""
        assert wrote.trial is not None
        return cls(wrote.trial, **wrote.value)


@dataclass
class _UnderWay:
    """A run under way, and what it has used so far."""

    recurrence: int
    choice: Choice
    stopped: tuple[Run, ...]
    config: Config
    device: str
    units: int = 0
    seconds: float = 0.0
    joules: float | None = 0.0  # None once a report had none
    cost: float = 0.0
    best: float = -inf


class Recurrences(Granting):
    """Each recurrence trains to the target, with the batch size that a policy chooses; ``trials`` counts recurrences.

    A run ends with the unit that reaches the target, as its worker sees. One that may be stopped is granted a unit
    first, and then half of what its stake still pays for at a time: so it stops before the unit that would pass its
    stake, unless units come to cost more than twice as much. The trial that reached the target last is not dropped
    before a later one has: its model is the job's.

    >>> Recurrences(config={"lr": 0.1}, sizes=[16, 32], default=32, target=0.9, max_budget=30, recurrences=90)._policy
    Staked(risk=0.0, beta=2.0)
    """

    samples = False

    def __init__(
        self,
        *,
        config: Config,
        sizes: Sequence[int],
        default: int,
        target: float,
        max_budget: int,
        recurrences: int,
        eta: float = 0.5,
        risk: float = 0.0,
        policy: PolicyName = "staked",
        beta: float = 2.0,
        window: int | None = None,
        scaling: Scaling | None = "sqrt",
    ) -> None:
        self.config, self.sizes = config, sorted({check_count("a batch size", size) for size in sizes})
        self.default, self.target = check_count("default", default), target
        self.max_budget = check_count("max_budget", max_budget)
        self.recurrences = check_count("recurrences", recurrences)
        self.eta, self.risk = fraction("eta", eta), fraction("risk", risk)
        self.policy, self.beta, self.window, self.scaling = policy, beta, window, scaling
        if self.default not in self.sizes:
            raise StudyError(f"default must be one of batch_sizes={self.sizes}, got {shown(default)}.")
        if scaling not in ("sqrt", "linear", None):
            raise StudyError(f'scaling must be "sqrt", "linear" or None, got {shown(scaling)}.')
        self._policy = policy_of(policy, self.risk, beta, window)
        self._phases = [Phase()]
        self._score = float("nan")

    @property
    def until(self) -> float | None:
        return self.target

    @property
    def learns(self) -> bool:
        """Whether the policy needs the cost of a unit of every size beforehand."""
        return self._policy.learns

    def keep(self, phases: Sequence[Phase]) -> None:
        """Take the phases of the job; the log keeps them."""
        self._phases = list(phases) or [Phase()]

    def kept(self) -> dict[str, Any]:
        return {"phases": [asdict(phase) for phase in self._phases]}

    def begin(self, search: Search) -> None:
        super().begin(search)
        self._score = score({"": self.target}, "", search.mode)
        self._past, self._runs = Past(), list[Ended]()
        self._under_way: dict[int, _UnderWay] = {}
        self._next: list[tuple[int, tuple[Run, ...]]] = []  # recurrences that go on with another run
        self._on: list[int] = []  # trials that go on with another unit
        self._begun = self._count = 0
        self._model: int | None = None  # the trial whose model is the job's
        self._devices: dict[int, str] = {}

    @property
    def ended(self) -> list[Ended]:
        """All runs that have ended, in their order."""
        return list(self._runs)

    def ask(self) -> list[TrialGroup]:
        groups: dict[int, list[Member]] = {}
        for trial in self._on:
            run = self._under_way[trial]
            start = StartFrom(trial, run.units)
            groups.setdefault(run.recurrence, []).append(Member(trial, run.config, self._budget(run), start))
        for recurrence, stopped in self._next:
            groups.setdefault(recurrence, []).append(self._start(recurrence, stopped))
        self._on, self._next = [], []
        while self._begun < needed_trials(self, self.search) and len(self._granted_now(groups)) < self._phase().overlap:
            groups.setdefault(self._begun, []).append(self._start(self._begun, ()))
            self._begun += 1
        return [self._grant(f"recurrence {number}", members) for number, members in groups.items()]

    def _granted_now(self, groups: Mapping[int, Sequence[Member]]) -> set[int]:
        return {*self._granted, *(member.trial for members in groups.values() for member in members)}

    def _phase(self, recurrence: int | None = None) -> Phase:
        at = self._begun if recurrence is None else recurrence
        return [phase for phase in self._phases if phase.since <= at][-1]

    def _start(self, recurrence: int, stopped: tuple[Run, ...]) -> Member:
        terms, device = self.terms(recurrence), self._phase(recurrence).device
        past = replace(self._past, runs=tuple(self._here(run, device) for run in self._past.runs))
        while True:
            draw = np.random.default_rng(key(self.search.seed, "batch size", self._count, len(stopped)))
            choice = self._policy.choose(terms, past, stopped, draw)
            if len(stopped) >= TRIES:
                choice = Choice(self.default)
            if choice.stake >= terms.unit_costs[choice.size]:
                break
            # Not one unit can be paid: the run counts as stopped without having begun.
            run = Run(choice, recurrence, 0, 0.0, False)
            self._past, past, stopped = self._past.with_run(run), past.with_run(run), (*stopped, run)
        number, self._count = self._count, self._count + 1
        self._past = replace(self._past, running=(*self._past.running, choice))
        config = scaled(self.config, self.default, choice.size, self.scaling) | {"recurrence": recurrence}
        self._under_way[number] = _UnderWay(recurrence, choice, stopped, config, device)
        return Member(number, config, self._budget(self._under_way[number]))

    def _budget(self, run: _UnderWay) -> int:
        """The units that a run is granted now, in all; the first one tells what a unit costs."""
        if not isfinite(run.choice.stake):
            return self.max_budget
        paid = (run.choice.stake - run.cost) / run.cost * run.units if run.cost > 0 else 0.0
        return min(self.max_budget, run.units + max(1, int(paid / 2)))

    def tell(self, report: Report) -> None:
        """Take every report: a run may reach the target below its budget."""
        if report.trial in self._under_way:
            self._take(report)

    def _here(self, run: Run, device: str) -> Run:
        """A run as it counts on a type of device: on another, its units tell something and its cost does not."""
        return replace(run, elsewhere=self._phase(run.recurrence).device != device)

    def terms(self, recurrence: int) -> Terms:
        """What is known before a recurrence: costs of units as runs had them, or as dry steps foretell."""
        phase, seen = self._phase(recurrence), dict[int, list[Ended]]()
        for run in self._runs:
            if run.units and self._phase(run.recurrence).device == phase.device:
                seen.setdefault(run.size, []).append(run)
        means = {size: _each(runs, "cost") for size, runs in seen.items()}
        foretold = dict(phase.unit_costs or {})
        if phase.dry and self.default in seen and self.default in foretold:
            seconds = _each(seen[self.default], "seconds")
            rate = means[self.default] / seconds if seconds else 0.0
            # A unit's evaluation takes as long at every size, and dry steps do not have it.
            beside = max(0.0, seconds - foretold[self.default])
            foretold = {size: (steps + beside) * rate for size, steps in foretold.items()}
        usual = means.get(self.default, foretold.get(self.default, 0.0))
        costs = {size: means.get(size, foretold.get(size, usual)) for size in self.sizes}
        before = usual if phase.default_cost is None else phase.default_cost
        sizes = tuple(self.sizes)
        return Terms(sizes, self.default, self.max_budget, self.recurrences, costs, max(before, costs[self.default]))

    def _take(self, report: Report) -> None:
        run, granted = self._under_way[report.trial], self._granted[report.trial]
        found = self.score(report)
        run.units, run.best = report.unit, max(run.best, found)
        usage, phase = report.usage, self._phase(run.recurrence)
        run.seconds += usage.device_seconds
        run.joules = None if usage.joules is None or run.joules is None else run.joules + usage.joules
        if usage.joules is None or phase.max_power is None:
            cost = usage.device_seconds * (phase.max_power or 1.0)  # what no meter counts is weighed by time alone
        else:
            cost = Objective(self.eta, phase.max_power).cost(usage.device_seconds, usage.joules)
        run.cost += cost
        if not report.metrics:
            self._end(report.trial, "failed")
        elif found >= self._score:
            self._end(report.trial, "reached")
        elif report.unit >= self.max_budget:
            self._end(report.trial, "missed")
        elif report.unit >= granted and run.cost + cost > run.choice.stake:
            self._end(report.trial, "stopped")
        elif report.unit >= granted:
            del self._granted[report.trial]
            self._on.append(report.trial)

    def _end(self, trial: int, verdict: Verdict) -> None:
        under_way = self._under_way.pop(trial)
        self._granted.pop(trial)
        choice, recurrence, reached = under_way.choice, under_way.recurrence, verdict == "reached"
        run = Run(choice, recurrence, under_way.units, under_way.cost, reached)
        self._past = self._past.with_run(run)
        best = under_way.best if isfinite(under_way.best) else None
        made = Ended(
            trial,
            recurrence,
            choice.size,
            under_way.units,
            under_way.seconds,
            under_way.joules,
            under_way.cost,
            choice.stake if isfinite(choice.stake) else None,
            verdict,
            best if best is None or self.search.mode == "max" else -best,
        )
        self._runs.append(made)
        self.search.write(Wrote(trial, WROTE, {k: v for k, v in asdict(made).items() if k != "trial"}))
        if not reached:
            self._dropped.append(trial)
            if choice.size != self.default or verdict == "stopped":  # the default is the last that a recurrence tries
                self._next.append((recurrence, (*under_way.stopped, run)))
        elif self._model is None or self._model < trial:
            self._dropped += [] if self._model is None else [self._model]
            self._model = trial
        else:
            self._dropped.append(trial)


def _each(runs: Sequence[Ended], of: Literal["cost", "seconds"]) -> float:
    """The mean cost or the mean seconds of a unit of some runs."""
    total: float = sum(getattr(run, of) for run in runs)
    return total / sum(run.units for run in runs)


def policy_of(name: str, risk: float, beta: float, window: int | None) -> Policy:
    """The policy of a name.

    >>> policy_of("zeus", 0.0, 2.0, None)
    Zeus(beta=2.0, prior=None, window=None)
    """
    made: dict[str, Policy] = {
        "staked": Staked(risk, beta),
        "zeus": Zeus(beta, window=window),
        "grid": Grid(),
        "default": Default(),
    }
    if name not in made:
        raise StudyError(f"policy must be one of {', '.join(made)}, got {shown(name)}.")
    return made[name]


def scaled(config: Config, default: int, size: int, scaling: Scaling | None) -> Config:
    """A config with another batch size; its ``lr``, if it has one, follows by the rule of ``scaling``.

    >>> scaled({"lr": 0.1}, 32, 128, "sqrt"), scaled({"lr": 0.1}, 32, 64, "linear")
    ({'lr': 0.2, 'batch_size': 128}, {'lr': 0.2, 'batch_size': 64})
    """
    ratio = size / default
    made = {**config, "batch_size": size}
    if scaling is not None and "lr" in config and ratio != 1:
        made["lr"] = config["lr"] * (sqrt(ratio) if scaling == "sqrt" else ratio)
    return made
