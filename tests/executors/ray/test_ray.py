"""Workers on a real Ray cluster of several nodes on this machine, which lose processes, raylets and nodes."""

from __future__ import annotations

import importlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import penstock as ps
from penstock.bundle import Bundle, Job, Placement, TrialFailed, TrialFinished, TrialStopped
from penstock.energy.lease import FOLDER
from penstock.energy.meter import CHOSEN
from penstock.energy.nvml import OBSERVE_ONLY
from penstock.executors.base import DeviceLost
from penstock.executors.ray import cluster as ray_cluster
from penstock.executors.ray import executor as rays
from penstock.executors.ray import slot as ray_slot
from penstock.executors.ray.address import parse
from penstock.executors.ray.executor import RayExecutor
from penstock.executors.ray.studies import Studies
from penstock.executors.ray.worker import RayWorker
from penstock.log import events, reader
from penstock.task import as_task
from penstock.trial import Report
from tests.clusters import Cluster, killed, processes, until  # before ray
from tests.contracts.executors import CONFIG, Exact, SharesContract, SpreadContract, alone, attempts
from tests.energy.conftest import gpus as gpus
from tests.energy.nvml import fake
from tests.functions import LONG, Cursed, Drawing, afresh, descend, needs_a_module, pulse, study
from tests.studies import studies
from tests.tasks import Blobs

TITLE = "ray::RayWorker"


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as cluster:
        for _ in range(2):
            cluster.add_node(cpus=2, gpus=2)
        yield cluster
    assert not cluster.leaks()


@pytest.fixture(scope="module")
def address(cluster):
    Two.on = f"ray://{cluster.address}"
    return Two.on


@pytest.fixture(scope="module")
def on(address, cluster):
    """The address, where the program is connected by itself: its workers rest until the next test that trains alike."""
    import ray

    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield address.replace("127.0.0.1", "localhost")  # which Ray takes for the same
    ray.shutdown()
    until(lambda: not cluster.leaks(), f"nothing is left: {cluster.leaks()}")


@pytest.fixture
def patient(monkeypatch):
    """Studies begin with all workers that they may have, however slowly these come."""
    monkeypatch.setattr(rays, "patience", lambda ready: math.inf)


@pytest.fixture
def whole(cluster):
    """Two nodes of two devices, whatever the test before has killed; nothing is left on them afterwards."""
    while len(cluster.nodes) < 2:
        cluster.add_node(cpus=2, gpus=2)
    until(lambda: len(cluster.alive() - cluster.draining()) == 3, "two nodes and the head are there")
    yield cluster
    until(lambda: not left(cluster), f"nothing is left: {left(cluster)}")


def left(cluster):
    """What studies have left on a cluster, beside workers that rest."""
    import ray

    resting = [kept for kin in ray_slot._resting.values() for kept in kin] if ray.is_initialized() else []
    ids = {id for group, actor in resting for id in (group.id.hex(), actor._actor_id.hex())}
    found = [leak for leak in cluster.leaks() if ids.isdisjoint(leak.split())]
    workers = [leak for leak in found if TITLE in leak]
    return [leak for leak in found if leak not in workers] + workers[len(resting) :]


def curves(result):
    return {trial.number: (trial.config, trial.state, trial.curve) for trial in result.trials}


@cache
def undisturbed():
    """What every trial of the study came to, which is best, and what was reported, without a fault."""
    with tempfile.TemporaryDirectory() as dir:
        result = study(dir, "undisturbed").run(sharing="solo")
        return curves(result), result.best.number, reports(Path(dir) / "undisturbed")


def assert_undisturbed(result, tmp_path, name):
    """Every trial and decision as without the fault."""
    assert (curves(result), result.best.number, reports(tmp_path / name)) == undisturbed()


def reports(dir):
    """What a log says that each trial reported; that nothing is there twice."""
    found = [e for e in reader.read(dir / "log.jsonl") if isinstance(e, events.Reported)]
    assert max(Counter((e.trial, e.unit) for e in found).values()) == 1
    return {(e.trial, e.unit): e.metrics for e in found}


def sabotage(monkeypatch, act, after=5):
    """Let something happen once, when a study on Ray has heard of some reports."""

    class Sabotaged(RayExecutor):
        heard = 0

        def wait(self, timeout=None):
            told = super().wait(timeout)
            before, self.heard = self.heard, self.heard + sum(isinstance(e, Report) for e in told)
            if before < after <= self.heard:
                act(self)
            return told

    monkeypatch.setattr(rays, "RayExecutor", Sabotaged)


