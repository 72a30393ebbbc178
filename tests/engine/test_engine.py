"""The engine: retries, limits, collection, and what it does with what goes wrong."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.bundle import Device, Left, TrialFailed, TrialFinished, TrialStopped
from penstock.executors.base import Executor
from penstock.log.events import Asked, Ended, Failed, Placed
from penstock.log.writer import Log
from penstock.trial import Report
from tests.programs import run
from tests.studies import log, studies
from tests.tasks import Blobs, trivial

SPACE = {"x": ps.uniform(0, 4)}


study = studies(trivial, SPACE, algorithm=ps.Random(budget=3), trials=4)


class ScriptedExecutor(Executor):
    """Not a place to train: says what a test's script says, on a clock that the script moves."""

    def __init__(self, script, devices=1):
        self.script, self.placed, self.events, self.time = script, [], [], 0.0
        self._devices = [Device(f"d{i}", "scripted", 1) for i in range(devices)]
        self.busy = {}  # trial by device

    def devices(self):
        return self._devices

    def place(self, bundle):
        self.placed.append(bundle)
        if bundle.placements:
            assert bundle.devices[0] not in self.busy, "a device was given out twice"
            assert bundle.placements[0].trial not in self.busy.values(), "a trial was placed before it had left"
            self.busy[bundle.devices[0]] = bundle.placements[0].trial
        self.events += self.script(self, bundle)

    def wait(self, timeout=None):
        if not self.events:
            self.time += timeout
            return []
        self.time += 1.0
        event = self.events.pop(0)
        if isinstance(event, Left):
            self.busy = {device: trial for device, trial in self.busy.items() if trial != event.trial}
        return [replace(event, study=self.placed[0].study)]

    def wake(self):
        pass

    def describe(self, configs, *, train, trials=(), study=""):
        from penstock.bundle import Description

        return [Description() for _ in configs]

    def now(self):
        return self.time

    def close(self):
        pass


def run_scripted(monkeypatch, script, devices=1, **settings):
    executor = ScriptedExecutor(script, devices)
    monkeypatch.setattr("penstock.running.executor_of", lambda *asked: executor)
    return study(**settings).run(progress=False), executor


def reports(placement, upto=None, first=1, loss=1.0):
    upto = placement.budget if upto is None else upto
    return [Report(placement.trial, u, {"loss": loss / u}, placement.attempt) for u in range(first, upto + 1)]


def test_a_trial_whose_worker_dies_is_retried_three_times_then_given_up(monkeypatch):
    def script(executor, bundle):
        (p,) = bundle.placements
        if p.trial == 1:
            return [TrialFailed(p.trial, p.attempt, "worker process 7 was killed by SIGKILL", died=True)]
        return [*reports(p), TrialFinished(p.trial, p.attempt)]

    result, executor = run_scripted(monkeypatch, script)
    assert [t.state for t in result.trials] == ["finished", "failed", "finished", "finished"]
    assert result.trials[1].error == "worker process 7 was killed by SIGKILL, and so did 3 retries"
    assert [b.placements[0].attempt for b in executor.placed if b.placements[0].trial == 1] == [1, 2, 3, 4]
    assert [e.final for e in log() if isinstance(e, Failed)] == [False, False, False, True]


def test_a_trial_that_comes_further_between_deaths_is_not_given_up(monkeypatch):
    def script(executor, bundle):
        (p,) = bundle.placements
        if p.attempt <= 6:
            return [*reports(p, upto=p.attempt), TrialFailed(p.trial, p.attempt, "killed", died=True)]
        return [*reports(p), TrialFinished(p.trial, p.attempt)]

    result, _ = run_scripted(monkeypatch, script, trials=1, algorithm=ps.Random(budget=8))
    assert result.trials[0].state == "finished"
    assert [row["budget"] for row in result.trials[0].curve] == list(range(1, 9)), "each unit is reported once"


