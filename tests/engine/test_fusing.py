"""Which trials are fused and how many: what is measured, chosen, declared and told, in whole studies and by hand."""

import inspect
import json
import signal
import warnings
from dataclasses import replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import penstock as ps
from penstock.bundle import Description, Device, Measured, Placement, TrialFailed
from penstock.cli.app import app
from penstock.engine.bundling import Bundling
from penstock.engine.clocking import Pace, Shelf
from penstock.engine.descriptions import Descriptions
from penstock.engine.placing import Placing
from penstock.executors.base import DeviceAdded, DeviceLost
from penstock.executors.local import LocalExecutor
from penstock.executors.processes import executor as processes
from penstock.log import events
from penstock.log.events import Asked, Dropped, Placed, Reported
from penstock.log.history import History, TrialRecord
from penstock.scheduling.base import Assignment, Demand
from penstock.scheduling.waterfill import waterfill
from penstock.speed.model import SpeedModel
from penstock.speed.profiles import Profiles
from penstock.speed.sizes import LARGEST, UNKNOWN_SIZE
from penstock.training.fused.measuring import Measuring
from penstock.training.runs import fused as fused_run
from penstock.training.runs import solo as solo_run
from penstock.training.worker import Worker
from tests.studies import log, studies
from tests.tasks import Blobs, trivial

pytestmark = pytest.mark.usefixtures("long_enough")

SPACE = {"lr": ps.loguniform(1e-3, 0.5), "rate": ps.uniform(0, 0.5)}


class Exact(Blobs):
    """In float64, with a dropout rate of its own."""

    def data(self, config):
        return tuple(tuple(t.double() if t.is_floating_point() else t for t in part) for part in super().data(config))

    def model(self, config):
        rate = nn.Dropout(config.get("rate", 0.3))
        return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), rate, nn.Linear(12, 2)).double()


study = studies(Exact, SPACE, algorithm=ps.Random(budget=3), trials=6)


def run(task=None, sharing="fused", workers=1, **settings):
    return study(task or Exact(), **settings).run(progress=False, sharing=sharing, workers=workers)


def logged(name, *kinds):
    return [event for event in log(name) if isinstance(event, kinds)]


def decisions(name):
    """What the algorithm asked for and dropped, in its order."""
    return [
        (e.trial, e.config, e.budget, e.start_from) if isinstance(e, Asked) else e.trials
        for e in logged(name, Asked, Dropped)
    ]


def kept():
    """The kinds of measurement that the next study finds."""
    path = Path(".penstock/profiles.jsonl")
    return {json.loads(line)["kind"] for line in path.read_text().splitlines()} if path.exists() else set()


def curves(result):
    return [[{k: v for k, v in row.items() if k != "budget"} for row in t.curve] for t in result.trials]


def alike(some, others):
    assert [len(rows) for rows in curves(some)] == [len(rows) for rows in curves(others)]
    for one, other in zip(curves(some), curves(others), strict=True):
        for row, expected in zip(one, other, strict=True):
            assert row == pytest.approx(expected, abs=1e-9)


class Turns(LocalExecutor):
    """Several workers in this process, which take turns step by step: what they say comes in one order."""

    def __init__(self, job, workers):
        super().__init__(job)
        memory = self._devices[0].memory // workers
        self._devices = [Device(f"cpu:{i}", "cpu", memory) for i in range(workers)]
        self._workers = {device.name: Worker(job, device.name) for device in self._devices}

    def place(self, bundle):
        self._workers[bundle.devices[0]].place(bundle)

    def wait(self, timeout=None):
        return [event for one in self._workers.values() if not one.idle and (event := one.advance()) is not None]

    def close(self):
        for one in self._workers.values():
            one.close()
        super().close()


@pytest.fixture
def in_turns(monkeypatch):
    monkeypatch.setattr(processes, "ProcessExecutor", Turns)


