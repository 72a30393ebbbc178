"""Profiles: the size that measurements choose, and a cache that costs nothing when it is damaged."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.speed import profiles as module
from penstock.speed.profiles import Profile, Profiles
from penstock.speed.sizes import best_size, marginal_benefit, most

PROFILE = Profile(
    task="Digits 1f",
    device="H200 torch 2.13.0",
    signature="a" * 40,
    kind="sharing",
    table={1: 0.1 + 0.2, 2: 1e-300, 64: 3.5},
    size=64,
    way="native",
    reason="64 together train 2.3× as fast — one ünit",
)
KEY = (PROFILE.task, PROFILE.device, PROFILE.signature, PROFILE.kind)


def named(signature):
    return (*KEY[:2], signature, PROFILE.kind)


def throughput(**steps):
    """Seconds of a bundle's step from model steps per second, as benches print them: ``x8=58`` is 58 at size 8."""
    return {int(size[1:]): int(size[1:]) / rate for size, rate in steps.items()}


# The size


def test_the_marginal_benefit_is_fluids_for_one_more_trial_and_for_a_doubling():
    seconds = {1: 1.0, 2: 1.2, 4: 1.8}
    assert marginal_benefit(seconds, 1, 2) == pytest.approx(1 - (1 / 2) * (1.2 / 1.0))  # Fluid's O^2
    assert marginal_benefit(seconds, 2, 4) == pytest.approx(1 - (1.8 / 4) / (1.2 / 2))
    assert (1 - marginal_benefit(seconds, 1, 4)) ** 2 == pytest.approx((1.8 / 4) / 1.0)


def test_the_marginal_benefit_of_neighbours_and_of_extremes_is_a_number():
    seconds = {1: 1e-300, 135: 0.1, 136: 250.0, 137: 1e300, 300: 5e-324}
    assert marginal_benefit(seconds, 135, 136) < -1e100
    assert marginal_benefit(seconds, 136, 137) < -1e100
    assert marginal_benefit(seconds, 137, 300) == 1
    assert best_size(seconds, 137) == 1


def test_a_bundle_grows_until_a_doubling_pays_too_little():
    assert best_size({1: 1, 2: 1.1, 4: 1.3, 8: 2.5, 16: 5.0, 32: 10.0}, 64) == 4
    assert best_size({1: 1, 2: 1.1, 4: 1.3, 8: 2.3, 16: 4.6, 32: 9.2}, 64) == 8
    assert best_size({1: 1, 2: 1.1, 4: 1.3, 8: 2.3, 16: 4.6, 32: 9.2}, 64, threshold=0.2) == 4
    assert best_size({1: 1, 2: 1.1, 4: 1.3, 8: 2.5, 16: 4.9, 32: 9.9}, 64, threshold=0.0) == 16


@pytest.mark.parametrize(
    ("seconds", "size"),
    [
        (throughput(x1=1535, x128=11355), 128),
        (throughput(x1=1535, x2=2400, x4=3900, x8=5900, x16=7900, x32=9500, x64=10600, x128=11355), 64),
        (throughput(x1=330, x64=746), 64),
        (throughput(x1=737, x32=726), 1),
        (throughput(x1=737, x2=760, x4=790, x8=770, x16=740, x32=726), 1),
        (throughput(x1=99, x8=58, x32=30), 1),
        (throughput(x1=128, x16=583, x32=583, x64=583), 16),
        (throughput(x1=738, x256=31480), 256),
    ],
)
def test_measured_models_get_the_size_that_pays(seconds, size):
    assert best_size(seconds, ceiling=max(seconds)) == size


def test_one_bad_measurement_does_not_stop_growth():
    clean = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7, 16: 2.5, 32: 4.8, 64: 9.6}
    assert best_size(clean, 64) == 16
    for bad in (2, 4, 8):
        assert best_size(clean | {bad: 3 * clean[bad]}, 64) == 16
    assert best_size(clean | {16: 3 * clean[16]}, 64) == 32  # two doublings from 8 still pay
    assert best_size({1: 1.0, 2: 1.9, 4: 3.9, 8: 1000.0, 16: 15.9}, 64) == 1


