"""A real autoscaler, of either version, that makes nodes for a study on this machine and takes them back."""

from __future__ import annotations

import math
import threading
import time

import pytest

import penstock as ps
from penstock.bundle import Bundle, Device, Failed, Finished, Job, Placement, Stopped
from penstock.executors.base import DeviceAdded, DeviceLost
from penstock.executors.local import LocalExecutor
from penstock.executors.ray import executor as rays
from penstock.executors.ray import scaling as ray_scaling
from penstock.executors.ray.cluster import MARKET, NAMESPACE, NodeFacts, Offer
from penstock.executors.ray.executor import RayExecutor
from penstock.executors.ray.scaling import Growth, NodeType, Scaling, order
from penstock.executors.ray.slot import Slot
from penstock.executors.ray.studies import NAME, Studies
from penstock.task import as_task
from penstock.trial import Report
from tests import autoscaling  # before ray
from tests.clusters import until
from tests.functions import LONG, held, pulse

SPOT = {MARKET: "spot"}
TYPES = {"small": autoscaling.NodeType(most=2), "spot": autoscaling.NodeType(most=1, labels=SPOT)}


@pytest.fixture(scope="module", params=[pytest.param(v, marks=pytest.mark.xdist_group(v)) for v in ("v1", "v2")])
def cluster(request):
    with autoscaling.AutoscalingCluster(TYPES, v2=request.param == "v2", most=2) as cluster:
        yield cluster
    assert not cluster.leaks()


@pytest.fixture
def empty(cluster):
    """No nodes but the head, and nothing left on them afterwards."""
    until(lambda: not cluster.made(), "the autoscaler has released all nodes")
    yield cluster
    until(lambda: not cluster.leaks(), f"nothing is left: {cluster.leaks()}")


@pytest.fixture
def make(empty, tmp_path):
    made = []

    def make(**settings):
        job = Job(as_task(pulse), 0, "loss", "min", tmp_path / "states")
        made.append(RayExecutor(job, f"ray://{empty.address}", **settings))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


class Watch:
    """What an executor says, and whether something has come true while it is listened to."""

    def __init__(self, executor):
        self.executor, self.told = executor, []

    def until(self, reached, what):
        until(lambda: self.told.extend(self.executor.wait(0.05)) or reached(), what)

    def count(self, *kinds):
        return sum(isinstance(event, kinds) for event in self.told)


def test_a_cluster_that_has_no_nodes_yet_follows_a_study(empty, tmp_path):
    space = {"number": ps.grid([0, 1]), "dir": str(tmp_path)}
    study = ps.Study(held, space, metric="loss", mode="min", algorithm=ps.Grid(budget=LONG), dir=tmp_path)
    where, results = f"ray://{empty.address}?idle=0", []
    running = threading.Thread(target=lambda: results.append(study.run(on=where, sharing="solo", progress=False)))
    running.start()
    until(lambda: len(empty.made()) == 2, "a node for each trial")
    (tmp_path / "go 0").touch()
    until(lambda: len(empty.made()) == 1, "one goes with the first trial")
    (tmp_path / "go 1").touch()
    running.join()
    (result,) = results
    for number, trial in enumerate(result.trials):
        *losses, last = (point["loss"] for point in trial.curve)  # the last one stands for its budget
        assert losses == [(1 + number) / step for step in range(1, len(losses) + 1)]
        assert last == losses[-1]


def test_nodes_come_for_a_request_and_go_with_it_but_not_under_a_trial(empty, make, monkeypatch):
    lost, lose = [], RayExecutor._lose

    def lose_and_tell(self, slot, error):
        if slot.without is not None:  # it had no node when it was asked for
            lost.append(error)
        lose(self, slot, error)

    monkeypatch.setattr(RayExecutor, "_lose", lose_and_tell)
    executor = make(idle=0)
    watch = Watch(executor)
    assert len(executor.devices()) == 1
    first = executor.provisioning
    assert first > 0

    executor.request(5)  # more than there can be
    watch.until(lambda: len(executor.devices()) == 2, "as many devices as the autoscaler can make")
    assert watch.count(DeviceAdded) == 1
    assert len(empty.made()) == 2
    assert executor.provisioning not in (0.0, first), "the second one was measured too"
    executor._look()
    assert empty.groups("PENDING") == 0
    assert empty.groups("CREATED") == 2

    trained = executor.devices()[1]
    executor.place(Bundle("a", (trained.name,), (Placement(0, 1, {}, LONG),)))
    watch.until(lambda: watch.count(Report), "the trial reports")
    executor.request(1)
    watch.until(lambda: watch.count(DeviceLost) == 1, "the idle worker goes")
    assert executor.devices() == [trained]
    assert empty.groups("CREATED") == 1, "its place was given back at once"
    watch.until(lambda: len(empty.made()) == 1, "the autoscaler releases the node that is empty")
    assert empty.made() == {executor._slots[0].node}

    executor.request(0)
    heard, looked = watch.count(Report), executor._looked
    watch.until(lambda: watch.count(Report) > heard and executor._looked > looked + 1, "the trial goes on")
    assert executor.devices() == [trained]
    assert not watch.count(Stopped, Finished, Failed), "no trial is stopped for a request"

    executor.place(Bundle("a", (trained.name,), ()))
    watch.until(lambda: watch.count(DeviceLost) == 2, "a device that nobody needs goes")
    assert watch.count(Stopped) == 1
    watch.until(lambda: not empty.made(), "the last node goes too")  # a worker may be placed on one that is about to
    assert executor.describe([{}], train=False), "a worker comes for what needs one"
    assert not lost, "none was started before it had a place"


