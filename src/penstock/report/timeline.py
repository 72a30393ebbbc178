"""The picture of a timeline: devices down and time across, a chart of busy devices above, and a caption below."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from penstock.log.events import Event
from penstock.log.timeline import Row, Span, busy_spans, measure
from penstock.report.bars import CHAR, MANY, Lane, Scale, bars, least_part
from penstock.report.format import clock

WIDTH = 1000.0  # the width of the whole picture in pixels
RIGHT = 972.0  # where the lanes end: half a label of the axis has room beside them
LANES = 64  # the most devices that are shown
CHART = 44.0  # the height of the chart of busy devices in pixels
SLICES = 900  # slices of the time in that chart

STYLE = """
.penstock{font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;font-variant-numeric:tabular-nums}
.penstock .right{text-anchor:end}.penstock .mid,.penstock .number{text-anchor:middle}
.penstock .node{font-weight:600;paint-order:stroke;stroke:#fff;stroke-width:4px}
.penstock .number{font-size:10px;fill:#111;pointer-events:none}.penstock .light{fill:#fff}
.penstock .paper{fill:#fff}.penstock .ink{fill:#1f2430}.penstock .dim{fill:#6b7280}
.penstock .line{stroke:#d9dce3;fill:none}.penstock .area{fill:#8fb0f2}.penstock .many{fill:#8b93a7}
.penstock .calm{fill:#f5f2fa}.penstock .hatch{fill:#d3c8e8}
@media(prefers-color-scheme:dark){
.penstock .paper{fill:#15181f}.penstock .node{stroke:#15181f}.penstock .ink{fill:#e6e8ee}.penstock .dim{fill:#98a0b0}
.penstock .line{stroke:#343a46}.penstock .area{fill:#3f66b3}.penstock .many{fill:#6d7588}
.penstock .calm{fill:#1d1b27}.penstock .hatch{fill:#463d60}}
""".strip()
HATCH = (
    '<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="calm" width="6" height="6"/><rect class="hatch" width="1.6" height="6"/></pattern>'
)


def end(events: Iterable[Event]) -> float:
    """The latest time in a log."""
    return max((getattr(event, "clock", 0.0) for event in events), default=0.0)


def figures(rows: Sequence[Row], devices: Mapping[str, Sequence[Span]], until: float) -> dict[str, str]:
    """The figures of a timeline's caption.

    >>> figures([Row("gpu 0", 0, 0.0, 3.0, 1.0, "solo")], {"gpu 0": [(0.0, 4.0)]}, 4.0)
    {'devices': '1', 'trials': '1', 'time': '4.0 s', 'utilisation': '75%'}
    """
    names, trials = {*devices, *(row.device for row in rows)}, {row.trial for row in rows}
    facts = {"devices": f"{len(names):,}", "trials": f"{len(trials):,}", "time": clock(until)}
    busy = measure(rows, devices)
    return {**facts, "utilisation": f"{busy.fraction:.0%}"} if busy.available > 0 else facts


def draw(rows: Sequence[Row], *, devices: Mapping[str, Sequence[Span]], until: float) -> str:
    """A self-contained SVG of which trial was on which device when, for light and dark backgrounds alike.

    Trials that share a device divide its lane by their shares (Fluid, figure 5). Those of a fused bundle, which has the
    whole device, divide it evenly, and each bundle of a pack has a lane of its own within it. The time that no trial
    had of a device is hatched (Fluid, figure 2). ``devices`` says when each device was there. Of many devices the first
    ``LANES`` are shown, and the picture says how many more there are. The chart and the caption count all devices.

    >>> draw([], devices={}, until=0.0).startswith("<svg")
    True
    """
    names = sorted({*devices, *(row.device for row in rows)}, key=natural)
    shown = names[:LANES]
    more = f"… {len(names) - LANES:,} more devices" if len(names) > LANES else ""
    nodes = any("/" in name for name in shown)
    labels = [_label(name, nodes) for name in shown]
    scale = Scale(26 + CHAR * max(8, len(more), *map(len, labels), 0), RIGHT, until if until > 0 else 1.0)
    y, parts, legend = 10.0, [], {}
    if not rows:
        parts.append(f'<text class="dim" x="16" y="{y + 16:g}">No trial has been placed on a device yet.</text>')
        y += 26
    if shown:
        lanes, bottom = _lanes(shown, nodes, y + CHART + 36, least_part(rows))
        parts += _chart(rows, devices, scale, y + 16)
        parts += _axis(scale, y + 16, bottom)
        parts += _names(lanes, labels, nodes, scale.left - 10)
        drawn = list(bars(rows, devices, lanes, scale))
        parts += drawn
        legend = {"idle": 'fill="url(#idle)"'}
        if any(MANY in part for part in drawn):
            legend["short stays, drawn together"] = MANY
        if more:
            parts.append(f'<text class="dim right" x="{scale.left - 10:.1f}" y="{bottom + 13:.1f}">{more}</text>')
        y = bottom + 22
    parts += _caption(figures(rows, devices, until), legend, y + 26)
    height = round(y + 42)
    size = f'viewBox="0 0 {WIDTH:g} {height}" width="{WIDTH:g}" height="{height}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="penstock" {size} role="img" aria-label="Timeline">',
        f"<style>{STYLE}</style><defs>{HATCH}</defs>",
        f'<rect class="paper" width="{WIDTH:g}" height="{height}"/>',
    ]
    return "\n".join([*head, *parts, "</svg>\n"])


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts numbers inside names as numbers.

    >>> sorted(["gpu 10", "gpu 9", "cpu"], key=natural)
    ['cpu', 'gpu 9', 'gpu 10']
    """
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"([0-9]+)", name)]


def ticks(until: float, most: int = 9) -> list[tuple[float, str]]:
    """Round times from 0 to ``until``, about ``most`` of them, with their labels.

    >>> ticks(30, 4)
    [(0.0, '0'), (10.0, '10 s'), (20.0, '20 s'), (30.0, '30 s')]
    >>> [label for _, label in ticks(3600, 5)]
    ['0', '15 min', '30 min', '45 min', '60 min']
    """
    unit, name, steps = 1.0, "s", [m * 10.0**e for e in range(-6, 2) for m in (1, 2, 5)]
    if until > 2 * 86400:
        unit, name, steps = 86400.0, "d", [m * 10.0**e for e in range(300) for m in (1, 2, 5)]
    elif until > 2 * 3600:
        unit, name, steps = 3600.0, "h", [0.5, 1, 2, 3, 6, 12]
    elif until > 120:
        unit, name, steps = 60.0, "min", [0.5, 1, 2, 5, 10, 15, 30]
    step = next((step for step in steps if until / (step * unit) <= most), steps[-1])
    count = math.floor(until / (step * unit) + 1e-9)
    return [(i * step * unit, f"{i * step:.6g} {name}" if i else "0") for i in range(count + 1)]


def _lanes(shown: Sequence[str], nodes: bool, top: float, least: float) -> tuple[list[Lane], float]:
    """A lane for each device, and where they end. Few lanes are high enough to number a trial of the least share."""
    height = 26.0 if len(shown) <= 12 else 20.0 if len(shown) <= 32 else 14.0
    height = max(height, min(11 / least, 400 / len(shown)))
    lanes: list[Lane] = []
    for name in shown:
        if nodes and (not lanes or _node(name) != _node(lanes[-1].device)):
            top += 20 if lanes else 16
        lanes.append(Lane(name, top, height))
        top += height + (4 if height > 16 else 2)
    return lanes, top


def _names(lanes: Sequence[Lane], labels: Sequence[str], nodes: bool, right: float) -> Iterator[str]:
    """The names of devices beside their lanes, and of each node above its lanes."""
    before = None
    for lane, label in zip(lanes, labels, strict=True):
        if nodes and (node := _node(lane.device)) != before:
            yield f'<text class="ink node" x="16" y="{lane.top - 6:.1f}">{escape(_short(node))}</text>'
            before = node
        yield (
            f'<text class="ink right" x="{right:.1f}" y="{lane.top + lane.height / 2 + 4:.1f}">'
            f"{escape(label)}<title>{escape(lane.device)}</title></text>"
        )


def _chart(rows: Sequence[Row], devices: Mapping[str, Sequence[Span]], scale: Scale, top: float) -> Iterator[str]:
    """The fraction of the devices that is busy, over time: the mean of each slice of time."""
    busy = _sliced((span for spans in busy_spans(rows, devices).values() for span in spans), scale.until)
    there = _sliced((span for spans in devices.values() for span in spans), scale.until)
    yield f'<text class="dim" x="{scale.left:.1f}" y="{top - 5:.1f}">devices busy</text>'
    for label, y in (("100%", top), ("0%", top + CHART)):
        yield f'<text class="dim right" x="{scale.left - 10:.1f}" y="{y + 4:.1f}">{label}</text>'
        yield f'<path class="line" d="M{scale.left:.1f} {y:.1f}H{scale.right:g}"/>'
    path, last = f"M{scale.left:.1f} {top + CHART:.1f}", ""
    for i in range(SLICES):
        part = busy[i] / there[i] if there[i] > 1e-9 else 0.0
        height = f"V{top + CHART * (1 - min(1.0, part)):.1f}"
        if height != last:
            path, last = f"{path}H{scale(i * scale.until / SLICES):.1f}{height}", height
    yield f'<path class="area" d="{path}H{scale.right:g}V{top + CHART:.1f}Z"/>'


def _sliced(spans: Iterable[Span], until: float) -> list[float]:
    """How much of the spans lies in each slice of time. A long span is counted as fast as a short one."""
    amount, steps = [0.0] * (SLICES + 1), [0] * (SLICES + 2)
    for start, stop in spans:
        a, b = (min(time / until, 1.0) * SLICES for time in (start, stop))
        amount[int(a)] -= a - int(a)
        amount[int(b)] += b - int(b)
        steps[int(a)] += 1
        steps[int(b)] -= 1
    whole = 0
    for i in range(SLICES):
        whole += steps[i]
        amount[i] += whole
    return amount[:SLICES]


def _axis(scale: Scale, top: float, bottom: float) -> Iterator[str]:
    for time, label in ticks(scale.until):
        yield f'<path class="line" d="M{scale(time):.1f} {top:.1f}V{bottom:.1f}"/>'
        yield f'<text class="dim mid" x="{scale(time):.1f}" y="{bottom + 13:.1f}">{label}</text>'


def _caption(facts: Mapping[str, str], legend: Mapping[str, str], y: float) -> Iterator[str]:
    counts = [f"{facts[what]} {what[:-1] if facts[what] == '1' else what}" for what in ("devices", "trials")]
    words = [*counts, facts["time"]]
    if "utilisation" in facts:
        words.append(f"utilisation {facts['utilisation']}")
    yield f'<text class="ink" x="16" y="{y:.1f}">{" · ".join(words)}</text>'
    x = RIGHT
    for word, fill in legend.items():
        yield f'<rect {fill} x="{x - 14:.1f}" y="{y - 9:.1f}" width="14" height="11"/>'
        yield f'<text class="dim right" x="{x - 20:.1f}" y="{y:.1f}">{word}</text>'
        x -= CHAR * len(word) + 44


def _node(name: str) -> str:
    return name.rpartition("/")[0]


def _label(name: str, nodes: bool) -> str:
    return _short(name.rpartition("/")[2] if nodes else name)


def _short(name: str, most: int = 22) -> str:
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}"