def test_the_ceiling_decides_where_nothing_is_measured_against_it():
    growing = {1: 1.0, 2: 1.1, 4: 1.2}
    assert best_size(growing, 4) == 4
    assert best_size(growing, 100) == 100
    assert best_size(growing, 3) == 3  # 4 would be taken
    assert best_size(growing, 1) == 1
    assert best_size(growing, 0) == 1
    assert best_size(growing | {8: 2.4}, 100) == 4
    assert best_size(growing | {8: 2.4}, 6) == 4
    assert best_size(growing | {8: 9.0, 16: 2.0}, 12) == 4  # 8 is known to be slow
    assert best_size({1: 1.0, 2: 2.5, 4: 1.2}, 3) == 1
    assert best_size({1: 1.0}, 100) == 1


def test_without_a_measurement_alone_nothing_says_that_fusing_pays():
    assert best_size({}, 8) == 1
    assert best_size({2: 1.0, 4: 1.0}, 8) == 1
    for bad in (0.0, -1.0, math.nan, math.inf):
        assert best_size({1: bad, 2: 1.0, 4: 1.0}, 8) == 1
        assert best_size({1: 1.0, 2: 1.0, 4: bad}, 8) == 8  # as if 4 had not been measured
        assert best_size({1: 1.0, 2: 1.0, 4: bad, 8: 8.0}, 8) == 2


@settings(deadline=None)
@given(
    st.dictionaries(st.integers(2, 300), st.floats(1e-3, 1e3), max_size=8),
    st.floats(1e-3, 1e3),
    st.integers(0, 400),
    st.sampled_from([0.05, 0.1, 0.3]),
)
def test_a_chosen_size_fits_beats_every_smaller_one_and_is_not_beaten_by_a_larger_one(others, solo, ceiling, threshold):
    seconds = dict(sorted(({1: solo} | others).items(), reverse=True))
    size = best_size(seconds, ceiling, threshold)
    assert 1 <= size <= max(1, ceiling)
    if size in seconds:
        assert seconds[size] / size <= solo
        for other in seconds:
            if other < size:
                assert marginal_benefit(seconds, other, size) >= threshold - 1e-9
            if size < other <= ceiling:
                assert marginal_benefit(seconds, size, other) < threshold + 1e-9
    else:
        assert size == ceiling > 1
        assert max(s for s in seconds if s < ceiling) > 1


def test_memory_bounds_the_size():
    assert most((200, 100), 1000, margin=0) == 8
    assert most((200, 100), 999, margin=0) == 7
    assert most((200, 100), 1000) == 7
    assert most((200, 100), 333) == most((200, 100), 333, margin=0.2) == 0
    assert most((200, 100), 334) == 1
    assert most((2000, 100), 1000) == most((0, 100), -5) == 0
    assert most((200, 0), 1000) == most((200, -3), 1000) == sys.maxsize
    assert most((2000, 0), 1000) == 0


# The file


def test_a_profile_comes_back_as_it_was(tmp_path):
    path = tmp_path / "deep" / "er" / "profiles.jsonl"
    profiles = Profiles.open(path)
    assert profiles.get(*KEY) is None
    profiles.put(PROFILE)
    assert profiles.get(*KEY) == PROFILE
    assert Profiles.open(str(path)).get(*KEY) == PROFILE
    for other in (("x", *KEY[1:]), (KEY[0], "x", *KEY[2:]), named("x"), (*KEY[:3], "scaling")):
        assert Profiles.open(path).get(*other) is None


def test_opening_writes_nothing(tmp_path):
    Profiles.open(tmp_path / "deep" / "profiles.jsonl")
    assert not list(tmp_path.iterdir())


def test_a_profile_of_numbers_alone_comes_back(tmp_path):
    profile = Profile(*KEY[:3], "moving", {0: 0.0, 1: 1.5})
    Profiles.open(tmp_path / "p").put(profile)
    assert Profiles.open(tmp_path / "p").get(*KEY[:3], "moving") == profile
    assert (profile.size, profile.way, profile.reason) == (0, "", "")


