"""Progress while a study runs: a live block on a terminal, a live line in a notebook, elsewhere a line now and then.

The engine calls ``Progress`` after every batch of events, thousands of times a second, so a call returns at once unless
it is time to draw. Times that are shown come from the study's clock; the machine's clock only says when to draw again.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.algorithms.transfer import CHECK
from penstock.energy.cost import legible
from penstock.log.history import History, TrialRecord
from penstock.log.messages import said_mode
from penstock.log.ranking import ranked
from penstock.report.console import Careful
from penstock.report.forecast import Pace, time_left, units_left
from penstock.report.format import clock, short, spent, value
from penstock.report.notebook import Cell, in_notebook
from penstock.report.ranks import present_search
from penstock.report.summary import begun
from penstock.saying import seen
from penstock.trial import Course, Later, Status

REDRAW = 0.25  # seconds between two drawings of what is live
LINES = 1.0  # seconds between two plain lines, at least
QUIET = 30.0  # seconds after which a plain line comes though no tenth of the work was done
STATES: dict[Status, str] = {
    "running": "cyan",
    "waiting": "yellow",
    "paused": "blue",
    "stopped": "dim",
    "finished": "green",
    "failed": "red",
}


class Lasting(Careful):
    """A console whose terminal or pipe may be closed: it then falls silent, and the study goes on."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except (OSError, ValueError):  # the terminal is gone, or the file closed
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Shown(NamedTuple):
    """The figures of a study that progress shows."""

    history: History
    done: int  # units trained
    total: int  # units in all, those to come included
    trials: str
    speed: float  # units a second since this driver took the study up
    left: float | None  # seconds, about
    sharing: str
    solo: str  # how many trials cannot be fused, and why

    @property
    def time(self) -> str:
        """The time that was used, the time that is left, and energy and cost where they are known."""
        used = f"{clock(self.history.clock)} used" + (f", about {clock(self.left)} left" if self.left else "")
        used += "" if (joules := self.history.joules) is None else f", {legible(joules)}"
        return f"{used}, cost {spent(costs)}" if (costs := self.history.costs) else used

    @property
    def line(self) -> str:
        """All of it on one line."""
        history = self.history
        best = "no result yet" if (leader := _leader(history)) is None else f"best {_best(history, leader)}"
        percent = f"{100 * self.done // self.total}%"
        goal = said_mode(history.settings) if history.settings.get("mode_from") in ("name", "log") else ""
        parts = [percent, self.trials, self.sharing, _units(self.done), best, self.time, goal]
        if history.ended:
            parts[0] = f"ended: {history.ended}"
        return " · ".join(part for part in parts if part)


class View(Protocol):
    """A place where progress is shown."""

    def open(self) -> None:
        """Begin to show."""

    def show(self, shown: Shown, now: float) -> None:
        """Show the figures, if it is time to."""

    def close(self, shown: Shown | None) -> None:
        """Show the last figures, where there are any."""