def test_an_error_of_the_users_code_is_final_at_once(monkeypatch):
    def script(executor, bundle):
        (p,) = bundle.placements
        return [TrialFailed(p.trial, p.attempt, "ZeroDivisionError")]

    result, executor = run_scripted(monkeypatch, script, trials=2)
    assert len(executor.placed) == 2
    assert result.ended == "failed"


def test_what_an_older_attempt_says_is_discarded(monkeypatch):
    def script(executor, bundle):
        (p,) = bundle.placements
        stale = [Report(p.trial, 1, {"loss": -99.0}, p.attempt - 1), TrialFinished(p.trial, p.attempt - 1)]
        return [
            *stale,
            *reports(p),
            Report(p.trial, 9, {"loss": -99.0}, p.attempt - 1),
            TrialFinished(p.trial, p.attempt),
        ]

    result, _ = run_scripted(monkeypatch, script)
    assert all(row["loss"] > 0 for t in result.trials for row in t.curve)


def test_a_promoted_trial_is_not_placed_before_it_has_left(monkeypatch):
    def script(executor, bundle):
        (p,) = bundle.placements
        return [
            *reports(p, first=1, loss=10.0 - p.trial),
            TrialFinished(p.trial, p.attempt),
        ]  # each better than the last

    algorithm = ps.ASHA(max_budget=4, reduction=2, concurrency=2)  # so that a device is free for it at once
    result, _ = run_scripted(monkeypatch, script, devices=3, algorithm=algorithm, trials=8)
    assert result.ended == "done"
    assert {t.state for t in result.trials} <= {"finished", "stopped"}


def test_the_deadline_ends_the_study_by_the_executors_clock_and_keeps_the_last_metrics(monkeypatch):
    def script(executor, bundle):
        if not bundle.placements:
            return []  # busy between two reports: it never stops
        (p,) = bundle.placements
        return [*reports(p), TrialFinished(p.trial, p.attempt)] if p.trial < 2 else reports(p, upto=1)

    result, executor = run_scripted(monkeypatch, script, deadline=100)
    assert result.ended == "deadline"
    assert 100 <= executor.time <= 102
    assert [len(t.curve) for t in result.trials] == [3, 3, 1, 0]
    assert result.trials[2].state == "paused"


def test_a_deadline_counts_time_used_over_resumes(monkeypatch):
    def stuck(executor, bundle):
        return reports(bundle.placements[0], upto=1) if bundle.placements else []

    run_scripted(monkeypatch, stuck, deadline=50)
    _, executor = run_scripted(monkeypatch, stuck, deadline=80)
    assert 28 <= executor.time <= 32
    _, executor = run_scripted(monkeypatch, stuck, deadline=60)
    assert executor.time == 0
    assert not executor.placed


def test_the_target_ends_the_study_and_running_trials_are_stopped(monkeypatch):
    def script(executor, bundle):
        if not bundle.placements:
            (p,) = next(b.placements for b in executor.placed if b.name == bundle.name)
            return [TrialStopped(p.trial, p.attempt, None)]
        (p,) = bundle.placements
        return reports(p) if p.trial == 0 else [*reports(p, loss=0.01)]

    result, _ = run_scripted(monkeypatch, script, devices=2, target=0.02)
    assert result.ended == "target"
    assert result.best.metrics["loss"] <= 0.02
    again, executor = run_scripted(monkeypatch, script, devices=2, target=0.02)
    assert not executor.placed
    assert again.ended == "target"


def test_metrics_that_are_not_finite_never_make_the_best_and_the_study_goes_on():
    values = {0: [5.0, 4.0], 1: [float("nan")] * 2, 2: [float("-inf"), 1.0], 3: [0.1, float("nan")], 4: [3.0, 3.5]}

    def train(trial):
        for unit, value in enumerate(values[trial.number]):
            trial.report(unit + 1, loss=value)

    result = study(train, algorithm=ps.Random(budget=2), trials=5).run(progress=False)
    assert result.ended == "done"
    assert result.best.number == 4
    assert result.best.metrics == {"loss": 3.0}
    assert [t.state for t in result.trials] == ["finished"] * 5


