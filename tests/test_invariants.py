"""The invariants of DESIGN.md that hold on one machine, each by name. Durability under SIGKILL is in test_crash.py."""

import ast
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.engine.decisions import Decider, replay
from penstock.log.events import Asked, Placed, Reported, Saved
from penstock.log.history import History
from penstock.log.reader import read
from penstock.log.writer import Log
from penstock.seeds import key
from penstock.training.random.keyed import Keyed
from penstock.training.random.masks import SoloKeys
from tests.contracts.executors import alone
from tests.studies import studies
from tests.tasks import Blobs, Fails, Noisy, blobs

SPACE = {"lr": ps.loguniform(1e-3, 1), "momentum": ps.uniform(0, 0.9)}
SOURCE = Path(ps.__file__).parent


study = studies(Noisy, SPACE, algorithm=ps.ASHA(max_budget=4, reduction=2, concurrency=3), trials=8)


def curves(result):
    return [[{k: v for k, v in row.items() if k != "budget"} for row in t.curve] for t in result.trials]


class Double(Blobs):
    """The task in float64, where equal means equal to 1e-9."""

    def data(self, config):
        return tuple(tuple(t.double() if t.is_floating_point() else t for t in part) for part in super().data(config))

    def model(self, config):
        return super().model(config).double()


def test_1_a_state_is_that_of_a_plain_pytorch_run():
    algorithm = ps.ASHA(max_budget=4, min_budget=2, reduction=2)
    result = study(Blobs(), algorithm=algorithm, trials=2).run(progress=False)
    trial = next(t for t in result.trials if t.state == "stopped")
    (file,) = Path(".penstock/s/states").glob(f"{trial.number:06d}-*.pt")
    state = torch.load(file, weights_only=True)
    x, y = blobs()
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=9.9, momentum=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for part, name in ((model, "model"), (optimizer, "optimizer"), (scheduler, "scheduler")):
        part.load_state_dict(state[name])
    order = torch.randperm(90, generator=torch.Generator().manual_seed(key(0, "order", 2)))
    step = state["step"]
    for rows in order.split(16):
        optimizer.zero_grad()
        with Keyed(SoloKeys(key(0, "trial", trial.number), step)):
            F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        scheduler.step()
        step += 1
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(x[90:]), y[90:]).item()
    assert loss == pytest.approx(alone(Blobs(), trial.number, trial.config, 3)[2]["loss"], rel=1e-6)


def test_2_a_curve_does_not_depend_on_company_or_on_moves():
    together = study(Double()).run(progress=False)
    assert any(len(t.curve) > 1 for t in together.trials), "some trial must have been paused and moved on"
    for trial, rows in zip(together.trials, curves(together), strict=True):
        for row, expected in zip(rows, alone(Double(), trial.number, trial.config, len(rows)), strict=True):
            assert row == pytest.approx(expected, abs=1e-9)


def test_2_a_trial_that_raises_or_diverges_costs_its_neighbours_no_bit():
    space = {**SPACE, "fail": ps.choice([False, True])}
    result = study(Fails(), space=space, algorithm=ps.Random(budget=2)).run(progress=False, sharing="solo")
    assert {t.state for t in result.trials} == {"finished", "failed"}
    for trial, rows in zip(result.trials, curves(result), strict=True):
        if trial.state == "finished":
            assert rows == alone(Blobs(), trial.number, trial.config, 2)


def test_3_the_seed_decides_everything_that_is_random():
    first = study(name="a").run(progress=False)
    second = study(name="b").run(progress=False)
    other = study(name="c", seed=1).run(progress=False)
    assert curves(first) == curves(second) != curves(other)
    assert [t.config for t in first.trials] == [t.config for t in second.trials] != [t.config for t in other.trials]


def test_4_decisions_are_a_function_of_the_order_of_reports():
    result = study().run(workers=2, progress=False)  # whatever order two workers happened to report in
    events = list(read(Path(".penstock/s/log.jsonl")))
    for _ in range(2):
        again = study()
        decider = Decider(again.algorithm, again._search(again.trials))
        assert replay(events, History(), decider) == [], "replaying the log repeats every decision"
    for trial, rows in zip(result.trials, curves(result), strict=True):
        assert rows == alone(Noisy(), trial.number, trial.config, len(rows))


def test_4_another_order_of_reports_is_noticed():
    study(algorithm=ps.ASHA(max_budget=4, reduction=2, concurrency=4)).run(progress=False)
    events = list(read(Path(".penstock/s/log.jsonl")))
    reports = [i for i, e in enumerate(events) if isinstance(e, Reported)]
    noticed = 0
    for first, second in pairwise(reports):
        swapped = list(events)
        swapped[first], swapped[second] = events[second], events[first]
        again = study(algorithm=ps.ASHA(max_budget=4, reduction=2, concurrency=4))
        try:
            replay(swapped, History(), Decider(again.algorithm, again._search(again.trials)))
        except ps.StudyError:
            noticed += 1
    assert noticed > 2


