"""A plan: how many nodes of which instance type each stage gets, the time and cost expected of it, and its frontier."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from penstock.errors import StudyError
from penstock.log.fields import build
from penstock.numeric import shown
from penstock.planning.cloud import Cloud
from penstock.planning.spec import Job
from penstock.planning.spec import Purpose as Purpose

Kind = Literal["static", "naive", "greedy"]
VERSION = 1  # of a plan's JSON


@dataclass(frozen=True)
class PlannedStage:
    """One stage: its ``trials`` train ``units`` more units each, to ``budget`` units in all, on ``nodes`` nodes.

    ``bracket`` and ``number`` say which stage it is: stages of a bracket follow one another, and brackets run at once,
    each on nodes of its own. ``devices`` is what a trial gets: 2 is two devices, 1/4 is a device that four share.
    ``at_once`` trials run at a time, and the others wait. ``nodes`` are held, of one ``instance`` type bought on one
    ``market``; ``used`` of them have trials. A node goes when its last trial ends, unless the next stage needs it.
    Nodes that the stage before did not have are asked for ``lead`` seconds before the stage before is expected to
    end; 0 asks at the barrier. ``start`` is the expected second of the study at which the barrier before it opens.
    ``seconds`` and ``cost`` are means from that moment to the next barrier, with the wait for nodes; ``late`` is the
    second of the study by which the stage has ended with the plan's confidence.
    """

    bracket: int
    number: int
    trials: int
    budget: int
    units: float
    devices: float
    at_once: int
    instance: str
    market: str
    nodes: int
    used: int
    lead: float
    start: float
    seconds: float
    late: float
    cost: float


@dataclass(frozen=True)
class Point:
    """A plan of the frontier: no plan is both quicker and cheaper in the mean. ``nodes`` has each stage's number."""

    seconds: float
    cost: float
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Baseline:
    """A plan of another kind for the same deadline and confidence (RubberBand §3.2, §4.3 and §6.3.1)."""

    kind: Kind
    seconds: float
    cost: float
    chance: float
    nodes: tuple[int, ...]
    instance: str
    market: str


@dataclass(frozen=True)
class Plan:
    """How many nodes of which type each stage of a study gets, and what that is expected to take and to cost.

    ``seconds`` and ``cost`` are means over the whole study, in seconds and in the catalogue's money. ``late`` is the
    time that holds with the plan's ``confidence``, and ``chance`` the part of samples that keep the ``deadline`` (1
    without one). ``assumed`` says in sentences what was assumed and not measured. ``frontier`` has the cheapest plan
    for each deadline, the quickest first. ``prices`` are an hour's price of each "instance market" that the plan was
    made with, ``priced`` the date of these prices. ``used_seconds`` and ``used_cost`` were used before the plan was
    made, where it replaces another: they are part of ``seconds`` and ``cost``. ``missed`` says why the deadline or the
    money cannot be kept any more, and is empty where they can. ``job`` and ``cloud`` are what the plan was made of:
    with them a study can be planned anew while it runs, and rehearsed.
    """

    purpose: Purpose
    stages: tuple[PlannedStage, ...]
    seconds: float
    late: float
    cost: float
    chance: float
    deadline: float | None = None
    max_cost: float | None = None
    confidence: float = 0.95
    billing: str = "instance"
    head: float = 0.0
    prices: dict[str, float] = field(default_factory=dict)
    priced: str = ""
    currency: str = "USD"
    assumed: tuple[str, ...] = ()
    frontier: tuple[Point, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    used_seconds: float = 0.0
    used_cost: float = 0.0
    missed: str = ""
    job: Job = field(kw_only=True)
    cloud: Cloud = field(kw_only=True)

    def at(self, bracket: int, number: int) -> PlannedStage | None:
        """The stage of that number in that bracket; None where the plan does not have it."""
        return next((one for one in self.stages if (one.bracket, one.number) == (bracket, number)), None)

    def baseline(self, kind: str) -> Baseline | None:
        """The plan of another kind, where there is one that keeps the deadline."""
        return next((one for one in self.baselines if one.kind == kind), None)

    def require(self, purpose: Purpose) -> None:
        """Refuse a study that the plan was not made for."""
        for name, made, now in (
            ("task", self.purpose.task, purpose.task),
            ("task's source", self.purpose.source, purpose.source),
            ("algorithm", self.purpose.algorithm, purpose.algorithm),
            ("number of trials", self.purpose.trials, purpose.trials),
        ):
            if made != now:
                raise StudyError(
                    f"The plan was made for another {name}: {shown(made)}, and the study has {shown(now)}. Make a plan "
                    "for this study, with study.plan(...) or `penstock plan FILE`."
                )

    def simulation(self) -> dict[str, Any]:
        """The settings of a simulated cloud that is as the plan takes the real one to be: see ``Simulated.of``."""
        from penstock.planning.rehearsing import simulation

        return simulation(self.job, self.cloud)

    def to_json(self) -> str:
        """The plan as JSON, which ``from_json`` reads."""
        return json.dumps({"penstock_plan": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that ``to_json`` wrote; refused where the text is no plan."""
        try:
            body: Any = json.loads(text)
            if not isinstance(body, dict) or body.pop("penstock_plan", None) != VERSION:
                raise ValueError(f"expected an object with penstock_plan = {VERSION}")
            made = build(cls, body)
        except ValueError as error:
            raise StudyError(
                f"That is no plan of this version of Penstock ({error}): make one with `penstock plan FILE --save "
                "plan.json`."
            ) from None
        assert isinstance(made, cls)
        return made
