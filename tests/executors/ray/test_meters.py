"""What the driver makes of readings that workers on a cluster send; the readings themselves are in ``test_ray.py``."""

import time

import pytest

from penstock.bundle import Bundle, Placement
from penstock.executors.ray.meters import Meterable, RayMetering, Reading
from penstock.trial import Report, Usage

RAPL = Meterable("machine 1", "RAPL")


@pytest.fixture
def at(monkeypatch):
    """Sets the driver's clock."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def begun(*devices):
    meters = RayMetering()
    for device in devices:
        meters.add(device, RAPL)
    meters.begin()
    for trial, device in enumerate(devices):
        meters.placed(Bundle(f"b{trial}", (device,), (Placement(trial, 1, {}, 9),), study="s"))
    return meters


def used(meters, trial, seconds):
    return meters.took(Report(trial, 1, {}, 1, None, Usage(seconds, 1), "s")).usage.joules


def test_workers_with_one_meter_count_once_and_the_next_is_listened_to_when_one_goes(at):
    meters = begun("n/cpu:0", "n/cpu:1")
    at(10.0)
    meters.tell("n/cpu:0", Reading(1000.0))
    meters.tell("n/cpu:1", Reading(990.0))
    assert (used(meters, 0, 10.0), used(meters, 1, 10.0)) == (500.0, 500.0)
    meters.remove("n/cpu:0")
    at(20.0)
    meters.tell("n/cpu:1", Reading(1790.0))
    assert used(meters, 1, 10.0) == 800.0, "it has the machine for itself"
    meters.add("n/cpu:0", RAPL)  # a new worker, which counts from its own beginning
    meters.remove("n/cpu:1")
    at(30.0)
    meters.tell("n/cpu:0", Reading(100.0))
    (line,) = meters.settle()
    assert (line.device, line.joules, line.meter) == ("n/cpu:0", 1900.0, "RAPL")


def test_a_meter_that_fails_on_its_node_is_said_and_no_zero(at):
    meters = begun("n/gpu:0")
    at(1.0)
    meters.tell("n/gpu:0", Reading(None, reason="GPU is lost"))
    usage = meters.took(Report(0, 1, {}, 1, None, Usage(1.0, 1), "s")).usage
    assert (usage.joules, usage.unmetered) == (None, "GPU is lost")
    assert [line.reason for line in meters.settle()] == ["GPU is lost"]


def test_a_study_that_began_without_joules_goes_on_without(at):
    meters = RayMetering()
    meters.add("n/cpu:0", Meterable(reason="there is no RAPL"))
    meters.begin()
    meters.add("m/gpu:0", Meterable("GPU-1", "NVML's counter"))
    assert not meters.active
    assert meters.unmetered == {"n/cpu:0": "there is no RAPL", "m/gpu:0": "the study began without joules"}
