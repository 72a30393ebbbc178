"""A study's surrogates for people: each layer's role, widths and factors, the check's verdict and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, isfinite, log2
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.report.format import size, value, width
from penstock.report.page import page, table
from penstock.report.tables import rows_table, spark
from penstock.surrogate.settings import STEPS

if TYPE_CHECKING:
    from penstock.surrogate.examine import Examined

WIDTH, HEIGHT = 860, 340  # of the picture
LEFT, RIGHT, ABOVE, BELOW = 72, 150, 28, 36  # beside its lines, where names and numbers stand
LINE, LONGEST = 14, 22  # how far names stand apart, and how many letters of one are shown


def surrogate_facts(found: Examined) -> dict[str, Any]:
    """The facts of a study's surrogates that tables and ``--json`` show."""
    return {
        "scale": found.scale,
        "family": found.family,
        "config": found.config,
        "layers": [
            {
                "parameter": name,
                "role": part.role,
                "width": part.width or None,
                "narrow": part.narrow or None,
                "init": part.init,
                "learning_rate": part.factor(found.family).rate,
                "epsilon": part.factor(found.family).eps,
                "multiplier": part.multiplier,
            }
            for name, part in found.parts.items()
        ],
        "check": [
            {"layer": one.layer, "slope": one.slope, "right": one.right, "changes": one.changes} for one in found.slopes
        ],
        "right": bool(found.slopes) and not found.wrong,
        "fewer": dict(found.reduced),
        "bytes": {"target": found.bytes[0], "surrogate": found.bytes[1]},
        "seconds": {"target": found.seconds[0], "surrogate": found.seconds[1]},
        "speedup": None if found.seconds[0] is None else found.seconds[0] / found.seconds[1],
    }


def shown(facts: dict[str, Any]) -> RenderableType:
    """Surrogates as a terminal shows them."""
    parts: list[RenderableType] = [rows_table(layer_rows(facts)), Text(), rows_table(check_rows(facts)), Text()]
    return Group(*parts, *(Text(line) for line in said(facts)))


def said(facts: dict[str, Any]) -> list[str]:
    """What was found, in sentences."""
    wrong = [one for one in facts["check"] if not one["right"]]
    steepest = max((abs(one["slope"]) for one in facts["check"]), default=0.0)
    verdict = f"The coordinate check is passed: the steepest slope over widths is {steepest:.2f}."
    if wrong:
        worst = max(wrong, key=lambda one: abs(one["slope"]))
        verdict = f"The coordinate check is failed: the slope of {worst['layer']} over widths is {worst['slope']:.2f}."
    elif not facts["check"]:
        verdict = "The coordinate check is failed: no module of the model gives a tensor of floats."
    bytes, seconds = facts["bytes"], facts["seconds"]
    return [
        verdict,
        f"A surrogate and its optimizer hold {size(bytes['surrogate'])}, the target's {size(bytes['target'])}.",
        f"A step alone takes {1000 * seconds['surrogate']:.3g} ms"
        + (
            ", and no single device holds the target."
            if facts["speedup"] is None
            else f", the target's {1000 * seconds['target']:.3g} ms: {facts['speedup']:.1f} times as fast."
        ),
        *(
            [f"It has {', '.join(facts['fewer'].values())}, if the study's rank check admits that."]
            if facts["fewer"]
            else []
        ),
        "Weight decay and dropout do not carry over: tune these at full width.",
    ]


