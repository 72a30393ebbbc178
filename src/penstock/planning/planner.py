"""The cheapest plan that keeps a deadline with a confidence, before a study begins and in its middle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from penstock.errors import StudyError
from penstock.numeric import finite, shown
from penstock.planning.choosing import Choosing, Judged, quantile
from penstock.planning.cloud import Cloud
from penstock.planning.execution import Choice
from penstock.planning.plan import Baseline, Kind, Plan, PlannedStage, Point
from penstock.planning.spec import Job

Late = Literal["finish", "pay"]


@dataclass(frozen=True)
class Held:
    """Nodes that a bracket has now."""

    instance: str
    market: str
    nodes: int


@dataclass(frozen=True)
class Used:
    """What a study has used so far: seconds since its start, and money."""

    seconds: float
    cost: float


def plan(
    job: Job,
    cloud: Cloud,
    *,
    deadline: float | None = None,
    max_cost: float | None = None,
    confidence: float = 0.95,
    ahead: bool = True,
    seed: int = 0,
) -> Plan:
    """The cheapest plan that keeps the ``deadline`` with the ``confidence``; with ``max_cost``, the quickest for it.

    With both, the cheapest for the deadline, refused where it costs more. Without either, the cheapest of all. With
    ``ahead``, nodes are asked for before the barrier at which they are needed.

    >>> from penstock.planning.catalogue import Catalogue
    >>> from penstock.planning.draws import Draws
    >>> from penstock.planning.spec import Times, works
    >>> from penstock.trial import Stage
    >>> from penstock.speed.curve import Curve
    >>> curve = Curve.of(beta=1.1, widest=8)
    >>> job = Job(works([Stage(8, 1), Stage(2, 4)]), {"v100": (Times(Draws(60.0), curve),)})
    >>> made = plan(job, Catalogue.read().cloud(["p3.8xlarge"], most=8, preparing=Draws(0.0)), deadline=600)
    >>> [stage.nodes for stage in made.stages], made.chance
    ([1, 1], 1.0)
    """
    deadline, max_cost = _limit("deadline", deadline, "seconds"), _limit("max_cost", max_cost, cloud.currency)
    choosing = Choosing(job, cloud, {}, ahead=ahead, seed=seed)
    others = choosing.others(deadline, _part(confidence))
    chosen = _chosen(choosing, others, deadline, max_cost, confidence)
    if chosen is None:
        raise StudyError(_refusal(choosing, cloud, deadline, max_cost, confidence))
    return _made(job, cloud, choosing, chosen, others, deadline, max_cost, confidence)


def replan(
    job: Job,
    cloud: Cloud,
    *,
    held: Mapping[int, Held],
    used: Used,
    deadline: float | None = None,
    max_cost: float | None = None,
    confidence: float = 0.95,
    ahead: bool = True,
    late: Late = "finish",
    seed: int = 0,
) -> Plan:
    """The cheapest plan for the rest of a study (``Job.rest``) that has nodes already, and has used time and money.

    ``deadline`` and ``max_cost`` are those of the whole study. Where they cannot be kept any more, ``missed`` of the
    plan says so, and the plan is the cheapest ("finish") or the quickest for ``max_cost`` ("pay").
    """
    rest = None if deadline is None else deadline - used.seconds
    left = None if max_cost is None else max_cost - used.cost
    has = {bracket: choice for bracket, one in held.items() if (choice := _choice(cloud, one)) is not None}
    choosing = Choosing(job, cloud, has, ahead=ahead, seed=seed)
    chosen, missed = _chosen(choosing, {}, rest, left, _part(confidence)), ""
    if chosen is None:
        missed = _refusal(choosing, cloud, rest, left, confidence, used)
        paid = choosing.quickest(left, confidence) if late == "pay" and left is not None else None
        chosen = paid or choosing.cheapest(None, confidence)
        assert chosen is not None
    made = _made(job, cloud, choosing, chosen, {}, rest, left, confidence)
    stages = [replace(one, start=one.start + used.seconds, late=one.late + used.seconds) for one in made.stages]
    return replace(
        made,
        stages=tuple(stages),
        seconds=made.seconds + used.seconds,
        late=made.late + used.seconds,
        cost=made.cost + used.cost,
        deadline=deadline,
        max_cost=max_cost,
        frontier=tuple(Point(p.seconds + used.seconds, p.cost + used.cost, p.nodes) for p in made.frontier),
        used_seconds=used.seconds,
        used_cost=used.cost,
        missed=missed,
    )


def _chosen(
    choosing: Choosing,
    others: Mapping[Kind, Judged],
    deadline: float | None,
    max_cost: float | None,
    confidence: float,
) -> Judged | None:
    if max_cost is not None and deadline is None:
        return choosing.quickest(max_cost, confidence)
    # Never above what was done before; the nodes of a static plan go here with their last trial.
    plans = [choosing.cheapest(deadline, confidence), *(choosing.judge(one.candidate) for one in others.values())]
    best = min((one for one in plans if one is not None), key=lambda one: float(one.cost.mean()), default=None)
    return None if best and max_cost is not None and best.paid(confidence) > max_cost else best


def _refusal(
    choosing: Choosing,
    cloud: Cloud,
    deadline: float | None,
    max_cost: float | None,
    confidence: float,
    used: Used | None = None,
) -> str:
    """Why no plan keeps the limits, and which limits could be kept."""
    at = used or Used(0.0, 0.0)
    quick, cheap = choosing.ends()
    sure = f"{confidence:.0%} sure"
    until = "" if deadline is None else f"a deadline of {_minutes(deadline + at.seconds)}"
    held = choosing.cheapest(deadline, confidence)
    if deadline is not None and held is None:
        return (
            f"No plan keeps {until}: the quickest takes {_minutes(quick.late(confidence) + at.seconds)} ({sure}) and "
            f"costs {quick.cost.mean() + at.cost:.2f} {cloud.currency}. Give a later deadline, more nodes (most=) or "
            "other instances."
        )
    assert max_cost is not None
    least = cheap if held is None else held
    return (
        f"No plan{' that keeps ' + until if until else ''} costs at most {max_cost + at.cost:.2f} {cloud.currency}: "
        f"the cheapest costs {least.paid(confidence) + at.cost:.2f} ({sure}) and takes "
        f"{_minutes(float(least.seconds.mean()) + at.seconds)}. Give a higher max_cost or other instances."
    )


def _made(
    job: Job,
    cloud: Cloud,
    choosing: Choosing,
    chosen: Judged,
    others: Mapping[Kind, Judged],
    deadline: float | None,
    max_cost: float | None,
    confidence: float,
) -> Plan:
    return Plan(
        purpose=job.purpose,
        stages=tuple(_stages(choosing, chosen, cloud, confidence)),
        seconds=float(chosen.seconds.mean()),
        late=chosen.late(confidence),
        cost=float(chosen.cost.mean()),
        chance=chosen.chance(deadline),
        deadline=deadline,
        max_cost=max_cost,
        confidence=confidence,
        billing=cloud.billing,
        head=cloud.head,
        prices={offer.name: float(offer.price) for offer in cloud.offers},
        priced=cloud.dated,
        currency=cloud.currency,
        assumed=(*job.assumed, *cloud.assumed),
        frontier=tuple(Point(one.seconds, one.cost, _nodes(one.paths)) for one in choosing.frontier),
        baselines=tuple(_baseline(kind, one, cloud, deadline) for kind, one in others.items()),
        job=job,
        cloud=cloud,
    )


def _stages(choosing: Choosing, chosen: Judged, cloud: Cloud, confidence: float) -> list[PlannedStage]:
    made = []
    for execution, path, outcome in zip(choosing.executions, chosen.candidate.paths, chosen.outcomes, strict=True):
        for at, (work, choice) in enumerate(zip(execution.works, path, strict=True)):
            layout, offer = execution.trained(at, choice).layout, cloud.offers[choice.offer]
            starts = outcome.starts[:, at]
            ends = outcome.starts[:, at + 1] if at + 1 < len(path) else outcome.seconds
            made.append(
                PlannedStage(
                    bracket=work.bracket,
                    number=work.number,
                    trials=work.trials,
                    budget=work.budget,
                    units=work.units,
                    devices=layout.devices,
                    at_once=min(work.trials, layout.slots * layout.share),
                    instance=offer.instance.name,
                    market=offer.market,
                    nodes=choice.nodes,
                    used=layout.nodes,
                    lead=outcome.leads[at],
                    start=float(starts.mean()),
                    seconds=float((ends - starts).mean()),
                    late=quantile(ends, confidence),
                    cost=float(outcome.costs[:, at].mean()),
                )
            )
    return made


def _baseline(kind: Kind, judged: Judged, cloud: Cloud, deadline: float | None) -> Baseline:
    first = cloud.offers[judged.candidate.paths[0][0].offer]
    return Baseline(
        kind,
        float(judged.seconds.mean()),
        float(judged.cost.mean()),
        judged.chance(deadline),
        _nodes(judged.candidate.paths),
        first.instance.name,
        first.market,
    )


def _nodes(paths: tuple[tuple[Choice, ...], ...]) -> tuple[int, ...]:
    return tuple(choice.nodes for path in paths for choice in path)


def _choice(cloud: Cloud, held: Held) -> Choice | None:
    """The offer of nodes that are held; None where there are none, or where the cloud does not have it any more."""
    for number, offer in enumerate(cloud.offers):
        if (offer.instance.name, offer.market) == (held.instance, held.market) and held.nodes:
            return Choice(number, held.nodes)
    return None


def _limit(name: str, value: float | None, what: str) -> float | None:
    if value is not None and ((made := finite(value)) is None or made <= 0):
        raise StudyError(f"{name} must be a number of {what} above 0, got {shown(value)}.")
    return value


def _part(confidence: float) -> float:
    if (made := finite(confidence)) is None or not 0 < made <= 1:
        raise StudyError(f"confidence must be above 0 and at most 1, e.g. 0.95, got {shown(confidence)}.")
    return made


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} minutes"
