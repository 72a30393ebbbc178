"""Which trial had how much of which device and when, read from the log alone, and how busy the devices were."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.log.events import Asked, Devices, Ended, Event, Failed, Opened, Placed, Reported, Saved, Stopped

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Row:
    """A trial's stay on one device; a trial that spans several devices has a row for each.

    ``share`` is the share logged at the placement: below 1 a part of the device, above 1 the number of devices.
    ``bundle`` is the name of its bundle, or of its part of a pack.
    """

    device: str
    trial: int
    start: float
    end: float
    share: float
    mode: str
    bundle: str = ""


@dataclass(frozen=True)
class Utilisation:
    """Device seconds. ``busy`` counts the seconds in which a trial was on a device.

    ``used`` sums each trial's seconds × its share. ``per_device`` has the fraction of its time that a device was busy.
    """

    busy: float
    available: float
    used: float
    per_device: dict[str, float]

    @property
    def fraction(self) -> float:
        """The fraction of the devices' time that they were busy; 0 where there was no device time."""
        return self.busy / self.available if self.available > 0 else 0.0


@dataclass
class _Stay:
    placed: Placed
    budget: float
    end: float = math.nan
    last: Reported | Saved | None = None
    until: float = math.inf  # when another trial was placed on a device that the two cannot share

    @property
    def alone(self) -> bool:
        return self.placed.mode in ("solo", "distributed")


def timeline(events: Iterable[Event]) -> list[Row]:
    """A row for each device of each placement, in the order of placement.

    A placement ends when its trial fails, is stopped or reaches the granted budget. Where no line says so:

    - A log of version 1 does not say that a trial was stopped. If the trial is placed again, its earlier placement
      ended with its last report or saved state, or at the new placement where there is none.
    - A trial that was still placed when the study ended left with its last saved state, if no report came after that
      state. Otherwise it left with the study.
    - Where a driver was killed, or still runs, its trials stay until the last line that it wrote.

    A trial never stays on a device past the placement of another trial there, if one of the two runs alone; a packed
    trial joins the trials there.

    >>> asked = Asked(0, {}, budget=2, group="g")
    >>> timeline([asked, Placed(0, 1, ("gpu 0",), "solo", None, 1.0), Ended("deadline", 4.0)])
    [Row(device='gpu 0', trial=0, start=1.0, end=4.0, share=1.0, mode='solo', bundle='')]
    """
    stays: list[_Stay] = []
    there: dict[int, _Stay] = {}
    on: dict[str, list[_Stay]] = {}
    budgets: dict[int, int] = {}
    now = 0.0
    for event in events:
        if isinstance(event, Opened):  # trials that the last driver still had placed were killed with it
            _leave(there, now)
        now = max(now, getattr(event, "clock", 0.0))
        if isinstance(event, Asked):
            budgets[event.trial] = event.budget
        elif isinstance(event, Placed):
            if (before := there.pop(event.trial, None)) is not None:
                before.end = min(event.clock, before.until) if before.last is None else before.last.clock
            stay = _Stay(event, budgets.get(event.trial, math.inf))
            for device in event.devices:
                beside = [other for other in on.get(device, ()) if math.isnan(other.end) and other.until == math.inf]
                for other in beside:
                    if (other.alone or stay.alone) and event.mode != "packed":
                        other.until = event.clock
                on[device] = [*beside, stay]
            stays.append(stay)
            there[event.trial] = stay
        elif isinstance(event, Reported | Saved | Failed | Stopped):
            one = there.get(event.trial)
            if one is None or one.placed.attempt != event.attempt:
                continue
            if isinstance(event, Failed | Stopped) or _unit(event) >= one.budget:
                one.end = event.clock
                del there[event.trial]
            else:
                one.last = event
        elif isinstance(event, Ended):
            for one in there.values():
                one.end = one.last.clock if isinstance(one.last, Saved) else min(now, one.until)
            there.clear()
    _leave(there, now)
    return [
        Row(device, placed.trial, placed.clock, stay.end, placed.share, placed.mode, placed.bundle)
        for stay in stays
        for placed in (stay.placed,)
        for device in placed.devices
    ]