def busiest(executor):
    return max(executor._slots, key=lambda slot: (len(slot.running), slot.pid))


def node_of(cluster, slot):
    return next(node for node in cluster.nodes if node.id == slot.node)


def made_of(kind):
    """How many actor classes Ray has made of a class of ours: it keeps them all. Others come with actors of a name."""
    return sum("_modify_class" in one.__qualname__ for one in kind.__subclasses__())


NODE = """
import os, subprocess
from tests.clusters import killed
subprocess.Popen(["sleep", "600"])
killed(os.getpid())
"""


def test_a_node_that_ends_itself_takes_all_its_processes_with_it():
    """As when whoever made the cluster is killed."""
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[3]}{os.pathsep}{os.environ['PYTHONPATH']}"}
    node = subprocess.Popen([sys.executable, "-c", NODE], start_new_session=True, env=environment)
    node.wait()
    try:
        until(lambda: not processes(node.pid), "its processes are gone")
    finally:
        killed(node.pid)


# A connection of the study's own


def test_every_device_of_the_cluster_trains(address, whole, patient, tmp_path):
    result = study(tmp_path, "ray", ps.Random(budget=3)).run(on=address, sharing="solo")
    placed = {e.devices[0] for e in reader.read(tmp_path / "ray" / "log.jsonl") if isinstance(e, events.Placed)}
    assert len(placed) == 4
    assert {name.split("/")[0] for name in placed} == {node.id[:6] for node in whole.nodes}
    assert len(result.trials) == 6
    assert made_of(RayWorker) == 1


def test_the_folder_of_a_studys_file_reaches_nodes_on_other_machines(address, whole, tmp_path, monkeypatch):
    """As on other machines: what the driver's folders are called means nothing there."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "nowhere_but_there.py").write_text("LOSS = 0.25")
    monkeypatch.setattr("penstock.executors.ray.cluster._here", lambda hosts: False)
    executor = RayExecutor(Job(as_task(needs_a_module), 0, "loss", "min", tmp_path), address, workers=1, folder=folder)
    try:
        executor.place(Bundle("a", (executor.devices()[0].name,), (Placement(0, next(attempts), {}, 1),)))
        told = []
        until(lambda: told.extend(executor.wait(0.1)) or len(told) >= 2, "the trial has ended")
    finally:
        executor.close()
    assert [type(event) for event in told] == [Report, TrialFinished]
    assert told[0].metrics == {"loss": 0.25}


def test_workers_are_held_until_the_connection_is_closed(address, whole, patient, tmp_path, monkeypatch):
    """Ray crashes the driver where that is closed while it sends word of one that was dropped."""
    import ray

    executor = RayExecutor(Job(as_task(pulse), 0, "loss", "min", tmp_path), address, workers=2)
    actors, held, shutdown = [weakref.ref(slot.actor) for slot in executor._slots], [], ray.shutdown
    executor._lose(executor._slots[0], None)
    monkeypatch.setattr(ray, "shutdown", lambda: held.extend(actor() is not None for actor in actors) or shutdown())
    executor.close()
    assert held == [True, True]


FILE = """
from tests.functions import study as make

