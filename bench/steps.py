"""The figures of a way in bench/fusion.py: its steps a second, the error of its losses, the memory it holds."""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle, islice
from typing import Any

import torch

from bench.networks import Batch, Network
from bench.ways import Step, alone

Row = dict[str, Any]
CHECKED = 8  # steps whose losses are checked


@cache
def expected(network: Network, precision: str, trial: int) -> tuple[list[float], float]:
    """The losses of a trial's first steps alone, and how much they change when each batch's rows are permuted."""
    batches = network.batches(precision)
    order = torch.randperm(network.batch_size, generator=torch.Generator().manual_seed(1)).to(network.device)
    permuted = [(network.laid_out(x[order], precision), y[order]) for x, y in batches]
    curve, control = (losses(alone(network, precision, trial)[2], data, 0) for data in (batches, permuted))
    return curve, difference(control, curve)


def losses(step: Step, batches: Sequence[Batch], place: int) -> list[float]:
    return [step(batch)[place].item() for batch in islice(cycle(batches), CHECKED)]


def difference(curve: Sequence[float], other: Sequence[float]) -> float:
    return float(max((torch.tensor(curve) - torch.tensor(other)).abs() / torch.tensor(other).abs()))


def measured(
    build: Callable[[Network, int, str], Step], network: Network, size: int, precision: str, *, single: bool = False
) -> Row:
    """Build the step, check its last trial against the same trial alone, time it."""
    cuda = network.device.type == "cuda"
    curve, control = expected(network, precision, size - 1)
    network.stacked(size)  # made before the memory is measured, because it is not the way's own
    before = reset_memory() if cuda else 0
    step = build(network, size, precision)
    batches = network.batches(precision)
    differs = difference(losses(step, batches, 0 if single else size - 1), curve)
    making = torch.cuda.max_memory_allocated() - before if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    rate = (1 if single else size) * steps_a_second(step, batches, network)
    if network.profiled:
        profile(step, batches[0], 1 if single else size)
    memory = max(torch.cuda.max_memory_allocated(), held()) - before if cuda else None
    note = f"made with {making / 1e9:.2f} GB" if memory is not None and making > 1.05 * memory else ""
    return row(network, size, precision, rate, memory, differs, control, note)


def profile(step: Step, batch: Batch, trials: int) -> None:
    """Print the kernels of one step on standard error, with their microseconds per trial."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step(batch)
        torch.cuda.synchronize()
    found = sorted(profiler.key_averages(), key=lambda one: -one.self_device_time_total)
    total = sum(one.self_device_time_total for one in found)
    print(f"    {total / trials:8.2f} µs in all", file=sys.stderr)
    for one in found[:12]:
        print(f"    {one.self_device_time_total / trials:8.2f} µs in {one.count:3} of {one.key[:80]}", file=sys.stderr)


def row(
    network: Network,
    size: int,
    precision: str,
    rate: float,
    memory: int | None,
    differs: float,
    control: float,
    note: str = "",
) -> Row:
    share = rate / network.floor(precision)
    return {
        "network": network.name,
        "precision": precision,
        "size": size,
        "rate": rate,
        "memory": memory,
        "share": share,
        "differs": differs,
        "control": control,
        "note": note,
    }


def steps_a_second(step: Step, batches: Sequence[Batch], network: Network) -> float:
    """The median of three timings, each of as many steps as fit into `network.seconds`."""
    feed, count = cycle(batches), 1

    def seconds() -> float:
        synchronize(network.device)
        began = time.perf_counter()
        for batch in islice(feed, count):
            step(batch)
        synchronize(network.device)
        return time.perf_counter() - began

    while (spent := seconds()) < network.seconds:
        count = math.ceil(count * min(10, max(1.2, 1.1 * network.seconds / spent)))
    return count / statistics.median([spent, seconds(), seconds()])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def held() -> int:
    """Bytes that other processes cannot use: those of tensors, and those that CUDA graphs will write to."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def reset_memory() -> int:
    before = held()
    torch.cuda.reset_peak_memory_stats()
    return before
