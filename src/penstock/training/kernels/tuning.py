"""The block sizes that a kernel runs with: timed on the device, once for each shape, and remembered.

A kernel offers a few candidates, the likeliest first. Without a device, while a CUDA graph is recorded, or where none
is to be timed (``untimed``), the first is taken. The times are kept in a file of the user's cache folder for the next
process, by device and version. It is only a cache: a line that cannot be read is passed over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from functools import cache
from pathlib import Path

import torch

from penstock import __version__

Blocks = dict[str, int]  # the launch options of a kernel: its block sizes, num_warps, num_stages
TIMED = 3
QUEUED = 2_000_000  # cycles, about a millisecond

_KNOWN: dict[tuple[Hashable, ...], Blocks] = {}
_UNTIMED = ContextVar("untimed", default=False)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def about(count: int) -> int:
    """A count, rounded to a power of two: one trial more or less asks for no other blocks, and compiles nothing."""
    return 1 << max(0, count.bit_length() - 1)


@contextmanager
def untimed() -> Iterator[None]:
    """Take the first candidate where none was ever timed.

    Backward passes stay in this thread: those of CUDA have a thread of their own, which sees no context variable.
    """
    token = _UNTIMED.set(True)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        _UNTIMED.reset(token)


def tuned(
    shape: tuple[Hashable, ...], candidates: Callable[[], Sequence[Blocks]], launch: Callable[[Blocks], object]
) -> Blocks:
    """The fastest candidate for a kernel and shape; ``launch`` runs the kernel, whatever it overwrites."""
    if (known := _KNOWN.get(shape)) is not None:
        return known
    offered = candidates()
    if interpreted() or len(offered) == 1 or torch.cuda.is_current_stream_capturing():
        return offered[0]
    name = f"{_here()}: {shape}"
    best = _kept().get(name, {})
    if best not in offered:  # it was never timed, or timed before the candidates changed
        if _UNTIMED.get():
            return offered[0]
        best = _fastest(offered, launch)
        _keep(name, best)
    _KNOWN[shape] = best
    return best


def _fastest(offered: Sequence[Blocks], launch: Callable[[Blocks], object]) -> Blocks:
    device = torch.cuda.current_device()

    def compiled(blocks: Blocks) -> bool:
        from triton.runtime.errors import OutOfResources

        with torch.cuda.device(device), torch.no_grad():
            try:
                launch(blocks)
            except OutOfResources:  # the device has too few registers or too little shared memory
                return False
        return True

    with ThreadPoolExecutor() as pool:  # compiling takes a second each, mostly outside of Python's lock
        able = [blocks for blocks, can in zip(offered, pool.map(compiled, offered), strict=True) if can]
    torch.cuda.synchronize()
    # A context of its own, as a thread has: nothing of it belongs to the step that runs now.
    return min(able or offered, key=lambda blocks: Context().run(_seconds, launch, blocks))


def _seconds(launch: Callable[[Blocks], object], blocks: Blocks) -> float:
    """The least time on the device. Launches are queued behind other work: a captured step pays no launching."""
    times = []
    for _ in range(TIMED):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(QUEUED)
        began.record()
        launch(blocks)
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return float(min(times))


# The file


def kept_in() -> Path:
    """The folder in which this user's choices and compiled steps are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def _file() -> Path:
    return kept_in() / "blocks.jsonl"


@cache
def _here() -> str:
    """Everything that a kernel's time depends on, besides its shape."""
    import triton

    return f"{torch.cuda.get_device_name()}, triton {triton.__version__}, penstock {__version__}"


@cache
def _kept() -> dict[str, Blocks]:
    """The choices of earlier processes; of two lines for one shape the last counts."""
    kept: dict[str, Blocks] = {}
    with suppress(OSError, RuntimeError):
        for line in _file().read_bytes().splitlines():
            with suppress(ValueError, TypeError):
                name, blocks = json.loads(line)
                kept[str(name)] = dict(blocks)
    return kept


def _keep(name: str, blocks: Blocks) -> None:
    """Append a line in one write, which other processes see whole or not at all."""
    with suppress(OSError, RuntimeError):  # without a home folder to write to, kernels are timed again
        _file().parent.mkdir(parents=True, exist_ok=True)
        with _file().open("ab", buffering=0) as file:
            file.write(json.dumps([name, blocks]).encode() + b"\n")