def test_what_is_known_already_is_not_written_again(tmp_path):
    Profiles.open(tmp_path / "p").put(PROFILE)
    again = Profiles.open(tmp_path / "p")
    again.put(replace(PROFILE, table=dict(PROFILE.table)))
    assert len(lines(tmp_path / "p")) == 1
    again.put(replace(PROFILE, reason="another"))
    assert len(lines(tmp_path / "p")) == 2


def test_what_is_not_to_be_kept_is_known_to_this_study_alone(tmp_path):
    Profiles.open(tmp_path / "p").put(PROFILE)
    profiles = Profiles.open(tmp_path / "p", kept=False)
    assert profiles.get(*KEY) == PROFILE
    profiles.put(replace(PROFILE, size=2))
    assert profiles.get(*KEY).size == 2
    assert Profiles.open(tmp_path / "p").get(*KEY) == PROFILE
    Profiles.open(tmp_path / "deep" / "q", kept=False).put(PROFILE)
    assert [one.name for one in tmp_path.iterdir()] == ["p"]


# Kinds of measurement

SCALING = Profile(*KEY[:3], "scaling", {1: 3.0, 2: 1.75}, 2, "distributed", "2 devices")
UNIT = Profile(*KEY[:3], "unit", {1: 30.0})
MOVING = Profile(*KEY[:3], "moving", {0: 2.0, 1: 0.5})
REFUSED = Profile(*KEY[:3], "refusing", {}, 1, "solo", "item at task.py:3")  # it has no table
KINDS = (PROFILE, SCALING, UNIT, MOVING, REFUSED)


def kept(path):
    profiles = Profiles.open(path)
    return {one.kind: profiles.get(*KEY[:3], one.kind) for one in KINDS}


def test_measurements_of_several_kinds_lie_side_by_side_whoever_writes_them_and_when(tmp_path):
    first, second = Profiles.open(tmp_path / "p"), Profiles.open(tmp_path / "p")
    first.put(PROFILE)
    second.put(SCALING)  # that object has never seen the first one's line
    first.put(UNIT)
    second.put(MOVING)
    second.put(REFUSED)
    assert kept(tmp_path / "p") == {one.kind: one for one in KINDS}
    second.put(replace(MOVING, table={0: 9.0, 1: 9.0}))
    first.put(replace(UNIT, table={1: 7.0}))
    assert kept(tmp_path / "p")["sharing"] == PROFILE
    assert kept(tmp_path / "p")["scaling"] == SCALING
    assert kept(tmp_path / "p")["unit"].table == {1: 7.0}
    assert kept(tmp_path / "p")["moving"].table == {0: 9.0, 1: 9.0}


def test_measurements_of_several_kinds_survive_a_rewrite(tmp_path, monkeypatch):
    profiles = Profiles.open(tmp_path / "p")
    for one in KINDS:
        profiles.put(one)
    for i in range(20):
        profiles.put(replace(UNIT, table={1: float(i)}))
    monkeypatch.setattr(module, "LINES", 10)
    Profiles.open(tmp_path / "p")
    assert len(lines(tmp_path / "p")) == 5
    assert kept(tmp_path / "p") == {one.kind: one for one in (*KINDS, replace(UNIT, table={1: 19.0}))}


def test_all_that_is_known_of_a_task_on_a_device_is_found(tmp_path):
    profiles = Profiles.open(tmp_path / "p")
    for one in (*KINDS, replace(UNIT, signature="b"), replace(UNIT, task="other"), replace(UNIT, device="cpu")):
        profiles.put(one)
    assert Profiles.open(tmp_path / "p").of(*KEY[:2]) == [*KINDS, replace(UNIT, signature="b")]


IN_TURNS = """
import sys
from dataclasses import replace
from penstock.speed.profiles import Profiles
from tests.speed.test_profiles import KINDS
profiles = Profiles.open("p")
print("ready", flush=True)
for line in sys.stdin:
    profiles.put(KINDS[int(line)])
    print("done", flush=True)
"""


def test_two_processes_that_measure_in_turns_lose_nothing_of_each_other(tmp_path):
    both = [started(tmp_path, IN_TURNS) for _ in range(2)]
    for one in both:
        assert one.stdout.readline() == "ready\n", "both have opened the file, which is not there yet"
    for i in range(len(KINDS)):
        one = both[i % 2]
        one.stdin.write(f"{i}\n")
        one.stdin.flush()
        assert one.stdout.readline() == "done\n"
    for one in both:
        one.communicate(timeout=60)
        assert one.returncode == 0
    assert kept(tmp_path / "p") == {one.kind: one for one in KINDS}


