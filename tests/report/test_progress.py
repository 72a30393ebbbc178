"""What a person sees while a study runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import StringIO

import pytest
from rich.console import Console

from penstock.log.events import SOLO, Asked, Devices, Ended, Measured, Opened, Placed
from penstock.log.history import History
from penstock.report import progress as module
from penstock.report.progress import Progress
from penstock.trial import Course, Later
from tests.report.studies import SETTINGS, ended, fused, history, reported, story


class Clock:
    """The machine's clock, which only decides when to draw."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def terminal(width: int = 120) -> Console:
    return Console(file=StringIO(), force_terminal=True, width=width, height=40, color_system=None)


def plain() -> Console:
    return Console(file=StringIO(), width=40)


def text(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def growing(trials: int) -> Iterator[History]:
    """A history in which one trial after another trains its only unit, for a second."""
    past = History.of([Opened(SETTINGS), Devices(({"name": "cpu", "type": "cpu"},), 0.0)])
    past.apply(Asked(0, {"lr": 0.1}, 1, "rung 0"))
    past.apply(Placed(0, 1, ("cpu",), "solo", None, 0.0))
    yield past
    for trial in range(trials):
        past.apply(reported(trial, 1, trial + 1.0, accuracy={1: 0.5, 6: 0.75}.get(trial, 0.25)))
        if trial + 1 == trials:
            yield past
            return
        past.apply(Asked(trial + 1, {"lr": 0.1}, 1, "rung 0"))
        past.apply(Placed(trial + 1, 1, ("cpu",), "solo", None, trial + 1.0))
        yield past


def last_block(console: Console) -> list[str]:
    """The lines of the last drawing: what follows the last title."""
    lines = text(console).replace("\r", "\n").rstrip().splitlines()
    return lines[max(i for i, line in enumerate(lines) if "accuracy max" in line) :]


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error")])
@pytest.mark.parametrize("live", [True, False])
def test_a_reader_that_goes_ends_no_study(clock: Clock, error: OSError, live: bool) -> None:
    class Closed(StringIO):
        def write(self, text: str) -> int:
            raise error

    with Progress(5, console=module.Lasting(file=Closed(), force_terminal=live, width=80), now=clock) as progress:
        progress(history())
        clock.now += 10
        progress(history())


def test_a_live_block_shows_bar_best_states_speed_and_time(clock: Clock) -> None:
    console, past = terminal(), History()
    with Progress(5, console=console, now=clock) as progress:
        for event in story():
            past.apply(event)
            progress(past)
    title, bar, best, trials, trained, time = last_block(console)
    assert title.split() == ["digits-1", "ASHA,", "accuracy", "max"]
    assert bar.endswith("3/5 trials")  # 0 and 1 have reported, 2 failed
    assert "━" in bar
    assert best.startswith("best     accuracy 0.875 (trial 0, unit 2)  lr=0.1 widths=[64, 32] [red]act=:smile:")
    assert trials == "trials   2 running  1 waiting  1 finished  1 failed"
    assert trained.startswith("trained  5 units, 1.25 a second")
    assert re.fullmatch(r"time     4.0 s used, about 1.0 s left", time)


def test_the_block_fits_its_terminal_line_by_line(clock: Clock) -> None:
    console = terminal(width=40)
    with Progress(5, console=console, now=clock) as progress:
        progress(history())
    block = last_block(console)
    assert len(block) == 6
    assert all(len(line) <= 40 for line in block)
    assert len(block[-1]) < 38  # room for the terminal's ^C


def test_a_call_draws_only_when_it_is_time(clock: Clock) -> None:
    console, past = terminal(), history()
    with Progress(5, console=console, now=clock) as progress:
        progress(past)
        drawn = text(console)
        for _ in range(1000):
            progress(past)
        assert text(console) == drawn
        clock.now += module.REDRAW
        progress(past)
        assert text(console) != drawn


@pytest.mark.parametrize("console", [terminal(), plain()])
def test_what_came_since_the_last_drawing_is_shown_at_the_end(clock: Clock, console: Console) -> None:
    past = history()
    with Progress(5, console=console, now=clock) as progress:
        progress(past)
        past.apply(reported(3, 1, 9.0, accuracy=0.9375))
        past.apply(Ended("deadline", 10.0))
        progress(past)
        assert "0.9375" not in text(console)
    end = text(console).split("s left")[-1]
    assert "accuracy 0.9375 (trial 3, unit 1)" in end
    assert "ended: deadline" in end
    assert text(console).rstrip().endswith("10.0 s used")


@pytest.mark.parametrize("trials", [None, 5])
@pytest.mark.parametrize("make", [terminal, plain])
def test_nothing_yet_is_shown_as_such(clock: Clock, make: type[Console], trials: int | None) -> None:
    console = make()
    with Progress(trials, console=console, now=clock) as progress:
        progress(History())  # not even opened
    assert "0 trials" in text(console) or "0/5 trials" in text(console)
    assert "none yet" in text(console) or "no result yet" in text(console)

    console, past = make(), History.of([Opened(SETTINGS), Asked(0, {}, 1, "rung 0")])
    with Progress(trials, console=console, now=clock) as progress:
        progress(past)
    assert "none yet" in text(console) or "no result yet" in text(console)


def test_an_error_before_the_first_report_leaves_no_block(clock: Clock) -> None:
    console = terminal()
    with pytest.raises(ValueError, match="early"), Progress(5, console=console, now=clock):
        raise ValueError("early")
    assert "trials" not in text(console)
    assert isinstance(console.file, StringIO)
    assert "\x1b[1A\x1b[2K" in console.file.getvalue().split("Preparing…")[-1]  # erased


def test_plain_lines_come_with_each_tenth_of_the_work(clock: Clock) -> None:
    console = plain()
    with Progress(40, console=console, now=clock) as progress:
        for past in growing(40):
            clock.now += module.LINES
            progress(past)
    lines = text(console).splitlines()
    assert [line.split(" · ")[0] for line in lines] == [f"{10 * tenth}%" for tenth in range(1, 11)] + ["100%"]
    assert (
        lines[3]
        == "40% · 16/40 trials · 16 units · best accuracy 0.75 (trial 6, unit 1) · 16.0 s used, about 24.0 s left"
    )


def test_plain_lines_keep_their_distance(clock: Clock) -> None:
    console = plain()
    with Progress(40, console=console, now=clock) as progress:
        for past in growing(40):
            progress(past)
    assert [line.split()[0] for line in text(console).splitlines()] == ["100%"]


def test_a_plain_line_comes_now_and_then_though_little_is_done(clock: Clock) -> None:
    console = plain()
    with Progress(5000, console=console, now=clock) as progress:
        for past in growing(40):
            clock.now += module.QUIET / 4
            progress(past)
        assert len(text(console).splitlines()) == 10  # in 300 seconds
    assert text(console).splitlines()[0].startswith("0% · ")


def test_the_first_unit_whose_time_is_mostly_start_up_gives_no_estimate(clock: Clock) -> None:
    shown = []
    for units in (1, 2):
        console = plain()
        with Progress(40, console=console, now=clock) as progress:
            for past in growing(units):
                progress(past)
        shown.append("left" in text(console))
    assert shown == [False, True]


def test_the_bar_counts_the_work_that_the_algorithm_expects(clock: Clock) -> None:
    filled = []
    for to_come in (2, 8, 20):  # units of trials to come, beside 5 that are trained and 3 that are granted
        console = terminal()
        with Progress(
            5, lambda to_come=to_come: [Course(("rung 1",), (Later(2, to_come // 2),))], console, clock
        ) as one:
            one(history())
        filled.append(last_block(console)[1].count("━") / 120)
    assert filled == pytest.approx([5 / 10, 5 / 16, 5 / 28], abs=0.1)
    assert filled == sorted(filled, reverse=True)


def test_paused_trials_of_a_study_that_is_done_are_stopped(clock: Clock) -> None:
    console = terminal()
    with Progress(5, console=console, now=clock) as progress:
        progress(History.of(ended()))
    assert last_block(console)[3] == "trials   1 paused  2 stopped  1 finished  1 failed"


@pytest.mark.parametrize(("size", "together"), [(4, ", up to 4 together"), (512, ", up to 5 together"), (1, "")])
def test_how_many_of_those_that_run_are_fused_is_said_beside_the_counts(clock: Clock, size: int, together: str) -> None:
    past, console, lines = History.of(fused(size)), terminal(), plain()
    for one in (console, lines):
        with Progress(5, console=one, now=clock) as progress:
            progress(past)
    assert last_block(console)[3] == f"trials   4 running  2 of 4 fused{together}"
    assert f"0/5 trials · 2 of 4 fused{together} · 0 units" in text(lines)


def test_once_none_runs_all_trials_tell_how_they_ran(clock: Clock) -> None:
    past, console = History.of(fused()), terminal()
    for trial in range(4):
        past.apply(Placed(trial, 2, ("cpu",), "fused", None, 2.0))
    past.apply(Ended("done", 3.0))
    with Progress(5, console=console, now=clock) as progress:
        progress(past)
    assert last_block(console)[3] == "trials   4 paused  fused, up to 4 together"


def test_the_deadline_bounds_what_is_left(clock: Clock) -> None:
    console = plain()
    with Progress(5000, console=console, now=clock) as progress:
        progress(history(deadline=6.0))
    assert "about 2.0 s left" in text(console)


def test_speed_is_that_of_this_driver(clock: Clock) -> None:
    console, past = terminal(), history()
    with Progress(5, console=console, now=clock) as progress:
        progress(past)
        past.apply(reported(3, 1, 4.5, accuracy=0.1))
    assert "6 units, 2 a second" in text(console)  # one unit in half a second, after 5 in 4


def test_off_a_terminal_nothing_is_redrawn_whatever_the_environment_says(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress(5) as progress:
        progress(history())
    assert "\x1b[1A" not in capsys.readouterr().err


@pytest.mark.parametrize(("origin", "said"), [("name", True), ("given", False), (None, False)])
def test_a_line_says_a_mode_that_nobody_gave(clock: Clock, origin: str | None, said: bool) -> None:
    console = plain()
    with Progress(5, console=console, now=clock) as progress:
        progress(history(mode_from=origin))
    assert ("accuracy max (by its name)" in " ".join(text(console).split())) is said


def test_trials_that_cannot_be_fused_have_a_line_of_their_own(clock: Clock) -> None:
    line = "3 of 5 trials train solo: LBFGS needs a closure."
    consoles = terminal(), plain()
    for console in consoles:
        with Progress(5, console=console, now=clock) as progress:
            past = history()
            progress(past)
            past.apply(Measured(SOLO, "", "sharing", {}, 1, line, "solo", 1.0))
            for _ in range(3):
                clock.now += 40
                progress(past)
    assert f"solo     {line}" in last_block(consoles[0])
    assert text(consoles[1]).splitlines().count(line) == 1
