"""Recurring jobs, from the first recurrence on: resumed by replay, overlapping, and refused in one message."""

import json
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock.algorithms.recurring import Ended
from penstock.energy.cost import Objective
from penstock.log.events import Asked, Limited, Opened, Placed, Reported, Wrote
from penstock.log.reader import read
from penstock.recurring import unlimited_cost
from penstock.trial import Usage
from tests.tasks import Blobs

NEEDED = {16: 22, 32: 20, 64: 20, 128: 24}
LIMITS = {250: (240.0, 1.0), 175: (170.0, 1.05), 100: (98.0, 1.6)}


def table(config):
    """A run whose units depend on its size, and a little on the day."""
    needed = NEEDED[config["batch_size"]] + config["recurrence"] % 3
    reached = [min(1.0, (unit + 1) / needed) for unit in range(60)]
    return ps.Tabulated({"accuracy": reached}, seconds=3200 / config["batch_size"] + 20, limits=LIMITS)


def job(task=table, **changes):
    given = {"batch_sizes": [16, 32, 64, 128], "default": 32, "metric": "accuracy", "target": 1.0, "max_budget": 60}
    made = ps.TabulatedTask(task) if task is table else task
    return ps.Recurring(made, {"lr": 0.1}, **{**given, "recurrences": 40, "name": "nightly", **changes})


def on(**changes):
    return ps.Simulated(devices=3, watts=200, kept=False, **changes)


def logged(name="nightly"):
    return [Ended.of(event) for event in read(Path(f".penstock/{name}/log.jsonl")) if isinstance(event, Wrote)]


def test_a_job_learns_what_costs_least_and_goes_on_from_its_log():
    first = job().run(on=on(), power="limit")
    assert (first.number, first.size, first.reached, first.trial.config["lr"]) == (0, 32, True, 0.1)
    assert first.cost == pytest.approx(0.5 * first.joules + 0.5 * 250 * first.seconds)
    again = job()  # as a process of the next night makes it
    for _ in range(3):
        again.run(on=on(), power="limit")
    last = again.run(4, on=on(), power="limit")
    assert [one.number for one in last] == [4, 5, 6, 7]
    assert [one.number for one in again.recurrences] == list(range(8))
    assert all(one.cost < 0.7 * first.cost for one in last)
    assert {one.size for one in last} == {128}
    assert [run for one in again.recurrences for run in one.runs] == logged()