class Progress:
    """Shows how far a study has come.

    >>> from penstock.log.history import History
    >>> with Progress(64) as progress:
    ...     progress(History())

    Args:
        trials: the number of trials in all, if that is known.
        outlook: gives the trials that are expected to be asked for, or None where nothing is expected.
        console: where to show the progress; a notebook's cell or stderr if None.
        now: the machine's clock, which says when to draw.
    """

    def __init__(
        self,
        trials: int | None,
        outlook: Callable[[], Sequence[Course] | None] = lambda: None,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trials, self._outlook, self._now = trials, outlook, now
        self._history: History | None = None
        self._pace = Pace()
        self._began: tuple[float, int] | None = None  # clock and units when this driver took the study up
        self._next = 0.0
        self._view = _view(console)

    def __enter__(self) -> Progress:
        self._view.open()
        return self

    def __call__(self, history: History) -> None:
        """Show the history, if it is time to draw."""
        self._history = history
        self._pace.take(history)
        now = self._now()
        if now < self._next:
            return
        self._next = now + REDRAW
        if self._began is None:
            self._began = (history.clock, sum(trial.reported for trial in history.trials))
        self._view.show(self._shown(history), now)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._view.close(None if self._history is None else self._shown(self._history))

    def _shown(self, history: History) -> Shown:
        counts = _Counts.of(history)
        courses = [] if history.ended else self._courses(history, counts)
        trials = f"{counts.begun}/{self.trials} trials" if self.trials else f"{counts.begun} trials"
        if history.surrogates:
            trials = _apart(history, self.trials)
        total = max(counts.trained + units_left(history, courses), 1)
        left = None if history.ended else self._left(history, counts, courses)
        speed = self._speed(history, counts)
        sharing = self._sharing(history, counts)
        return Shown(history, counts.trained, total, trials, speed, left, sharing, history.solo)

    def _courses(self, history: History, counts: _Counts) -> Sequence[Course]:
        """The trials to come; where an algorithm expects nothing, each as long as the mean trial so far."""
        courses = self._outlook()
        if courses is not None:
            return courses
        to_come = max((self.trials or 0) - len(history.trials), 0)
        units = sum(trial.granted for trial in history.trials) / max(len(history.trials), 1)
        return [Course((), (Later(to_come, round(units)),))]

    def _speed(self, history: History, counts: _Counts) -> float:
        clock, units = self._began or (0.0, 0)
        if history.clock <= clock:
            clock, units = 0.0, 0
        return (counts.trained - units) / (history.clock - clock) if history.clock > clock else 0.0

    def _left(self, history: History, counts: _Counts, courses: Sequence[Course]) -> float | None:
        """The estimated seconds until the end, which is at the deadline at the latest."""
        # The time of the first unit is mostly start-up.
        left = time_left(history, courses, self._pace) if counts.trained > 1 else None
        deadline: float | None = history.settings.get("deadline")
        if deadline is None:
            return left
        return min(deadline if left is None else left, max(deadline - history.clock, 0.0))

    def _sharing(self, history: History, counts: _Counts) -> str:
        """How many trials are fused, and how many at once were measured to pay; empty where all trials are solo."""
        if not counts.fused:
            return ""
        said = "fused" if counts.fused == counts.placed else f"{counts.fused} of {counts.placed} fused"
        most = max((one.size for one in history.measured.values() if one.kind == "sharing"), default=1)
        return said if most == 1 else f"{said}, up to {min(most, max(self.trials or 0, len(history.trials)))} together"


def _view(console: Console | None) -> View:
    if console is None:
        if in_notebook():
            return InNotebook()
        # With FORCE_COLOR rich takes a file for a terminal, but redrawing makes no sense in a file.
        console = Lasting(stderr=True, force_interactive=None if seen() else False)
    return OnTerminal(console) if console.is_interactive else InFile(console)


class OnTerminal:
    """A block of six lines, seven where trials cannot be fused, that is drawn again and again."""

    def __init__(self, console: Console) -> None:
        # On a terminal prints go above the block; stdout that goes to a file is left as it is.
        start, catch = Text("Preparing…", style="dim"), sys.stdout is not None and sys.stdout.isatty()
        self._live = Live(start, console=console, auto_refresh=False, redirect_stdout=catch)

    def open(self) -> None:
        self._live.start(refresh=True)

    def show(self, shown: Shown, now: float) -> None:
        self._live.update(_block(shown), refresh=True)

    def close(self, shown: Shown | None) -> None:
        if shown is None:
            self._live.transient = True
        else:
            self._live.update(_block(shown))
        self._live.stop()


class InNotebook:
    """A line below a notebook's cell, with a bar, that changes while the cell runs."""

    def __init__(self) -> None:
        self._cell = Cell()

    def open(self) -> None:
        pass

    def show(self, shown: Shown, now: float) -> None:
        self._cell.update(" · ".join(filter(None, (shown.line, shown.solo))), shown.done / shown.total)

    def close(self, shown: Shown | None) -> None:
        if shown is None:
            self._cell.update("", None)
        else:
            self.show(shown, 0.0)


class InFile:
    """A plain line with each tenth of the work, or after some time without one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tenths = 0
        self._said: float | None = None  # the machine's clock at the last line
        self._solo = ""  # the line about trials that cannot be fused, as it was said last

    def open(self) -> None:
        pass

    def show(self, shown: Shown, now: float) -> None:
        if self._said is None:
            self._said = now - LINES
        tenths = 10 * shown.done // shown.total
        if now >= self._said + (LINES if tenths > self._tenths else QUIET):
            self._said, self._tenths = now, tenths
            self._line(shown)

    def close(self, shown: Shown | None) -> None:
        if shown is not None:
            self._line(shown)

    def _line(self, shown: Shown) -> None:
        new = [shown.line] if shown.solo == self._solo else [shown.line, shown.solo]
        self._solo = shown.solo
        for line in new:
            self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


class _Counts(NamedTuple):
    """Counts of one pass over the trials."""

    begun: int  # trials that have reported at least once, or failed
    trained: int  # units trained
    placed: int  # trials that run, or trials that have run where none runs now
    fused: int  # the fused ones among the placed

    @classmethod
    def of(cls, history: History) -> _Counts:
        reporting = trained = fused = 0
        running = history.counts["running"]
        for trial in history.trials:
            trained += trial.reported
            reporting += begun(trial)
            if trial.status == "running" or not running:
                fused += history.mode_of.get(trial.number) == "fused"
        return cls(reporting, trained, running or len(history.mode_of), fused)


def _block(shown: Shown) -> RenderableType:
    history = shown.history
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(justify="right", no_wrap=True)
    bar.add_row(ProgressBar(total=shown.total, completed=shown.done), Text(shown.trials, style="bold"))
    best = Text("none yet", style="dim")
    if (leader := _leader(history)) is not None:
        best = Text(_best(history, leader), style="bold green")
        best.append("  " + short(leader.measured), style="not bold default")
    counts = Counter(trial.outcome for trial in history.trials)
    states = [Text(f"{counts[s]} {s}", style=style) for s, style in STATES.items() if counts[s]]
    if shown.sharing:
        states.append(Text(shown.sharing, style="dim"))
    return Group(
        _title(history),
        bar,
        _row("best", best),
        _row("trials", Text("  ").join(states)),
        _row("trained", Text(f"{_units(shown.done)}, {shown.speed:,.4g} a second")),
        _row("time", Text(shown.time)),
        *([_row("solo", Text(shown.solo, style="yellow"))] if shown.solo else []),
    )


def _title(history: History) -> Text:
    settings = history.settings
    title = Text(str(settings.get("name", "study")), style="bold", no_wrap=True, overflow="ellipsis")
    if "algorithm" in settings:
        algorithm = settings["algorithm"].split("(")[0]
        title.append(f"  {algorithm}, {said_mode(settings)}", style="not bold dim")
    if history.ended:
        title.append(f"  ended: {history.ended}", style="not bold" if history.ended == "done" else "not bold yellow")
    return title


def _row(label: str, text: Text) -> Text:
    """A line without padding: after a full line the terminal's ^C would wrap, and shift the block."""
    return Text.assemble((f"{label:9}", "dim"), text, no_wrap=True, overflow="ellipsis")


def _best(history: History, best: TrialRecord) -> str:
    what = "surrogate" if best.variant else "trial"
    return f"{history.metric} {value(best.metrics[history.metric])} ({what} {best.number}, unit {best.best_unit})"


def _leader(history: History) -> TrialRecord | None:
    """The best trial; as long as there is none, the best surrogate."""
    return history.best or next(iter(ranked(history.surrogates)), None)


def _apart(history: History, total: int | None) -> str:
    """How many surrogates, trials of rank checks and targets have begun."""
    search = present_search(history)
    own = f"{sum(map(begun, search))}/{total}"
    checks = sum(begun(one) for one in history.surrogates if one.group == CHECK)
    checked = f", {checks} of the rank check" if checks else ""
    if search and not search[-1].variant:
        return f"{own} trials"
    targets = sum(map(begun, history.targets))
    return f"{own} surrogates{checked}, {targets}/{len(history.targets)} targets"


def _units(units: int) -> str:
    return f"{units:,} unit{'' if units == 1 else 's'}"
