"""States that are flipped, cut, swapped, removed or unreadable: noticed, and trained again to the same curves."""

import json
import logging
import os
import random
import shutil
from pathlib import Path

import pytest

import penstock as ps
from penstock.log import reading
from penstock.log.events import Failed, Placed, Reported
from penstock.log.states import Folder
from penstock.log.writer import Log
from penstock.training.checkpoint import load
from penstock.trial import StateRef
from tests.studies import log, studies, version_2
from tests.tasks import Blobs, Noisy

SPACE = {"lr": ps.loguniform(1e-3, 1), "momentum": ps.uniform(0, 0.9)}
ALGORITHMS = {
    "halving": dict(algorithm=ps.SuccessiveHalving(max_budget=4, reduction=2), trials=6),
    "asha": dict(algorithm=ps.ASHA(max_budget=4, reduction=2, concurrency=3), trials=7),
    "hyperband": dict(algorithm=ps.Hyperband(max_budget=4, reduction=2)),
    "pbt": dict(algorithm=ps.PBT(population=4, max_budget=5, interval=1)),
    "random": dict(algorithm=ps.Random(budget=3), trials=4),
}
PBT = ALGORITHMS["pbt"]
STATES = Path(".penstock/s/states")

study = studies(Noisy, SPACE)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(reading, "PAUSES", (0.0, 0.0, 0.0))


def run(*task, **settings):
    how = {"sharing": "solo", **{key: settings.pop(key) for key in ("sharing", "on") if key in settings}}
    return study(*task, **settings).run(progress=False, **how)


def curves(result):
    return [(t.number, t.config, list(t.curve)) for t in result.trials], result.best.number


class Interrupted:
    """Interrupts a study after its n-th line, as Ctrl-C would."""

    def __init__(self, monkeypatch, lines, wanted=Reported):
        left, append = lines, Log.append

        def interrupting(self, event):
            nonlocal left
            append(self, event)
            left -= isinstance(event, wanted)
            if left == 0:
                left = -1
                raise KeyboardInterrupt

        self.patch = lambda: monkeypatch.setattr(Log, "append", interrupting)
        self.mend = lambda: monkeypatch.setattr(Log, "append", append)

    def __call__(self, **settings):
        self.patch()
        with pytest.raises(KeyboardInterrupt):
            run(**settings)
        self.mend()


def flip(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def swap(path, rng):
    other = rng.choice(sorted(STATES.iterdir()))
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two), other.write_bytes(one)


def cut(path, rng):
    os.truncate(path, rng.randrange(path.stat().st_size))


def remove(path, rng):
    path.unlink()


DAMAGES = [flip, swap, cut, remove]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What each study finds when nothing happens to it."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = curves(run(**ALGORITHMS[name], dir=tmp_path_factory.mktemp("whole")))
        return found[name]

    return of


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_whatever_is_damaged_while_a_study_rests_its_curves_are_the_same(name, seed, undisturbed, monkeypatch, caplog):
    whole, rng = undisturbed(name), random.Random(f"{name} {seed}")
    reports = sum(len(curve) for _, _, curve in whole[0])
    Interrupted(monkeypatch, rng.randrange(1, reports))(**ALGORITHMS[name])
    for path in [path for path in sorted(STATES.iterdir()) if rng.random() < 0.7]:
        if path.exists():
            rng.choice(DAMAGES)(path, rng)
    result = run(**ALGORITHMS[name])
    assert curves(result) == whole
    assert not any(e.final for e in log() if isinstance(e, Failed))
    reported = [(e.trial, e.unit) for e in log() if isinstance(e, Reported)]
    assert name == "pbt" or len(set(reported)) == len(reported), "a report came twice"
    assert len(reported) == reports
    assert all("gone or damaged" in record.message for record in caplog.records)


def interrupted_pbt(monkeypatch, **more):
    """A PBT study that rests after a generation in which a trial took over another trial's state and trained on."""
    Interrupted(monkeypatch, 14)(**PBT, **more)
    assert [e.start_from for e in log() if hasattr(e, "start_from") and e.start_from and e.start_from[0] != e.trial]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("sharing", ["solo", "fused"])