study = make(".penstock", None)
"""


def test_a_driver_that_is_killed_and_resumed(address, whole, tmp_path):
    file = tmp_path / "tuned.py"
    file.write_text(FILE)
    command = [str(Path(sys.executable).with_name("penstock"))]
    common = ["--dir", str(tmp_path), "--on", address, "--workers", "2", "--sharing", "solo", "--json"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    quiet["env"] = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[3]}{os.pathsep}{os.environ['PYTHONPATH']}"}
    driver = subprocess.Popen([*command, "run", str(file), "--name", "ray", *common], **quiet)
    log = tmp_path / "ray" / "log.jsonl"
    until(lambda: log.exists() and log.read_text().count('"reported"') > 3, "the study reports")
    driver.kill()
    driver.wait()
    until(lambda: not any(whole.workers(node, TITLE) for node in whole.nodes), "workers end with their driver")
    subprocess.run([*command, "resume", "ray", *common], check=True, **quiet)
    assert reports(tmp_path / "ray") == undisturbed()[2]


# Bad input


def test_an_address_that_does_not_answer(tmp_path, cluster):
    import ray

    assert not ray.is_initialized()
    with pytest.raises(ps.StudyError, match=r"No Ray cluster answers at 127\.0\.0\.1:9"):
        RayExecutor(Job(Blobs(), 0, "loss", "min", tmp_path), "ray://127.0.0.1:9")


@pytest.mark.parametrize("on", ["ray://", "ray://host", "ray:host:6379", "ray://host:0", "ray://a b:1", "rays"])
def test_an_address_that_is_none(on):
    with pytest.raises(ps.StudyError, match="Expected on="):
        parse(on)


def test_more_workers_than_there_are_devices(address, whole, tmp_path):
    with pytest.raises(ps.StudyError, match="with 5 devices or more, got one whose nodes offer 4 GPUs in all"):
        RayExecutor(Job(Blobs(), 0, "loss", "min", tmp_path), address, workers=5)


def test_a_task_that_cannot_be_sent_names_the_attribute(address, tmp_path):
    task = Blobs()
    task.lock = threading.Lock()
    with pytest.raises(ps.StudyError, match="its attribute 'lock' cannot be pickled"):
        RayExecutor(Job(task, 0, "loss", "min", tmp_path), address)


def test_another_version_on_a_node(address, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.executors.ray.slot.__version__", "9.9")
    with pytest.raises(ps.StudyError, match=r"has Penstock .* and the driver has 9\.9: expected the same on all nodes"):
        RayExecutor(Job(as_task(descend), 0, "loss", "min", tmp_path), address, workers=1)


def test_a_driver_with_another_version_of_ray():
    mismatch = "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\nThis process with:\n    Ray: 2.1.0\n"
    said = ray_cluster._cannot_join("head:6379", None, RuntimeError(mismatch))
    assert "started with: Ray: 2.60.0 This process with: Ray: 2.1.0 Expected the same versions" in said


def test_states_that_workers_cannot_reach(address, whole, tmp_path):
    with pytest.raises(ps.StudyError, match=r"A worker could not start on .*:\nCannot .* nosuch://bucket"):
        RayExecutor(Job(as_task(descend), 0, "loss", "min", "nosuch://bucket"), address, workers=1)


def test_a_ray_address_in_the_environment_that_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "head")
    with pytest.raises(ps.StudyError, match=r"Expected RAY_ADDRESS to be .* got 'head'"):
        RayExecutor(Job(Blobs(), 0, "loss", "min", tmp_path), "ray")


def test_studies_in_threads_connect_one_after_another(monkeypatch):
    """Ray refuses to be joined twice, and a study that ends would close another's new connection."""
    monkeypatch.setattr(ray_cluster, "_connect", lambda *given: ray_cluster._connecting.locked())
    assert ray_cluster.connect("ray", None)


def test_what_killed_a_worker_was_not_its_node():
    from ray.exceptions import OutOfMemoryError, RayError

    assert ray_slot.alone(OutOfMemoryError("killed due to the node running low on memory"))
    assert ray_slot.alone(RayError("The actor is dead because its worker process has died."))
    assert not ray_slot.alone(RayError("The actor is dead because its node has died."))


def test_without_ray_the_install_line_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ps.StudyError, match=r'pip install "penstock\[ray\]"'):
        rays.require()


# From here on the program is connected


@pytest.mark.usefixtures("on")
class Two:
    on = ""

    @classmethod
    def make(cls, job):
        return RayExecutor(job, Two.on, workers=2)


class TestRayExecutor(Two, SpreadContract):
    pass


class TestShares(Two, SharesContract):
    pass


def test_a_program_that_is_connected_by_the_ray_client(on, tmp_path, monkeypatch):
    monkeypatch.setattr("ray.util.client.RayAPIStub.is_connected", lambda self: True)
    with pytest.raises(ps.StudyError, match="connected by the Ray client, which Penstock does not use"):
        RayExecutor(Job(Blobs(), 0, "loss", "min", tmp_path), on)