def test_a_trial_that_failed_before_its_weights_were_saved_is_not_best():
    class Fades(Blobs):
        def metrics(self, model, batch, config):
            loss = super().metrics(model, batch, config)["loss"]
            return {"loss": loss - 100 if config["lr"] > 0.5 else loss}

        def loss(self, model, batch, config):
            if config["lr"] > 0.5:
                self.steps = getattr(self, "steps", 0) + 1
                if self.steps > 8:  # two calls of the dry batch, and a unit
                    raise MemoryError("no more room") if self.steps % 2 else RuntimeError("broken")
            return super().loss(model, batch, config)

    settings = {"space": {"lr": ps.grid([0.9, 0.1])}, "algorithm": ps.Grid(budget=2), "trials": None}
    result = study(Fades(), **settings).run(progress=False, sharing="solo")
    assert [t.state for t in result.trials] == ["failed", "finished"]
    assert len(result.trials[0].curve) == 1
    assert result.best.number == 1
    assert result.best.model()


def test_the_best_config_of_pbt_is_the_one_that_was_measured():
    algorithm = ps.PBT(population=4, max_budget=5, interval=1)
    result = study(Blobs(), space={"lr": ps.loguniform(1e-3, 1)}, algorithm=algorithm, trials=None).run(progress=False)
    for trial in result.trials:
        units = [row["budget"] for row in trial.curve if row["loss"] == trial.metrics["loss"]]
        asked = [e for e in log() if isinstance(e, Asked) and e.trial == trial.number and e.budget <= units[0]]
        assert trial.config == asked[-1].config


def test_only_what_can_still_be_needed_stays_on_disk():
    space = {"lr": ps.loguniform(1e-3, 1)}
    settings = dict(space=space, algorithm=ps.SuccessiveHalving(max_budget=4, reduction=2), trials=8)
    result = study(Blobs(), **settings).run(progress=False)
    (kept,) = Path(".penstock/s/states").iterdir()
    assert int(kept.name.split("-")[0]) == result.best.number
    assert result.best.model()
    with pytest.raises(ps.StudyError, match="only paused trials, donors and the best keep theirs"):
        next(t for t in result.trials if t.number != result.best.number).model()


def test_paused_trials_keep_their_states():
    algorithm = ps.ASHA(max_budget=4, reduction=2, concurrency=2)
    result = study(Blobs(), space={"lr": ps.loguniform(1e-3, 1)}, algorithm=algorithm, trials=12).run(progress=False)
    kept = {int(path.name.split("-")[0]) for path in Path(".penstock/s/states").iterdir()}
    finished = [t for t in result.trials if t.state == "finished"]
    settled = min(finished, key=lambda t: t.metrics["loss"])  # the best, should a better one that is paused diverge
    assert kept == {t.number for t in result.trials if t.state == "stopped"} | {result.best.number, settled.number}
    assert len(finished) > 1


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:100])])
def test_a_state_that_is_gone_or_cut_short_is_trained_again(damage):
    space = {"lr": ps.loguniform(1e-3, 1)}
    first = study(Blobs(), space=space, target=10.0).run(progress=False, sharing="solo")  # reached by the first report
    assert [len(t.curve) for t in first.trials] == [1, 0, 0, 0]
    (state,) = Path(".penstock/s/states").iterdir()
    damage(state)
    second = study(Blobs(), space=space).run(progress=False, sharing="solo")
    assert [(e.attempt, e.state) for e in log() if isinstance(e, Placed) and e.trial == 0] == [(1, None), (2, None)]
    whole = study(Blobs(), space=space, name="w").run(progress=False, sharing="solo")
    assert [list(t.curve) for t in second.trials] == [list(t.curve) for t in whole.trials]