def test_a_job_that_is_cut_off_anywhere_goes_on_as_if_it_had_not_been(tmp_path):
    """Invariant 5: its log, cut after any line, is resumed by replay to the same runs."""
    whole = job(name="whole")
    whole.run(on=on(), power="limit")
    whole.run(6, on=on(), power="limit")
    lines = Path(".penstock/whole/log.jsonl").read_text().splitlines(keepends=True)
    for cut in range(len(lines) // 5, len(lines), len(lines) // 6):
        folder = tmp_path / str(cut) / "whole"
        folder.mkdir(parents=True)
        (folder / "log.jsonl").write_text("".join(lines[:cut]))
        (folder / "states").mkdir()
        cut_off = job(name="whole", dir=folder.parent)
        while len(cut_off.recurrences) < 7:
            cut_off.run(on=on(), power="limit")
        runs = [run for one in cut_off.recurrences for run in one.runs]
        assert [(r.recurrence, r.size, r.verdict, r.stake) for r in runs] == [
            (r.recurrence, r.size, r.verdict, r.stake) for r in logged("whole")
        ]


def test_overlapping_recurrences_have_a_device_each_and_all_their_runs():
    done = job(policy="zeus").run(7, workers=3, on=on())
    assert [one.number for one in done] == list(range(7))
    assert all(one.reached for one in done)
    open, most = set(), 0
    for event in read(Path(".penstock/nightly/log.jsonl")):
        if isinstance(event, Asked):
            open.add(event.trial)
        elif isinstance(event, Wrote):
            open.discard(event.trial)
        most = max(most, len(open))
    assert most == 3, "the first recurrence is alone, and then three are under way"
    days = {
        event.config["recurrence"] for event in read(Path(".penstock/nightly/log.jsonl")) if isinstance(event, Asked)
    }
    assert days == set(range(7))


def test_a_run_is_placed_once_where_nothing_can_stop_it_and_ends_with_the_unit_that_reaches_the_target():
    done = job(policy="default").run(3, on=on())
    events = list(read(Path(".penstock/nightly/log.jsonl")))
    assert [event.trial for event in events if isinstance(event, Placed)] == [0, 1, 2]
    assert [one.runs[0].units for one in done] == [20, 21, 22]
    last = [event for event in events if isinstance(event, Reported)][-1]
    assert (last.unit, last.state.unit) == (22, 22)


def test_a_run_that_its_stake_stops_is_granted_ever_less_of_it():
    job(policy="zeus", batch_sizes=[16, 32], beta=1.0).run(3, on=on())
    (stopped, *_) = [run for run in logged() if run.verdict == "stopped"]
    assert stopped.cost <= stopped.stake
    assert stopped.cost + stopped.cost / stopped.units > stopped.stake, "its next unit would have passed the stake"
    asked = [event for event in read(Path(".penstock/nightly/log.jsonl")) if isinstance(event, Asked)]
    budgets = [event.budget for event in asked if event.trial == stopped.trial]

    assert budgets == [1, 5, 7, 8, 9, 10]
    assert stopped.units == 10


def test_where_nothing_counts_joules_the_cost_is_time_and_that_is_said_once(capsys):
    made = job()
    one = made.run(on=ps.Simulated(devices=1, kept=False))
    assert (one.cost, one.joules) == (one.seconds, None)
    made.run(on=ps.Simulated(devices=1, kept=False))
    said = capsys.readouterr().err
    assert said.count("The cost is time alone, and eta has no effect: simulated devices count joules with") == 1


def test_a_default_that_misses_the_target_is_one_message_that_says_how_far_it_got():
    with pytest.raises(
        ps.StudyError, match=r"did not reach accuracy=1\.0: the default .* \(of batch sizes, 32 got to 0\.5 in 10 u"
    ):
        job(max_budget=10).run(5, on=on())
    assert len(logged()) == 1, "the other recurrences have not begun"


def test_no_size_that_reaches_the_target_is_one_message_that_says_how_far_each_got():
    def drifting(config):
        made = table(config)
        return made if config["recurrence"] == 0 else ps.Tabulated({"accuracy": [0.4] * 60}, seconds=10)

    broken = job(ps.TabulatedTask(drifting), policy="grid", batch_sizes=[16, 32])
    broken.run(on=on())
    with pytest.raises(
        ps.StudyError, match=r"1 did .*: no batch .*\(of batch sizes, 16 got to 0\.4 in 60 units, 32 got to 0"
    ):
        broken.run(on=on())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_sizes": []}, "^batch_sizes must be a list of batch sizes"),
        ({"default": 48}, "^default must be one of batch_sizes="),
        ({"target": None}, "^target must be a finite value of 'accuracy', got None"),
        ({"eta": 1.5}, "^eta must be a number from 0 to 1, got 1.5"),
        ({"risk": -0.1}, "^risk must be a number from 0 to 1, got -0.1"),
        ({"beta": 0.5}, "^beta must be a number of at least 1, got 0.5"),
        ({"recurrences": 0}, "^recurrences must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_input_is_refused_before_any_work(change, said):
    with pytest.raises(ps.StudyError, match=said):
        job(**change)
    with pytest.raises(ps.StudyError, match=r"^config must be a dict without batch_size and recurrence"):
        ps.Recurring(
            table, {"batch_size": 3}, batch_sizes=[3], default=3, metric="a", target=1, max_budget=1, recurrences=1
        )


class Days(Blobs):
    """Blobs that turn a little each day."""

    def data(self, config):
        (x, y), valid = super().data({})
        turn = 0.05 * config["recurrence"]
        return (x + turn, y), valid


def test_a_task_really_trains_with_each_size_and_gives_its_model():
    made = job(Days(), metric="loss", mode="min", target=0.62, batch_sizes=[8, 16], default=16, risk=0.5, name="days")
    made.config["momentum"] = 0.5
    done = made.run(2, progress=False)
    assert done[-1].model().training is False
    assert isinstance(next(iter(done[-1].model().parameters())), torch.Tensor)
    opened = json.loads(Path(".penstock/days/log.jsonl").read_text().splitlines()[0])["settings"]["kept"]
    (phase,) = opened["phases"]
    assert phase["dry"]
    assert all(seconds > 0 for seconds in phase["unit_costs"].values())
    assert phase["unit_costs"].keys() == {"8", "16"}


def test_what_a_unit_would_cost_without_a_limit_follows_from_units_with_it():
    """At 250 W a unit would take 10 s and 200 W; at 100 W, it takes 12 s and 100 W."""
    objective, table = Objective(0.5, 250.0), {250: (1.0, 200.0), 100: (1.2, 100.0)}
    at_limit = Usage(12.0, 10, joules=1200.0)

    def unit(trial, number, usage=at_limit):
        return Reported(trial, 1, number, {}, None, usage, 0.0)

    opened = Opened({"metric": "a", "mode": "max"})
    past = [opened, *(Asked(trial, {"batch_size": size}, 9, "") for trial, size in ((0, 32), (1, 64)))]
    past.append(unit(0, 1, Usage(99.0, 10, joules=1.0)))
    assert unlimited_cost(past, 32, objective) is None, "no limit is known"
    past.append(Limited("cuda:0", "32.ab", 1, 100.0, True, 1.2, 0.6, table=table))
    past.append(unit(0, 2, Usage(50.0, 10, joules=1.0)))
    assert unlimited_cost(past, 32, objective) is None, "that unit began at other limits"
    past += [unit(1, 1, Usage(77.0, 10, joules=7.0)), unit(0, 3)]
    assert unlimited_cost(past, 32, objective) == pytest.approx(objective.cost(10.0, 2000.0))
    past += [opened, unit(0, 4, Usage(10.0, 10, joules=2000.0))]
    assert unlimited_cost(past, 32, objective) == pytest.approx(objective.cost(10.0, 2000.0)), "it set no limit"
