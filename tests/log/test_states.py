"""States in any place: the class, whole studies, kills, and what is refused before anything trains."""

import json
import os
import pickle
import random
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock.cli.app import app
from penstock.log import owners
from penstock.log.events import Failed, Opened, Placed
from penstock.log.history import History
from penstock.log.states import Folder, States, Store
from penstock.report import summary, tables
from penstock.training.checkpoint import load, save
from penstock.trial import StateRef
from tests.disk import Disk, DiskBlobs
from tests.studies import log, studies, version_2
from tests.tasks import Blobs, trivial
from tests.test_crash import KilledAt, found, in_a_child

SPACE = {"lr": ps.loguniform(1e-3, 1)}
PLACES = ["{}", "file://{}", "disk://{}"]
LARGE = bytes(range(256)) * 8


study = studies(DiskBlobs, SPACE, algorithm=ps.SuccessiveHalving(max_budget=4, reduction=2), trials=6)


def run(**settings):
    how = {key: settings.pop(key) for key in ("workers", "allow_changes") if key in settings}
    return study(**settings).run(progress=False, sharing="solo", **how)


def files(dir):
    return sorted(path.name for path in Path(dir).iterdir() if path.name != owners.FILE)


# The class


@pytest.fixture(params=[*PLACES, "memory://{}"])
def states(request, tmp_path):
    return States.of(request.param.format(tmp_path / "some where"))


@pytest.mark.parametrize("content", [b"12\n", LARGE, memoryview(LARGE)], ids=["few", "many", "a view"])
def test_what_is_written_is_read_counted_and_deleted(states, content):
    assert states.names() == []
    assert states.size("000000-1-6.pt") is None
    states.write("000000-1-6.pt", content)
    states.write("000001-1-6.pt", b"another")
    states.write("000001-1-6.pt", content)  # again: the later one stands
    assert sorted(states.names()) == ["000000-1-6.pt", "000001-1-6.pt"]
    for name in states.names():
        states.sync(name)
        assert states.size(name) == len(content)
        with states.read(name) as file:
            assert file.read() == content
    states.delete("000002-1-6.pt", "000000-1-6.pt", "000003-1-6.pt", "000001-1-6.pt")
    assert states.names() == []
    with pytest.raises(FileNotFoundError):
        states.read("000000-1-6.pt")


def test_it_travels_to_workers_and_has_places_inside(states):
    assert pickle.loads(pickle.dumps(states)) == states
    states.under("a").write("000000-1-6.pt", LARGE)
    assert states.names() == []
    assert States.of(f"{states}/a").names() == ["000000-1-6.pt"]
    assert states.under("a").where("000000-1-6.pt") == f"{states}/a/000000-1-6.pt"


def test_a_probe_leaves_nothing(states, tmp_path):
    states.probe()
    assert states.names() == []
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    if isinstance(states, Folder):
        assert not states.dir.exists(), "a study that is refused later leaves no trace"


def test_a_path_and_a_file_url_are_a_folder_and_no_fsspec_is_asked(monkeypatch, tmp_path):
    assert States.of(f"file://{tmp_path}/a/") == States.of(tmp_path / "a") == Folder(tmp_path / "a")
    assert States.of("a") == Folder(tmp_path / "a"), "workers may have another current directory"
    assert States.of("s3://bucket/a/") == Store("s3://bucket/a")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    States.of(f"file://{tmp_path}").write("000000-1-6.pt", LARGE)


def test_listings_that_are_remembered_are_asked_for_anew(tmp_path):
    states = States.of(f"disk://{tmp_path}")
    assert states.names() == []
    (tmp_path / "000000-1-6.pt").write_bytes(b"by a worker")
    assert states.names() == ["000000-1-6.pt"]


def test_what_is_not_a_state_is_not_touched(states):
    states.write("000000-1-6.pt", LARGE)
    states.write("model.pt", LARGE)
    states.write("7-photos.pt", LARGE)
    assert states.names() == ["000000-1-6.pt"]
    assert states.size("model.pt") == len(LARGE)


@pytest.mark.parametrize("place", PLACES)
def test_what_is_cut_short_has_no_states_name(place, tmp_path, monkeypatch):
    states = States.of(place.format(tmp_path))

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", broken)
    monkeypatch.setattr(Disk, "mv", broken)
    with pytest.raises(KeyboardInterrupt):
        states.write("000000-1-6.pt", LARGE)
    assert states.names() == ["000000-1-6.pt.partial"]