def test_all_states_of_a_population_are_lost_and_its_donors_are_trained_again(damage, sharing, monkeypatch, caplog):
    settings = dict(PBT, sharing=sharing) if sharing == "solo" else dict(PBT, sharing=sharing, task=Blobs())
    whole = run(**settings, name="whole")
    interrupted_pbt(monkeypatch, **{k: v for k, v in settings.items() if k not in PBT})
    rng = random.Random(0)
    for path in sorted(STATES.iterdir()):
        damage(path, rng)
    result = run(**settings)
    for one, other in zip(result.trials, whole.trials, strict=True):
        assert one.config == other.config
        assert [row["loss"] for row in one.curve] == pytest.approx([row["loss"] for row in other.curve], rel=1e-4)
    if sharing == "solo":
        assert curves(result) == curves(whole)
    assert [t.state for t in result.trials] == ["finished"] * 4
    said = [record.message for record in caplog.records]
    assert any("had taken over another trial's state: first trial" in message for message in said)
    assert len(said) == len(set(said)), "one message a trial"


def test_a_function_that_took_over_a_state_is_trained_again_too(monkeypatch):
    def train(trial):
        w, done = (5.0, 0) if trial.state is None else (trial.state["w"], trial.state["unit"])
        for unit in range(done + 1, 6):
            w -= trial.config["lr"] * 2 * w + 0.01 * random.random()
            trial.report(unit, state={"w": w, "unit": unit}, loss=w**2)

    whole = run(train, **PBT, name="whole")
    interrupted_pbt(monkeypatch, task=train)
    shutil.rmtree(STATES)
    assert curves(run(train, **PBT)) == curves(whole)


def test_a_simulated_population_goes_on_without_its_states(monkeypatch):
    def look_up(config):
        return ps.Tabulated({"loss": [config["lr"] / (unit + 1) for unit in range(5)]}, seconds=1)

    settings = dict(PBT, task=ps.TabulatedTask(look_up), on=ps.Simulated(devices=2))
    whole = run(**settings, name="whole")
    interrupted_pbt(monkeypatch, **{k: v for k, v in settings.items() if k not in PBT})
    shutil.rmtree(STATES)
    assert curves(run(**settings)) == curves(whole)


@pytest.mark.parametrize("damage", DAMAGES)
def test_states_that_are_damaged_while_the_study_runs(damage, undisturbed, monkeypatch):
    rng, append, reports = random.Random(1), Log.append, 0

    def damaging(self, event):
        nonlocal reports
        append(self, event)
        reports += isinstance(event, Reported)
        if reports in (4, 9) and isinstance(event, Reported):
            for path in sorted(STATES.iterdir()):
                damage(path, rng)

    monkeypatch.setattr(Log, "append", damaging)
    monkeypatch.setattr(Log, "tick", lambda log: None)  # needless states go at once, and others are synced before
    monkeypatch.setattr("penstock.training.trials.WARM_BYTES", 0)  # no trial stays in memory
    for name in ("halving", "pbt"):
        reports = 0
        assert curves(run(**ALGORITHMS[name])) == undisturbed(name)
        shutil.rmtree(".penstock/s")


class Unreadable:
    """Reads of states fail so often, or for good."""

    def __init__(self, monkeypatch, times):
        self.left, read = times, Folder.read

        def failing(states, name):
            if self.left > 0 and not name.startswith("probe"):
                self.left -= 1
                raise OSError(5, "Input/output error")
            return read(states, name)

        monkeypatch.setattr(Folder, "read", failing)


def test_a_read_is_repeated_before_a_state_is_given_up(undisturbed, monkeypatch, caplog):
    Interrupted(monkeypatch, 10)(**PBT)
    waited = []
    monkeypatch.setattr(reading.time, "sleep", waited.append)
    unreadable = Unreadable(monkeypatch, 3)
    assert curves(run(**PBT)) == undisturbed("pbt")
    assert unreadable.left == 0
    assert len(waited) == 3
    assert not caplog.records
    assert not any(isinstance(e, Failed) for e in log())


def test_a_state_that_stays_unreadable_is_as_a_missing_one_and_may_come_back(undisturbed, monkeypatch, caplog):
    Interrupted(monkeypatch, 10)(**PBT)
    unreadable = Unreadable(monkeypatch, 10**9)
    Interrupted(monkeypatch, 1)(**PBT)  # goes on without its states, and is stopped again
    assert any("Input/output error" in e.error and not e.final for e in log() if isinstance(e, Failed))
    unreadable.left = 0
    result = run(**PBT)
    assert curves(result) == undisturbed("pbt")
    assert [t.error for t in result.trials] == [None] * 4


