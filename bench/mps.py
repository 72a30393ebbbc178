"""Trials in processes that share a GPU under MPS, for bench/fusion.py: with CUDA graphs or eager, whichever is faster.

python bench/mps.py DEVICE TRIAL [--benchmark]      one of the processes: it answers requests, a line each
"""

from __future__ import annotations

import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.networks import Batch, Network
from bench.steps import Row, difference, expected, losses, reset_memory, row, synchronize
from bench.ways import Step, eager, graph

PROCESSES = 16


class Pool:
    """Workers that each train one trial; started once, since sixteen of them take long to import torch."""

    def __init__(self, device: torch.device, count: int = PROCESSES) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mps"))
        self.workers: list[subprocess.Popen[str]] = []
        self.environment = dict(os.environ, OMP_NUM_THREADS="1")
        self.daemon = device.type == "cuda"
        self.before = memory_elsewhere() if self.daemon else 0
        if self.daemon:
            for name in ("pipe", "log"):
                (self.folder / name).mkdir()
            self.environment["CUDA_MPS_PIPE_DIRECTORY"] = str(self.folder / "pipe")
            self.environment["CUDA_MPS_LOG_DIRECTORY"] = str(self.folder / "log")
            self.control("-d")
        try:
            benchmark = ["--benchmark"] if torch.backends.cudnn.benchmark else []
            for trial in range(count):
                with open(self.folder / f"{trial}.err", "w") as errors:
                    self.workers.append(
                        subprocess.Popen(
                            [sys.executable, __file__, str(device), str(trial), *benchmark],
                            env=self.environment,
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            stderr=errors,
                            text=True,
                        )
                    )
        except BaseException:
            self.close()
            raise

    def control(self, *arguments: str, say: str | None = None) -> None:
        command = ["nvidia-cuda-mps-control", *arguments]
        subprocess.run(command, env=self.environment, input=say, text=True, check=True, timeout=30)

    def ask(self, **request: Any) -> list[Any]:
        """Send the same request to all workers at once; gives their answers."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
        return [self.answer(trial, worker) for trial, worker in enumerate(self.workers)]

    def answer(self, trial: int, worker: subprocess.Popen[str]) -> Any:
        assert worker.stdout is not None
        ready, _, _ = select.select([worker.stdout], [], [], 60)
        line = worker.stdout.readline() if ready else ""
        if not line:
            said = (self.folder / f"{trial}.err").read_text().strip()[-300:]
            raise RuntimeError(f"worker {trial} {'ended' if ready else 'does not answer'}: {said}")
        answer = json.loads(line)
        if isinstance(answer, str):
            raise RuntimeError(f"worker {trial}: {answer}")
        return answer

    def close(self) -> None:
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self.workers:
            try:
                worker.wait(20)
            except subprocess.TimeoutExpired:
                worker.kill()
        if self.daemon:
            self.control(say="quit\n")
        shutil.rmtree(self.folder, ignore_errors=True)


def memory_elsewhere() -> int:
    """Bytes of the GPU that other processes hold, including their contexts."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


pools: list[Pool] = []


def mps(network: Network, size: int, precision: str) -> Row:
    if not pools:
        pools.append(Pool(network.device, size))
    curve, control = expected(network, precision, size - 1)
    cuda = network.device.type == "cuda"
    task = {"network": network.name, "precision": precision, "batch_size": network.batch_size}
    rows = []
    for way in ("graph", "eager") if cuda else ("eager",):
        differs = difference(pools[0].ask(way=way, **task)[-1], curve)
        rates = [sum(pools[0].ask(seconds=2 * network.seconds)) for _ in range(3)]
        memory = memory_elsewhere() - pools[0].before if cuda else None
        rows.append(row(network, size, precision, statistics.median(rates), memory, differs, control, way))
    best, *others = sorted(rows, key=lambda row: -row["rate"])
    best["note"] += "".join(f" ({other['note']}: {other['rate']:,.0f})" for other in others)
    return best


def worker(trial: int, device: torch.device) -> None:
    """Answer requests on standard output: with the first losses for a network, with steps a second for seconds."""
    step: Step | None = None
    batches: list[Batch] = []
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "network" in request:
                step = None
                if device.type == "cuda":
                    reset_memory()
                network = Network(request["network"], device, request["batch_size"], 0)
                network.skip(trial)
                batches = network.batches(request["precision"])
                step = {"eager": eager, "graph": graph}[request["way"]](network, trial + 1, request["precision"])
                answer: Any = losses(step, batches, 0)
            else:
                assert step is not None
                answer = steps_within(step, batches, request["seconds"], device)
        except Exception as error:  # the error is an answer: the bench goes on with other requests
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


def steps_within(step: Step, batches: Sequence[Batch], seconds: float, device: torch.device) -> float:
    feed, count, began = cycle(batches), 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        for batch in islice(feed, 4):  # few batches, so that no process has much queued when its time is over
            step(batch)
        synchronize(device)
        count += 4
    return count / spent


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")  # TF32, as in the convolutions
    torch.backends.cudnn.benchmark = "--benchmark" in sys.argv
    worker(int(sys.argv[2]), torch.device(sys.argv[1]))
