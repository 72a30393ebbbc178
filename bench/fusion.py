"""Many trials on one GPU: model steps a second of every public way to train them, and of Penstock.

    python bench/fusion.py --goals                   what goals are set for, one size of each way: ten minutes
    python bench/fusion.py [--network rn18/8] [--way vmap] [--precision bf16] [--sizes 16,128] [--quick] [--benchmark]
                           [--profile] [--json]
    python bench/fusion.py --device cpu --quick      a smoke test without a GPU: batches of 8, few sizes

eager    one after another, as written
graph    one after another, the whole step captured as a CUDA graph
vmap     torch.func: `vmap` over the loss, ordinary backward on the sum, torch.optim on the stacked parameters
math     the same with attention spelt out, where `vmap` fails in the backward of the fused attention
grouped  one convolution with groups=F, BatchNorm over F·C channels, baddbmm: what HFTA and Hydro do
penstock one bundle in the fused mode, with plain steps
captured the same with its step captured as a CUDA graph
compiled the same with its step compiled (and then captured), as it is once enough steps are certain
mps      16 processes under MPS, by graphs or eager, whichever is faster

A model step is one forward, backward and optimizer step of one model; steps are summed over the models. fp32 allows
TF32; bf16 is autocast, with convolutional networks in channels-last. The trials of a row share one config and differ in
their initial weights, the easiest case for the public ways: one torch.optim steps all of them.

floor: the fewest bytes a step moves, at 4.8 TB/s (H200). Convolution, linear, attention, BatchNorm and LayerNorm read
their inputs and write their output; backward they read the output's gradient and the inputs and write the inputs'
gradients: 3 × inputs + 2 × output. The loss reads the logits and writes their gradient; an embedding's output is
written and its gradient read. All else is fused into these. A parameter is read forward and backward, and it and each
of the optimizer's tensors are read and written by the update, in fp32; its gradient never leaves the chip. Nothing for
the batch, which the models share. By this count rn18/8 in bf16 could do 12,000 a second and mlp512 97,000.

differs: the greatest relative difference between the losses of the row's last trial over its first 8 steps and those of
the same trial alone, eager, in the same precision. control: the same between that run and one whose batches have their
rows permuted, which is what rounding alone does. GB: the most that steps hold while they are timed; "made with" says
what the first ones took, where that is more: those that find and check a faster way.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.networks import TASKS, Batch, Network
from penstock.training.data import Data, Source
from penstock.training.fused import Fused, Recipe
from penstock.training.loop import Training

Row = dict[str, Any]
Step = Callable[[Batch], Tensor]  # trains every trial on a batch; their losses before it

CHECKED = 8  # steps
PROCESSES = 16
SIZES = {"mlp512": (1, 4, 16, 64, 128, 256), "rn18/8": (1, 4, 16, 64, 128, 512), "rn18": (1, 2, 4)}
SIZE = (1, 4, 16, 64, 128)
GOALS = {  # how many trials Penstock trains at once
    ("rn18/8", "bf16"): 512,
    ("rn18/8", "fp32"): 256,
    ("mlp512", "fp32"): 256,
    ("char transformer", "bf16"): 128,
    ("mobilenet/8", "bf16"): 128,
    ("rn18", "bf16"): 4,
}
OTHERS = 128  # at most that many by the other ways, which gain nothing from more


# One trial alone


def alone(network: Network, precision: str, trial: int) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    model = network.model()
    model.load_state_dict(network.initial(trial))
    if network.convolutional and precision == "bf16":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = network.task.optimizer(model.parameters(), network.config)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with network.autocast(precision):
            loss = network.task.loss(model, batch, network.config)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach().view(1)

    return model, optimizer, step


def eager(network: Network, size: int, precision: str) -> Step:
    return alone(network, precision, size - 1)[2]


def graph(network: Network, size: int, precision: str) -> Step:
    model, optimizer, train = alone(network, precision, size - 1)
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    static = tuple(value.clone() for value in network.batches(precision)[0])
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train(static)  # type: ignore[arg-type]
    torch.cuda.current_stream().wait_stream(stream)
    # Back to the start, in place: a graph keeps the addresses that it saw.
    model.load_state_dict(network.initial(size - 1))
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    optimizer.zero_grad()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        loss = train(static)  # type: ignore[arg-type]

    def step(batch: Batch) -> Tensor:
        for into, value in zip(static, batch, strict=True):
            into.copy_(value)
        captured.replay()
        return loss

    return step


# Many trials as one


class Loss(nn.Module):
    """The task's loss as a module, which `functional_call` gives other parameters."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network, self.model = network, network.model()

    def forward(self, batch: Batch) -> Tensor:
        return self.network.task.loss(self.model, batch, self.network.config)


