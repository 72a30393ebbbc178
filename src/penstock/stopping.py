"""How a user stops a study: Ctrl-C or SIGTERM, and the command that goes on with it."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import Parameter
from pathlib import Path
from typing import Any

from penstock.executors.simulated.executor import Simulated


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
        with suppress(OSError):  # nobody looks any more
            print("Stopping at the next step, saving… (again to stop at once)", file=sys.stderr)

    before = {one: signal.signal(one, handle) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, old in before.items():
            signal.signal(one, old)


def say_how_to_resume(dir: Path, on: str | Simulated, how: Mapping[str, Any], usual: Mapping[str, Parameter]) -> None:
    """The whole command: the log keeps what is tuned, and not where and how it runs."""
    words = ["penstock", "resume", dir.name]
    if dir.parent != Path(".penstock"):
        words += ["--dir", str(dir.parent)]
    if isinstance(on, Simulated):
        words += ["--on", "simulated", "--devices", str(len(on.cluster()))]
    elif on != "local":
        words += ["--on", on]
    for key, value in how.items():
        if value != usual[key].default:
            words += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    with suppress(OSError):  # nobody looks any more
        print(f"Interrupted; go on with: {shlex.join(words)}", file=sys.stderr)
