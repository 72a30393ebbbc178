"""Trials that are looked up."""

import numpy as np
import pytest

import penstock as ps
from penstock.bundle import Bundle, Job, Placement, TrialFinished
from penstock.executors.simulated.executor import SimulatedExecutor
from penstock.task import as_task, fingerprint, task_name
from penstock.trial import Report

CURVES = np.arange(24, dtype="float32").reshape(3, 4, 2) + 1  # configs, units, metrics


def written(tmp_path, **arrays):
    path = tmp_path / "digits.npz"
    np.savez(path, **{"curves": CURVES, "metrics": ["loss", "accuracy"], "seconds": [1.5, 2, 3], **arrays})
    return path


@ps.TabulatedTask
def halves(config):
    return ps.Tabulated({"loss": [config["x"] / 2**unit for unit in range(3)]}, seconds=config.get("seconds", 2))


def test_a_function_gives_a_configs_table():
    found = halves.look_up({"x": 8})
    assert found.metrics == {"loss": (8, 4, 2)}
    assert (found.units, found.seconds) == (3, (2, 2, 2))
    assert (halves.look_up({"x": 8, "seconds": np.array([1, 2, 3])})).seconds == (1, 2, 3)


@pytest.mark.parametrize(
    ("metrics", "seconds", "said"),
    [
        ({"loss": [1, 2], "accuracy": [1]}, 1, "loss has 2, accuracy has 1"),
        ({}, 1, "Expected a metric's values"),
        ({"loss": []}, 1, "Expected a metric's values"),
        ({"loss": 3}, 1, "metric 'loss' of a table as numbers, one a unit, got 3"),
        ({"loss": ["low"]}, 1, "got \\['low'\\]"),
        ({"loss": [1, 2]}, 0, "seconds above 0 for each unit of a table, got 0.0 for unit 1"),
        ({"loss": [1, 2]}, [1, -2], "got -2.0 for unit 2"),
        ({"loss": [1, 2]}, float("nan"), "got nan for unit 1"),
        ({"loss": [1, 2]}, [1, float("inf")], "got inf for unit 2"),
        ({"loss": [1, 2]}, [1], "seconds of 2 units, or one number for all, got 1"),
        ({"loss": [1, 2]}, None, "the seconds of a table as numbers"),
    ],
)
def test_a_table_that_cannot_be_is_refused(metrics, seconds, said):
    with pytest.raises(ps.TaskError, match=said):
        ps.Tabulated(metrics, seconds)


def test_a_metric_that_is_not_finite_is_as_it_stands():
    assert ps.Tabulated({"loss": [float("inf"), 1]}, 1).metrics["loss"][0] == float("inf")


def test_what_is_no_function_or_gives_no_table_is_refused():
    with pytest.raises(ps.TaskError, match="expected a function of a config, got int"):
        ps.TabulatedTask(3)
    with pytest.raises(ps.TaskError, match=r"must return a penstock\.Tabulated for a config, got dict"):
        ps.TabulatedTask(lambda config: {}).look_up({})
    with pytest.raises(ps.TaskError, match="halves is a function and has no rows"):
        halves.space()


def test_a_study_knows_a_table_by_its_name_and_source(tmp_path):
    assert as_task(halves) is halves
    assert task_name(halves) == "halves"
    assert fingerprint(halves) == fingerprint(ps.TabulatedTask(halves.function))
    first = ps.TabulatedTask.load(written(tmp_path))
    assert task_name(first) == "digits"
    before = fingerprint(first)
    assert before == fingerprint(ps.TabulatedTask.load(written(tmp_path)))
    assert before != fingerprint(ps.TabulatedTask.load(written(tmp_path, curves=CURVES + 1)))