def vmap(network: Network, size: int, precision: str, backends: Sequence[SDPBackend] = ()) -> Step:
    module = Loss(network)
    stacked = {f"model.{name}": value for name, value in network.stacked(size).items()}
    names = {name for name, _ in module.named_parameters()}
    parameters = {name: value.requires_grad_() for name, value in stacked.items() if name in names}
    buffers = {name: value for name, value in stacked.items() if name not in names}
    optimizer = network.task.optimizer(parameters.values(), network.config)  # type: ignore[arg-type]

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Batch) -> Tensor:
        return torch.func.functional_call(module, (parameters, buffers), (batch,))  # type: ignore[no-any-return]

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with network.autocast(precision), sdpa_kernel(list(backends)) if backends else nullcontext():
            losses: Tensor = torch.func.vmap(loss, in_dims=(0, 0, None))(parameters, buffers, batch)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return losses.detach()

    return step


def math_vmap(network: Network, size: int, precision: str) -> Step:
    return vmap(network, size, precision, [SDPBackend.MATH])


class GroupedLinear(nn.Module):
    """F linear layers as one batched product. Takes (B, in), the same for all, (B, F·in) or (F, B, in)."""

    def __init__(self, linear: nn.Linear, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.new_empty(size, linear.in_features, linear.out_features))
        self.bias = nn.Parameter(linear.weight.new_empty(size, 1, linear.out_features))

    def forward(self, x: Tensor) -> Tensor:
        size, inside, _ = self.weight.shape
        if x.dim() == 2:
            x = x.view(len(x), -1, inside).transpose(0, 1)
        return torch.baddbmm(self.bias, x.expand(size, -1, -1), self.weight)


def grouped_layer(layer: nn.Module, size: int) -> nn.Module | None:
    if isinstance(layer, nn.Conv2d):
        return nn.Conv2d(
            size * layer.in_channels,
            size * layer.out_channels,
            layer.kernel_size,  # type: ignore[arg-type]
            layer.stride,  # type: ignore[arg-type]
            layer.padding,  # type: ignore[arg-type]
            groups=size * layer.groups,
            bias=layer.bias is not None,
            device=layer.weight.device,
        )
    if isinstance(layer, nn.BatchNorm2d):
        return nn.BatchNorm2d(size * layer.num_features, device=layer.weight.device)
    return GroupedLinear(layer, size) if isinstance(layer, nn.Linear) else None


def grouped(network: Network, size: int, precision: str) -> Step:
    """The network with its layers exchanged for grouped ones, as HFTA's users write it."""
    model = network.model()
    for name, layer in list(model.named_modules()):
        if (exchanged := grouped_layer(layer, size)) is not None:
            model.set_submodule(name, exchanged)
    stacked = network.stacked(size)
    with torch.no_grad():
        for name, layer in model.named_modules():
            for part, value in layer.named_parameters(prefix=name, recurse=False):
                turned = isinstance(layer, GroupedLinear) and part.endswith("weight")
                plain = stacked[part].transpose(1, 2) if turned else stacked[part]
                value.copy_(plain.reshape(value.shape))
    last = network.convolutional and precision == "bf16"
    if last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = network.task.optimizer(model.parameters(), network.config)

    def step(batch: Batch) -> Tensor:
        x, y = batch
        if last:
            x = x.permute(0, 2, 3, 1).repeat(1, 1, 1, size).permute(0, 3, 1, 2)
        elif network.convolutional:
            x = x.repeat(1, size, 1, 1)
        optimizer.zero_grad()
        with network.autocast(precision):
            logits = model(x)
            losses = F.cross_entropy(logits.flatten(0, 1), y.repeat(size), reduction="none").view(size, -1).mean(1)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return losses.detach()

    return step


class Fed(Source):
    """A training source that gives the batch it was handed last."""

    batch: Batch

    def batches(self, epoch: int, start: int, size: int, cut: object = None) -> Iterator[Batch]:
        while True:
            yield self.batch

    def all(self, size: int, first: int = 0, every: int = 1) -> Iterator[tuple[Batch, int]]:
        yield self.batch, size


