"""Meters tell joules, or why nobody can."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from penstock.energy import nvml
from penstock.energy.meter import CHOSEN, GpuMeter, MeterError, Rapl, Unmetered, meter_of
from penstock.energy.nvml import OBSERVE_ONLY, Gpu, NvmlError
from tests.energy.nvml import fake

REPO = Path(__file__).parents[2]


def at(folder, clock, **more):
    fake.change(folder, clock=clock, **more)
    return clock


def test_a_gpus_counter_tells_its_joules(gpus):
    fake.make(gpus, clock=0.0, since=0.0)
    meter = GpuMeter(Gpu("GPU-fake"), clock=lambda: 0.0)
    at(gpus, 10.0)
    assert meter.read() == 5000.0
    fake.change(gpus, joules=-4990.0, since=10.0, clock=10.0)  # the driver was loaded anew
    assert meter.read() == 5000.0


@pytest.mark.parametrize("how", [{"stands": True}, {"counter": False}])
def test_a_counter_that_stands_still_or_is_not_there_gives_way_to_power_over_time(gpus, how):
    fake.make(gpus, clock=0.0, since=0.0, **how)
    times = iter([0.0, *range(1, 99)])
    meter = GpuMeter(Gpu("GPU-fake"), clock=lambda: next(times))
    readings = [meter.read() for _ in range(5)]
    assert readings[-1] >= 4 * 500.0 - 500.0
    assert meter.kind == "NVML's power over time"


def packages(folder, *counts):
    for i, micro in enumerate(counts):
        (zone := folder / f"intel-rapl:{i}").mkdir(exist_ok=True)
        (zone / "energy_uj").write_text(f"{micro}\n")
        (zone / "max_energy_range_uj").write_text("262143328850\n")
        (folder / f"intel-rapl:{i}:0").mkdir(exist_ok=True)  # its cores, which would count twice


def test_processors_are_counted_together_and_their_counters_wrap(tmp_path):
    packages(tmp_path, 262143000000, 5000000)
    meter = Rapl(tmp_path)
    packages(tmp_path, 671150, 6000000)
    assert meter.read() == 2.0
    packages(tmp_path, 1671150, 6000000)
    assert meter.read() == 3.0


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        (None, "has no RAPL"),
        ("none", "says none"),
        ("nvml:GPU-other", "Not Found"),
        ("nvml:MIG-1", "MIG slice"),
        ("replay:/nowhere", r"no list of \[seconds, joules\]"),
        ("watts", "must be nvml:UUID"),
    ],
)
def test_a_device_without_a_meter_says_why(gpus, monkeypatch, chosen, why):
    monkeypatch.setattr("penstock.energy.meter.RAPL", gpus / "nowhere")
    if chosen is not None:
        monkeypatch.setenv(CHOSEN, chosen)
    found = meter_of(None)
    assert isinstance(found, Unmetered)
    assert re.search(why, found.reason)


def test_mig_and_a_missing_driver_leave_a_gpu_unmetered(gpus, monkeypatch):
    fake.change(gpus, mig=True)
    assert "MIG is on" in meter_of("GPU-fake").reason
    monkeypatch.delenv("FAKE_NVML")
    nvml._library.cache_clear()
    assert "Driver Not Loaded" in meter_of("GPU-fake").reason


def test_counters_that_only_root_may_read_say_so(tmp_path, monkeypatch):
    packages(tmp_path, 1)
    monkeypatch.setattr("pathlib.Path.read_text", lambda self: (_ for _ in ()).throw(PermissionError()))
    monkeypatch.setenv(CHOSEN, f"rapl:{tmp_path}")
    assert "sudo chmod a+r" in meter_of(None).reason


def test_a_meter_that_fails_midway_raises(gpus):
    meter = meter_of("GPU-fake")
    fake.change(gpus, broken=True)
    with pytest.raises(MeterError, match="GPU is lost"):
        meter.read()


def test_a_recorded_meter_plays_back(tmp_path, monkeypatch):
    (tmp_path / "trace.json").write_text(json.dumps([[0, 0], [1e9, 5e9]]))
    monkeypatch.setenv(CHOSEN, f"replay:{tmp_path / 'trace.json'}")
    meter = meter_of(None)
    first = meter.read()
    assert meter.read() >= first >= 0


def test_no_test_can_set_a_real_devices_limit():
    assert pynvml.FAKE
    assert os.environ[OBSERVE_ONLY]
    code = "import os, pynvml; assert pynvml.FAKE and os.environ['PENSTOCK_OBSERVE_ONLY']"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", sorted(p for part in ("bench", "examples") for p in (REPO / part).rglob("*.py")))
def test_no_bench_or_example_sets_a_real_devices_limit(path):
    text = path.read_text()
    lines = [line for line in text.splitlines() if re.search(r"\bpower=", line) and "ps.Simulated(" not in line]
    assert not lines or OBSERVE_ONLY in text


def test_where_only_observing_is_allowed_every_setting_is_refused(gpus, monkeypatch):
    monkeypatch.setenv(OBSERVE_ONLY, "1")
    with pytest.raises(NvmlError, match="no power limit may be changed"):
        Gpu("GPU-fake").set_limit(300.0)
    assert fake.look(gpus)["sets"] == []
