"""The program of the side process: compiles kernels into Triton's cache, beside training.

The program reads requests as JSON lines, forks a child for each, and answers with a line once the kernel lies in the
cache. It imports torch and Triton once, never touches a device, and gives way to training. At the end of its input it
ends, with all its children.
"""

from __future__ import annotations

import gc
import json
import os
import signal
from collections import deque
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import wait

from penstock.training.kernels.needed import OURS, Job, digest, source

MODULES = ("all_layers", "attention", "convolution", "depthwise", "moments", "normalization", "patches", "weighing")
MOST = 16  # children at a time
NICE = 10
READ = 1 << 16  # bytes
SAID = 600  # characters of an error, of up to six bytes each in JSON


class _Side:
    """The requests that wait, and the children that compile; each is known by a pidfd, readable once it has ended."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.most = max(1, min(MOST, len(os.sched_getaffinity(0)) - 2))  # the others train and evaluate
        self.waiting: deque[bytes] = deque()
        self.children: dict[int, tuple[int, bytes]] = {}
        self._rest = b""

    def read(self) -> bool:
        """Take the requests that have come; False at the end of the input."""
        came = os.read(0, READ)
        *lines, self._rest = (self._rest + came).split(b"\n")
        self.waiting.extend(lines)
        return bool(came)

    def begin(self) -> None:
        while self.waiting and len(self.children) < self.most:
            request = self.waiting.popleft()
            with suppress(Exception):  # the child says what is wrong
                digest(Job(*json.loads(request)[2]))  # what all children need for it is read here, once
            if (pid := os.fork()) == 0:
                self._compile(request)
            self.children[os.pidfd_open(pid)] = pid, request

    def end(self, ended: int) -> None:
        pid, request = self.children.pop(ended)
        _, status = os.waitpid(pid, 0)
        os.close(ended)
        if status:
            self._answer(request, f"the compiler ended with {os.waitstatus_to_exitcode(status)}")

    def _compile(self, request: bytes) -> None:
        error = None
        try:
            _, where, job = json.loads(request)
            os.environ["TRITON_CACHE_DIR"] = where
            compile_job(Job(*job))
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
        self._answer(request, error)
        os._exit(0)

    def _answer(self, request: bytes, error: str | None) -> None:
        """One write: a pipe keeps 4096 bytes together, so that answers of two children do not mix."""
        line = json.dumps([json.loads(request)[0], error and error[:SAID]])
        os.write(self.answers, line.encode() + b"\n")


def compile_job(job: Job) -> None:
    """Put a kernel, and the program that launches it, into Triton's cache."""
    import triton
    from triton.backends.nvidia.driver import CudaLauncher

    made, target, options = source(job)
    kernel = triton.compile(made, target=target, options=options)
    with suppress(Exception):  # training makes it in a fraction of a second
        CudaLauncher(kernel.src, kernel.metadata)


def main() -> None:
    os.nice(NICE)
    side = _Side(os.dup(1))
    os.dup2(2, 1)  # whatever libraries print is no answer
    for name in MODULES:
        import_module(OURS + name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it shares with this process
    while True:
        ready = wait([0, *side.children])
        for ended in ready:
            if ended != 0:
                side.end(ended)  # type: ignore[arg-type]
        if 0 in ready and not side.read():
            os.killpg(0, signal.SIGKILL)  # this process too: it leads a session of its own
        side.begin()


if __name__ == "__main__":
    main()