def test_5_a_state_is_written_before_the_line_that_names_it_and_an_older_one_goes_only_after(monkeypatch):
    append, named = Log.append, {}

    def checked(log, event):
        for file in named.values():
            assert (log.dir / "states" / file).exists(), "a state went before the line that makes it needless"
        if isinstance(event, Reported | Saved) and event.state is not None:
            assert (log.dir / "states" / event.state.file).exists(), "a line names a state that is not there"
        append(log, event)
        if isinstance(event, Reported | Saved) and event.state is not None:
            named[event.trial] = event.state.file
        if type(event).__name__ == "Dropped":
            for trial in event.trials:
                named.pop(trial, None)

    monkeypatch.setattr(Log, "append", checked)
    monkeypatch.setattr(Log, "tick", Log.sync)  # a sync a line, so that needless states go at once
    study().run(progress=False)
    assert named


def test_5_a_placement_is_logged_before_it_takes_effect(monkeypatch):
    from penstock.executors.local import LocalExecutor

    place, seen = LocalExecutor.place, []

    def checked(executor, bundle):
        logged = [(e.trial, e.attempt) for e in read(Path(".penstock/s/log.jsonl")) if isinstance(e, Placed)]
        seen.extend((p.trial, p.attempt) for p in bundle.placements)
        assert seen == logged
        place(executor, bundle)

    monkeypatch.setattr(LocalExecutor, "place", checked)
    study().run(progress=False)
    assert seen


def test_5_between_reports_states_are_written_as_often_as_costs_little(monkeypatch):
    for run in ("solo", "fused"):
        monkeypatch.setattr(f"penstock.training.runs.{run}.SAVING", float("inf"))  # saving is free: save at every step
    study(Blobs(), algorithm=ps.Random(budget=2), trials=1).run(progress=False)
    events = list(read(Path(".penstock/s/log.jsonl")))
    assert [e.state.step for e in events if isinstance(e, Saved)] == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert len(list(Path(".penstock/s/states").iterdir())) == 1


def modules(*folders):
    return [path for folder in folders for path in sorted(SOURCE.glob(folder))]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_6_nothing_above_the_executor_reads_the_machines_clock():
    above = modules(
        *("study.py", "running.py", "settings.py", "result.py", "engine/*.py", "log/history.py", "log/changes.py"),
        *("algorithms/*.py", "scheduling/**/*.py"),
    )
    assert len(above) > 10
    for path in above:
        assert "time" not in set(imports(path)), path


def test_9_trials_are_a_total_over_any_number_of_resumes():
    for _ in range(3):
        result = study(trials=5).run(progress=False)
    asked = [e.trial for e in read(Path(".penstock/s/log.jsonl")) if isinstance(e, Asked)]
    assert len(result.trials) == len(set(asked)) == 5


LEVELS = [
    ["cli"],
    ["recurring"],
    ["dry_steps"],
    [
        "study",
        "running",
        "transferring",
        "plans",
        "stopping",
        "settings",
        "report",
        "result",
        "opening",
        "goal",
        "reading",
        "arguments",
    ],
    ["engine"],
    ["planning"],
    ["algorithms", "scheduling"],
    ["executors"],
    ["training", "surrogate"],
    ["energy"],
    ["bundle"],
    ["log"],
    ["task"],
    ["tabulated"],
    ["speed"],
    ["space"],
    ["domains"],
    ["trial", "seeds", "errors", "numeric", "saying"],
]


def test_no_module_holds_two_ideas():
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert len(lengths) > 300
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_imports_point_down():
    level = {name: i for i, names in enumerate(LEVELS) for name in names}
    checked = 0
    for path in SOURCE.rglob("*.py"):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for module in imports(path):
            if module and module.startswith("penstock."):
                other = module.split(".")[1]
                assert level[own] <= level[other], f"{path} imports {module}"
                checked += 1
    assert checked > 50


@pytest.mark.parametrize(("package", "homes"), [("torch", ("training", "surrogate")), ("ray", ()), ("fsspec", ())])
def test_packages_are_imported_where_they_belong(package, homes):
    for path in SOURCE.rglob("*.py"):
        top = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {a.name.split(".")[0] for n in top for a in n.names} | {getattr(n, "module", "") or "" for n in top}
        if package in {name.split(".")[0] for name in names}:
            assert path.relative_to(SOURCE).parts[0] in homes, path
