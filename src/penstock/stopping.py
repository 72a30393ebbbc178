"""How a user stops a study: Ctrl-C or SIGTERM, and the command that goes on with it."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.executors.simulated.settings import Simulated
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
        with suppress(OSError):  # the terminal may be gone
            print("Stopping at the next step, saving… (again to stop at once)", file=sys.stderr)

    before = {one: signal.signal(one, handle) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, old in before.items():
            signal.signal(one, old)


def say_how_to_resume(dir: Path, settings: RunSettings) -> None:
    """Print the whole command: `penstock resume` takes up what is tuned from the log, but not where and how it runs."""
    words = ["penstock", "resume", dir.name]
    if dir.parent != Path(".penstock"):
        words += ["--dir", str(dir.parent)]
    for name, value in settings.changed().items():
        if isinstance(value, Simulated):
            words += ["--on", "simulated", "--devices", str(len(value.cluster()))]
        else:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    with suppress(OSError):  # the terminal may be gone
        print(f"Interrupted; go on with: {shlex.join(words)}", file=sys.stderr)