def test_object_stores_put_a_state_whole(monkeypatch):
    monkeypatch.setattr("penstock.log.states.OBJECT_STORES", {"memory"})
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.mv", None)
    states = States.of("memory://bucket")
    states.write("000000-1-6.pt", LARGE)
    assert states.names() == ["000000-1-6.pt"]


def raising(error):
    def method(*_, **__):
        raise error

    return method


@pytest.mark.parametrize(
    ("place", "broken", "message"),
    [
        ("s3://bucket", {}, r"in s3://bucket/s, .*not installed: Install s3fs to access S3\. Or choose another place"),
        ("what://bucket", {}, r"in what://bucket/s: expected a protocol that fsspec knows"),
        ("disk:///x", {"pipe_file": PermissionError("Access Denied")}, r"PermissionError: Access Denied.*permissions"),
        ("disk:///x", {"pipe_file": FileNotFoundError("NoSuchBucket")}, r"no such bucket or folder \(NoSuchBucket\)"),
        ("disk:///x", {"pipe_file": OSError(2, "ENOENT")}, r"there is no such bucket or folder"),
        ("disk:///x", {"rm": PermissionError("no deleting")}, r"PermissionError: no deleting"),
        ("/proc/x", {}, r"in /proc/x/s: there is no such bucket or folder"),
        ("file://{}", {}, r"in .*/file/s \(NotADirectoryError: "),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_before_anything_trains(place, broken, message, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setattr(Disk, "makedirs", lambda *_, **__: None)
    monkeypatch.setattr(Disk, "mv", lambda *_: None)
    monkeypatch.setattr(Disk, "cat_file", lambda *_: b"")
    monkeypatch.setattr(Disk, "pipe_file", lambda *_: None)
    for name, error in broken.items():
        monkeypatch.setattr(Disk, name, raising(error))
    monkeypatch.setattr(Blobs, "data", raising(AssertionError("it trained")))
    with pytest.raises(ps.StudyError, match=message) as refused:
        run(states=place.format(tmp_path / "file"))
    assert "\n" not in str(refused.value)
    assert str(refused.value).endswith("choose another place with states= or --states.")
    assert not Path(".penstock/s").exists(), "nothing was begun"


def test_a_place_that_cannot_be_listed_is_refused_while_a_name_is_chosen(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ps.StudyError, match=r"Cannot reach the states in .*/file/diskblobs-1 \(NotADirectoryError"):
        run(states="file", name=None)


def test_a_place_that_gives_back_something_else_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(Disk, "cat_file", lambda *_: b"else")
    with pytest.raises(ps.StudyError, match=r"Expected to read from .* what was written there, got b'else'"):
        States.of(f"disk://{tmp_path}").probe()


@pytest.mark.parametrize(
    "place", ["", 3, "simplecache::s3://bucket", Path("s3://bucket"), "file://shared", "s3:/bucket"]
)
def test_what_cannot_be_a_place_is_refused_at_once(place):
    with pytest.raises(ps.StudyError, match="got "):
        study(states=place)


def test_a_state_that_is_gone_or_cut_is_an_error_that_names_it(states):
    ref = save({"unit": 1, "step": 6}, states, "000000-1-6.pt")
    assert load(states, ref) == {"unit": 1, "step": 6}
    with states.read(ref.file) as file:
        states.write(ref.file, file.read()[:100])
    for name in (ref.file, "000001-1-6.pt"):
        with pytest.raises(ps.TaskError, match=rf"The state {states.where(name)} cannot be read .* {ref.bytes} bytes"):
            load(states, StateRef(name, 1, 6, ref.bytes))


# Whole studies


@pytest.mark.parametrize(("place", "workers"), [*((place, 1) for place in PLACES), (PLACES[-1], 2)])
def test_a_study_with_its_states_elsewhere_pauses_goes_on_and_finds_the_same(place, workers, tmp_path):
    place = place.format(tmp_path / "shared")
    whole = run(name="whole")
    paused = run(states=place, target=10.0)  # reached by the first report
    assert paused.ended == "target"
    assert 0 < len(paused.trials[0].curve) < 4
    there = files("shared/s")
    assert there
    result = run(states=place, workers=workers)
    assert any(e.state is not None for e in log() if isinstance(e, Placed)), "none went on from a state"
    assert found(result) == found(whole)
    (kept,) = files("shared/s")  # what nothing needs any more is deleted there too
    assert int(kept.split("-")[0]) == result.best.number
    for one, other in zip(result.best.model().parameters(), whole.best.model().parameters(), strict=True):
        assert one.equal(other)
    assert Path(".penstock/s/best.pt").is_file()
    assert not Path(".penstock/s/states").exists()


def test_a_study_in_memory_has_one_process(tmp_path):
    result = run(states="memory://here")
    assert result.best.model()
    assert len(States.of("memory://here/s").names()) == 1
    with pytest.raises(ps.StudyError, match="a place that all workers reach, got states='memory://here'"):
        run(states="memory://here", workers=2)


@pytest.mark.parametrize("task", [trivial, ps.TabulatedTask(lambda c: ps.Tabulated({"loss": [c["x"]] * 4}, seconds=1))])
def test_simulated_trials_write_there_too(task, tmp_path):
    result = study(task, space={"x": ps.uniform(0, 4)}, states=f"disk://{tmp_path}/shared").run(
        on=ps.Simulated(devices=2, unit_seconds=1 if task is trivial else None), progress=False
    )
    (kept,) = files("shared/s")
    assert int(kept.split("-")[0]) == result.best.number


class Killed:
    """Kills the process in the middle of, or right after, the n-th state that is written through fsspec."""

    def __init__(self, n, moment):
        self.left, write, move = n, Disk.pipe_file, Disk.mv

        def pipe_file(files, path, value, **kwargs):
            self.left -= path.endswith(".pt.partial")
            write(files, path, value[: len(value) // 2] if self.left == 0 and moment == "middle" else value, **kwargs)
            if self.left == 0 and moment != "after":
                os.kill(os.getpid(), signal.SIGKILL)

        def mv(files, path, target, **kwargs):
            move(files, path, target, **kwargs)
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        Disk.pipe_file, Disk.mv = pipe_file, mv


@pytest.mark.parametrize("place", PLACES[1:])
def test_killed_at_a_write_nothing_torn_is_taken_for_a_state(place, tmp_path):
    whole = found(run(name="whole"))
    rng, torn = random.Random(0), 0
    for point in range(6):
        n, moment = rng.randint(2, 9), ("before", "middle", "after")[point % 3]
        settings = dict(states=place.format(tmp_path / str(point)), dir=tmp_path / f"log {point}")

        def killed(n=n, moment=moment, settings=settings):
            if "disk:" in settings["states"]:
                Killed(n, moment)
            else:
                KilledAt(3 * n, moment)
            run(**settings)

        assert os.WIFSIGNALED(in_a_child(killed)), (n, moment)
        states = States.of(settings["states"]).under("s")
        for name in states.names():
            torn += name.endswith(".partial")
            if name.endswith(".pt"):
                assert load(states, StateRef(name, 0, 0, states.size(name)))["step"] == int(name[:-3].split("-")[2])
        result = run(**settings)
        assert found(result) == whole, (n, moment)
        assert len(files(tmp_path / str(point) / "s")) == 1
    assert torn, "no kill came while a state was being written"


def test_a_place_that_is_out_of_reach_when_states_are_deleted_ends_no_study(tmp_path, monkeypatch):
    place, delete = f"disk://{tmp_path}/shared", Store.delete

    def broken(states, *names):
        delete(states, *names)
        if not names[0].startswith("probe"):
            raise ps.StudyError("the network is down")

    monkeypatch.setattr(Store, "delete", broken)
    assert run(states=place).ended == "done"


# Which place, and what is refused


@pytest.fixture
def command(tmp_path):
    (tmp_path / "file.py").write_text(
        "import penstock as ps\nfrom tests.tasks import Blobs\n"
        "study = ps.Study(Blobs(), {'lr': ps.loguniform(1e-3, 1)}, metric='loss', mode='min', trials=4,"
        " algorithm=ps.ASHA(max_budget=4, reduction=2))\n"
    )

    def command(*arguments, code=0):
        done = CliRunner().invoke(app, [*arguments, "--sharing", "solo", "--json"])
        assert done.exit_code == code, done.output
        return done

    return command


def test_the_log_keeps_the_place_and_the_command_line_finds_it_again(command, tmp_path):
    run_it = ("run", "file.py", "--name", "s")
    command(*run_it, "--states", "shared", "--target", "10")
    before = files("shared/s")
    assert log()[0].settings["states"] == str(tmp_path / "shared")
    assert "give states=" in command(*run_it, code=1).stderr
    facts = json.loads(command("resume", "s", "--target", "0").stdout)
    assert facts["states"] == str(tmp_path / "shared")
    assert facts["state_bytes"] == sum(path.stat().st_size for path in Path("shared/s").glob("*.pt")) > 0
    assert before != files("shared/s")
    (tmp_path / "moved").mkdir()
    (tmp_path / "shared" / "s").rename(tmp_path / "moved" / "s")
    command("resume", "s", "--states", "moved")
    assert not Path(".penstock/s/states").exists()


def test_a_log_from_before_there_was_a_choice_goes_on(command):
    command("run", "file.py", "--name", "s", "--target", "10")
    path = Path(".penstock/s/log.jsonl")
    lines = version_2(path)
    assert lines[0]["settings"].pop("states") is None
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command("resume", "s", "--target", "0")
    assert any(e.state is not None for e in log() if isinstance(e, Placed))


@pytest.mark.parametrize(("before", "after"), [(None, "new"), ("old", "new"), ("old", None)])
def test_states_that_are_not_where_the_study_now_says_are_refused(before, after, tmp_path):
    place = {"old": f"disk://{tmp_path}/old", "new": str(tmp_path / "new"), None: None}
    folder = {"old": "old/s", "new": "new/s", None: ".penstock/s/states"}
    run(states=place[before], target=10.0)
    lines = len(log())
    back = "leave states= .* out" if before is None else f"give states='{place[before]}' .--states."
    with pytest.raises(ps.StudyError, match=rf"has its states in .*{folder[before]}, got .*missing: {back}, or copy"):
        run(states=place[after])
    assert len(log()) == lines
    Path(folder[after]).parent.mkdir(parents=True, exist_ok=True)
    Path(folder[before]).rename(folder[after])
    result = run(states=place[after])  # they were brought there: nothing is trained again
    assert any(e.state is not None for e in log() if isinstance(e, Placed))
    assert found(result) == found(run(name="whole"))


def test_trials_begin_again_where_that_is_wanted(tmp_path):
    run(states="old", target=10.0)
    result = run(states="new", allow_changes=True)
    (_, opened) = [e for e in log() if isinstance(e, Opened)]
    assert opened.settings["states"] == str(tmp_path / "new")
    assert opened.settings["changed"] == []
    assert found(result) == found(run(name="whole"))
    assert len(files("new/s")) == 1


def test_a_study_that_needs_no_state_may_change_its_place():
    run(states="old", target=10.0)
    path = Path(".penstock/s/log.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))  # killed before the first state
    assert run(states="new").ended == "done"


def test_trials_that_took_over_others_states_begin_again_with_their_donors():
    algorithm = ps.PBT(population=4, max_budget=6, interval=1)
    settings = dict(algorithm=algorithm, trials=None, states="old")
    whole = run(**settings, name="whole")
    target = min(row["loss"] for trial in whole.trials for row in trial.curve if row["budget"] <= 3)
    run(**settings, target=target)
    assert any(t.copied_at >= 0 and t.status != "finished" for t in History.of(log()).trials)
    result = run(**{**settings, "states": "new"}, allow_changes=True)
    assert found(result) == found(whole)
    assert not any(isinstance(event, Failed) for event in log())


def test_the_states_of_another_study_are_left_alone(tmp_path):
    run(states="shared", dir="here")
    before = files("shared/s")
    with pytest.raises(ps.StudyError, match="shared/s holds the states of another study"):
        run(states="shared", dir="there")
    assert files("shared/s") == before
    assert not Path("there/s").exists()


def test_studies_without_a_name_on_several_machines_get_places_of_their_own():
    first = run(states="shared", dir="here", name=None)
    second = run(states="shared", dir="there", name=None)
    assert [first.dir.name, second.dir.name] == ["diskblobs-1", "diskblobs-2"]
    assert files("shared") == ["diskblobs-1", "diskblobs-2"]


def test_looking_at_a_study_asks_no_network(tmp_path, monkeypatch):
    result = run(states=f"disk://{tmp_path}/shared")
    size = sum(path.stat().st_size for path in Path("shared/s").glob("*.pt"))
    monkeypatch.setattr("fsspec.url_to_fs", raising(AssertionError("it asked")))
    facts = summary.study_facts(result.dir, summary.history_of(result.dir))
    assert facts["state_bytes"] == size > 0
    console = tables.console()
    with console.capture() as shown:
        console.print(tables.study_summary(facts))
    assert f"in disk://{tmp_path}/shared" in " ".join(shown.get().split())


def test_a_changed_study_keeps_its_place(tmp_path):
    assert study(states="shared").replace(trials=8).states == str(tmp_path / "shared")
    assert study(states="s3://bucket/").replace(states=None).states is None