def packs(rows: Iterable[Row]) -> dict[str, list[list[int]]]:
    """The largest pack of each device that had one: the trials of each of its bundles.

    >>> packs([Row("gpu 0", n, 0.0, 1.0, 1.0, "packed", f"bundle {n // 2}") for n in range(3)])
    {'gpu 0': [[0, 1], [2]]}
    """
    found: dict[str, list[list[int]]] = {}
    there: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.start):
        beside = there[row.device] = [one for one in there.get(row.device, ()) if one.end > row.start] + [row]
        parts: dict[str, list[int]] = {}
        for one in beside:
            parts.setdefault(one.bundle, []).append(one.trial)
        if row.mode == "packed" and len(parts) > max(1, len(found.get(row.device, ()))):
            found[row.device] = list(parts.values())
    return found


def available(events: Iterable[Event]) -> dict[str, list[Span]]:
    """The spans of time in which each device was there.

    A log without ``Devices`` events has the devices that trials were placed on, from the first placement to the end.

    >>> first, second = {"name": "gpu 0", "type": "A100"}, {"name": "gpu 1", "type": "A100"}
    >>> available([Devices((first,), 0.0), Devices((second,), 3.0), Ended("done", 4.0)])
    {'gpu 0': [(0.0, 3.0)], 'gpu 1': [(3.0, 4.0)]}
    """
    spans: dict[str, list[Span]] = {}
    since: dict[str, float] = {}
    first, now, told = math.nan, 0.0, False
    for event in events:
        now = max(now, getattr(event, "clock", 0.0))
        if isinstance(event, Devices):
            told = True
            there = [one["name"] for one in event.devices]
            for device in [device for device in since if device not in there]:
                spans[device].append((since.pop(device), event.clock))
            for device in there:
                spans.setdefault(device, [])
                since.setdefault(device, event.clock)
        elif isinstance(event, Placed) and not told:
            first = event.clock if math.isnan(first) else first
            for device in event.devices:
                spans.setdefault(device, [])
                since[device] = first
    for device, start in since.items():
        spans[device].append((start, now))
    return spans


def utilisation(rows: Iterable[Row], events: Iterable[Event]) -> Utilisation:
    """How busy the devices were while they were there, from the rows and the events of one log."""
    return measure(rows, available(events))


def measure(rows: Iterable[Row], devices: Mapping[str, Sequence[Span]]) -> Utilisation:
    """How busy devices were in the spans that they were there; one trial on a device counts as much as a dozen.

    >>> rows = [Row("gpu 0", 0, 0.0, 3.0, 0.5, "fused"), Row("gpu 0", 1, 1.0, 2.0, 0.5, "fused")]
    >>> measure(rows, {"gpu 0": [(0.0, 4.0)]})
    Utilisation(busy=3.0, available=4.0, used=2.0, per_device={'gpu 0': 0.75})
    """
    rows = list(rows)
    busy = {device: _seconds(spans) for device, spans in busy_spans(rows, devices).items()}
    there = {device: _seconds(spans) for device, spans in devices.items()}
    return Utilisation(
        busy=sum(busy.values()),
        available=sum(there.values()),
        used=sum((row.end - row.start) * min(1.0, row.share) for row in rows),
        per_device={device: busy[device] / there[device] if there[device] > 0 else 0.0 for device in devices},
    )


def busy_spans(rows: Iterable[Row], devices: Mapping[str, Sequence[Span]]) -> dict[str, list[Span]]:
    """The spans in which a trial was on each device while it was there, in order and without overlaps."""
    ours: dict[str, list[Span]] = {device: [] for device in devices}
    for row in rows:
        if row.device in ours and row.end > row.start:
            ours[row.device].append((row.start, row.end))
    return {device: _both(union(spans), devices[device]) for device, spans in ours.items()}


def union(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """The spans in order; spans that overlap or are at most ``gap`` apart are joined.

    >>> union([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _both(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The intersection of two lists of spans, each in order and without overlaps."""
    common: list[Span] = []
    i = j = 0
    while i < len(some) and j < len(others):
        start, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if start < end:
            common.append((start, end))
        if some[i][1] <= others[j][1]:
            i += 1
        else:
            j += 1
    return common


def _seconds(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def _leave(there: dict[int, _Stay], clock: float) -> None:
    for stay in there.values():
        stay.end = min(clock, stay.until)
    there.clear()


def _unit(event: Reported | Saved) -> int:
    """How far the trial had come. A unit that is trained again is not reported again, but its state has the unit."""
    return event.unit if isinstance(event, Reported) else event.state.unit
