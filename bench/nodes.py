"""The gain of having a trial's workers together on one node (RubberBand §4.4): a section of bench/elastic.py.

The nodes are two network namespaces of this machine, which any user may make where the system allows it. A pair of
virtual interfaces between them carries 1 Gbit/s each way. The nodes share the same two cores: with four workers a step
computes no faster than with two, wherever they are, and only the traffic over the link differs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.images import CONFIG, Images, Row, row, taken
from penstock.bundle import Bundle, Device, Gathering, Job, Placement, TrialFailed
from penstock.log.states import States
from penstock.scheduling.nodes import arrange
from penstock.training.worker import Worker

HOSTS = ("10.9.0.1", "10.9.0.2")
RATE = "1gbit"
EPOCHS, ROUNDS = 6, 2
PAPER = {2: 1480.07 / 947.76, 4: 2773.04 / 1209.51}  # RubberBand, table 1


def placement() -> Iterator[Row]:
    yield from links()
    yield from counts()


# --- two nodes with a slow link --------------------------------------------------------------------------------------


def links() -> Iterator[Row]:
    apart = ["unshare", "--map-root-user", "--net"]
    if not all(map(shutil.which, ("unshare", "nsenter", "ip", "tc"))) or subprocess.run([*apart, "true"]).returncode:
        print("placement: this system makes no network namespaces, so its real rows are left out", file=sys.stderr)
        return
    done = subprocess.run([*apart, sys.executable, __file__, "measure"], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[tuple[int, str], list[float]] = {}
    for line in done.stdout.splitlines():
        count, how, rate = json.loads(line)
        found.setdefault((count, how), []).append(rate)
    middle = {key: statistics.median(rates) for key, rates in found.items()}
    for (count, how), rate in middle.items():
        yield row("placement", f"{count} workers {how}, 1 Gbit/s between two nodes, samples a second", rate)
    for count in (2, 4):
        ratio = middle[count, "together"] / middle[count, "scattered"]
        said = f"ratio, {count} workers together to scattered (RubberBand's table 1: {PAPER[count]:.2f})"
        yield row("placement", said, ratio, "above 1", ratio > 1)


def measure() -> None:
    """Run in a namespace of its own, which is one node: make the other node, and print the throughput of trials."""
    other = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)  # the node ends with this process
    here = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{other.pid}/ns/net") == here:
        time.sleep(0.01)
    inside = ["nsenter", "--target", str(other.pid), "--net"]
    commands = ["ip link add near type veth peer name far", f"ip link set far netns {other.pid}"]
    subprocess.run(" && ".join(commands), shell=True, check=True)
    for prefix, name, host in (([], "near", HOSTS[0]), (inside, "far", HOSTS[1])):
        made = f"ip link set lo up && ip addr add {host}/24 dev {name} && ip link set {name} up"
        shaped = f"tc qdisc add dev {name} root tbf rate {RATE} burst 256kb latency 50ms"
        subprocess.run([*prefix, "sh", "-c", f"{made} && {shaped}"], check=True)
    for _ in range(ROUNDS):
        for count in (2, 4):
            for how, nodes in (("together", [0] * count), ("scattered", [i % 2 for i in range(count)])):
                print(json.dumps([count, how, throughput(nodes, inside)]), flush=True)


def throughput(nodes: list[int], inside: list[str]) -> float:
    """Samples a second of a trial with a worker on each of these nodes."""
    with TemporaryDirectory() as folder:
        workers = [
            subprocess.Popen(
                [*(inside if node else []), sys.executable, __file__, HOSTS[node], str(rank), str(len(nodes)), folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},  # hides warnings that these hosts have no names
                text=True,
            )
            for rank, node in enumerate(nodes)
        ]
        first = workers[0].stdout
        assert first is not None
        meeting = first.readline()
        for worker in workers[1:]:
            assert worker.stdin is not None
            worker.stdin.write(meeting)
            worker.stdin.flush()
        if any(worker.wait() for worker in workers):
            raise RuntimeError("a worker of the trial failed")
        ends = [ended for _, ended, pid in taken(Path(folder)) if pid == workers[0].pid]
    return Images.batch_size / statistics.median(after - before for before, after in pairwise(ends))


def serve(host: str, rank: int, count: int, folder: str) -> None:
    """Run one worker of the trial: the first prints the address where they meet, and the others are given it."""
    worker = Worker(Job(Images(folder, hidden=512), 0, "loss", "min", States.of(Path(folder) / "states")), "cpu", host)
    meeting = "" if rank == 0 else sys.stdin.readline().strip()
    placed = (Placement(0, 1, CONFIG, EPOCHS),)
    devices = tuple(f"device {i}" for i in range(count))
    worker.place(Bundle("a", devices, placed, "distributed", "images", rank=rank, meeting=meeting))
    while not worker.idle:
        event = worker.advance()
        if isinstance(event, Gathering):
            print(event.bundle.meeting, flush=True)
        if isinstance(event, TrialFailed):
            raise RuntimeError(event.error)


# --- counted ---------------------------------------------------------------------------------------------------------


def counts(loads: int = 200) -> Iterator[Row]:
    """The nodes per trial, while loads of trials of 2 and 4 devices follow each other on 4 nodes of 8 devices."""
    devices = {f"{n}/{i}": Device(f"{n}/{i}", "gpu", 0, f"node {n}") for n in range(4) for i in range(8)}
    dealt = [f"{n}/{i}" for i in range(8) for n in range(4)]  # devices in turn from each node
    rng = random.Random(0)
    arranged: dict[int, list[int]] = {2: [], 4: []}
    scattered: dict[int, list[int]] = {2: [], 4: []}
    held: dict[int, tuple[str, ...]] = {}
    sizes: dict[int, int] = {}
    for number in range(loads):
        sizes = {trial: size for trial, size in sizes.items() if rng.random() < 0.7}  # the other trials have ended
        while (left := 32 - sum(sizes.values())) > 0:
            sizes[1000 * number + len(sizes)] = min(left, rng.choice((2, 4)))
        held = arrange(devices, {trial: held[trial] for trial in held if trial in sizes}, sizes)
        place = 0
        for trial, size in sizes.items():
            arranged[size].append(len({devices[name].node for name in held[trial]}))
            scattered[size].append(len({devices[name].node for name in dealt[place : place + size]}))
            place += size
    for size in (2, 4):
        mean, other = statistics.fmean(arranged[size]), statistics.fmean(scattered[size])
        said = f"counted, 4 nodes of 8 devices, {len(arranged[size])} trials of {size}: nodes of a trial"
        yield row("placement", f"{said}, arranged", mean, "1", mean == 1)
        yield row("placement", f"{said}, dealt in turn", other)


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        measure()
    else:
        serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
