"""A study's surrogates for people: each layer's role, widths and factors, the check's verdict and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log2
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.report.format import size, value
from penstock.report.page import page, table
from penstock.report.tables import rows_table, spark

if TYPE_CHECKING:
    from penstock.surrogate.examine import Examined

WIDTH, HEIGHT, EDGE = 720, 300, 56  # of the picture


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
                "learning_rate": part.rate(found.family),  # type: ignore[arg-type]
                "multiplier": part.multiplier,
            }
            for name, part in found.parts.items()
        ],
        "check": [
            {"layer": one.layer, "slope": one.slope, "right": one.right, "changes": one.changes} for one in found.slopes
        ],
        "right": not found.wrong,
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
            **({"output ×": value(one["multiplier"])} if any(o["multiplier"] != 1 for o in facts["layers"]) else {}),
        }
        for one in facts["layers"]
    ]


def check_rows(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each activation: how much it changes, from the narrowest width to the target's."""
    rows = []
    for one in facts["check"]:
        changes = [log2(change) for _, change in sorted(one["changes"].items(), reverse=True)]
        least = min(changes)
        span = max(max(changes) - least, len(changes) - 1.0)
        rows.append(
            {
                "activation": one["layer"] or "model",
                "change, narrow to wide": spark(changes, least, least + span, len(changes)),
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
    return page(f"Surrogates of {name}", heads, draw(facts["check"]), more=more)


def draw(check: Sequence[dict[str, Any]]) -> str:
    """The change of each activation over widths, both as logarithms, as SVG: right ones are level."""
    points = [(-log2(scale), log2(change)) for one in check for scale, change in one["changes"].items()]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def at(x: float, y: float) -> str:
        across = EDGE + (x - left) / ((right - left) or 1) * (WIDTH - 2 * EDGE)
        return f"{across:.1f},{HEIGHT - EDGE / 2 - (y - low) / ((high - low) or 1) * (HEIGHT - EDGE):.1f}"

    text = 'fill="var(--dim)" font-size="12"'
    drawn = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="change of activations over widths">']
    for one in check:
        line = " ".join(at(-log2(scale), log2(change)) for scale, change in sorted(one["changes"].items()))
        color = "#4c78a8" if one["right"] else "#d62728"
        title = escape(f"{one['layer']}: slope {one['slope']:.2f}")
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"><title>{title}')
        drawn.append("</title></polyline>")
    drawn.append(f'<text x="{EDGE}" y="14" {text}>change of activations (log)</text>')
    drawn.append(f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 4}" text-anchor="end" {text}>width (log)</text>')
    return "\n".join([*drawn, "</svg>"])
