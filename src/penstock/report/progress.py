"""Progress while a study runs: a live block on a terminal, plain lines elsewhere; both on stderr.

The engine calls ``Progress`` after every event, thousands of times a second, so a call returns at once unless it is
time to draw. Times that are shown come from the study's clock; the machine's clock only says when to draw again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.log.history import History, TrialRecord
from penstock.report.format import clock, short, value
from penstock.report.summary import begun
from penstock.trial import Stage, Status

REDRAW = 0.25  # seconds between two drawings of the live block
LINES = 1.0  # seconds between two plain lines
STATES: dict[Status, str] = {
    "running": "cyan",
    "waiting": "yellow",
    "paused": "blue",
    "stopped": "dim",
    "finished": "green",
    "failed": "red",
}


class Lasting(Console):
    """A console whose terminal or pipe may be closed: it then falls silent, and the study goes on."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Progress:
    """Shows how far a study has come.

    >>> from penstock.log.history import History
    >>> with Progress(64) as progress:
    ...     progress(History())

    Args:
        trials: the number of trials in all, if that is known.
        stages_units: the units that all stages take, where the algorithm knows its stages beforehand.
        console: where to show the progress; stderr if None.
    """

    def __init__(self, trials: int | None, stages_units: int | None = None, console: Console | None = None) -> None:
        if console is None:  # with FORCE_COLOR rich takes a file for a terminal, but redrawing makes no sense in a file
            console = Lasting(stderr=True, force_interactive=None if sys.stderr.isatty() else False)
        self.trials, self.units, self.console = trials, stages_units, console
        self._history: History | None = None
        self._began: tuple[float, int] | None = None  # clock and units when this driver took the study up
        self._next = 0.0
        self._said: tuple[int, float] = (0, float("-inf"))  # tenths and best score of the last line
        self._live: Live | None = None
        if console.is_interactive:
            start, catch = (
                Text("Preparing…", style="dim"),
                sys.stdout.isatty(),
            )  # on a terminal prints go above the block; stdout that goes to a file is left as it is
            self._live = Live(start, console=console, auto_refresh=False, redirect_stdout=catch)

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __call__(self, history: History) -> None:
        """Show the history, if it is time to."""
        self._history = history
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (LINES if self._live is None else REDRAW)
        if self._began is None:
            self._began = (history.clock, _Counts.of(history).trained)
        if self._live is not None:
            self._live.update(self._block(history), refresh=True)
        elif self._news(history):
            self._line(history)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        history = self._history
        if self._live is not None:
            if history is None:
                self._live.transient = True
            else:
                self._live.update(self._block(history))
            self._live.stop()
        elif history is not None:
            self._line(history)

    # For the block and for lines alike

    def _done(self, history: History, counts: _Counts) -> tuple[int, int]:
        """The progress and its total: units where the stages are known, else trials that have reported."""
        if self.units is not None:
            return min(counts.trained, self.units), max(self.units, 1)
        return counts.begun, max(self.trials or 0, len(history.trials), 1)

    def _speed(self, history: History, counts: _Counts) -> float:
        """Units a second since this driver took the study up."""
        clock, units = self._began or (0.0, 0)
        if history.clock <= clock:
            clock, units = 0.0, 0
        return (counts.trained - units) / (history.clock - clock) if history.clock > clock else 0.0

    def _left(self, history: History, counts: _Counts) -> float | None:
        """The estimated seconds until the end, at the present speed and by the deadline at the latest."""
        left, speed = None, self._speed(history, counts)
        if counts.trained <= 1:
            speed = 0.0  # the first unit's time is mostly start-up
        if speed > 0 and self.units is not None:
            left = max(self.units - counts.trained, 0) / speed
        elif speed > 0 and counts.begun:
            to_come = max((self.trials or 0) - counts.begun, 0)  # each is taken to be as long as the trials so far
            left = (counts.granted + to_come * counts.trained / counts.begun) / speed
        deadline = history.settings.get("deadline")
        if deadline is not None:
            left = min(left if left is not None else deadline, max(deadline - history.clock, 0.0))
        return left

    def _time(self, history: History, counts: _Counts) -> str:
        left = None if history.ended else self._left(history, counts)
        return f"{clock(history.clock)} used" + (f", about {clock(left)} left" if left else "")

    # A live block

    def _block(self, history: History) -> RenderableType:
        counts = _Counts.of(history)
        done, total = self._done(history, counts)
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_row(ProgressBar(total=total, completed=done), Text(self._trials(counts), style="bold"))
        best = Text("none yet", style="dim")
        if history.best is not None:
            best = Text(_best(history, history.best), style="bold green")
            best.append("  " + short(history.best.measured), style="not bold default")
        states = [Text(f"{history.counts[s]} {s}", style=style) for s, style in STATES.items() if history.counts[s] > 0]
        if sharing := self._sharing(history, counts):
            states.append(Text(sharing, style="dim"))
        return Group(
            _title(history),
            bar,
            _row("best", best),
            _row("trials", Text("  ").join(states)),
            _row("trained", Text(f"{_units(counts)}, {self._speed(history, counts):,.4g} a second")),
            _row("time", Text(self._time(history, counts))),
        )

    def _trials(self, counts: _Counts) -> str:
        return f"{counts.begun}/{self.trials} trials" if self.trials else f"{counts.begun} trials"

    def _sharing(self, history: History, counts: _Counts) -> str:
        """How many trials are fused, and how many at once were measured to pay; empty where all trials are solo."""
        if not counts.fused:
            return ""
        said = "fused" if counts.fused == counts.placed else f"{counts.fused} of {counts.placed} fused"
        most = max((one.size for one in history.measured.values() if one.kind == "sharing"), default=1)
        return said if most == 1 else f"{said}, up to {min(most, max(self.trials or 0, len(history.trials)))} together"

    # Plain lines

    def _news(self, history: History) -> bool:
        done, total = self._done(history, _Counts.of(history))
        now = (10 * done // total, history.best.best_score if history.best else float("-inf"))
        news, self._said = now != self._said, now
        return news

    def _line(self, history: History) -> None:
        counts = _Counts.of(history)
        best = "no result yet" if history.best is None else f"best {_best(history, history.best)}"
        parts = [self._trials(counts), _units(counts), best, self._time(history, counts)]
        if sharing := self._sharing(history, counts):
            parts.insert(1, sharing)
        if history.ended:
            parts.insert(0, f"ended: {history.ended}")
        self.console.print(" · ".join(parts), markup=False, highlight=False, emoji=False, soft_wrap=True)


class _Counts(NamedTuple):
    """Counts of one pass over the trials."""

    begun: int  # trials that have reported at least once, or failed
    trained: int  # units trained
    granted: int  # units that begun trials may train further
    placed: int  # trials that run, or trials that have run where none runs now
    fused: int  # the fused ones among the placed

    @classmethod
    def of(cls, history: History) -> _Counts:
        reporting = trained = granted = fused = 0
        running = history.counts["running"]
        for trial in history.trials:
            trained += trial.reported
            if trial.status == "running" or not running:
                fused += history.mode_of.get(trial.number) == "fused"
            if begun(trial):
                reporting += 1
                if trial.status in ("waiting", "running"):
                    granted += trial.granted - trial.reported
        return cls(reporting, trained, granted, running or len(history.mode_of), fused)


def stage_units(stages: Iterable[Stage] | None) -> int | None:
    """The units that stages take in all; a trial continues from one stage of its bracket to the next.

    >>> stage_units([Stage(9, 1), Stage(3, 3), Stage(1, 9)])
    21
    """
    if stages is None:
        return None
    units, before = 0, dict[int, int]()
    for stage in stages:
        units += stage.trials * (stage.budget - before.get(stage.bracket, 0))
        before[stage.bracket] = stage.budget
    return units


def _title(history: History) -> Text:
    settings = history.settings
    title = Text(str(settings.get("name", "study")), style="bold", no_wrap=True, overflow="ellipsis")
    if "algorithm" in settings:
        algorithm = settings["algorithm"].split("(")[0]
        title.append(f"  {algorithm}, {settings['metric']} {settings['mode']}", style="not bold dim")
    if history.ended:
        title.append(f"  ended: {history.ended}", style="not bold" if history.ended == "done" else "not bold yellow")
    return title


def _row(label: str, text: Text) -> Text:
    """A line without padding: after a full line the terminal's ^C would wrap, and shift the block."""
    return Text.assemble((f"{label:9}", "dim"), text, no_wrap=True, overflow="ellipsis")


def _best(history: History, best: TrialRecord) -> str:
    return f"{history.metric} {value(best.metrics[history.metric])} (trial {best.number}, unit {best.best_unit})"


def _units(counts: _Counts) -> str:
    return f"{counts.trained:,} unit{'' if counts.trained == 1 else 's'}"