def penstock(network: Network, size: int, precision: str, faster: str | None = None) -> Step:
    """The fused mode itself, on plain trials: each with its own optimizer, as a worker trains them."""
    task = copy.copy(network.task)
    task.precision = precision  # type: ignore[assignment]
    feed = Fed(0, 10**9)
    fused = Fused(Recipe())
    for trial in range(size):
        data = Data(feed, feed, {})
        one = Training(
            task, trial, network.config, data, seed=0, device=network.device, metric="loss", mode="min"
        )  # fmt: skip
        one.model.load_state_dict(network.initial(trial))
        fused.enter(one)

    def step(batch: Batch) -> Tensor:
        feed.batch = batch
        if fused.recipe.way is not None and not fused.fast and not fused.recipe.refusals:
            fused.speeding.wanted = faster
        fused.step()
        refused = [said for said in fused.recipe.refusals if not said.startswith("kernels")]
        if refused:
            raise RuntimeError("; ".join(refused))
        if fused.recipe.refusals:
            print(f"not {fused.recipe.refusals.pop()}", file=sys.stderr)
        return fused.losses

    return step


# What a row says


@cache
def expected(network: Network, precision: str, trial: int) -> tuple[list[float], float]:
    """The losses of a trial's first steps alone, and how far they move when each batch's rows are permuted."""
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
    build: Callable[[Network, int, str], Step], network: Network, size: int, precision: str, *, alone: bool = False
) -> Row:
    """Build the step, check its last trial against the same trial alone, time it."""
    cuda = network.device.type == "cuda"
    curve, control = expected(network, precision, size - 1)
    network.stacked(size)  # made before, so that the row's memory is its own
    before = reset_memory() if cuda else 0
    step = build(network, size, precision)
    batches = network.batches(precision)
    differs = difference(losses(step, batches, 0 if alone else size - 1), curve)
    making = torch.cuda.max_memory_allocated() - before if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    rate = (1 if alone else size) * steps_a_second(step, batches, network)
    if network.profiled:
        profile(step, batches[0], 1 if alone else size)
    memory = max(torch.cuda.max_memory_allocated(), held()) - before if cuda else None
    note = f"made with {making / 1e9:.2f} GB" if memory is not None and making > 1.05 * memory else ""
    return row(network, size, precision, rate, memory, differs, control, note)


def profile(step: Step, batch: Batch, trials: int) -> None:
    """What one step spends its time on, on standard error: microseconds of one trial by kernel."""
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
    """The median of three timings, each of as many steps as last `network.seconds`."""
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
    """Bytes that nobody else can have: those of tensors, and of what CUDA graphs will write."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def reset_memory() -> int:
    before = held()
    torch.cuda.reset_peak_memory_stats()
    return before


# Processes under MPS


class Pool:
    """Workers that each train one trial; started once, since sixteen of them take long to import torch."""

    def __init__(self, device: torch.device) -> None:
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
            command = [sys.executable, __file__, "--device", str(device), *benchmark, "--worker"]
            for trial in range(PROCESSES):
                with open(self.folder / f"{trial}.err", "w") as errors:
                    self.workers.append(
                        subprocess.Popen(
                            [*command, str(trial)],
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
        """The same request to all at once; their answers."""
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
    """Bytes of the GPU that other processes hold, their contexts among them."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


pools: list[Pool] = []


def mps(network: Network, size: int, precision: str) -> Row:
    if not pools:
        pools.append(Pool(network.device))
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
    """Answers on standard output: the first losses when given a network, its steps a second when given seconds."""
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
        except Exception as error:  # for the one who asked, who has other requests
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


def steps_within(step: Step, batches: Sequence[Batch], seconds: float, device: torch.device) -> float:
    feed, count, began = cycle(batches), 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        for batch in islice(feed, 4):  # few, so that no process has much queued when its time is over
            step(batch)
        synchronize(device)
        count += 4
    return count / spent


ways: dict[str, Callable[[Network, int, str], Row]] = {
    "eager": partial(measured, eager, alone=True),
    "graph": partial(measured, graph, alone=True),
    "vmap": partial(measured, vmap),
    "math": partial(measured, math_vmap),
    "grouped": partial(measured, grouped),
    "penstock": partial(measured, penstock),
    "captured": partial(measured, partial(penstock, faster="captured")),
    "compiled": partial(measured, partial(penstock, faster="compiled")),
    "mps": mps,  # last: its processes stay until the end
}
ONE_SIZE = {"eager": 1, "graph": 1, "mps": PROCESSES}
NEEDS_CUDA = ("graph", "mps", "captured", "compiled")
COVERS = {"math": ["char transformer"], "grouped": ["rn18/8", "rn18", "mlp512", "mobilenet/8"]}  # other ways cover all


