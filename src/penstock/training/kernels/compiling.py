"""The kernels that a step needs, compiled beside training by a process of their own (``side.py``).

Compiling takes seconds, in which training goes on without kernels. A process has one ``Compiling``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from threading import Thread

from penstock.training.beside import Beside
from penstock.training.kernels.needed import Job, folder, lies_there, name_parts


class Compiling(Beside):
    """The side process, seen from training. No method waits for it."""

    program = "penstock.training.kernels.side"
    work = "compiles kernels"

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[tuple[str, Job], int] = {}  # by Triton's folder; the number of the request
        self._there: set[tuple[str, Job]] = set()

    def prepare(self) -> None:
        """Get ready beside other work, as a step will soon need kernels: all that takes seconds and needs no step."""
        self.start()
        Thread(target=name_parts, daemon=True).start()

    def ask(self, jobs: Iterable[Job]) -> None:
        """Have kernels compiled, unless they lie in Triton's cache or were asked for before."""
        where = folder()
        for job in jobs:
            if (where, job) in self._there or (where, job) in self._asked:
                continue
            if lies_there(job):
                self._there.add((where, job))
                continue
            number = self._asked[where, job] = len(self._asked)
            self._send(number, where, job)
        self._exchange()

    def ready(self, jobs: Iterable[Job]) -> bool:
        """Whether all these kernels lie in Triton's cache. A kernel that was not asked for is asked for now."""
        jobs, where = list(jobs), folder()
        self.ask(jobs)
        return all((where, job) in self._there for job in jobs)

    def _environment(self) -> dict[str, str]:
        # It has no use for a device, and must not take memory there.
        return {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}

    def _hear(self, number: int, error: str | None) -> None:
        where, job = list(self._asked)[number]
        if error is None:
            self._there.add((where, job))
        else:
            self._fail(f"Kernel {job.module}.{job.name} was not compiled: {error}.")

    def forget(self) -> None:
        super().forget()
        self._asked = {}


@cache
def compiling() -> Compiling:
    """This process's own."""
    return Compiling.own()