@pytest.mark.parametrize("cluster", ["v2"], indirect=True)  # that either makes nodes from none is seen above
def test_workers_that_are_yet_to_come(empty, make, monkeypatch):
    """Asked for by number, they come without a request; the study begins before all have."""
    import ray

    for too_many in ({"workers": 3}, {"least": 3}):
        with pytest.raises(
            ps.StudyError, match="with 3 devices or more, got one whose nodes offer 0 GPUs in all and whose"
        ):
            make(**too_many)
    with monkeypatch.context() as patch:
        patch.setattr(rays, "COMING", 0.0)
        with pytest.raises(ps.StudyError, match="came within 0 seconds, though the cluster's autoscaler can make 2"):
            make(workers=2)
    with monkeypatch.context() as patch:
        patch.setattr(Growth, "room", lambda *_: 3)  # one of which will never come
        patch.setattr(RayExecutor, "_patience", lambda self: math.inf)
        patch.setattr(rays, "COMING", 30.0)
        executor = make(workers=3)
    assert executor.devices(), "it begins with those that are there"
    watch = Watch(executor)
    watch.until(lambda: len(executor.devices()) == 2, "two have come")
    executor.request(5)
    watch.until(lambda: len(executor._slots) == 2, "the third is not waited for any longer")
    assert empty.groups("PENDING") == 0

    first = empty.actors(Studies)
    ray.kill(ray.get_actor(NAME, namespace=NAMESPACE))
    watch.until(lambda: empty.actors(Studies).keys() - first.keys(), "what studies share is made again")
    assert set(empty.actors(Studies).values()) == {empty.head.id}, "on any other node, it would hold that"


def test_nodes_of_one_market(empty, make):
    if not empty.v2:  # it does not heed labels: nodes of the wrong type would come and go for ever
        with pytest.raises(
            ps.StudyError, match="spot nodes offer 0 GPUs in all and whose autoscaler can add 0: use the"
        ):
            make(market="spot")
        return
    executor = make(market="spot")
    executor.request(2)
    executor._look()
    assert len(executor._slots) == 1, "there can be one of these"
    (node,) = empty.made()
    assert empty.labels()[node][MARKET] == "spot"
    with pytest.raises(ps.StudyError, match="on-demand nodes offer 0 GPUs"):
        make(market="on-demand")


# Without a cluster


def test_a_market_that_is_none():
    with pytest.raises(ps.StudyError, match='Expected market="spot", "on-demand" or None for any, got \'cheap\''):
        Scaling(None, "cheap", 0.0)


def test_executors_that_cannot_change_ignore_a_request(tmp_path):
    executor = LocalExecutor(Job(as_task(pulse), 0, "loss", "min", tmp_path))
    before = executor.devices()
    executor.request(64)
    assert executor.devices() == before
    executor.close()


def node(id, gpus=1.0, labels=(), head=False):
    resources = {"CPU": 1.0, "GPU": gpus} | ({"node:__internal_head__": 1.0} if head else {})
    return NodeFacts(id, resources, dict(labels), leaving=False)


def growth(labelled=True, most=10):
    one, eight = {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 8}
    types = NodeType("one", 4, one), NodeType("eight", 2, eight), NodeType("spot", 3, one, SPOT)
    return Growth((*types, NodeType("cores", 5, {"CPU": 16})), most, labelled)


HEAD = node("head", gpus=0.0, head=True)


@pytest.mark.parametrize(
    ("there", "most", "room"),
    [
        ([HEAD], 10, 16 + 7),
        ([HEAD], 3, 16 + 1),
        ([HEAD, node("a"), node("b", 8.0)], 10, 8 + 3 + 3),
        ([HEAD, node("a"), node("b")], 3, 8),
        ([HEAD, node("a"), node("b"), node("c")], 3, 0),
        ([HEAD, node("by hand", 3.0)], 2, 16),
        ([HEAD, node("a", 1.0, SPOT), node("b", 1.0, {"ray.io/node-group": "spot"})], 10, 16 + 4 + 1),
    ],
)
def test_how_many_devices_could_come(there, most, room):
    assert growth(most=most).room("GPU", there) == room


