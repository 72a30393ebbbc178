"""A study that was cut off, wherever that was, decides as the undisturbed study does (invariant 4)."""

from pathlib import Path

import pytest
from torch import nn

from penstock.engine.engine import Engine
from penstock.log.events import Asked, Failed, Opened, Placed, Reported, Stopped
from penstock.log.history import History
from penstock.speed.model import SIZES
from penstock.trial import Usage
from tests.cut import ALGORITHMS, copied, curves, decisions, study
from tests.tasks import Blobs

WHOLE, PART = Path("whole"), Path("part")


def falling(trial):
    for unit in range(trial.state or 0, 10**6):
        trial.report(unit + 1, state=unit + 1, loss=(trial.config["lr"] - 0.1) ** 2 / (unit + 1))


def resumed(algorithm, task, after, **how):
    """Run a study, and resume what it was after each of some lines; gives the folders that differ."""
    with copied(WHOLE, PART, after):
        study(algorithm, task(), WHOLE).run(progress=False, **how)
    for dir in sorted(PART.iterdir()):
        study(algorithm, task(), dir).run(progress=False, **how)
        assert decisions(dir) == decisions(WHOLE), f"after line {dir.name}"
        yield dir


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_cut_off_after_any_line_of_solo_trials(algorithm):
    after = range(3 + list(ALGORITHMS).index(algorithm), 80, 9)  # bench/faults.py --lines has every line
    for dir in resumed(algorithm, lambda: falling, after, sharing="solo"):
        assert curves(dir) == curves(WHOLE)


@pytest.mark.parametrize(("algorithm", "after"), [("ASHA", (17, 26, 33, 41)), ("BOHB", (31, 42)), ("PBT", (24,))])
def test_cut_off_after_any_line_of_a_fused_bundle(algorithm, after, monkeypatch):
    monkeypatch.setitem(SIZES, "forced", 3)  # of several trials that wait, some enter one by one
    for dir in resumed(algorithm, Blobs, after, sharing="fused"):
        assert curves(dir) == {at: pytest.approx(metrics, rel=1e-4) for at, metrics in curves(WHOLE).items()}


class Wide(Blobs):
    """Trials of two widths, which cannot be fused with each other."""

    def model(self, config):
        return nn.Linear(6, 2) if config["lr"] < 0.02 else super().model(config)


def test_the_bundle_that_was_cut_off_goes_on_although_a_scheduler_would_now_begin_with_another(monkeypatch):
    monkeypatch.setitem(SIZES, "forced", 2)
    for _ in resumed("ASHA", Wide, (30, 46, 57), sharing="fused"):
        pass


@pytest.mark.parametrize("sharing", ["solo", "fused"])
def test_stopped_in_good_order_again_and_again(sharing, monkeypatch):
    study("ASHA", Blobs(), WHOLE).run(progress=False, sharing=sharing)
    take = Engine.take

    def interrupted(engine, batch):
        engine.taken = getattr(engine, "taken", 0) + 1
        if engine.taken == 6:
            engine.interrupt()
        return take(engine, batch)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "take", interrupted)
            with pytest.raises(KeyboardInterrupt):
                study("ASHA", Blobs(), PART).run(progress=False, sharing=sharing)
    study("ASHA", Blobs(), PART).run(progress=False, sharing=sharing)
    assert decisions(PART) == decisions(WHOLE)


def test_a_state_that_was_saved_for_one_trial_alone_does_not_bring_it_ahead_of_its_bundle(monkeypatch):
    monkeypatch.setattr("penstock.training.runs.fused.SAVING", float("inf"))  # save at every step, trial by trial
    for _ in resumed("ASHA", Blobs, (60, 95), sharing="fused"):
        pass


def test_under_other_settings_no_bundle_is_formed_again(monkeypatch):
    with copied(WHOLE, PART, [20]):
        study("ASHA", Blobs(), WHOLE).run(progress=False, sharing="fused")
    result = study("ASHA", Blobs(), PART / "20").run(progress=False, sharing="solo")
    assert len(result.trials) == 9
    events = [e for e in Path(PART / "20/s/log.jsonl").read_text().splitlines() if '"event":"placed"' in e]
    assert '"mode":"fused"' in events[0]
    assert '"mode":"solo"' in events[-1]


# The order of turns, from a log


def opened(**run):
    return Opened({"run": run, "metric": "loss", "mode": "min"})


def asked(trial, budget=1):
    return Asked(trial, {}, budget, "group")


def placed(trial, attempt=1):
    return Placed(trial, attempt, ("cpu",), "fused", None, 0.0, 0.5)


def reported(trial, unit=1):
    return Reported(trial, 1, unit, {"loss": 1.0}, None, Usage(), 0.0)


def turns(*events):
    return History.of(events).turns


def test_a_trial_that_is_asked_for_again_waits_behind_the_trials_that_were_asked_for_with_it():
    begun = [opened(), asked(0), asked(1), placed(0), reported(0), asked(0, 2), asked(2)]
    before, after = turns(*begun), turns(*begun, placed(1))
    assert (list(before.waiting), list(before.running)) == ([1, 2], [0])
    before.settle()
    assert sorted(before.waiting, key=before.waiting.get) == [1, 2, 0]
    assert (sorted(after.waiting, key=after.waiting.get), list(after.running)) == ([2, 0], [1])


def test_trials_that_leave_at_the_end_of_a_driver_are_taken_for_running():
    begun = [
        opened(),
        asked(0, 2),
        asked(1, 2),
        asked(2, 2),
        placed(0),
        placed(1),
        Stopped(1, 1, 0.0),
        Stopped(0, 1, 0.0),
    ]
    assert list(turns(*begun, opened()).running) == [0, 1]
    assert list(turns(*begun, placed(2), opened()).running) == [2], "the others were stopped for its sake"
    assert turns(*begun, opened(workers=2)).waiting == {2: 3, 0: 1, 1: 2}, "other settings form nothing again"


def test_a_trial_enters_in_the_round_that_its_bundle_is_in():
    begun = [opened(), asked(0, 9), asked(1, 9), asked(2, 9), placed(0), reported(0), reported(0, 2), placed(1)]
    assert [turns(*begun).since(trial) for trial in (0, 1)] == [0, 2]
    later = [*begun, reported(1), reported(0, 3), placed(2)]
    assert turns(*later).since(2) == 3
    again = turns(*later, opened(), placed(0, attempt=2), placed(1, attempt=2))
    assert [again.since(trial) for trial in (0, 1, 2)] == [0, 2, 3]
    lost = turns(*begun, reported(1), Stopped(1, 1, 0.0), reported(0, 3), placed(1, attempt=2))
    assert lost.since(1) == 2, "it has reported a unit, and trains it again where its state is lost"
    emptied = turns(*begun, Failed(0, 1, "", True, 0.0), Failed(1, 1, "", True, 0.0), placed(2))
    assert emptied.since(2) == 0, "a new bundle begins anew"