def test_a_trial_on_two_nodes_loses_one_of_them(on, whole, tmp_path):
    executor = RayExecutor(Job(Exact(), 0, "loss", "min", tmp_path / "states"), on)
    suite = TestRayExecutor()
    try:
        nodes = [device.node for device in executor.devices()]
        apart = (0, next(i for i, node in enumerate(nodes) if node != nodes[0]))
        suite.spread(executor, Placement(4, 1, CONFIG, LONG), devices=apart)
        told = []
        until(lambda: told.extend(executor.wait(0.1)) or any(isinstance(e, Report) for e in told), "it trains")
        (node,) = [node for node in whole.nodes if node.id[:6] + node.id[-6:] == nodes[apart[1]]]
        whole.kill_node(node)
        until(
            lambda: told.extend(executor.wait(0.1)) or any(isinstance(e, TrialFailed) for e in told), "its end is told"
        )
        failed = next(e for e in told if isinstance(e, TrialFailed))
        assert failed.died
        until(lambda: told.extend(executor.wait(0.1)) or any(isinstance(e, DeviceLost) for e in told), "a device too")
        (left,) = {device.node for device in executor.devices()} - {nodes[apart[1]]}
        there = [i for i, device in enumerate(executor.devices()) if device.node == left]
        suite.spread(executor, Placement(4, 2, CONFIG, 2), devices=there[:2], name="b")
        again = [e for e in suite.until_left(executor) if getattr(e, "attempt", 2) == 2]
        suite.assert_as_alone(again, 4, CONFIG, 2)
    finally:
        executor.close()


@pytest.mark.parametrize("sharing", ["solo", "fused"])
def test_a_study_on_a_cluster_is_the_study_of_one_machine(on, whole, tmp_path, sharing):
    halving = ps.SuccessiveHalving(max_budget=9)
    result = study(tmp_path, "ray", halving, Blobs()).run(on=on, workers=2, sharing=sharing)
    expected = study(tmp_path, "local", halving, Blobs()).run(sharing=sharing)
    assert result.best.number == expected.best.number
    for one, other in zip(result.trials, expected.trials, strict=True):
        assert one.config == other.config
        assert [row["loss"] for row in one.curve] == pytest.approx([row["loss"] for row in other.curve], rel=1e-4)