def test_the_last_one_counts(tmp_path):
    first, second = Profiles.open(tmp_path / "p"), Profiles.open(tmp_path / "p")
    first.put(replace(PROFILE, size=2))
    second.put(replace(PROFILE, size=4))
    assert Profiles.open(tmp_path / "p").get(*KEY).size == 4
    first.put(replace(PROFILE, size=8))
    assert Profiles.open(tmp_path / "p").get(*KEY).size == 8
    assert len((tmp_path / "p").read_bytes().splitlines()) == 3


LINE = json.dumps(vars(PROFILE)).encode()
TABLE = json.dumps(PROFILE.table).encode()


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\n\n",
        b"\xff\xfe\x00",
        b"not json",
        b"[]",
        b"1",
        b"null",
        b"[" * 100_000,
        b"9" * 10_000,
        LINE[: len(LINE) // 2],
        LINE + LINE,
        LINE.replace(b'"size": 64', b'"size": "64"'),
        LINE.replace(b'"size": 64', b'"size": -1'),
        LINE.replace(b'"size": 64', b'"size": true'),
        LINE.replace(b'"size": 64', b'"size": 64, "more": 1'),
        LINE.replace(b'"native"', b"7"),
        LINE.replace(b'"native"', b"[]"),
        LINE.replace(b'"Digits 1f"', b"[]"),
        LINE.replace(b'"64": 3.5', b'"many": 3.5'),
        LINE.replace(b'"64": 3.5', b'"64": "long"'),
        LINE.replace(b'"64": 3.5', b'"64": null'),
        LINE.replace(b'"64": 3.5', b'"64": -1.0'),
        LINE.replace(b'"64": 3.5', b'"64": Infinity'),
        LINE.replace(b'"64": 3.5', b'"64": NaN'),
        LINE.replace(b'"table"', b'"seconds"'),
        LINE.replace(TABLE, b"{}"),
        LINE.replace(TABLE, b"[1.0]"),
        LINE.replace(TABLE, b"7"),
        LINE.replace(b'"sharing"', b'"packing"'),
        LINE.replace(b'"sharing"', b"7"),
        LINE.replace(b'"sharing"', b"[]"),
        LINE.replace(b'"kind": "sharing", ', b""),
    ],
)
def test_a_damaged_line_is_passed_over(tmp_path, garbage):
    assert garbage != LINE
    path = tmp_path / "p"
    path.write_bytes(garbage)
    assert Profiles.open(path).get(*KEY) is None
    before, after = (replace(PROFILE, signature=name) for name in ("before", "after"))
    path.unlink()
    Profiles.open(path).put(before)
    with path.open("ab") as file:
        file.write(garbage + b"\n")
    Profiles.open(path).put(after)
    profiles = Profiles.open(path)
    assert profiles.get(*KEY) is None
    assert profiles.get(*named("before")) == before
    assert profiles.get(*named("after")) == after


def test_a_line_that_was_torn_costs_only_itself(tmp_path):
    path = tmp_path / "p"
    Profiles.open(path).put(replace(PROFILE, signature="first"))
    Profiles.open(path).put(replace(PROFILE, signature="torn"))
    whole = path.read_bytes()
    for cut in (2, 20, 100):
        path.write_bytes(whole[:-cut])
        Profiles.open(path).put(PROFILE)
        profiles = Profiles.open(path)
        assert profiles.get(*KEY) == PROFILE
        assert profiles.get(*named("first")) is not None
        assert profiles.get(*named("torn")) is None
    path.write_bytes(whole[:-1])  # whole but for its newline
    Profiles.open(path).put(PROFILE)
    assert Profiles.open(path).get(*KEY) == PROFILE
    assert Profiles.open(path).get(*named("torn")) is not None


