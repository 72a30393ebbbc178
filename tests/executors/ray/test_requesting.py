"""A real autoscaler, of either version, that makes nodes for a study on this machine and takes them back."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace

import pytest

import penstock as ps
from penstock.bundle import Bundle, Device, Job, Placement, Request, TrialFailed, TrialFinished, TrialStopped
from penstock.executors.base import DeviceAdded, DeviceLost
from penstock.executors.local import LocalExecutor
from penstock.executors.ray import autoscaler, requesting
from penstock.executors.ray import executor as rays
from penstock.executors.ray.autoscaler import Growth, NodeType
from penstock.executors.ray.cluster import NAMESPACE
from penstock.executors.ray.executor import RayExecutor
from penstock.executors.ray.nodes import ACCELERATOR, INSTANCE, MARKET, PRICE, NodeFacts, Offer
from penstock.executors.ray.requesting import Requesting, order
from penstock.executors.ray.slot import Slot
from penstock.executors.ray.studies import NAME, Studies
from penstock.log.events import Devices, Placed
from penstock.log.reader import read
from penstock.planning import spec as planning
from penstock.planning.cloud import Cloud, Instance
from penstock.planning.cloud import Offer as Offer_
from penstock.planning.draws import Draws
from penstock.planning.planner import plan
from penstock.planning.spec import Times, works
from penstock.plans import purpose
from penstock.task import as_task
from penstock.trial import Report
from tests import autoscaling  # before ray
from tests.clusters import until
from tests.functions import HALVING, LONG, descend, held, pulse, usual

SPOT = {MARKET: "spot"}
TYPES = {
    "small": autoscaling.NodeType(most=2, labels={INSTANCE: "small"}),
    "spot": autoscaling.NodeType(most=1, labels={**SPOT, ACCELERATOR: "L4", PRICE: "0.5"}),
}


@pytest.fixture(scope="module", params=["v1", "v2"])
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


@pytest.mark.parametrize("cluster", ["v2"], indirect=True)  # the first version heeds no labels
def test_a_study_follows_a_plan_over_two_types_of_nodes(empty, tmp_path):
    study = usual(descend, {"lr": ps.grid([0.1, 0.2, 0.3])}, trials=3, algorithm=HALVING, dir=tmp_path, name="planned")
    kinds = [
        Offer_(Instance("small", "gpu", 1, 2**30, {"on-demand": 36.0}), "on-demand"),
        Offer_(Instance("spot", "gpu", 1, 2**30, {"spot": 18.0}), "spot"),
    ]
    # Nothing here leaves such a plan, whatever this machine takes.
    times = {one.instance.name: (Times(Draws(0.5, 9.0)),) for one in kinds}
    job = planning.Job(works(HALVING.stages(3)), times, purpose=purpose(study))
    made = plan(job, Cloud(tuple(kinds), arrival=Draws(60.0), minimum=0.0, most=2))
    stages = [
        replace(stage, instance=one.instance.name, market=one.market, nodes=1, used=1, devices=1, lead=0.0)
        for stage, one in zip(made.stages, kinds, strict=True)
    ]
    given = replace(made, stages=tuple(stages))
    result = study.run(on=f"ray://{empty.address}?idle=0", plan=given, progress=False)
    events = list(read(result.dir / "log.jsonl"))
    there, placed = {}, []
    for event in events:
        if isinstance(event, Devices):
            there = {device["name"]: device["instance"] for device in event.devices}
        elif isinstance(event, Placed):
            placed.append(there[event.devices[0]])
    assert placed == ["small"] * 3 + ["spot"]
    names = {node["name"] for event in events if isinstance(event, Devices) for node in event.nodes}
    assert len(names) == 2, "each is a node of its own, and is paid for"
    assert result.best.curve[-1]["budget"] == 27
    assert result.cost is not None
    assert 0 < result.cost < 36.0 * result.seconds / 3600 * 2


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

    executor.request([Request(5)])  # more than there can be
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
    executor.request([Request(1)])
    watch.until(lambda: watch.count(DeviceLost) == 1, "the idle worker goes")
    assert executor.devices() == [trained]
    assert empty.groups("CREATED") == 1, "its place was given back at once"
    watch.until(lambda: len(empty.made()) == 1, "the autoscaler releases the node that is empty")
    assert empty.made() == {executor._slots[0].node}

    executor.request([Request(0)])
    heard, looked = watch.count(Report), executor._looked
    watch.until(lambda: watch.count(Report) > heard and executor._looked > looked + 1, "the trial goes on")
    assert executor.devices() == [trained]
    assert not watch.count(TrialStopped, TrialFinished, TrialFailed), "no trial is stopped for a request"

    executor.place(Bundle("a", (trained.name,), ()))
    watch.until(lambda: watch.count(DeviceLost) == 2, "a device that nobody needs goes")
    assert watch.count(TrialStopped) == 1
    watch.until(lambda: not empty.made(), "the last node goes too")
    assert not lost, "no worker was started before it had a place"
    # A worker comes for what needs one; the first autoscaler may take its node away once more before it is there.
    assert executor.describe([{}], train=False)


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
        patch.setattr(rays, "patience", lambda ready: math.inf)
        patch.setattr(rays, "COMING", 30.0)
        executor = make(workers=3)
    assert executor.devices(), "it begins with those that are there"
    watch = Watch(executor)
    watch.until(lambda: len(executor.devices()) == 2, "two have come")
    executor.request([Request(5)])
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
    executor.request([Request(2)])
    executor._look()
    assert len(executor._slots) == 1, "there can be one of these"
    (node,) = empty.made()
    assert empty.labels()[node][MARKET] == "spot"
    (device,) = executor.devices()
    assert (device.market, device.price) == ("spot", 0.5)
    with pytest.raises(ps.StudyError, match="on-demand nodes offer 0 GPUs"):
        make(market="on-demand")


@pytest.mark.parametrize("cluster", ["v2"], indirect=True)  # the first version does not heed labels
def test_a_node_of_the_type_that_is_named_comes_and_an_idle_one_makes_room(empty, make):
    executor = make(workers=1)
    watch = Watch(executor)
    (first,) = executor.devices()
    assert first.market == "on-demand", "the autoscaler makes nodes first that no label says to be of another market"
    executor.request([Request(1, type="L4")])
    watch.until(lambda: [device.market for device in executor.devices()] == ["spot"], "a node of that type")
    assert watch.count(DeviceLost) == 1
    executor.request([Request(1, market="on-demand")])
    executor._look()
    assert len(executor.devices()) == 1, "there can be none of these, and none goes before its time"


# Without a cluster


def test_a_market_that_is_none():
    with pytest.raises(ps.StudyError, match='Expected market="spot", "on-demand" or None for any, got \'cheap\''):
        Requesting(None, "cheap", 0.0)


def test_executors_that_cannot_change_ignore_a_request(tmp_path):
    executor = LocalExecutor(Job(as_task(pulse), 0, "loss", "min", tmp_path))
    before = executor.devices()
    executor.request([Request(64)])
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
    assert growth().room("GPU", [HEAD], SPOT) == 3
    assert growth().room("GPU", [HEAD, node("a", 1.0, SPOT)], SPOT) == 2
    assert growth().room("GPU", [HEAD], {MARKET: "on-demand"}) == 0
    assert growth(labelled=False).room("GPU", [HEAD], SPOT) == 0, "it might make nodes of another market"
    assert growth(labelled=False).room("GPU", [HEAD]) == 16 + 7


def test_nodes_with_accelerators_do_not_come_for_their_cores():
    assert growth().room("CPU", [HEAD]) == 5 * 16


def test_what_a_providers_own_autoscaler_reports(monkeypatch):
    from ray._private.state import GlobalState
    from ray.core.generated.autoscaler_pb2 import ClusterConfig

    config = ClusterConfig()
    config.node_group_configs.add(name="any", max_count=-1, resources={"GPU": 4})
    monkeypatch.setattr(GlobalState, "get_cluster_config", lambda self: config)
    assert autoscaler.reported().room("GPU", [HEAD]) >= 10**6


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
    assert Requesting(None, None, 60.0, least=3).target(found) == 3
    assert Requesting(None, None, 60.0).target(found) == 1


def test_a_study_on_cores_stays_there_when_a_node_with_a_gpu_comes(monkeypatch):
    there = [node("a", gpus=0)]
    monkeypatch.setattr(requesting, "nodes_now", lambda: there)
    asking = Requesting(None, None, 60.0)
    assert asking.begin().nodes == {"a": 1}
    there.append(node("b"))
    assert asking.find().nodes == {"a": 1, "b": 1}
    assert Requesting(None, None, 60.0).begin().nodes == {"b": 1}


def test_nodes_of_a_market_that_has_none(monkeypatch):
    monkeypatch.setattr(requesting, "nodes_now", lambda: [node("a", gpus=0)])
    monkeypatch.setattr(Requesting, "_ask", lambda self, timeout=0.0: None)
    with pytest.raises(ps.StudyError, match=r"ray start --labels ray\.io/market-type=spot"):
        Requesting(None, "spot", 60.0).begin()


def test_idle_workers_are_kept_for_a_while(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(requesting.time, "monotonic", lambda: now[0])
    found, asking = Offer("GPU", {"a": 1, "b": 1}, {}), Requesting(None, None, 60.0)
    slots = one, other = [slot("a1", "a"), slot("b1", "b", busy=True)]
    pending = slot("new")
    assert asking.surplus(slots, found) == []
    asking.request([Request(1)])
    assert asking.surplus([*slots, pending], found) == [pending], "nothing is lost by that"
    now[0] += 59
    assert asking.surplus(slots, found) == []
    asking.request([Request(2)])  # the lull is over
    assert asking.surplus(slots, found) == []
    asking.request([Request(1)])
    now[0] += 59
    assert asking.surplus(slots, found) == []
    now[0] += 60
    assert asking.surplus(slots, found) == [one]
    one.running = [(0, 0)]
    assert asking.surplus(slots, found) == []
    assert one.spare == other.spare == math.inf
    asking.request([Request(0)])
    now[0] += 1000
    assert asking.surplus(slots, found) == []


def test_a_wait_is_measured_where_a_node_had_to_come():
    asking, here, beyond = Requesting(None, None, 0.0), slot("a1", "a"), slot("b1", "b")
    asking.greeted(here)
    beyond.without, beyond.node = {"a"}, "a"
    asking.greeted(beyond)  # another went, and it took its place
    assert asking.provisioning is None
    beyond.began, beyond.node = time.monotonic() - 30, "b"
    asking.greeted(beyond)
    assert asking.provisioning >= 30


H200, L4 = {ACCELERATOR: "H200"}, {ACCELERATOR: "L4", MARKET: "spot"}
BOTH = Offer("GPU", {"a": 2, "b": 2}, {}, labels={"a": H200, "b": L4})


def labelled(name, labels, *, busy=False, type="gpu"):
    one = slot(name, name[0], busy=busy)
    one.labels, one.device = labels, Device(name, type, 0, name[0])
    return one


def test_devices_of_a_type_or_a_market_are_asked_for_by_the_labels_of_their_nodes():
    asking = Requesting(None, None, 60.0)
    asking.request([Request(1), Request(1, "H200"), Request(3, market="spot"), Request(9, "B200")])
    spot = {MARKET: "spot"}
    assert asking.missing([], BOTH) == [(H200, False), (spot, False), (spot, False), ({}, False)]
    assert asking.target(BOTH) == 14, "whether they can be had or not"
    one, other = labelled("a1", H200), labelled("b1", L4)
    assert asking.missing([other, one], BOTH) == [(spot, False), ({}, False)]


def test_a_starting_worker_counts_for_the_request_that_it_was_asked_for():
    asking, starting = Requesting(None, None, 60.0), slot("new")
    starting.labels = H200
    asking.request([Request(1, "H200"), Request(1)])
    assert asking.missing([starting], BOTH) == [({}, False)]


def test_a_device_type_that_was_seen_is_asked_for_by_its_label():
    asking, one = Requesting(None, None, 60.0), labelled("a1", H200, type="NVIDIA H200")
    asking.request([Request(2, "NVIDIA H200")])
    assert asking.missing([one], BOTH) == [], "no label of that name"
    asking.greeted(one)
    assert asking.missing([one], BOTH) == [(H200, False)]


def test_no_more_than_all_workers_and_only_of_the_study_s_own_market():
    asking = Requesting(2, "spot", 60.0)
    asking.request([Request(3, "L4"), Request(3, market="on-demand")])
    assert asking.target(BOTH) == 2
    assert asking.missing([], BOTH) == [(L4, False), (L4, False)]


def test_an_idle_worker_of_another_kind_makes_room_at_once_and_a_busy_one_stays():
    asking, idle, busy = Requesting(None, None, 60.0), labelled("b1", L4), labelled("b2", L4, busy=True)
    asking.request([Request(1, "H200")])
    assert asking.surplus([idle, busy], BOTH) == [idle]
    asking.request([Request(1, "B200")])
    assert asking.surplus([idle, busy], BOTH) == [], "none of these can come"


def test_cores_are_of_one_type():
    asking, found = Requesting(None, None, 60.0), Offer("CPU", {"a": 2}, {}, labels={"a": {}})
    asking.request([Request(2, "cpu")])
    assert asking.missing([], found) == [({}, False), ({}, False)]