def test_pbt_takes_over_states_on_other_workers(on, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(rays, "leave_token", lambda states: Path("/nowhere/.driver"))
    pbt = ps.PBT(population=4, max_budget=6, interval=2)
    result = study(tmp_path, "ray", pbt, Blobs(), trials=None).run(on=on, workers=2, sharing="solo")
    expected = study(tmp_path, "local", pbt, Blobs(), trials=None).run(sharing="solo")
    assert curves(result) == curves(expected)


def test_states_travel_where_nodes_do_not_see_the_drivers_folder(on, whole, tmp_path, monkeypatch):
    """As on machines that share no folder: the token that workers look for is not to be found."""
    monkeypatch.setattr(rays, "leave_token", lambda states: Path("/nowhere/.driver"))
    result = study(tmp_path, "ray").run(on=on, workers=2, sharing="solo")
    assert_undisturbed(result, tmp_path, "ray")
    assert result.best.last_state()[0] == 27


# Joules


@pytest.fixture
def drawing(gpus):
    """A task whose workers read the fake device's counter, wherever they are."""
    environment = {CHOSEN: "nvml:GPU-fake", **{name: os.environ[name] for name in ("FAKE_NVML", FOLDER)}}
    return Drawing(environment)


def test_joules_are_read_on_the_nodes_and_charged_to_trials(address, whole, patient, tmp_path, monkeypatch, drawing):
    """Two nodes have one meter, which counts once; one of its readers is killed."""
    sabotage(monkeypatch, lambda executor: os.kill(busiest(executor).pid, signal.SIGKILL))
    before = fake._joules(fake.look(os.environ["FAKE_NVML"]))
    result = study(tmp_path, "ray", task=drawing).run(on=address, workers=2, sharing="solo")
    after = fake._joules(fake.look(os.environ["FAKE_NVML"]))
    assert_undisturbed(result, tmp_path, "ray")
    used, meters = [trial.joules for trial in result.trials], result._history.meters
    assert min(used) > 0
    assert 0 < result.joules <= after - before
    assert result.joules == pytest.approx(sum(used) + meters.idle, rel=1e-9)
    told = [e for e in reader.read(tmp_path / "ray" / "log.jsonl") if isinstance(e, events.Metered)]
    assert {event.meter for event in told} == {"NVML's counter"}
    assert not result.unmetered


def test_a_limit_of_energy_ends_a_study_on_a_cluster(address, whole, patient, tmp_path, drawing):
    limited = study(tmp_path, "ray", task=drawing, max_energy=1.0)
    result = limited.run(on=address, workers=1, sharing="solo")
    assert result.ended == "energy"
    with pytest.raises(ps.StudyError, match="max_energy= needs a device whose joules are metered, and this machine"):
        study(tmp_path, "none", max_energy=1.0).run(on=address, workers=1, sharing="solo")


class Limitable(Blobs):
    """Its workers may limit the fake device, and slices take no time."""

    def __init__(self, environment):
        self.environment = environment

    def __setstate__(self, state):
        from penstock.training import limiting

        self.environment = state["environment"]
        os.environ.update(self.environment)
        os.environ.pop(OBSERVE_ONLY, None)
        limiting.SLICE = limiting.LOOK = 0.0


def test_a_limit_is_set_on_its_node_and_the_prior_one_is_there_when_the_study_is_over(
    address, whole, patient, tmp_path, drawing, gpus
):
    made = studies(Blobs, {"lr": ps.loguniform(1e-3, 1)}, trials=2, algorithm=ps.Random(budget=8))
    limited = made(Limitable(drawing.environment), dir=tmp_path, objective=0.5)
    limited.run(on=address, workers=1, sharing="solo", power="limit")
    lines = [e for e in reader.read(tmp_path / "s" / "log.jsonl") if isinstance(e, events.Limited)]
    (placed, *_) = [e for e in reader.read(tmp_path / "s" / "log.jsonl") if isinstance(e, events.Placed)]
    assert lines[-1].set
    assert {line.device for line in lines} == set(placed.devices)
    until(lambda: fake.look(gpus)["limit"] == 700.0, "the prior limit is back")
    assert len(fake.look(gpus)["sets"]) > 3


# Faults


def test_a_worker_that_is_killed(on, whole, tmp_path, monkeypatch):
    sabotage(monkeypatch, lambda executor: os.kill(busiest(executor).pid, signal.SIGKILL))
    result = study(tmp_path, "ray").run(on=on, workers=2, sharing="solo")
    assert_undisturbed(result, tmp_path, "ray")
    log = list(reader.read(tmp_path / "ray" / "log.jsonl"))
    assert any(isinstance(e, events.Failed) and "died" in e.error and not e.final for e in log)


def test_a_node_that_is_killed(on, whole, tmp_path, monkeypatch):
    sabotage(monkeypatch, lambda executor: whole.kill_node(node_of(whole, busiest(executor))))
    result = study(tmp_path, "ray").run(on=on, workers=2, sharing="solo")
    assert_undisturbed(result, tmp_path, "ray")


def test_a_raylet_that_is_killed(on, whole, tmp_path, monkeypatch):
    def act(executor):
        node = node_of(whole, busiest(executor))
        whole.kill_raylet(node)
        whole.nodes.remove(node)

    sabotage(monkeypatch, act)
    result = study(tmp_path, "ray").run(on=on, workers=2, sharing="solo")
    assert_undisturbed(result, tmp_path, "ray")


def test_all_nodes_are_killed_and_another_comes(on, whole, tmp_path, monkeypatch):
    def act(executor):
        for node in list(whole.nodes):
            whole.kill_node(node)
        threading.Thread(target=lambda: whole.add_node(cpus=2, gpus=2)).start()

    sabotage(monkeypatch, act)
    result = study(tmp_path, "ray").run(on=on, workers=2, sharing="solo")
    assert_undisturbed(result, tmp_path, "ray")


def test_a_head_that_is_away(on, whole, tmp_path, monkeypatch):
    """What runs goes on for a while; then the study ends, before Ray ends the whole program."""

    def act(executor):
        monkeypatch.setattr(ray_cluster, "HEADLESS", 0.0)
        away = iter([False])
        monkeypatch.setattr(executor._connection, "reached", lambda: next(away, True))

    sabotage(monkeypatch, act)
    with pytest.raises(ps.StudyError, match=r"The head of the Ray cluster at .* has not answered for 0 seconds\. What"):
        study(tmp_path, "ray").run(on=on, workers=2, sharing="solo")
    monkeypatch.undo()
    assert_undisturbed(study(tmp_path, "ray").run(sharing="solo"), tmp_path, "ray")


def test_a_worker_that_hangs(on, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(rays, "SILENT", 4.0)
    stopped = []

    def act(executor):
        stopped.append(busiest(executor).pid)
        os.kill(stopped[0], signal.SIGSTOP)

    sabotage(monkeypatch, act)
    result = study(tmp_path, "ray").run(on=on, workers=2, sharing="solo")
    assert_undisturbed(result, tmp_path, "ray")
    log = list(reader.read(tmp_path / "ray" / "log.jsonl"))
    assert any(isinstance(e, events.Failed) and "did not answer any more" in e.error for e in log)
    until(lambda: not Path(f"/proc/{stopped[0]}").exists(), "the hung worker is gone")


def test_the_trials_of_a_node_that_will_be_preempted_move_before_it_goes(on, whole, tmp_path, monkeypatch):
    def act(executor):
        node = node_of(whole, busiest(executor))
        whole.drain(node, seconds=600)
        whole.nodes.remove(node)
        drained.append(node)
        until(lambda: node.id in whole.draining(), "the notice is out")
        executor._looked = -math.inf

    drained = []
    sabotage(monkeypatch, act)
    result = study(tmp_path, "ray").run(on=on, workers=2, sharing="solo")
    log = list(reader.read(tmp_path / "ray" / "log.jsonl"))
    assert not any(isinstance(e, events.Failed) for e in log), "they stopped in good order"
    devices = [e.devices for e in log if isinstance(e, events.Devices)]
    assert not any(device["name"].startswith(drained[0].id[:6]) for device in devices[-1])
    assert_undisturbed(result, tmp_path, "ray")
    whole.kill_node(drained[0])


def test_an_object_store_that_is_full(on, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(rays, "leave_token", lambda states: Path("/nowhere/.driver"))  # states go through the store
    held = []

    def act(executor):
        import ray

        held.extend(ray.put(b"." * (40 * 2**20)) for _ in range(6))  # the store has 100 MiB

    sabotage(monkeypatch, act)
    result = study(tmp_path, "ray").run(on=on, workers=2, sharing="solo")
    held.clear()
    assert_undisturbed(result, tmp_path, "ray")


class Deadly(Blobs):
    """One of its trials kills whoever trains it."""

    def loss(self, model, batch, config):
        if config["lr"] == 0.01:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch, config)


def test_only_the_culprit_of_a_bundle_fails(on, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.engine.engine.RETRIES", 1)
    space, algorithm = {"lr": ps.grid([0.1, 0.05, 0.01])}, ps.Grid(budget=2)
    settings = dict(metric="loss", mode="min", algorithm=algorithm, dir=tmp_path, name="deadly")
    result = ps.Study(Deadly(), space, **settings).run(on=on, workers=1, sharing="fused")
    for trial in result.trials:
        if trial.config["lr"] == 0.01:
            assert "and so did 1 retries" in trial.error
            assert "worker process" in trial.error
        else:
            expected = alone(Blobs(), trial.number, {"lr": trial.config["lr"]}, 2)
            assert [row["loss"] for row in trial.curve] == pytest.approx([row["loss"] for row in expected], rel=1e-5)


def test_a_node_where_every_worker_dies_is_avoided(on, whole, tmp_path):
    result = study(tmp_path, "ray", task=Cursed(whole.nodes[0].id)).run(on=on, sharing="solo")
    assert not [trial for trial in result.trials if trial.error]
    assert_undisturbed(result, tmp_path, "ray")


def test_a_node_that_comes_later_with_another_version_is_left_alone(on, whole, tmp_path, monkeypatch):
    gone = whole.nodes[0]
    whole.kill_node(gone)
    whole.wait_until_dead(gone)

    def act(executor):
        monkeypatch.setattr("penstock.executors.ray.slot.__version__", "9.9")
        whole.add_node(cpus=2, gpus=2)
        until(lambda: executor._look() or executor._listen(0.1) or executor._doubts.avoided, "its workers are refused")

    sabotage(monkeypatch, act)
    with pytest.warns(UserWarning, match=r"and the driver has 9\.9"):
        result = study(tmp_path, "ray").run(on=on, sharing="solo")
    assert_undisturbed(result, tmp_path, "ray")


# Workers that rest


def pids(cluster):
    return {pid for node in cluster.nodes for pid in cluster.workers(node, TITLE)}


def tuned(tmp_path, name, **settings):
    return study(tmp_path, name, **settings).run(on="ray", sharing="solo", workers=2)


def test_workers_rest_for_the_programs_next_study(on, whole, patient, tmp_path):
    first = tuned(tmp_path, "first", task=afresh)
    there = pids(whole)
    assert len(there) == 2
    second = tuned(tmp_path, "second", task=afresh, seed=1)
    assert pids(whole) == there
    assert curves(first) != curves(second)
    assert curves(second) == curves(study(tmp_path, "alone", seed=1).run(sharing="solo"))


def test_they_do_not_rest_for_a_program_that_is_itself_a_task(on):
    """Ray ends its process when it likes, and they would leave their placement groups behind."""
    import ray

    assert ray_cluster.connect("ray", None).stays
    assert not ray.get(ray.remote(num_cpus=0)(lambda: ray_cluster.connect("ray", None).stays).remote())


def test_one_that_died_at_rest_is_replaced(on, whole, tmp_path):
    tuned(tmp_path, "first")
    there = pids(whole)
    for pid in there:
        os.kill(pid, signal.SIGKILL)
    assert_undisturbed(tuned(tmp_path, "ray"), tmp_path, "ray")
    assert not pids(whole) & there


def test_one_whose_code_has_changed_is_replaced(on, whole, tmp_path, monkeypatch):
    code = tmp_path / "lately.py"
    code.write_text("def train(trial):\n    trial.report(1, loss=1.0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("lately")
    random = {"algorithm": ps.Random(budget=1), "trials": 4}
    assert tuned(tmp_path, "first", task=module.train, **random).best.metrics == {"loss": 1.0}
    code.write_text("def train(trial):\n    trial.report(1, loss=22.0)\n")
    monkeypatch.delitem(sys.modules, "lately")
    module = importlib.import_module("lately")
    assert tuned(tmp_path, "second", task=module.train, **random).best.metrics == {"loss": 22.0}


def test_they_leave_after_a_while(on, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.executors.ray.slot.RESTING", 0.1)
    tuned(tmp_path, "first")
    until(lambda: not whole.leaks(), "they have left")


def test_they_make_way_for_another_task_and_for_another_program(on, whole, patient, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.executors.ray.slot.RESTING", 1000.0)
    tuned(tmp_path, "first")
    there = pids(whole)
    executor = RayExecutor(Job(as_task(pulse), 0, "loss", "min", tmp_path / "states"), "ray")
    assert len(executor.devices()) == 4
    until(lambda: not pids(whole) & there, "the first task's workers are gone")
    executor.close()
    there = pids(whole)
    assert len(there) == 4
    file = tmp_path / "tuned.py"
    file.write_text(FILE)
    command = [str(Path(sys.executable).with_name("penstock")), "run", str(file), "--dir", str(tmp_path), "--json"]
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[3]}{os.pathsep}{os.environ['PYTHONPATH']}"}
    subprocess.run([*command, "--on", on, "--workers", "2"], check=True, env=environment, capture_output=True)
    assert not pids(whole) & there


# Several studies


def test_two_studies_share_a_cluster_by_weight_and_the_rest_falls_to_the_last(on, whole, tmp_path, monkeypatch):
    task = as_task(pulse)
    jobs = [Job(task, 0, "loss", "min", tmp_path / str(i) / "states") for i in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(rays, "patience", lambda ready: math.inf)
        first = RayExecutor(jobs[0], on, weight=3)
    assert len(first.devices()) == 4
    first.place(Bundle("a", (first.devices()[0].name,), (Placement(0, next(attempts), CONFIG, LONG),)))
    made = []
    coming = threading.Thread(target=lambda: made.append(RayExecutor(jobs[1], on, weight=1)))
    coming.start()
    told = []
    until(lambda: told.extend(first.wait(0.05)) or not coming.is_alive(), "the second study has a device")
    (second,) = made
    try:
        assert len(second.devices()) == 1
        assert len(first.devices()) == 3
        assert sum(isinstance(e, DeviceLost) for e in told) == 1
        assert not any(isinstance(e, TrialStopped | TrialFailed) for e in told), (
            "an idle device goes before one that trains"
        )
        first.close()
        until(lambda: second.wait(0.05) is None or len(second.devices()) == 4, "the second study has the cluster")
        assert made_of(Studies) == 1
    finally:
        second.close()
        first.close()