@pytest.fixture
def declared(monkeypatch):
    """The bundles that the engine declares."""
    found = []
    for kind in (LocalExecutor, Turns):
        monkeypatch.setattr(kind, "place", _noting(found, kind.place))
    return found


def _noting(found, place):
    return lambda self, bundle: found.append(bundle) or place(self, bundle)


def steps_take(monkeypatch, seconds):
    """Whatever a step takes, it is said to take ``seconds[size]``, and of larger bundles what the last one takes."""
    took, longest = Measuring.took, max(seconds.values())
    monkeypatch.setattr(
        Measuring, "took", lambda self, size, _, bytes: took(self, size, seconds.get(size, longest), bytes)
    )


# The same decisions. Decisions follow from the order of reports (invariant 4). One that decides when a rung is
# complete does not see the order inside it, so that nothing may differ at all, but for the order of brackets that know
# nothing of each other. ASHA decides at every report: there curves must be equal, and each mode repeat itself.


@pytest.mark.parametrize(
    ("algorithm", "trials"),
    [
        (ps.Hyperband(max_budget=9), None),
        (ps.SuccessiveHalving(max_budget=9), 12),
        (ps.PBT(population=6, max_budget=6, interval=2), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_fused_trials_lead_to_the_decisions_that_solo_ones_lead_to(algorithm, trials):
    settings = {"algorithm": algorithm, "trials": trials, "space": {"lr": ps.loguniform(1e-3, 0.5)}}
    together, alone = run(name="f", **settings), run(name="s", sharing="solo", **settings)
    assert {e.mode for e in logged("f", Placed)} == {"fused"}
    assert sorted(decisions("f"), key=repr) == sorted(decisions("s"), key=repr)
    assert [t.state for t in together.trials] == [t.state for t in alone.trials]
    assert together.best.number == alone.best.number
    alike(together, alone)


def test_where_the_order_of_reports_is_another_every_curve_is_still_that_of_the_trial_alone():
    settings = {"algorithm": ps.ASHA(max_budget=9, concurrency=3), "trials": 9}
    together = run(name="f", **settings)
    whole = run(name="w", sharing="solo", algorithm=ps.Random(budget=9), trials=9)
    for one, every in zip(curves(together), curves(whole), strict=True):
        for row, expected in zip(one, every, strict=False):
            assert row == pytest.approx(expected, abs=1e-9)
    again = run(name="g", **settings)
    assert curves(again) == curves(together), "one worker in one mode repeats every bit"
    assert decisions("g") == decisions("f")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("in_turns")
def test_a_study_that_is_interrupted_goes_on_in_any_mode_as_if_nothing_had_been(workers, monkeypatch):
    """Solo, fused and solo again, each stopped by Ctrl-C in the middle of units, then fused to the end."""
    for module in (solo_run, fused_run):
        monkeypatch.setattr(module, "SAVING", 1e-12)  # no state in between, which would come by the clock
    whole = run(name="w", sharing="solo", algorithm=ps.Random(budget=6), trials=8)
    calls, wait = count(1), LocalExecutor.wait

    def interrupting(self, timeout=None):
        if next(calls) % 23 == 0:
            signal.raise_signal(signal.SIGINT)
        return wait(self, 0.0)  # back after every step

    with monkeypatch.context() as patched:
        patched.setattr(LocalExecutor, "wait", interrupting)
        for sharing in ("solo", "fused", "solo"):
            with pytest.raises(KeyboardInterrupt):
                run(sharing=sharing, algorithm=ps.Random(budget=6), trials=8)
    stopped = [e.state.step for e in logged("s", Placed) if e.state is not None]
    assert any(step % 6 for step in stopped), "some were stopped in the middle of a unit"
    found = run(algorithm=ps.Random(budget=6), trials=8, workers=workers)
    assert {e.mode for e in logged("s", Placed)} == {"solo", "fused"}
    reported = [(e.trial, e.unit) for e in logged("s", Reported)]
    assert len(reported) == len(set(reported)), "nothing is reported twice"
    alike(found, whole)


# Trials that go wrong


class Stumbles(torch.optim.Adamax):
    """An optimizer that is not vectorised, and raises at its third step where a trial says so."""

    def step(self, closure=None):
        group = self.param_groups[0]
        if group["stumbles"] and any(float(state["step"]) == 2 for state in self.state.values()):
            raise ValueError("stumbled")
        return super().step(closure)


class Stumbling(Exact):
    def optimizer(self, params, config):
        return Stumbles([{"params": list(params), "stumbles": config["stumbles"]}], lr=config["lr"])


@pytest.mark.parametrize("sharing", ["fused", "auto"])
@pytest.mark.filterwarnings("ignore::penstock.SoloWarning")
def test_an_error_in_one_trials_optimizer_costs_the_others_at_most_a_repeat(sharing):
    space = {"lr": ps.grid([0.01, 0.02, 0.03]), "stumbles": ps.grid([False, True])}
    settings = {"task": Stumbling(), "space": space, "algorithm": ps.Grid(budget=2), "trials": None}
    found, alone = run(name="f", sharing=sharing, **settings), run(name="s", sharing="solo", **settings)
    assert [t.state for t in found.trials] == ["failed" if t.config["stumbles"] else "finished" for t in found.trials]
    assert all("stumbled" in t.error for t in found.trials if t.config["stumbles"])
    alike(found, alone)


@pytest.mark.filterwarnings("ignore::penstock.SoloWarning")
def test_an_error_in_one_trials_optimizer_fails_no_other_however_many_they_are():
    space = {"lr": ps.grid([0.001 * n for n in range(1, 41)]), "stumbles": False}

    class One(Stumbling):
        def optimizer(self, params, config):
            return super().optimizer(params, {**config, "stumbles": config["lr"] == 0.001 * 6})

    found = run(One(), space=space, algorithm=ps.Grid(budget=2), trials=None)
    assert [t.number for t in found.trials if t.state == "failed"] == [5]


def test_a_trial_that_diverges_leaves_its_neighbours_their_curves():
    space = {"lr": ps.grid([0.01, 1e200, 0.1]), "rate": 0.3}
    settings = {"space": space, "algorithm": ps.Grid(budget=2), "trials": None}
    found, alone = run(name="f", **settings), run(name="s", sharing="solo", **settings)
    assert not found.trials[1].curve[-1]["loss"] < 1e9
    for number in (0, 2):
        for row, expected in zip(found.trials[number].curve, alone.trials[number].curve, strict=True):
            assert dict(row) == pytest.approx(dict(expected), abs=1e-9)


# How many


def test_a_bundle_shrinks_to_the_size_that_was_measured(declared, monkeypatch):
    steps_take(monkeypatch, {1: 1.0, 2: 1.0, 4: 4.0, 6: 9.0})
    found = run(sharing="auto", name="a")
    first, *later = declared
    assert (first.mode, first.size, len(first.placements)) == ("fused", None, 6)
    assert {(one.mode, one.size) for one in later} == {("fused", 2)}
    assert [p.trial for p in later[0].placements] == [0, 1], "those who came first"
    assert [len(one.placements) for one in later] == [2] * 5, "whoever leaves makes room for one"
    assert {one.name for one in declared} == {"bundle 1"}
    assert [(e.way, e.size) for e in logged("a", events.Measured)] == [("native", 2)], "measured once"
    alike(found, run(sharing="solo"))


@pytest.mark.parametrize(("slower", "mode", "most"), [(1.0, "fused", 2), (3.0, "solo", 1)])
def test_the_next_study_begins_with_what_was_measured(slower, mode, most, declared, monkeypatch):
    steps_take(monkeypatch, {1: 1.0, 2: slower, 4: 9.0, 6: 20.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(sharing="auto")
        declared.clear()
        run(sharing="auto", name="next", algorithm=ps.Random(budget=2))
    assert {(one.mode, one.size) for one in declared} == {(mode, most)}
    assert max(len(one.placements) for one in declared) == most


def test_fused_takes_all_trials_together_and_measures_nothing(declared):
    run(name="f")
    assert [(one.mode, one.size, len(one.placements)) for one in declared] == [("fused", LARGEST, 6)]
    (told,) = logged("f", events.Measured)
    assert (told.way, told.size, told.table) == ("native", LARGEST, {})
    assert told.reason == 'asked for by sharing="fused"'
    assert "sharing" not in kept()


@pytest.mark.parametrize("sharing", ["solo", "auto"])
def test_a_trial_alone_trains_solo_and_nothing_is_measured(sharing, declared):
    run(sharing=sharing, trials=1)
    assert [one.mode for one in declared] == ["solo"]
    assert not logged("s", events.Measured)


@pytest.mark.parametrize("sharing", ["auto", "fused"])
def test_a_function_is_never_fused(sharing, declared):
    run(trivial, sharing=sharing, space={"x": ps.uniform(0, 4)}, trials=3)
    assert [(one.mode, len(one.placements)) for one in declared] == [("solo", 1)] * 3
    assert not logged("s", events.Measured)


@pytest.mark.usefixtures("in_turns")
def test_two_workers_divide_the_trials_and_what_one_has_measured_serves_both(declared, monkeypatch):
    steps_take(monkeypatch, {1: 1.0, 2: 1.0, 4: 4.0})
    found = run(sharing="auto", workers=2, trials=8, name="a")
    first, second, *later = declared
    assert [(one.devices, len(one.placements)) for one in (first, second)] == [(("cpu:0",), 4), (("cpu:1",), 4)]
    assert first.size is second.size is None
    assert {(one.mode, one.size) for one in later} == {("fused", 2)}
    assert max(len(one.placements) for one in later) == 2
    assert {one.devices for one in later} == {("cpu:0",), ("cpu:1",)}
    alike(found, run(sharing="solo", trials=8))


@pytest.mark.usefixtures("in_turns")
def test_two_workers_without_a_use_for_fusing_train_a_trial_each(declared):
    run(workers=2, trials=2)
    assert [(one.devices, len(one.placements)) for one in declared] == [(("cpu:0",), 1), (("cpu:1",), 1)]


# Why not


class Looks(Exact):
    """Looks at the memory of one trial's tensor."""

    def loss(self, model, batch, config):
        loss = super().loss(model, batch, config)
        loss.data_ptr()
        return loss


class Closes(Exact):
    def optimizer(self, params, config):
        return torch.optim.LBFGS(params, lr=0.1, max_iter=2)

    def scheduler(self, optimizer, config):
        return None


@pytest.mark.parametrize("task", [Looks(), Closes()], ids=lambda task: type(task).__name__)
@pytest.mark.parametrize("sharing", ["auto", "fused"])
def test_a_refusal_is_told_once_and_is_in_the_log_once(task, sharing, declared):
    with pytest.warns(ps.SoloWarning) as told:
        run(task, sharing=sharing, algorithm=ps.Random(budget=2), trials=3)
    assert len(told) == 1
    *tried, found = logged("s", events.Measured)
    assert (found.signature, found.way, found.size, found.table) == (events.SOLO, "solo", 1, {})
    assert found.reason == str(told[0].message)
    assert found.reason.startswith("3 of 3 trials train solo: ")
    assert all(one.reason in found.reason for one in tried)
    assert len(tried) == (1 if isinstance(task, Looks) else 0), "that is seen in training alone"
    assert [len(one.placements) for one in declared if one.mode == "solo"] == [1] * 3
    assert "sharing" not in kept(), "nothing was measured"


# What is kept of descriptions and measurements


ALIKE = Description(signature="alike", bytes=100)
KEEPER = SimpleNamespace(intact=bool)  # no trial here has a state


def record(number, kind):
    return TrialRecord(number, {"kind": kind}, "group")


def described(**kinds):
    """Descriptions of configs by their kind, and the configs that were asked about."""
    asked = []

    def describe(configs, trials):
        asked.extend(configs)
        return [kinds[config["kind"]] for config in configs]

    return Descriptions(describe, warns=True), asked


def test_a_config_is_described_once_and_again_when_it_changed():
    descriptions, asked = described(a=ALIKE, b=Description(signature="other", bytes=1))
    assert descriptions.learn([record(0, "a"), record(1, "a")]) == [0, 1]
    assert descriptions.learn([record(0, "a"), record(1, "b")]) == [1]
    assert [config["kind"] for config in asked] == ["a", "a", "b"]
    assert [descriptions.of(0).signature, descriptions.of(1).signature] == ["alike", "other"]


def told(descriptions, kinds):
    """The warnings that come with the descriptions of some trials, by their kinds."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        descriptions.learn([record(number, kind) for number, kind in enumerate(kinds)])
    assert all(one.category is ps.SoloWarning for one in found)
    return [str(one.message) for one in found]


def test_each_reason_is_told_once_with_the_number_of_its_trials():
    odd, even = Description(reason="it is odd"), Description(reason="it is even.")
    descriptions, _ = described(a=odd, b=even, c=Description(), d=ALIKE)
    assert told(descriptions, "aabcadd") == [
        "3 of 7 trials train solo: it is odd.",
        "1 of 7 trials trains solo: it is even.",
    ]
    assert descriptions.news() == "4 of 7 trials train solo: 3, as it is odd; 1, as it is even."
    assert descriptions.news() == ""
    assert told(descriptions, "aabcadda") == []
    assert descriptions.news() == "", "one more is not worth a line"
    assert descriptions.news(last=True) == "5 of 8 trials train solo: 4, as it is odd; 1, as it is even."
    assert descriptions.news(last=True) == ""


def test_trials_whose_signatures_all_differ_say_in_what():
    kinds = {
        k: Description(signature=k, unlike=(f"{k}.by", f"{k}.by is 1 in one trial and 2 in another")) for k in "bcd"
    }
    kinds |= {"a": Description(signature="a"), "e": Description(signature="e", unlike=kinds["b"].unlike)}
    descriptions, _ = described(**kinds)
    assert told(descriptions, "ab") == [
        "2 of 2 trials train solo: each has a signature of its own, as b.by is 1 in one trial and 2 in another. "
        "To fuse them, fix it or draw it from a few values."
    ]
    assert told(descriptions, "abcde") == []
    assert descriptions.news() == (
        "5 of 5 trials train solo: each has a signature of its own, as b.by is 1 in one trial and 2 in another; "
        "c.by is 1 in one trial and 2 in another; and 1 more parts differ. "
        "To fuse them, fix it or draw it from a few values."
    )
    assert told(descriptions, "abcdeabcde") == []
    assert descriptions.news(last=True) == "", "each has found another trial like it"


def test_few_odd_ones_among_many_are_told_at_the_end():
    descriptions, _ = described(a=ALIKE, b=Description(signature="b"), c=Description(signature="c"))
    assert told(descriptions, "aaaaabc") == []
    with pytest.warns(ps.SoloWarning, match="^2 of 7 trials train solo: each has a signature of its own.$"):
        descriptions.news(last=True)
    one, _ = described(a=ALIKE, b=Description(signature="b"))
    assert told(one, "aab") == []
    assert one.news(last=True) == ""


def test_a_surrogate_and_a_target_are_not_told_to_be_unlike():
    descriptions, _ = described(a=Description(signature="a"), b=Description(signature="b"))
    descriptions.learn([replace(record(0, "a"), variant="surrogate 8"), record(1, "b")])
    assert descriptions.news(last=True) == ""


def test_a_study_that_does_not_share_says_nothing():
    silent = Descriptions(lambda configs, trials: [Description(reason="it is odd") for _ in configs], warns=False)
    assert told(silent, "aa") == []
    assert silent.news(last=True) == ""


class Weighted(Exact):
    """Each trial has a loss of its own: the weight decides how many times a term is there."""

    def loss(self, model, batch, config):
        return sum(super(Weighted, self).loss(model, batch, config) for _ in range(config["times"]))


def test_a_study_of_unlike_trials_says_so_in_its_warning_its_log_and_its_progress():
    with pytest.warns(ps.SoloWarning) as found:
        run(Weighted(), space={"lr": 0.1, "times": ps.grid([1, 2, 3])}, algorithm=ps.Grid(budget=1), trials=None)
    at = inspect.getsourcelines(Weighted.loss)[1] + 1
    line = (
        "3 of 3 trials train solo: each has a signature of its own, as config['times'], which loss, metrics or data "
        f"read, is 1 in one trial and 2 in another (a plain number is needed at {__file__}:{at}). To fuse them, fix it "
        "or draw it from a few values."
    )
    assert [str(one.message) for one in found] == [line]
    assert History.of(log("s")).solo == line
    shown = CliRunner().invoke(app, ["show", "s"]).output
    assert "3 of 3 trials train solo: each has a signature of its own" in " ".join(shown.split())


def measured(size, table=None, device="cpu", way="native", reason="why"):
    return Measured("alike", device, "sharing", table or {}, size, reason, way)


@pytest.fixture
def made(tmp_path):
    """What one study after another knows of bundles of the signature "alike"."""

    def make(*devices, sharing="measured"):
        there = devices or (Device("cpu", "cpu", 2**40),)
        pace = Pace(SpeedModel(sharing), Shelf(Profiles.open(tmp_path / "profiles.jsonl"), "task"))
        pace.look({device.name: device for device in there})
        pace.know(0, "alike")
        return pace

    return make


def most(pace, device="cpu"):
    return pace.model.curve(pace._devices[device].type, 0).most, pace.size("alike", device)


def test_the_size_is_what_was_measured_asked_for_or_still_to_be_measured(made):
    pace = made()
    assert most(pace) == (UNKNOWN_SIZE, None)
    pace.measured(measured(3, reason="memory ran out"))
    assert most(pace) == (3, 3)
    pace.measured(measured(7, {1: 1.0, 7: 2.0}))
    assert most(pace) == (7, 7)
    forced = made(sharing="forced")
    assert most(forced) == (LARGEST, LARGEST)
    forced.measured(measured(2))
    assert most(forced) == (2, 2)
    assert most(made(sharing="never")) == (1, 1)


@pytest.mark.parametrize(("memory", "together"), [(1000, 5), (10**6, 6), (90, 1)])
def test_states_must_fit_into_the_device(memory, together, monkeypatch):
    """A trial takes 200 bytes beside others, and 80 where it has the device alone."""
    cards = [Device("cpu", "cpu", memory)]
    executor = SimpleNamespace(
        nodes=tuple,
        devices=lambda: cards,
        place=lambda bundle: declared.append(bundle),
        modes={"solo", "fused"},
        flexible=False,
    )
    executor.describe = lambda configs, train, trials, study: (
        [Description(signature="a", bytes=80, beside=200)] * len(configs)
    )
    declared, history = [], History.of([events.Opened({"metric": "loss", "mode": "min"})])
    placing = Placing(executor, history, waterfill, history.apply, float, KEEPER)
    placing.look()
    for trial in range(6):
        history.apply(Asked(trial, {}, 3, "g"))
        placing.ask(history.trials[trial])
    placing.place()
    assert [len(one.placements) for one in declared] == [together]


def test_only_times_are_kept_for_the_next_study(made):
    pace = made()
    pace.measured(measured(3, reason="memory ran out"))
    assert made().size("alike", "cpu") is None
    pace.measured(measured(5, {1: 1.0, 5: 2.0}))
    after = made()
    assert after.size("alike", "cpu") == 5
    assert after.reason("alike", "cpu") == "measured before: why"
    after.measured(measured(4, reason="memory ran out"))
    assert after.reason("alike", "cpu") == "memory ran out"
    assert after.size("other", "cpu") is None


def test_what_was_measured_elsewhere_says_nothing_here(made, tmp_path):
    made().measured(measured(5, {1: 1.0, 5: 2.0}))
    assert made().size("alike", "cpu") == 5
    assert made(Device("cpu", "cpu", 2**39)).size("alike", "cpu") == 5, "less memory changes no time"
    assert made(Device("cpu", "cpu", 2**40, threads=2)).size("alike", "cpu") is None, "other threads"
    assert made(Device("cpu", "another", 2**40)).size("alike", "cpu") is None, "another device"
    (line,) = (tmp_path / "profiles.jsonl").read_text().splitlines()
    for package in ("torch", "penstock"):
        assert f"{package} {version(package)}" in json.loads(line)["device"], "another version of either"


def test_a_profile_serves_every_device_of_its_kind(made):
    two = [Device(f"cpu:{i}", "cpu", 2**40) for i in range(2)]
    made(*two).measured(measured(5, {1: 1.0, 5: 2.0}, "cpu:0"))
    assert made(*two).size("alike", "cpu:1") == 5


def test_what_was_measured_on_one_kind_of_device_bounds_no_bundle_on_another(made):
    three = [Device("new 0", "new", 2**40), Device("new 1", "new", 2**40), Device("old", "old", 2**40)]
    pace = made(*three)
    pace.measured(measured(3, device="new 0"))
    assert [most(pace, device.name) for device in three] == [(3, 3), (3, 3), (UNKNOWN_SIZE, None)]
    assert [pace.reason("alike", device.name) for device in three] == ["why", "why", ""]
    assert pace.alike("new 1") == ["new 0", "new 1"]


def test_a_device_that_comes_later_is_of_a_kind_that_may_be_known(made):
    pace = made()
    pace.measured(measured(3))
    pace.look({"alike": Device("alike", "cpu", 2**40)})  # and "cpu" is gone
    assert most(pace, "alike") == (3, 3)
    pace.measured(measured(2))  # told by the worker of the device that is gone
    assert most(pace, "alike") == (2, 2)


class Elastic(Turns):
    """Devices come and go by turns; one that goes is handed back, or lost with what it trained."""

    turns = {
        8: ("add", "cpu:2"),
        15: ("hand back", "cpu:1"),
        24: ("lose", "cpu:2"),
        30: ("hand back", "cpu:0"),
        60: ("add", "cpu:1"),
    }

    def __init__(self, job, workers):
        super().__init__(job, workers)
        self.job, self.turn, self.bundles = job, 0, {}

    def place(self, bundle):
        assert bundle.devices[0] in {device.name for device in self._devices}, "placed on a device that is gone"
        self.bundles[bundle.devices[0]] = bundle
        super().place(bundle)

    def wait(self, timeout=None):
        self.turn += 1
        assert self.turn < 10**4, "everybody waits, and nothing happens"
        what, name = self.turns.get(self.turn, ("", ""))
        if what == "add":
            self._devices = [*self._devices, Device(name, "cpu", 2**30)]
            self._workers[name] = Worker(self.job, name)
            return [DeviceAdded(self._devices[-1])]
        if what:
            (gone,) = [device for device in self._devices if device.name == name]
            self._devices = [device for device in self._devices if device is not gone]
            if what == "hand back":  # those that leave say so at their next steps
                self._workers[name].place(replace(self.bundles[name], placements=()))
                return [DeviceLost(gone)]
            self._workers.pop(name).close()
            left = [
                TrialFailed(p.trial, p.attempt, "lost", died=True, study=self.bundles[name].study)
                for p in self.bundles[name].placements
            ]
            return [DeviceLost(gone), *left]
        return super().wait(timeout)


@pytest.mark.parametrize("sharing", ["fused", "solo"])
def test_trials_train_on_while_devices_come_and_go(sharing, monkeypatch):
    """One comes by a new name; then all of them are gone for a while, until one comes by a name that was known."""
    monkeypatch.setattr(processes, "ProcessExecutor", Elastic)
    found = run(sharing=sharing, workers=2, trials=9, name="e")
    assert {t.state for t in found.trials} == {"finished"}
    assert [sorted(device["name"] for device in e.devices) for e in logged("e", events.Devices)] == [
        ["cpu:0", "cpu:1"],
        ["cpu:0", "cpu:1", "cpu:2"],
        ["cpu:0", "cpu:2"],
        ["cpu:0"],
        [],
        ["cpu:1"],
    ]
    assert {e.devices[0] for e in logged("e", Placed)} == {"cpu:0", "cpu:1", "cpu:2"}
    assert not any(e.own or e.final for e in logged("e", events.Failed)), "nobody is to blame"
    moved = [e for e in logged("e", Placed) if e.state is not None]
    assert any(e.state.step % 6 for e in moved), "what was handed back in the middle of a unit was kept"
    alike(found, run(sharing="solo", trials=9))


@pytest.mark.parametrize("sharing", ["never", "forced"])
def test_a_bundle_whose_device_was_lost_is_not_told_anything_and_keeps_nobody_waiting(sharing):
    cards, declared = [Device(f"cpu:{i}", "cpu", 2**40) for i in range(3)], []
    there = cards[:2]
    executor = SimpleNamespace(
        devices=lambda: there, nodes=tuple, place=declared.append, modes={"solo", "fused"}, flexible=False
    )
    executor.describe = lambda configs, train, trials, study: [ALIKE] * len(configs)
    history = History.of([events.Opened({"metric": "loss", "mode": "min"})])
    placing = Placing(executor, history, waterfill, history.apply, float, KEEPER, pace=Pace(SpeedModel(sharing)))

    def ask(*trials):
        for trial in trials:
            history.apply(Asked(trial, {"kind": "a"}, 3, "g"))
            placing.ask(history.trials[trial])
        declared.clear()
        placing.place()
        return [(one.name, one.devices[0], [p.trial for p in one.placements]) for one in declared]

    placing.look()
    assert ask(0, 1) == [("bundle 1", "cpu:0", [0]), ("bundle 2", "cpu:1", [1])]
    placing.lose("cpu:0")  # and it is back already, while 0 has not said that it left
    assert ask(2) == [("bundle 3", "cpu:0", [2])]
    there[:] = [cards[1], cards[2]]
    placing.look()  # "cpu:2" has come; that "cpu:0" is gone is still to be told
    assert ask(3) == [("bundle 4", "cpu:2", [3])]
    placing.lose("cpu:0")
    declared.clear()
    placing.bundling.shrink("alike", 1, ["cpu:0", "cpu:1", "cpu:2"])
    placing.bundling.stop()
    assert {one.devices[0] for one in declared} == {"cpu:1", "cpu:2"}


def test_bundles_shrink_on_the_devices_that_the_measurement_holds_for():
    declared, pace = [], Pace()
    devices = {name: Device(name, name.split()[0], 2**40) for name in ("new 0", "new 1", "old")}
    pace.look(devices)
    bundling = Bundling(declared.append, float, pace, "")
    bundling.look(devices)
    for number, device in enumerate(devices):
        place = bundling.make((device,), "fused", "alike")
        for trial in range(4 * number, 4 * number + 4):
            demand = Demand(trial, "g", 9, signature="alike")
            bundling.enter(place, demand, Placement(trial, 1, {}, 9), Assignment(trial, (device,), 1 / 64))
    bundling.shrink("other", 2, ["new 0", "new 1"])
    assert not declared
    bundling.shrink("alike", 2, ["new 0", "new 1"])
    assert [(one.devices[0], [p.trial for p in one.placements], one.size) for one in declared] == [
        ("new 0", [0, 1], 2),
        ("new 1", [4, 5], 2),
    ]
    assert not bundling.running[8].leaving
    assert bundling.running[8].size is None
    for trial in (2, 3, 6, 7):
        bundling.left(trial)
    assert "new 0" not in bundling.room, "two have a half each"
    assert bundling.room["old"].share == 60 / 64
