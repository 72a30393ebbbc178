"""The program of the side process that compiles steps, and that of its children.

The first only starts a process for each request, a few at a time: a process that has used a CUDA device cannot be
forked, and one that ends gives its memory there back. Each imports torch, compiles one step into its file, and answers.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

from penstock.training.side import Side, answer

PROGRAM = "penstock.training.fused.side"
EACH = 4  # cores for each child, which compiles in processes of its own
MOST = 4  # children at a time
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class _Steps(Side):
    def __init__(self, cores: int) -> None:
        super().__init__(max(1, min(MOST, cores // EACH)))
        threads = max(1, (cores - 2) // self.most)  # the others train and evaluate
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
        os.set_inheritable(self.answers, True)

    def start(self, request: bytes) -> int:
        if (pid := os.fork()) == 0:
            given = os.memfd_create("request")
            with open(given, "wb", closefd=False) as file:
                file.write(request)
            os.lseek(given, 0, os.SEEK_SET)
            os.dup2(given, 0)
            os.execv(sys.executable, [sys.executable, "-P", "-m", PROGRAM, str(self.answers)])
        return pid


def compile_one(answers: int) -> None:
    """Compile the step that this process was asked for."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    request, error = sys.stdin.buffer.read(), None
    try:
        from penstock.training.fused.artifacts import compile_text

        _, name, text = json.loads(request)
        compile_text(text, name)
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    answer(answers, request, error)
    os._exit(0)


def main() -> None:
    if len(sys.argv) > 1:
        compile_one(int(sys.argv[1]))
    _Steps(len(os.sched_getaffinity(0))).serve()


if __name__ == "__main__":
    main()
