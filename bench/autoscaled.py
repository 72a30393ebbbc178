"""A plan on a real autoscaler: the seconds of the nodes that it makes, against those of a static cluster.

    python bench/autoscaled.py [--json]

Ray's autoscaler (version 2) makes nodes of one device on this machine and releases them. A study of 9 trials, of which
3 and then 1 train on, follows its plan, and then has the plan's static cluster from its beginning to its end. Units
sleep, so that the machine's own speed counts little. Nodes are counted as the cluster has them, ten times a second.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import autoscaling  # isort: skip  # before ray
import penstock as ps
from bench.clusters import row
from bench.scheduling import show
from penstock.executors.ray.nodes import INSTANCE
from penstock.log.events import Planned
from penstock.log.reader import read
from penstock.planning.cloud import Cloud, Instance, Offer
from penstock.planning.draws import Draws
from penstock.planning.planner import plan
from penstock.planning.spec import Job, Times, works
from penstock.plans import purpose
from tests.clusters import Cluster, until

UNIT, START, COMING, MOST = (
    6.0,
    1.5,
    6.0,
    4,
)  # seconds of a unit, until a trial begins and until a node is of use; nodes
DEADLINE = 105.0  # which two nodes cannot keep
LOOK = 0.1  # seconds between two counts


def train(trial: ps.FunctionTrial) -> None:
    for unit in range((trial.state or 0) + 1, 10):
        time.sleep(UNIT)
        trial.report(unit, state=unit, loss=trial.config["x"] / unit)


@contextmanager
def counted(cluster: Cluster) -> Iterator[list[float]]:
    """The seconds of all nodes that the autoscaler has made, summed up while the context lasts."""
    seconds, over = [0.0], threading.Event()

    def count() -> None:
        last = time.monotonic()
        while not over.wait(LOOK):
            now = time.monotonic()
            seconds[0], last = seconds[0] + len(cluster.alive() - {cluster.head.id}) * (now - last), now

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield seconds
    finally:
        until(lambda: cluster.alive() == {cluster.head.id}, "the autoscaler has released all nodes")
        over.set()
        thread.join()


def main() -> None:
    json, types = "--json" in sys.argv, {"small": autoscaling.NodeType(most=MOST, labels={INSTANCE: "small"})}
    study = ps.Study(
        train, {"x": ps.uniform(1, 2)}, metric="loss", mode="min", algorithm=ps.SuccessiveHalving(max_budget=9),
        trials=9, name="planned", dir=tempfile.mkdtemp(),
    )  # fmt: skip
    node = Offer(Instance("small", "gpu", 1, 2**30, {"on-demand": 3600.0}), "on-demand")
    job = Job(
        works(study.algorithm.stages(9) or ()), {"small": (Times(Draws(UNIT, 0.2)),)}, Draws(START), purpose(study)
    )
    made = plan(job, Cloud((node,), preparing=Draws(COMING, 1.0), minimum=0.0, most=MOST), deadline=DEADLINE)
    static = made.baseline("static")
    assert static is not None
    with autoscaling.AutoscalingCluster(types, v2=True, most=MOST) as cluster:
        where = f"ray://{cluster.address}?idle=0"
        with counted(cluster) as seconds:
            result = study.run(on=where, plan=made, progress=False)
        anew = [event.reason for event in read(result.dir / "log.jsonl") if isinstance(event, Planned)][1:]
        ours, took, cost = seconds[0], result.seconds, result.cost or 0.0
        with counted(cluster) as held:
            other = study.replace(name="static").run(
                on=f"ray://{cluster.address}?idle=1000", workers=static.nodes[0], sharing="solo", progress=False
            )
    nodes = " ".join(str(one.nodes) for one in made.stages)
    kept = took <= DEADLINE
    show(row("autoscaled", f"the plan, nodes {nodes}: seconds", took, f"<= {DEADLINE:g}", kept), json)
    for reason in anew:
        print(f"planned anew: {reason}", file=sys.stderr)
    show(row("autoscaled", f"the plan, planned anew {len(anew)} times: node-seconds", ours), json)
    show(row("autoscaled", "what its log says that it cost, at 1 a node-second", cost), json)
    show(row("autoscaled", "what the plan says", made.cost), json)
    show(row("autoscaled", f"a static cluster of {static.nodes[0]}: seconds", other.seconds), json)
    show(row("autoscaled", "the static cluster: node-seconds", held[0]), json)
    show(row("autoscaled", "node-seconds of static over the plan", held[0] / ours, "> 1", held[0] > ours), json)


if __name__ == "__main__":
    main()
