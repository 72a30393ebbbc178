"""The program of the side process: compiles kernels into Triton's cache, beside training.

The program forks a child for each request, which ends once the kernel lies in the cache. It imports torch and Triton
once, and never touches a device.
"""

from __future__ import annotations

import gc
import json
import os
from contextlib import suppress
from importlib import import_module

from penstock.training.kernels.needed import OURS, Job, digest, source
from penstock.training.side import Side, answer

MODULES = ("all_layers", "attention", "convolution", "depthwise", "moments", "normalization", "patches", "weighing")
MOST = 16  # children at a time


class _Kernels(Side):
    def start(self, request: bytes) -> int:
        with suppress(Exception):  # the child says what is wrong
            digest(Job(*json.loads(request)[2]))  # what all children need for it is read here, once
        if (pid := os.fork()) == 0:
            self._compile(request)
        return pid

    def _compile(self, request: bytes) -> None:
        error = None
        try:
            _, where, job = json.loads(request)
            os.environ["TRITON_CACHE_DIR"] = where
            compile_job(Job(*job))
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
        answer(self.answers, request, error)
        os._exit(0)


def compile_job(job: Job) -> None:
    """Put a kernel, and the program that launches it, into Triton's cache."""
    import triton
    from triton.backends.nvidia.driver import CudaLauncher

    made, target, options = source(job)
    kernel = triton.compile(made, target=target, options=options)
    with suppress(Exception):  # training makes it in a fraction of a second
        CudaLauncher(kernel.src, kernel.metadata)


def main() -> None:
    side = _Kernels(max(1, min(MOST, len(os.sched_getaffinity(0)) - 2)))  # the others train and evaluate
    for name in MODULES:
        import_module(OURS + name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it shares with this process
    side.serve()


if __name__ == "__main__":
    main()
