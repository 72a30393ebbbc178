"""Nodes of a simulated cloud: asked for, waited for, paid for, lost, given back."""

from statistics import fmean

import pytest

import penstock as ps
from penstock.bundle import Job, Request
from penstock.executors.base import DeviceAdded, DeviceLost, NodeAdded, NodeLost
from penstock.executors.simulated.executor import SimulatedExecutor
from penstock.executors.simulated.nodes import NodeType, draw
from penstock.executors.simulated.settings import Simulated

TYPES = [
    NodeType("a", 4, price=8.0, queueing=5.0, starting=10.0),
    NodeType("b", 2, price=3.0, market="spot", starting=20.0),
]


@pytest.fixture
def executor(tmp_path):
    task = ps.TabulatedTask(lambda config: ps.Tabulated({"loss": [1.0]}, 60))
    settings = Simulated(0, instances=TYPES, losses=[(50.0, "a 0")])
    return SimulatedExecutor(Job(task, 0, "loss", "min", tmp_path), settings)


def told(executor, until):
    """The kinds of the events up to a time, and the clock at each."""
    seen = []
    while executor.now() < until:
        seen += [(type(event), executor.now()) for event in executor.wait(until - executor.now())]
    return seen


def test_it_begins_empty_and_makes_whole_nodes_of_the_types_that_are_asked_for(executor):
    assert executor.devices() == executor.nodes() == []
    assert executor.instances() == {"a", "b"}
    executor.request([Request(5, instance="a"), Request(1, market="spot")])
    assert [kind for kind, _ in told(executor, 30.0) if kind is NodeAdded] == [NodeAdded] * 3
    assert sorted(device.instance for device in executor.devices()) == ["a"] * 8 + ["b"] * 2
    assert {(one.instance, one.market, one.price, one.since) for one in executor.nodes()} == {
        ("a", "on-demand", 8.0, 5.0),
        ("b", "spot", 3.0, 0.0),
    }
    assert {device.price for device in executor.devices()} == {2.0, 1.5}


def test_a_node_that_is_lost_takes_its_devices_along_and_is_asked_for_again(executor):
    executor.request([Request(4, instance="a")])
    told(executor, 40.0)
    after = told(executor, 70.0)
    assert after == [
        *[(DeviceLost, 50.0)] * 4,
        (NodeLost, 50.0),
        (NodeAdded, 55.0),
        *[(DeviceAdded, 65.0)] * 4,
    ]
    assert [node.name for node in executor.nodes()] == ["a 1"]


def test_nodes_beyond_a_request_go_and_those_in_the_queue_are_never_paid(executor):
    executor.request([Request(4, instance="a")])
    told(executor, 20.0)
    executor.request([Request(12, instance="a")])
    executor.request([Request(4, instance="a")])
    assert told(executor, 40.0) == []
    executor.request([])
    assert {kind for kind, _ in told(executor, 41.0)} == {DeviceLost, NodeLost}
    assert executor.nodes() == executor.devices() == []


def test_delays_are_drawn_by_their_mean_and_deviation_and_repeat():
    drawn = [draw((10.0, 5.0), 0, "starting", number) for number in range(2000)]
    assert fmean(drawn) == pytest.approx(10.0, rel=0.05)
    assert min(drawn) > 0
    assert drawn == [draw((10.0, 5.0), 0, "starting", number) for number in range(2000)]
    assert draw(7.0, "any") == 7.0


def test_types_of_nodes_that_make_no_sense_are_refused(executor):
    with pytest.raises(ps.StudyError, match="devices of a NodeType must be a whole number from 1 on, got 0"):
        NodeType("a", 0)
    with pytest.raises(ps.StudyError, match="starting of a NodeType must be a number from 0 on, or the mean"):
        NodeType("a", starting=-1.0)
    with pytest.raises(ps.StudyError, match="Expected each instance and market once in instances, got a on-demand"):
        Simulated(0, instances=[NodeType("a"), NodeType("a")])
    with pytest.raises(ps.StudyError, match="most= is for devices that come one by one"):
        Simulated(1, instances=TYPES, most=4)
    with pytest.raises(ps.StudyError, match="Expected a request for one of"):
        executor.request([Request(1, instance="c")])
