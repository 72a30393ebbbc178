"""Which block sizes a kernel runs with: timed on the device, once for each shape, and remembered.

A kernel offers a few candidates, the likeliest first. Without a device, or while a CUDA graph is recorded, the first is
taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence

import torch

Blocks = dict[str, int]  # what a kernel is launched with: its block sizes, num_warps, num_stages
TIMED = 3

_KNOWN: dict[Hashable, Blocks] = {}


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def tuned(
    shape: tuple[Hashable, ...], candidates: Callable[[], Sequence[Blocks]], launch: Callable[[Blocks], object]
) -> Blocks:
    """The fastest candidate for a kernel and shape; ``launch`` runs the kernel, whatever it overwrites."""
    if (known := _KNOWN.get(shape)) is not None:
        return known
    offered = candidates()
    if interpreted() or len(offered) == 1 or torch.cuda.is_current_stream_capturing():
        return offered[0]
    times = [(_seconds(launch, blocks), i) for i, blocks in enumerate(offered)]
    best = _KNOWN[shape] = offered[min(times)[1]]
    return best


def _seconds(launch: Callable[[Blocks], object], blocks: Blocks) -> float:
    """The least time of a launch; infinite where the device has not the registers or the shared memory."""
    from triton.runtime.errors import OutOfResources

    try:
        launch(blocks)
    except OutOfResources:
        return float("inf")
    times = []
    for _ in range(TIMED):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        launch(blocks)
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return float(min(times))