def test_where_no_file_can_be_read_the_study_ends_and_loses_nothing(undisturbed, monkeypatch):
    Interrupted(monkeypatch, 10)(**PBT)
    before = sorted(STATES.iterdir())

    def failing(states, name):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "read", failing)
        with pytest.raises(
            ps.StudyError, match=r"Cannot reach the states in .*PermissionError.*permissions, or choose"
        ):
            run(**PBT)
    assert sorted(STATES.iterdir()) == before
    assert not any(isinstance(e, Failed) for e in log())
    assert curves(run(**PBT)) == undisturbed("pbt")


@pytest.mark.parametrize("broken", ["listdir", "stat"])
def test_a_folder_that_cannot_be_looked_at_is_one_message_or_none(broken, undisturbed, monkeypatch):
    Interrupted(monkeypatch, 10)(**PBT)
    function = getattr(os, broken)

    def failing(path, *more, **how):
        if str(path).startswith(str(STATES.absolute())):
            raise PermissionError(13, "Permission denied")
        return function(path, *more, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, failing)
        if broken == "listdir":
            with pytest.raises(ps.StudyError, match=r"Cannot reach the states in .*Permission denied"):
                run(**PBT)
        else:
            assert curves(run(**PBT)) == undisturbed("pbt"), "the workers read them all the same"
    assert curves(run(**PBT)) == undisturbed("pbt")


@pytest.mark.parametrize("broken", ["unlink", "fsync"])
def test_states_that_cannot_be_deleted_or_synced_are_one_message_and_the_study_goes_on(
    broken, undisturbed, monkeypatch, caplog
):
    (target, function) = (Path, Path.unlink) if broken == "unlink" else (os, os.fsync)

    def failing(what, *more, **how):
        if broken == "unlink" and what.parent.name != "states":
            return function(what, *more, **how)
        if broken == "fsync" and not os.readlink(f"/proc/self/fd/{what}").endswith(".pt"):
            return function(what)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Log, "tick", lambda log: None)
    with monkeypatch.context() as patch:
        patch.setattr(target, broken, failing)
        assert curves(run(**ALGORITHMS["halving"])) == undisturbed("halving")
    (record,) = caplog.records
    assert "needless states are not deleted, and the study goes on. Cannot reach" in record.message
    assert len(list(STATES.iterdir())) > 1
    run(**ALGORITHMS["halving"])  # once more: now they go
    assert len(list(STATES.iterdir())) == 1


def test_many_lost_states_are_a_few_messages(caplog, monkeypatch):
    settings = dict(algorithm=ps.ASHA(max_budget=4, reduction=2), trials=12)
    Interrupted(monkeypatch, 12)(**settings)
    shutil.rmtree(STATES)
    run(**settings)
    assert 0 < len(caplog.records) <= 6


def test_each_line_names_a_sum_and_each_file_its_trial():
    run(**ALGORITHMS["random"])
    states = [e.state for e in log() if isinstance(e, Reported) and e.state is not None]
    assert states
    assert all(isinstance(state.sum, int) for state in states)
    (kept,) = STATES.iterdir()
    (ref,) = [state for state in states if state.file == kept.name]
    import torch

    assert torch.load(kept, weights_only=True)["trial"] == ref.trial == int(kept.name[:6])
    assert "trial" not in load(STATES, ref)
    other = StateRef(f"{ref.trial + 1:06d}-1-1.pt", ref.unit, ref.step, ref.bytes)  # as in a log without sums
    kept.rename(STATES / other.file)
    with pytest.raises(ps.TaskError, match=rf"cannot be read \(it is of trial {ref.trial}\)"):
        load(STATES, other)


def test_a_log_without_sums_goes_on_by_size(undisturbed, monkeypatch):
    Interrupted(monkeypatch, 10)(**PBT)
    path = Path(".penstock/s/log.jsonl")
    lines = version_2(path)
    assert sum(line["state"].pop("sum") is not None for line in lines if line.get("state"))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cut(sorted(STATES.iterdir())[0], random.Random(0))
    assert curves(run(**PBT)) == undisturbed("pbt")
    assert any(e.state is not None and e.state.sum is None for e in log() if isinstance(e, Placed))


def test_a_best_state_that_is_damaged_is_no_model(caplog):
    caplog.set_level(logging.WARNING)
    result = run(**ALGORITHMS["random"])
    (kept,) = STATES.iterdir()
    flip(kept, random.Random(0))
    with pytest.raises(ps.TaskError, match=r"cannot be read \(its content .*\): expected the \d+ bytes .* Put it back"):
        result.best.model()