def test_a_file_that_cannot_be_read_or_written_fails_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "folder", tmp_path / "file" / "p", tmp_path / ("n" * 300), "/proc/none/p"):
        profiles = Profiles.open(path)
        profiles.put(PROFILE)
        assert profiles.get(*KEY) == PROFILE  # this study still knows
        assert Profiles.open(path).get(*KEY) is None


def test_a_full_disk_fails_nothing_and_is_no_worse_than_a_torn_line(tmp_path, monkeypatch):
    write = os.write
    profiles = Profiles.open(tmp_path / "p")
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:30]))
    profiles.put(replace(PROFILE, signature="half"))

    def full(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    profiles.put(replace(PROFILE, signature="none"))
    monkeypatch.undo()
    profiles.put(PROFILE)
    assert Profiles.open(tmp_path / "p").get(*KEY) == PROFILE
    assert profiles.get(*named("none")) is not None


def test_no_file_stays_open(tmp_path):
    profiles = Profiles.open(tmp_path / "p")
    before = len(os.listdir("/proc/self/fd"))
    for size in range(5):
        profiles.put(replace(PROFILE, size=size))
    assert len(os.listdir("/proc/self/fd")) == before


def lines(path):
    return path.read_bytes().splitlines()


def test_a_long_file_is_compacted_when_it_is_opened(tmp_path):
    path = tmp_path / "p"
    profiles = Profiles.open(path)
    for i in range(module.LINES):
        profiles.put(replace(PROFILE, signature=str(i % 7), size=i + 1))
    Profiles.open(path)
    assert len(lines(path)) == module.LINES  # not yet
    with path.open("ab") as file:
        file.write(b"garbage\n")
    opened = Profiles.open(path)
    assert len(lines(path)) == 7
    again = Profiles.open(path)
    for i in range(7):
        assert again.get(*named(str(i))) == opened.get(*named(str(i))) == profiles.get(*named(str(i)))
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_too_many_profiles_keeps_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LINES", 10)
    path = tmp_path / "p"
    profiles = Profiles.open(path)
    for i, name in enumerate([*range(11), 0]):
        profiles.put(replace(PROFILE, signature=str(name), size=i))
    assert Profiles.open(path).get(*named("3")) is not None  # the study that compacts has read them all
    assert [json.loads(line)["signature"] for line in lines(path)] == ["7", "8", "9", "10", "0"]


def test_a_long_file_that_cannot_be_rewritten_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LINES", 3)
    path = tmp_path / "p"
    path.write_bytes(b"".join(LINE.replace(b"a" * 40, b"%d" % i) + b"\n" for i in range(5)))

    def refuse(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.replace", refuse)
    profiles = Profiles.open(path)
    assert all(profiles.get(*named(str(i))) for i in range(5))
    assert len(lines(path)) == 5
    assert list(tmp_path.iterdir()) == [path]


APPEND = """
import sys
from dataclasses import replace
from pathlib import Path
from penstock.speed.profiles import Profiles
from tests.speed.test_profiles import PROFILE
profiles = Profiles.open("p")
print("ready", flush=True)
sys.stdin.readline()
for i in range(300):
    profiles.put(replace(PROFILE, signature=f"{sys.argv[1]} {i}", reason=sys.argv[1] * 3000))
"""


def started(folder, code, *arguments):
    """A process that runs code in a folder, and is told and tells by lines."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_processes_append_at_once(tmp_path):
    both = [started(tmp_path, APPEND, name) for name in "xy"]
    for one in both:
        assert one.stdout.readline() == "ready\n"
    for one in both:
        one.stdin.write("go\n")
        one.stdin.flush()
    for one in both:
        one.communicate(timeout=60)
        assert one.returncode == 0
    names = [json.loads(line)["signature"] for line in lines(tmp_path / "p") if line]
    assert sorted(names) == sorted(f"{name} {i}" for name in "xy" for i in range(300))
    for name in "xy":  # each in its own order
        assert [n for n in names if n.startswith(name)] == [f"{name} {i}" for i in range(300)]
    profiles = Profiles.open(tmp_path / "p")
    assert all(profiles.get(*named(name)).reason == name[0] * 3000 for name in names)


def test_neither_module_needs_torch():
    code = "import sys, penstock.speed.profiles, penstock.scheduling.grouping; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