def layer_rows(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each parameter."""
    return [
        {
            "parameter": one["parameter"],
            "role": one["role"],
            "width": one["width"] or "",
            "narrow": one["narrow"] or "",
            "init ×": value(one["init"]),
            "learning rate ×": value(one["learning_rate"]),
            **({"eps ×": value(one["epsilon"])} if any(o["epsilon"] != 1 for o in facts["layers"]) else {}),
            **({"output ×": value(one["multiplier"])} if any(o["multiplier"] != 1 for o in facts["layers"]) else {}),
        }
        for one in facts["layers"]
    ]


def check_rows(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each activation: how much it changes, from the narrowest width to the target's."""
    rows = []
    for one in facts["check"]:
        changes = [log2(change) for _, change in sorted(one["changes"].items(), reverse=True)]
        drawn = "not finite"
        if all(map(isfinite, changes)):
            least = min(changes)
            span = max(max(changes) - least, len(changes) - 1.0)
            drawn = spark(changes, least, least + span, len(changes))
        rows.append(
            {
                "activation": one["layer"] or "model",
                "change, narrow to wide": drawn,
                "slope": f"{one['slope']:.2f}",
                "right": "yes" if one["right"] else "no",
            }
        )
    return rows


def surrogate_page(name: str, facts: dict[str, Any]) -> str:
    """Surrogates as one self-contained HTML page, with the check as a picture."""
    heads = {
        "scale": str(facts["scale"]),
        "check": "passed" if facts["right"] else "failed",
        "speed-up of a step": "not known" if facts["speedup"] is None else f"{facts['speedup']:.1f}",
        "bytes": f"{size(facts['bytes']['surrogate'])} of {size(facts['bytes']['target'])}",
    }
    sentences = "".join(f"<p>{escape(line)}</p>" for line in said(facts))
    more = [sentences, table(layer_rows(facts), "Parameters"), table(check_rows(facts), "Coordinate check")]
    return page(f"Narrow twins of {name}", heads, draw(facts["check"]), more=more)


def draw(check: Sequence[dict[str, Any]]) -> str:
    """The change of each activation over widths, both as logarithms, as SVG: right ones are level."""
    points = [(-log2(scale), log2(change)) for one in check for scale, change in one["changes"].items()]
    points = [(x, y) for x, y in points if isfinite(y)]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = floor(min(y for _, y in points)), ceil(max(y for _, y in points) + 1e-9)

    def across(x: float) -> float:
        return LEFT + (x - left) / ((right - left) or 1) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return HEIGHT - BELOW - (y - low) / (high - low) * (HEIGHT - ABOVE - BELOW)

    text = 'fill="var(--dim)" font-size="12"'
    drawn = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="change of activations over widths">']
    drawn.append(f'<text x="16" y="14" {text}>change of an activation in {STEPS} steps</text>')
    for power in range(low, high + 1, max(1, round((high - low) / 6))):
        y = f"{down(power):.1f}"
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="var(--line)"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end" {text}>{2.0**power:.3g}</text>')
    for scale in sorted({scale for one in check for scale in one["changes"]}):
        x = f"{across(-log2(scale)):.1f}"
        drawn.append(f'<text x="{x}" y="{HEIGHT - 6}" text-anchor="middle" {text}>{width(scale)} width</text>')
    taken: list[float] = []  # where names stand already
    for one in sorted(check, key=lambda one: -abs(one["slope"])):
        path = [(across(-log2(scale)), log2(change)) for scale, change in sorted(one["changes"].items())]
        if not all(isfinite(y) for _, y in path):
            continue
        line = " ".join(f"{x:.1f},{down(y):.1f}" for x, y in path)
        color = "#4c78a8" if one["right"] else "#d62728"
        title = escape(f"{one['layer'] or 'model'}: slope {one['slope']:.2f}")
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"><title>{title}')
        drawn.append("</title></polyline>")
        if all(abs(down(path[0][1]) - other) >= LINE for other in taken):
            taken.append(down(path[0][1]))
            x, y = f"{WIDTH - RIGHT + 8}", f"{taken[-1]:.1f}"
            drawn.append(f'<text x="{x}" y="{y}" dy="4" {text}>{escape(_short(one["layer"] or "model"))}</text>')
    return "\n".join([*drawn, "</svg>"])


def _short(layer: str) -> str:
    """The end of a layer's path, as far as there is room for it."""
    return layer if len(layer) <= LONGEST else f"…{layer[1 - LONGEST :]}"
