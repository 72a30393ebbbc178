"""How a user stops a study: Ctrl-C or SIGTERM, and the command that goes on with it."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.executors.simulated.settings import Simulated
from penstock.saying import say
from penstock.settings import RunSettings


@contextmanager
def stoppable(interrupt: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C or SIGTERM once: stop at the next boundary and save; Ctrl-C twice: at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        for one, old in before.items():
            signal.signal(one, signal.default_int_handler if one == signal.SIGINT else old)
        interrupt()
        say("Stopping at the next step, saving… (again to stop at once)")

    before = {one: signal.signal(one, handle) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, old in before.items():
            signal.signal(one, old)


def say_how_to_resume(dir: Path, settings: RunSettings, file: str | None, begun: bool = True) -> None:
    """Print the whole command: `penstock resume` takes up what is tuned from the log, but not where and how it runs.

    A study that was begun without a file, as in a notebook, goes on where it was made. One that had not begun, because
    its task was still tried, leaves nothing to go on with.
    """
    if not begun:
        say("Interrupted before the study began: nothing is left of it.")
        return
    if file is None:
        say(f"Interrupted; go on by running this Study with name={dir.name!r} again.")
        return
    words = ["penstock", "resume", dir.name]
    if dir.parent != Path(".penstock"):
        words += ["--dir", str(dir.parent)]
    for name, value in settings.changed().items():
        if isinstance(value, Simulated):
            words += ["--on", "simulated", "--devices", str(len(value.cluster()))]
        else:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    say(f"Interrupted; go on with: {shlex.join(words)}")
