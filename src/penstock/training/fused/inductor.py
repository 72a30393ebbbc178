"""Inductor beside training: traced steps are compiled by processes of their own (``side.py``), and loaded here.

Compiling takes 5 to 60 seconds, in which training goes on as it is. A process has one ``Inductor``.
"""

from __future__ import annotations

import sys
import time
from functools import cache, cached_property
from threading import Thread

from penstock.training.beside import Beside
from penstock.training.fused import artifacts
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.traces import Traced

SWITCH = 2e-4  # seconds after which Python's lock goes to another thread while modules are imported


class Inductor(Beside):
    """The side process, seen from training. No method waits for it."""

    program = "penstock.training.fused.side"
    work = "compiles steps"

    def __init__(self) -> None:
        super().__init__()
        self._asked: list[str] = []  # the names of steps, by the number of the request
        self._since: dict[str, float] = {}  # when they were asked for
        self._pending: set[str] = set()
        self._there: set[str] = set()
        self._refused: dict[str, str] = {}
        self._again: set[str] = set()  # steps whose files could not be loaded
        self._waited: float | None = None
        self._imports: Thread | None = None

    def waits(self, unknown: float) -> float:
        """How many seconds a step is to be waited for: as long as the last one, or so many where none was yet."""
        return unknown if self._waited is None else self._waited

    @cached_property
    def warm(self) -> bool:
        """Whether steps were compiled here before, so that the next one may be there at once."""
        return any(artifacts.folder().glob("*.*"))

    @property
    def idle(self) -> bool:
        """Whether all that was asked for is done."""
        return not self._pending

    @property
    def imported(self) -> bool:
        """Whether all that tracing and loading need is imported."""
        return self._imports is not None and not self._imports.is_alive()

    def prepared(self) -> bool:
        """Whether a step can be traced and loaded at once. That takes imports of some seconds, begun by the first call.

        They go on beside steps, which are launched ahead of a device: this thread waits for Python's lock only briefly.
        """
        if self.failed is not None:
            return False
        if self._imports is None:
            self._imports = Thread(target=_import, daemon=True)
            self._imports.start()
        return self.imported

    def ready(self, traced: Traced) -> bool:
        """Whether a step is there to be loaded; it is asked for the first time. Raises where it cannot be compiled."""
        name = artifacts.name_of(traced.key, traced.device)
        if name not in self._there | self._pending | self._refused.keys():
            # On a CPU the file has no machine code: what is not in Inductor's own cache any more is compiled beside.
            if traced.device.type == "cuda" and artifacts.found(name) is not None:
                self._there.add(name)
                self._waited = 0.0
            else:
                self._ask(name, traced.text)
        self._exchange()
        if name in self._refused:
            raise Unfusable(self._refused[name])
        return name in self._there

    def load(self, traced: Traced) -> artifacts.Run | None:
        """The compiled step, once it is ready; None where its file was no good, and it is compiled anew."""
        name = artifacts.name_of(traced.key, traced.device)
        if (file := artifacts.found(name)) is not None:
            try:
                return artifacts.loaded(file)
            except Exception:
                artifacts.drop(file)
                if name in self._again:
                    raise
        if name in self._again:
            raise Unfusable(f"its file in {artifacts.folder()} was deleted")
        self._again.add(name)
        self._there.discard(name)
        return None

    def close(self) -> None:
        super().close()
        if self._imports is not None:
            self._imports.join()  # Python's end would cut it off in the middle

    def _ask(self, name: str, text: str) -> None:
        self._pending.add(name)
        self._since[name] = time.monotonic()
        self._send(len(self._asked), name, text)
        self._asked.append(name)

    def _environment(self) -> dict[str, str]:
        return {"TRITON_INTERPRET": "0"}

    def _hear(self, number: int, error: str | None) -> None:
        name = self._asked[number]
        self._pending.discard(name)
        if error is None:
            self._there.add(name)
            self._waited = time.monotonic() - self._since[name]
        else:
            self._refused[name] = error

    def forget(self) -> None:
        super().forget()
        self._asked, self._pending, self._imports = [], set(), None


def _import() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        artifacts.import_inductor()
    finally:
        sys.setswitchinterval(before)


@cache
def inductor() -> Inductor:
    """This process's own."""
    return Inductor.own()
