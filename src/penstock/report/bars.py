"""The bars of a timeline's picture: a lane for each device, a colour for each trial, stacked by share."""

from __future__ import annotations

import colorsys
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from penstock.log.timeline import Row, Span, union
from penstock.report.format import clock

BARS = 16_000  # the most stays that have a bar each: more bars would make the file large, and be too narrow to see
HALF = 0.5  # pixels: a bar narrower than this is not seen by itself
MANY = 'class="many"'  # the mark of short stays that are drawn together
CHAR = 6.7  # the width of a character in pixels, about


@dataclass(frozen=True)
class Scale:
    """The horizontal position of a time: from ``left`` to ``right`` in pixels, from 0 to ``until`` in seconds."""

    left: float
    right: float
    until: float

    @property
    def pixel(self) -> float:
        """The seconds of one pixel."""
        return self.until / (self.right - self.left)

    def __call__(self, time: float) -> float:
        return self.left + min(max(time, 0.0), self.until) / self.pixel


@dataclass(frozen=True)
class Lane:
    """The vertical position of a device in the picture."""

    device: str
    top: float
    height: float


def bars(
    rows: Iterable[Row], devices: Mapping[str, Sequence[Span]], lanes: Sequence[Lane], scale: Scale
) -> Iterator[str]:
    """The lanes in SVG: hatched while their devices were there, and on top a bar for each row.

    Where there are more than ``BARS`` rows, only the longest have a bar of their own, and none narrower than half a
    pixel; the others are drawn together in grey.
    """
    ours: dict[str, list[Row]] = {lane.device: [] for lane in lanes}
    for row in rows:
        if row.device in ours:
            ours[row.device].append(row)
    seconds = [row.end - row.start for some in ours.values() for row in some]
    least = 0.0
    if len(seconds) > BARS:  # rows of equal length all have a bar, or none of them has
        least = max(HALF * scale.pixel, math.nextafter(heapq.nlargest(BARS + 1, seconds)[-1], math.inf))
    for lane in lanes:
        yield f'<g class="lane"><title>{escape(lane.device)}</title>'
        yield f'<path fill="url(#idle)" d="{_path(devices.get(lane.device, ()), lane, scale)}"/>'
        if short := [(row.start, row.end) for row in ours[lane.device] if row.end - row.start < least]:
            yield f'<path {MANY} d="{_path(union(short, scale.pixel), lane, scale)}"/>'
        long = [row for row in ours[lane.device] if row.end - row.start >= least]
        yield from (_bar(row, lane, scale, low, high) for row, low, high in stack(long, scale.pixel / 4))
        yield "</g>"


def stack(rows: Iterable[Row], slack: float = 0.0) -> list[tuple[Row, float, float]]:
    """The rows of one device, each with its place in the lane, from 0 to 1: as low as there is room for its share.

    Shares that add up to more than 1, as in a fused bundle that other trials entered, shrink until they fit, together
    with all rows that overlap them in time. Rows that overlap by no more than ``slack`` seconds do not shrink.

    >>> rows = [Row("gpu 0", 0, 0.0, 2.0, 0.5, "fused"), Row("gpu 0", 1, 0.0, 2.0, 0.5, "fused")]
    >>> [(low, high) for _, low, high in stack(rows)]
    [(0.0, 0.5), (0.5, 1.0)]
    """
    stacked: list[tuple[Row, float, float]] = []
    together: list[tuple[Row, float, float]] = []
    there: list[tuple[float, float, float]] = []  # bottom and top in the lane, and the end in time
    for row in sorted(rows, key=lambda row: (row.start, row.trial)):
        there = [one for one in there if one[2] > row.start + slack]
        if not there:
            stacked += _fitted(together)
            together = []
        share, low = min(1.0, row.share), 0.0
        for bottom, top, _ in sorted(there):
            if bottom - low >= share - 1e-9:
                break
            low = max(low, top)
        there.append((low, low + share, row.end))
        together.append((row, low, low + share))
    return stacked + _fitted(together)


def colour(trial: int) -> tuple[str, bool]:
    """A trial's colour, always the same and far from its neighbours', and whether text on it must be light.

    >>> colour(7) == colour(7) != colour(8)
    True
    """
    hue = trial * 137.508 % 360 / 360  # the golden angle spreads the colours of trials that follow one another
    rgb: tuple[float, ...] = colorsys.hls_to_rgb(hue, (0.60, 0.46, 0.70)[trial % 3], (0.62, 0.55, 0.70)[trial // 3 % 3])
    bright = _brightness(rgb)
    white = max(0.0, 0.36 - bright) / (1 - bright)  # a deep blue would be lost on a dark background
    rgb = tuple(c + (1 - c) * white for c in rgb)
    return "#" + "".join(f"{round(255 * c):02x}" for c in rgb), _brightness(rgb) < 0.55


def _brightness(rgb: Sequence[float]) -> float:
    return 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]


def _fitted(together: Sequence[tuple[Row, float, float]]) -> list[tuple[Row, float, float]]:
    peak = max((1.0, *(high for _, _, high in together)))
    return [(row, low / peak, high / peak) for row, low, high in together]


def _bar(row: Row, lane: Lane, scale: Scale, low: float, high: float) -> str:
    x, width = scale(row.start), max(1.0, scale(row.end) - scale(row.start))
    y, height = lane.top + lane.height * (1 - high), lane.height * (high - low)
    width -= 0.6 if width > 4 else 0.0  # a gap, so that neighbours of like colours can be told apart
    height -= 0.6 if low > 0 and height > 4 else 0.0
    fill, light = colour(row.trial)
    what = f"trial {row.trial} · share {row.share:.3g} · {escape(row.mode)} · {clock(row.start)} – {clock(row.end)}"
    bar = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}">'
        f"<title>{what}</title></rect>"
    )
    name = str(row.trial)
    if width < CHAR * len(name) + 3 or height < 9.5:
        return bar
    kind = "number light" if light else "number"
    return f'{bar}<text class="{kind}" x="{x + width / 2:.1f}" y="{y + height / 2 + 3.5:.1f}">{name}</text>'


def _path(spans: Iterable[Span], lane: Lane, scale: Scale) -> str:
    return "".join(
        f"M{scale(start):.1f} {lane.top:.1f}h{max(HALF, scale(end) - scale(start)):.1f}v{lane.height:.1f}"
        f"H{scale(start):.1f}z"
        for start, end in spans
    )