def test_donors_keep_their_states_until_they_were_read(monkeypatch):
    monkeypatch.setattr(Log, "tick", Log.sync)  # a sync a line, so that needless states go at once
    algorithm = ps.PBT(population=8, max_budget=6, interval=2, quantile=0.5)
    result = study(Blobs(), space={"lr": ps.loguniform(1e-3, 1)}, algorithm=algorithm, trials=None).run(progress=False)
    events = log()
    placed = {(e.trial, e.attempt): e.state for e in events if isinstance(e, Placed)}
    copies = [e for e in events if isinstance(e, Asked) and e.start_from and e.start_from[0] != e.trial]
    assert copies
    donors = {int(state.file.split("-")[0]) for (trial, _), state in placed.items() if state}
    assert {e.start_from[0] for e in copies} <= donors
    assert [t.state for t in result.trials] == ["finished"] * 8
    assert not any(isinstance(e, Failed) for e in events)
    (kept,) = Path(".penstock/s/states").iterdir()
    assert int(kept.name.split("-")[0]) == result.best.number


def test_the_best_model_gives_the_best_metrics():
    import torch.nn.functional as F

    from tests.tasks import blobs

    result = study(Blobs(), space={"lr": ps.loguniform(1e-2, 3)}, algorithm=ps.Random(budget=6), trials=5).run(
        progress=False
    )
    x, y = blobs()
    model = result.best.model()
    assert not model.training
    loss = F.cross_entropy(model(x[90:]), y[90:]).item()
    assert loss == pytest.approx(result.best.metrics["loss"], rel=1e-5)
    assert result.best.metrics["loss"] == min(row["loss"] for t in result.trials for row in t.curve)


INTERRUPTED = """
import os, signal, sys
import penstock as ps
from tests.tasks import Noisy
class Interrupts(Noisy):
    def loss(self, model, batch, config):
        Interrupts.calls = getattr(Interrupts, "calls", 0) + 1
        if len(sys.argv) > 1 and Interrupts.calls == int(sys.argv[1]):
            for _ in range(int(sys.argv[2])):
                os.kill(os.getpid(), signal.SIGINT)
        return super().loss(model, batch, config)
study = ps.Study(Interrupts(), {"lr": ps.loguniform(1e-3, 1)}, metric="loss", mode="min", name="s",
                 algorithm=ps.Random(budget=3), trials=4)
if __name__ == "__main__":
    result = study.run(progress=False, sharing="solo")
    print([list(t.curve) for t in result.trials])
"""


def interrupted(folder, *when, by="SIGINT"):
    """What the study above shows, run in a folder. An interrupted study ends by SIGINT, as a shell expects."""
    (folder / "interrupts.py").write_text(INTERRUPTED.replace("SIGINT", by))
    return run(f"python {folder / 'interrupts.py'} {' '.join(when)}", -signal.SIGINT if when else 0)


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_stops_at_the_next_step_and_everything_is_resumable(presses, tmp_path, monkeypatch):
    first = interrupted(tmp_path, "30", str(presses))
    assert "KeyboardInterrupt" in first.stderr
    events = log()
    assert [e.reason for e in events if isinstance(e, Ended)] == ["interrupted"]
    if presses == 1:
        assert "go on with: penstock resume s --sharing solo\n" in first.stderr
        saved = [e for e in events if type(e).__name__ == "Saved"]
        assert saved[-1].state.step == 12  # 18 of trial 0, and 12: the dry batch leaves no trace in the count
    resumed = interrupted(tmp_path).stdout
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    assert resumed == interrupted(tmp_path / "whole").stdout != ""


def test_sigterm_is_like_ctrl_c_once(tmp_path):
    interrupted(tmp_path, "30", "1", by="SIGTERM")
    assert [e.reason for e in log() if isinstance(e, Ended)] == ["interrupted"]


@pytest.mark.parametrize("sharing", ["solo", "fused"])
def test_a_full_disk_ends_the_study_and_not_its_trials(sharing, monkeypatch):
    blobs = study(Blobs(), space={"lr": ps.loguniform(1e-3, 1)})

    def full(self, name, content):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("penstock.log.states.Folder._write", full)
        with pytest.raises(ps.StudyError, match=r"No space left on device\). Everything before is safe: make room"):
            blobs.run(sharing=sharing)
    assert not [event for event in log() if isinstance(event, Failed)]
    assert [trial.state for trial in blobs.run(sharing=sharing).trials] == ["finished"] * 4
