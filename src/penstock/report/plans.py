"""A plan for people: its stages as a table, the plans beside it, its frontier as text and as a picture, and a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.planning.plan import Plan, Point
from penstock.report.format import clock
from penstock.report.page import page, table
from penstock.report.tables import rows_table

SHOWN = 8  # points of the frontier that a terminal shows
WIDTH, HEIGHT, EDGE = 720, 300, 56  # of the picture
LETTER, LINE = 6.5, 14  # about the width of a letter, and the height of a line


def plan_facts(plan: Plan) -> dict[str, Any]:
    """The facts of a plan that tables and ``--json`` show."""
    static = plan.baseline("static")
    return {
        "seconds": plan.seconds,
        "cost": plan.cost,
        "currency": plan.currency,
        "late": plan.late,
        "confidence": plan.confidence,
        "deadline": plan.deadline,
        "max_cost": plan.max_cost,
        "chance": plan.chance,
        "priced": plan.priced,
        "saving": None if static is None else static.cost / plan.cost,
        "stages": [vars(stage) for stage in plan.stages],
        "others": [vars(one) for one in plan.baselines],
        "frontier": [vars(point) for point in plan.frontier],
        "assumed": list(plan.assumed),
    }


def shown(plan: Plan) -> RenderableType:
    """A plan as a terminal shows it."""
    lines: list[RenderableType] = [rows_table(stage_rows(plan)), Text()]
    if plan.baselines:
        lines += [rows_table(other_rows(plan)), Text()]
    lines += [Text(line) for line in said(plan)]
    if len(plan.frontier) > 1:
        lines += [
            Text(),
            Text("The cheapest plan for each deadline, by mean times:", style="dim"),
            rows_table(frontier_rows(plan)),
        ]
    if plan.assumed:
        lines += [Text(), Text("Assumed, not measured:", style="yellow"), *(Text(f"- {one}") for one in plan.assumed)]
    return Group(*lines)


def said(plan: Plan) -> list[str]:
    """What a plan promises, in sentences."""
    lines = [f"It takes {clock(plan.seconds)} and costs {money(plan, plan.cost)} in the mean."]
    if plan.deadline is not None:
        lines.append(f"It keeps the deadline of {clock(plan.deadline)} with a chance of {plan.chance:.0%}.")
    else:
        lines.append(f"It ends within {clock(plan.late)} with a chance of {plan.confidence:.0%}.")
    if (static := plan.baseline("static")) is not None:
        same = f"{_count(static.nodes[0], static.instance)} from the beginning to the end"
        lines.append(f"{same} would cost {money(plan, static.cost)}: {static.cost / plan.cost:.2f} times as much.")
    if plan.priced:
        lines.append(f"Prices are of {plan.priced}.")
    return lines


def stage_rows(plan: Plan) -> list[dict[str, Any]]:
    """A row for each stage."""
    several = len({stage.bracket for stage in plan.stages}) > 1
    return [
        {
            **({"bracket": stage.bracket} if several else {}),
            "stage": stage.number,
            "trials": stage.trials,
            "budget": stage.budget,
            "nodes": stage.nodes,
            "instance": stage.instance + (" spot" if stage.market == "spot" else ""),
            "devices a trial": _share(stage.devices),
            "at once": stage.at_once,
            "asked ahead": clock(stage.lead) if stage.lead else "",
            "begins": clock(stage.start),
            "time": clock(stage.seconds),
            "cost": money(plan, stage.cost),
        }
        for stage in plan.stages
    ]


def other_rows(plan: Plan) -> list[dict[str, Any]]:
    """A row for this plan, and one for each plan of another kind."""
    ours = {"plan": "this", "nodes": _nodes([stage.nodes for stage in plan.stages]), "time": clock(plan.seconds)}
    rows = [{**ours, "cost": money(plan, plan.cost), "chance": f"{plan.chance:.0%}"}]
    others = [(one.kind, one.nodes, one.seconds, one.cost, one.chance) for one in plan.baselines]
    rows += [
        {
            "plan": kind,
            "nodes": _nodes(nodes),
            "time": clock(time),
            "cost": money(plan, cost),
            "chance": f"{chance:.0%}",
        }
        for kind, nodes, time, cost, chance in others
    ]
    return rows


def frontier_rows(plan: Plan) -> list[dict[str, Any]]:
    """A row for some plans of the frontier, the quickest first."""
    points = plan.frontier
    last = len(points) - 1
    steps = max(1, min(last, SHOWN - 1))
    some = sorted({round(i * last / steps) for i in range(steps + 1)})
    return [
        {"time": clock(points[i].seconds), "cost": money(plan, points[i].cost), "nodes": _nodes(points[i].nodes)}
        for i in some
    ]


def plan_page(name: str, plan: Plan) -> str:
    """A plan as one self-contained HTML page, with its frontier as a picture."""
    facts = {
        "time": clock(plan.seconds),
        "cost": money(plan, plan.cost),
        "chance of the deadline": f"{plan.chance:.0%}",
    }
    if plan.deadline is None:
        del facts["chance of the deadline"]
    parts = [table(stage_rows(plan), "Stages")]
    if plan.baselines:
        parts.append(table(other_rows(plan), "Other plans"))
    sentences = "".join(f"<p>{escape(line)}</p>" for line in said(plan))
    assumed = "".join(f"<li>{escape(one)}</li>" for one in plan.assumed)
    parts.append(sentences + (f"<h2>Assumed, not measured</h2><ul>{assumed}</ul>" if assumed else ""))
    return page(f"Plan of {name}", facts, draw_frontier(plan), more=parts)


def draw_frontier(plan: Plan) -> str:
    """The frontier as SVG: time across, cost upwards, this plan and the others as points."""
    marks = [("this plan", plan.seconds, plan.cost)] + [(one.kind, one.seconds, one.cost) for one in plan.baselines]
    points: Sequence[Point] = plan.frontier or (Point(plan.seconds, plan.cost),)
    most_time = max([point.seconds for point in points] + [time for _, time, _ in marks]) * 1.05
    most_cost = max([point.cost for point in points] + [cost for *_, cost in marks]) * 1.1

    def at(time: float, cost: float) -> tuple[float, float]:
        x = EDGE + time / most_time * (WIDTH - 2 * EDGE)
        return round(x, 1), round(HEIGHT - EDGE / 2 - cost / most_cost * (HEIGHT - EDGE), 1)

    line = " ".join(f"{x},{y}" for x, y in (at(point.seconds, point.cost) for point in points))
    (left, bottom), (right, _), (_, top) = at(0, 0), at(most_time, 0), at(0, most_cost)
    text = 'fill="var(--dim)" font-size="12"'
    drawn = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="cost by time">',
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="var(--line)"/>',
        f'<text x="{left}" y="{top - 6}" {text}>{escape(plan.currency)}</text>',
        f'<text x="{right}" y="{bottom + 18}" text-anchor="end" {text}>{clock(most_time)}</text>',
        f'<text x="{left - 6}" y="{top + 4}" text-anchor="end" {text}>{most_cost:.2f}</text>',
        f'<polyline points="{line}" fill="none" stroke="#4c78a8" stroke-width="2"/>',
    ]
    labels: list[tuple[float, float, float]] = []
    for (x, y), names in _points([(name, at(time, cost)) for name, time, cost in marks]).items():
        color = "#d62728" if "this plan" in names else "var(--dim)"
        drawn.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{color}"/>')
        label = ", ".join(names)
        begin = x - 7 - LETTER * len(label) if x > 0.8 * WIDTH else x + 7
        height = _free(labels, begin, begin + LETTER * len(label), y - 7)
        side, anchor = (x - 7, "end") if begin < x else (begin, "start")
        drawn.append(f'<text x="{side}" y="{height}" text-anchor="{anchor}" {text}>{escape(label)}</text>')
    if plan.deadline is not None and plan.deadline <= most_time:
        x, _ = at(plan.deadline, 0)
        drawn.append(f'<path d="M{x} {top}V{bottom}" stroke="#d62728" stroke-dasharray="4 4"/>')
    return "\n".join([*drawn, "</svg>"])


def _points(marks: Sequence[tuple[str, tuple[float, float]]]) -> dict[tuple[float, float], list[str]]:
    """The names of each point; those of a point that is hardly apart from one before are named there.

    >>> _points([("this plan", (9.0, 9.0)), ("static", (9.0, 2.0)), ("greedy", (9.5, 9.0))])
    {(9.0, 9.0): ['this plan', 'greedy'], (9.0, 2.0): ['static']}
    """
    found: dict[tuple[float, float], list[str]] = {}
    for name, (x, y) in marks:
        near = next((one for one in found if abs(one[0] - x) < 4 and abs(one[1] - y) < 4), (x, y))
        found.setdefault(near, []).append(name)
    return found


def _free(labels: list[tuple[float, float, float]], begin: float, end: float, height: float) -> float:
    """The height for a label from ``begin`` to ``end`` at which it covers none of the others; it is one of them then.

    >>> labels = []
    >>> _free(labels, 0, 50, 90), _free(labels, 40, 80, 92), _free(labels, 60, 99, 90)
    (90, 64, 90)
    """
    while any(begin < right and left < end and abs(height - other) < LINE for left, right, other in labels):
        height -= LINE
    labels.append((begin, end, height))
    return height


def money(plan: Plan, amount: float) -> str:
    """An amount of a plan's money."""
    return f"{amount:.2f} {plan.currency}"


def _share(devices: float) -> str:
    return f"{devices:g}" if devices >= 1 else f"1/{round(1 / devices)}"


def _nodes(nodes: Sequence[int]) -> str:
    return " ".join(map(str, nodes))


def _count(number: int, what: str) -> str:
    return f"{number} {what}"
