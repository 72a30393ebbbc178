"""The bars of a timeline's picture: a lane for each device, a colour for each trial, stacked by share."""

from __future__ import annotations

import colorsys
import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from penstock.log.timeline import Row, Span, union
from penstock.report.format import clock

BARS = 16_000  # the most stays that have a bar each: more bars would make the file large, and be too narrow to see
HALF = 0.5  # pixels: a bar narrower than this is not seen by itself
MANY = 'class="many"'  # the mark of short stays that are drawn together
DIVIDED = ("fused", "packed")  # the modes whose bundles have a whole device
GAP = 0.06  # the part of a pack's lane that is left free above it
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


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a row's bar: its times, and its place in the lane, from 0 to 1."""

    row: Row
    start: float
    end: float
    low: float
    high: float


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
    together = sum(row.end - row.start for some in ours.values() for row in some if row.mode in DIVIDED) / scale.until
    apart = scale.pixel * max(0.25, (scale.right - scale.left) * together / (2 * BARS))  # it bounds the pieces
    for lane in lanes:
        yield f'<g class="lane"><title>{escape(lane.device)}</title>'
        yield f'<path fill="url(#idle)" d="{_path(devices.get(lane.device, ()), lane, scale)}"/>'
        if short := [(row.start, row.end) for row in ours[lane.device] if row.end - row.start < least]:
            yield f'<path {MANY} d="{_path(union(short, scale.pixel), lane, scale)}"/>'
        long = [row for row in ours[lane.device] if row.end - row.start >= least]
        packed = any(row.mode == "packed" for row in long)  # beside bundles that were there before
        modes = (*DIVIDED, "solo") if packed else DIVIDED
        for row, low, high in stack([row for row in long if row.mode not in modes], scale.pixel / 4):
            yield _bar(Piece(row, row.start, row.end, low, high), lane, scale)
        for piece in divided([row for row in long if row.mode in modes], apart):
            yield _bar(piece, lane, scale)
        yield "</g>"


def divided(rows: Iterable[Row], apart: float = 0.0) -> list[Piece]:
    """The rows of fused bundles and packs on one device, cut where a trial comes or goes: they have the whole device.

    So the bundles of each moment divide the whole lane, and the trials of each divide its part, whatever share each was
    placed with. Cuts are at least ``apart`` seconds from each other.

    >>> rows = [Row("gpu 0", 0, 0.0, 2.0, 0.1, "fused"), Row("gpu 0", 1, 0.0, 1.0, 0.1, "fused")]
    >>> [(piece.row.trial, piece.start, piece.low, piece.high) for piece in divided(rows)]
    [(0, 0.0, 0.0, 0.5), (1, 0.0, 0.5, 1.0), (0, 1.0, 0.0, 1.0)]
    """
    rows = sorted(rows, key=lambda row: (row.start, row.trial))
    cuts: list[float] = []
    for time in sorted({time for row in rows for time in (row.start, row.end)}):
        if not cuts or time - cuts[-1] > apart:
            cuts.append(time)
    comes: dict[int, list[Row]] = {}
    goes: dict[Row, int] = {}
    for row in rows:
        first, last = bisect_right(cuts, row.start) - 1, bisect_right(cuts, row.end) - 1
        comes.setdefault(first, []).append(row)
        goes[row] = max(last, first + 1)
    cuts += [cuts[-1] + apart] if cuts else []  # a row that begins at the last cut has a piece, too
    pieces: list[Piece] = []
    there: dict[Row, tuple[float, float, float]] = {}  # since when, and the place in the lane
    for i, time in enumerate(cuts):
        now = [row for row in [*there, *comes.get(i, ())] if goes[row] > i]
        places = _places(now)
        for row, (since, low, high) in there.items():
            if places.get(row) != (low, high):
                pieces.append(Piece(row, since, time, low, high))
        there = {
            row: there[row] if row in there and there[row][1:] == place else (time, *place)
            for row, place in places.items()
        }
    return sorted(pieces, key=lambda piece: (piece.start, piece.low))


def _places(rows: Sequence[Row]) -> dict[Row, tuple[float, float]]:
    """The place of each of the rows of one moment in their lane, those of a bundle beside each other."""
    bundles: dict[str, list[Row]] = {}
    for row in rows:
        bundles.setdefault(row.bundle, []).append(row)
    gap, places = GAP if len(bundles) > 1 else 0.0, dict[Row, tuple[float, float]]()
    for i, some in enumerate(bundles.values()):
        low, each = i / len(bundles), (1 - gap) / len(bundles) / len(some)
        places |= {row: (low + j * each, low + (j + 1) * each) for j, row in enumerate(some)}
    return places


def least_part(rows: Iterable[Row]) -> float:
    """The smallest part of a lane that a row has.

    >>> least_part([Row("gpu 0", trial, 0.0, 2.0, 0.1, "fused") for trial in range(4)])
    0.25
    """
    parts = [1.0]
    ends: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: row.start):
        if row.mode not in DIVIDED:
            parts.append(row.share)
            continue
        there = ends.setdefault(row.device, [])
        while there and there[0] <= row.start:
            heapq.heappop(there)
        heapq.heappush(there, row.end)
        parts.append(1 / len(there))
    return min(parts)


def stack(rows: Iterable[Row], slack: float = 0.0) -> list[tuple[Row, float, float]]:
    """The rows of one device, each with its place in the lane, from 0 to 1: as low as there is room for its share.

    Shares that add up to more than 1 shrink until they fit, together with all rows that overlap them in time. Rows that
    overlap by no more than ``slack`` seconds do not shrink.

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


def _bar(piece: Piece, lane: Lane, scale: Scale) -> str:
    row, low, high = piece.row, piece.low, piece.high
    x, width = scale(piece.start), max(1.0, scale(piece.end) - scale(piece.start))
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