def rows(
    networks: Sequence[Network], chosen: Sequence[str], precisions: Sequence[str], sizes: Sequence[int], goals: bool
) -> Iterator[Row]:
    for way in chosen:
        if way in NEEDS_CUDA and networks[0].device.type != "cuda":
            print(f"{way}: skipped, needs CUDA", file=sys.stderr)
            continue
        for network in (network for network in networks if network.name in COVERS.get(way, TASKS)):
            for precision in network.precisions:
                goal = GOALS.get((network.name, precision))
                if precision not in precisions or (goals and goal is None):
                    continue
                those = [goal if way in NEEDS_CUDA else min(goal, OTHERS)] if goals and goal else sizes
                for size in [ONE_SIZE[way]] if way in ONE_SIZE else those or SIZES.get(network.name, SIZE):
                    found = attempted(way, network, size, precision)
                    yield {"way": way, **found}
                    if found["rate"] is None:
                        break


def attempted(way: str, network: Network, size: int, precision: str) -> Row:
    """The row, or one without numbers that says why there are none."""
    try:
        return ways[way](network, size, precision)
    except torch.cuda.OutOfMemoryError:
        note = "out of memory"
    except Exception as error:  # a failure of one way is what its row says, and the others go on
        note = f"fails: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    nothing = dict.fromkeys(("rate", "memory", "share", "differs", "control"))
    return {"network": network.name, "precision": precision, "size": size, **nothing, "note": note}


def line(row: Row) -> str:
    numbers = f"{'–':>9}"
    if row["rate"] is not None:
        memory = f"{row['memory'] / 1e9:8.2f}" if row["memory"] is not None else f"{'–':>8}"
        numbers = f"{row['rate']:9,.0f} {memory} {row['share']:6.1%} {row['differs']:9.1e} {row['control']:9.1e}"
    return f"{row['network']:17} {row['precision']:5} {row['way']:8} {row['size']:4} {numbers}  {row['note']}".rstrip()


HEAD = f"{'network':17} {'':5} {'way':8} {'F':>4} {'steps/s':>9} {'GB':>8} {'floor':>6} {'differs':>9} {'control':>9}"


def summary(found: Sequence[Row]) -> str:
    """The best size of each way, a column a way."""
    kinds = list(dict.fromkeys(row["way"] for row in found))
    lines = [f"{'best':23}" + "".join(f"{kind:>16}" for kind in kinds)]
    for network, precision in sorted({(row["network"], row["precision"]) for row in found}):
        cells = []
        for kind in kinds:
            same = [r for r in found if (r["network"], r["precision"], r["way"]) == (network, precision, kind)]
            best = max((r for r in same if r["rate"] is not None), key=lambda r: r["rate"], default=None)
            cells.append(f"{best['rate']:,.0f} at {best['size']}" if best else "–")
        lines.append(f"{network:17} {precision:5}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=TASKS, help="may be given several times; all of them")
    parser.add_argument("--way", action="append", choices=ways, help="may be given several times; all of them")
    parser.add_argument("--precision", action="append", choices=("fp32", "bf16"))
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=[])
    parser.add_argument("--goals", action="store_true", help="the networks, precisions and sizes that have goals")
    parser.add_argument("--quick", action="store_true", help="two sizes and short timings")
    parser.add_argument("--benchmark", action="store_true", help="let cuDNN time its algorithms: tens of seconds a row")
    parser.add_argument("--profile", action="store_true", help="what a step of each row spends its time on")
    parser.add_argument("--json", action="store_true", help="JSON lines, and the table on standard error")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()

    cuda = options.device.type == "cuda"
    if cuda:
        torch.set_float32_matmul_precision("high")  # TF32, as in the convolutions
        torch.backends.cudnn.benchmark = options.benchmark
    if options.worker is not None:
        worker(options.worker, options.device)
        return
    if cuda and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu runs a smoke test")
    table = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    table(f"torch {torch.__version__}, {torch.cuda.get_device_name() if cuda else 'CPU'}\n{HEAD}")
    sizes = options.sizes or ([4, 64] if cuda else [1, 2]) if options.quick else options.sizes
    seconds = 0.1 if options.quick else 0.3
    networks = [Network(name, options.device, None if cuda else 8, seconds) for name in options.network or TASKS]
    for network in networks:
        network.profiled = options.profile and cuda
    precisions = options.precision or ["fp32", "bf16"]
    chosen = options.way or [way for way in ways if not options.goals or way not in ("math", "penstock", "captured")]
    found: list[Row] = []
    try:
        for row in rows(networks, chosen, precisions, sizes, options.goals):
            found.append(row)
            table(line(row))
            if options.json:
                print(json.dumps(row), flush=True)
    finally:
        for pool in pools:
            pool.close()
        table(summary(found))


if __name__ == "__main__":
    main()