def test_a_file_gives_the_rows_of_its_table(tmp_path):
    configs = dict(configs=np.array([[0.5, 16], [0.25, 32], [0.125, 64]]), config_names=["lr", "width"])
    task = ps.TabulatedTask.load(written(tmp_path, **configs), bytes=7, curve=ps.Curve(sharing=(1, 1.5)))
    assert repr(task.space()["row"]) == "randint(0, 3)"
    assert task.config(1) == {"lr": 0.25, "width": 32}
    found = task.look_up({"row": 1})
    assert found.metrics == {"loss": (9, 11, 13, 15), "accuracy": (10, 12, 14, 16)}
    assert (found.seconds, found.bytes, found.curve.most, found.signature) == ((2, 2, 2, 2), 7, 2, "digits")
    with pytest.raises(ps.TaskError, match="has the rows 0 to 2, got row 3"):
        task.look_up({"row": 3})
    with pytest.raises(ps.TaskError, match="got row None"):
        task.look_up({"lr": 0.5})


def test_a_file_without_configs_has_its_rows_alone(tmp_path):
    assert ps.TabulatedTask.load(written(tmp_path)).config(2) == {"row": 2}


def test_a_files_seconds_may_be_those_of_each_unit_or_a_metric(tmp_path):
    path = written(tmp_path, seconds=np.arange(12).reshape(3, 4) + 1, metrics=["took", "accuracy"])
    assert ps.TabulatedTask.load(path).look_up({"row": 1}).seconds == (5, 6, 7, 8)
    found = ps.TabulatedTask.load(path, seconds="took").look_up({"row": 0})
    assert (found.seconds, list(found.metrics)) == ((1, 3, 5, 7), ["accuracy"])
    assert ps.TabulatedTask.load(path, seconds="took", cumulative=True).look_up({"row": 0}).seconds == (7 / 4,) * 4


def test_a_file_of_several_tasks_gives_the_one_that_is_chosen(tmp_path):
    path = written(tmp_path, curves=np.stack([CURVES, CURVES * 10]), openml_task_ids=["3945", "7593"])
    for task in (1, "7593"):
        assert ps.TabulatedTask.load(path, task=task).look_up({"row": 0}).metrics["loss"][0] == 10
    for task in (None, 2, "1"):
        with pytest.raises(
            ps.TaskError, match=f"2 tasks: expected task= from 0 on, or one of 3945, 7593, got {task!r}"
        ):
            ps.TabulatedTask.load(path, task=task)
    with pytest.raises(ps.TaskError, match="has the curves of one task"):
        ps.TabulatedTask.load(written(tmp_path), task=0)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (dict(metrics=["loss"]), r"Expected curves \[configs, units, 1 metrics\].*got the shape \(3, 4, 2\)"),
        (dict(seconds=[1, 2]), "Expected the seconds of 3 configs as 'seconds'"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, arrays, said):
    with pytest.raises(ps.TaskError, match=said):
        ps.TabulatedTask.load(written(tmp_path, **arrays))


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ps.TaskError, match="cannot be read"):
        ps.TabulatedTask.load(tmp_path / "none.npz")
    np.savez(tmp_path / "other.npz", x=1)
    with pytest.raises(ps.TaskError, match=r"Expected the key 'curves' in .*found x"):
        ps.TabulatedTask.load(tmp_path / "other.npz")


def test_a_row_trains_and_goes_on_from_its_state(tmp_path):
    task = ps.TabulatedTask.load(written(tmp_path))
    executor = SimulatedExecutor(Job(task, 0, "loss", "min", tmp_path / "states"), ps.Simulated(devices=1))
    (device,) = executor.devices()
    state, reports = None, []
    for attempt, budget in ((1, 1), (2, 4)):
        executor.place(Bundle("a", (device.name,), (Placement(5, attempt, {"row": 0}, budget, state),)))
        events = []
        while not any(isinstance(event, TrialFinished) for event in events):
            events += executor.wait()
        reports += [event for event in events if isinstance(event, Report)]
        state = reports[-1].state
    assert [(report.unit, report.metrics["loss"]) for report in reports] == [(1, 1), (2, 3), (3, 5), (4, 7)]
    assert executor.now() == 4 * 1.5