def test_how_many_could_come_on_a_market():
    assert growth().room("GPU", [HEAD], "spot") == 3
    assert growth().room("GPU", [HEAD, node("a", 1.0, SPOT)], "spot") == 2
    assert growth().room("GPU", [HEAD], "on-demand") == 0
    assert growth(labelled=False).room("GPU", [HEAD], "spot") == 0
    assert growth(labelled=False).room("GPU", [HEAD]) == 16 + 7


def test_nodes_with_accelerators_do_not_come_for_their_cores():
    assert growth().room("CPU", [HEAD]) == 5 * 16


def test_what_a_providers_own_autoscaler_reports(monkeypatch):
    from ray._private.state import GlobalState
    from ray.core.generated.autoscaler_pb2 import ClusterConfig

    config = ClusterConfig()
    config.node_group_configs.add(name="any", max_count=-1, resources={"GPU": 4})
    monkeypatch.setattr(GlobalState, "get_cluster_config", lambda self: config)
    assert ray_scaling._reported().room("GPU", [HEAD]) >= 10**6


def slot(name, node="", *, busy=False, began=0.0):
    device = Device(name, "cpu", 0, node) if node else None
    running = [(0, 0)] if busy else []
    return Slot(
        None, None, None, began, phase="ready" if node else "starting", node=node, device=device, running=running
    )


def names(slots, made="abcd"):
    return [s.device.name if s.device else "starting" for s in order(slots, made)]


def test_workers_are_given_up_so_that_nodes_come_free():
    both = [slot("a1", "a"), slot("a2", "a"), slot("b1", "b")]
    assert names(both)[0] == "b1", "the emptiest node"
    mixed = [slot("a1", "a"), slot("b1", "b", busy=True), slot("b2", "b"), slot("a2", "a"), slot("c1", "c", busy=True)]
    assert set(names(mixed)[:2]) == {"a1", "a2"}, "a node where none trains"
    assert names(mixed)[2] == "b2"
    assert set(names(mixed)[3:]) == {"b1", "c1"}
    assert names([*mixed, slot("new")])[0] == "starting"
    assert names([slot("h1", "head"), slot("a1", "a"), slot("a2", "a")])[2] == "h1", "no autoscaler takes the head back"


def test_what_a_trial_needs_is_asked_for_from_the_start():
    found = Offer("GPU", {"a": 1}, {})
    assert Scaling(None, None, 60.0, least=3).target(found) == 3
    assert Scaling(None, None, 60.0).target(found) == 1


def test_a_study_on_cores_stays_there_when_a_node_with_a_gpu_comes(monkeypatch):
    there = [node("a", gpus=0)]
    monkeypatch.setattr(ray_scaling, "nodes_now", lambda: there)
    scaling = Scaling(None, None, 60.0)
    assert scaling.begin().nodes == {"a": 1}
    there.append(node("b"))
    assert scaling.find().nodes == {"a": 1, "b": 1}
    assert Scaling(None, None, 60.0).begin().nodes == {"b": 1}


def test_nodes_of_a_market_that_has_none(monkeypatch):
    monkeypatch.setattr(ray_scaling, "nodes_now", lambda: [node("a", gpus=0)])
    monkeypatch.setattr(Scaling, "_ask", lambda self, timeout=0.0: None)
    with pytest.raises(ps.StudyError, match=r"ray start --labels ray\.io/market-type=spot"):
        Scaling(None, "spot", 60.0).begin()


def test_idle_workers_are_kept_for_a_while(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(ray_scaling.time, "monotonic", lambda: now[0])
    found, scaling = Offer("GPU", {"a": 1, "b": 1}, {}), Scaling(None, None, 60.0)
    slots = one, other = [slot("a1", "a"), slot("b1", "b", busy=True)]
    pending = slot("new")
    assert scaling.surplus(slots, found) == []
    scaling.requested = 1
    assert scaling.surplus([*slots, pending], found) == [pending], "nothing is lost by that"
    now[0] += 59
    assert scaling.surplus(slots, found) == []
    scaling.requested = 2  # the lull is over
    assert scaling.surplus(slots, found) == []
    scaling.requested = 1
    now[0] += 59
    assert scaling.surplus(slots, found) == []
    now[0] += 60
    assert scaling.surplus(slots, found) == [one]
    one.running = [(0, 0)]
    assert scaling.surplus(slots, found) == []
    assert one.spare == other.spare == math.inf
    scaling.requested = 0
    now[0] += 1000
    assert scaling.surplus(slots, found) == []


def test_a_wait_is_measured_where_a_node_had_to_come():
    scaling, here, beyond = Scaling(None, None, 0.0), slot("a1", "a"), slot("b1", "b")
    scaling.greeted(here, "a")
    beyond.without = {"a"}
    scaling.greeted(beyond, "a")  # another went, and it took its place
    assert scaling.provisioning is None
    beyond.began = time.monotonic() - 30
    scaling.greeted(beyond, "b")
    assert scaling.provisioning >= 30
