"""Work of a device, recorded once as a CUDA graph and launched as one from then on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from penstock.training.fused.step import unchanged

LARGE = 2**28  # bytes of a graph that are worth the wait for the pieces of memory that torch keeps
_warmed: set[int] = set()  # streams with room of their own for cuBLAS


def records(device: torch.device) -> bool:
    """Whether work of a device can be recorded: the graph of a CPU's work would be empty."""
    return device.type == "cuda"


class Recording:
    """A function that was recorded: ``replay`` launches it, ``made`` is what it gives each time.

    Recordings of one ``pool`` share their memory, so only one of them may run at a time.
    """

    def __init__(self, run: Callable[[], Any], written: Iterable[torch.Tensor], pool: Pool) -> None:
        current, stream = torch.cuda.current_stream(), _recording_stream()
        with unchanged(written):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self.bytes = _room(run)  # libraries choose their kernels here, before the recording
                if self.bytes > LARGE:
                    # Without this, the graph's memory would be cut from large free pieces, and would hold them.
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
                self._graph = torch.cuda.CUDAGraph()
                with _nothing_freed():
                    try:
                        # Other threads may use the device meanwhile.
                        self._graph.capture_begin(pool.handle, capture_error_mode="thread_local")
                        torch.empty(self.bytes, dtype=torch.uint8, device="cuda")  # all its memory in one piece
                        self.made = run()
                        self._graph.capture_end()
                    except BaseException:
                        _give_up(self._graph, pool)
                        raise
            current.wait_stream(stream)
        self.replay, self._run = self._graph.replay, run  # the graph reads tensors that the function holds

    def timed(self) -> float:
        """The milliseconds that it takes on the device."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        self.replay()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended))


class Pool:
    """The memory of recordings that never run at the same time."""

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None


@contextmanager
def _nothing_freed() -> Iterator[None]:
    """Collect no garbage meanwhile: an older graph may be among it, and to free one breaks a recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _give_up(graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
    """End a recording that failed.

    Work that cannot be recorded breaks a recording, and torch then leaves open what it had begun for it: its random
    generator would refuse all draws from then on, and the pool all other recordings. A recording that succeeds closes
    the first; the next ones have another pool.
    """
    with suppress(RuntimeError):
        graph.capture_end()
        return
    pool.handle = torch.cuda.graph_pool_handle()
    another = torch.cuda.CUDAGraph()
    another.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device="cuda")
    another.capture_end()


def _recording_stream() -> torch.cuda.Stream:
    """The current stream, or one beside the default stream, which cannot be recorded.

    cuBLAS has room of its own for each stream, and a recording goes on to use it. So recordings that may run at the
    same time, which are those of different streams, must be made on different streams.
    """
    stream = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():
        stream = _beside(torch.cuda.current_device())
    if stream.cuda_stream not in _warmed:  # or the first recording's memory would hold that room
        with torch.cuda.stream(stream):
            one = torch.ones(1, 1, device="cuda")
            one @ one
        _warmed.add(stream.cuda_stream)
    return stream


_STREAMS: dict[int, torch.cuda.Stream] = {}


def _beside(device: int) -> torch.cuda.Stream:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _STREAMS[device]


def _room(run: Callable[[], object]) -> int:
    """How many bytes a run takes at most, besides those in use before it.

    A graph's own memory is never given back to others. Asked for piece by piece, as the run goes on, it would come to
    a quarter more than is ever in use at once.
    """
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before
