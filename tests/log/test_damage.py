"""Logs whose bytes were changed: noticed with one message, by versions with sums and by versions without."""

import io
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import penstock as ps
from penstock.algorithms.seen import read_study
from penstock.log.events import Asked
from penstock.log.history import History
from penstock.log.ranking import ranked
from penstock.log.reader import LogReader, read
from penstock.log.writer import Log
from penstock.report import summary, tables
from penstock.report.page import study_page
from tests.log.lines import ALL, write
from tests.report.studies import ended, fused
from tests.studies import version_2

FIRST_VERSION = Path(__file__).with_name("version-1.jsonl")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The bytes of logs by version, each of several studies."""
    dir, made = tmp_path_factory.mktemp("logs"), {1: [FIRST_VERSION.read_bytes()], 2: [], 3: []}
    for name, events in (("all", ALL), ("ended", ended()), ("fused", fused())):
        path = write(dir / name, *events)
        made[3].append(path.read_bytes())
        version_2(path)
        made[2].append(path.read_bytes())
    return made


def look_at(dir):
    """All that a person can look at of a study."""
    events = list(summary.events_of(dir))
    history = summary.history_of(dir)
    facts = {**summary.study_facts(dir, history), **summary.device_facts(dir)}
    console = Console(file=io.StringIO(), width=120)
    best = ranked(history.trials)
    shown = [tables.study_summary(facts), tables.measured(facts), tables.best_trials(history, best, console)]
    shown += [tables.study_list([facts]), tables.curves(history, best), tables.failures(history), tables.busy(facts)]
    for one in shown:
        console.print(one)
    json.loads(summary.to_json({**facts, "top": [summary.trial_facts(trial, True) for trial in best]}))
    study_page(dir.name, events, [trial.row() for trial in best])
    assert len(read_study(dir).trials) == len(history.trials)
    return events


def changed(data, draw):
    """Bytes with one to three of them changed, removed or added."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data) - 1))
        how = draw(st.sampled_from(["digit", "any", "bit", "remove", "add", "letter"]))
        if how == "remove":
            del data[at]
        elif how == "add":
            data.insert(at, draw(st.integers(0, 255)))
        elif how == "bit":
            data[at] ^= 1 << draw(st.integers(0, 7))
        else:  # bytes of one kind often stay JSON
            kinds = {"digit": b"0123456789-.e", "letter": b'abcxyz,:"[]{}', "any": bytes(range(256))}
            data[at] = draw(st.sampled_from(kinds[how]))
    return bytes(data)


@pytest.mark.parametrize("version", [1, 2, 3])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_changed_bytes_are_one_message_or_no_harm(logs, tmp_path_factory, version, data):
    dir = tmp_path_factory.getbasetemp() / f"damaged-{version}"
    dir.mkdir(exist_ok=True)
    before = data.draw(st.sampled_from(logs[version]))
    after = changed(before, data.draw)
    (dir / "log.jsonl").write_bytes(after)
    try:
        events = look_at(dir)
    except ps.PenstockError:  # any other error fails this test
        return
    if version == 3:  # a change that is not said changed nothing, or cut the last line off
        (dir / "log.jsonl").write_bytes(before)
        assert repr(events) == repr(list(read(dir / "log.jsonl"))[: len(events)])
        assert len(events) >= before.count(b"\n") - 1


def test_a_changed_bit_of_a_line_with_a_sum_is_noticed(tmp_path):
    path = write(tmp_path / "s", *ALL)
    whole, rng = path.read_bytes(), random.Random(0)
    for at in range(0, len(whole) - 1, 7):
        if whole[at : at + 1] == b"\n":
            continue
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        line = whole[:at].count(b"\n") + 1
        with pytest.raises(ps.LogError, match=rf"Line {line} of .* is damaged"):
            list(read(path))


def test_a_damaged_last_line_is_not_dropped(tmp_path):
    path = write(tmp_path / "s", *ALL)
    damaged = path.read_bytes().replace(b'"reason":"done"', b'"reason":"gone"')
    path.write_bytes(damaged)
    with pytest.raises(ps.LogError, match=rf"Line {len(ALL)} of .*its text does not fit its sum"):
        Log.open(tmp_path / "s")
    assert path.read_bytes() == damaged


@pytest.mark.parametrize(("setting", "folder"), [("home", "../victim/states"), ("home", ".."), ("name", "a/b")])
def test_a_log_leads_out_of_no_folder(tmp_path, setting, folder):
    opened = replace(ALL[0], settings={**ALL[0].settings, setting: folder})
    with pytest.raises(ps.LogError, match=f"{setting}: expected the name of one folder, got '{folder}'"):
        list(read(write(tmp_path / "s", opened, *ALL[1:])))


def test_a_line_whose_sum_was_taken_away_is_noticed(tmp_path):
    path = write(tmp_path / "s", *ALL)
    lines = path.read_text().splitlines(keepends=True)
    for number in (0, 4, len(lines) - 1):
        bare = lines[number].partition(',"sum"')[0] + "}\n"
        path.write_text("".join([*lines[:number], bare, *lines[number + 1 :]]))
        with pytest.raises(ps.LogError, match=rf"Line {number + 1} of .*its sum is missing"):
            list(read(path))


def test_a_log_without_sums_goes_on_with_sums(tmp_path):
    path = write(tmp_path / "s", *ALL[:4])
    version_2(path)
    log = Log.open(tmp_path / "s")
    for event in ALL[4:]:
        log.append(event)
    log.close()
    assert [e for e in read(path) if e not in ALL] == [e for e in read(path) if e.__class__ is ALL[0].__class__]
    path.write_bytes(path.read_bytes().replace(b'"clock":4.0', b'"clock":5.0'))
    with pytest.raises(ps.LogError, match="its text does not fit its sum"):
        list(read(path))


# Line ends


@pytest.mark.parametrize("version", [2, 3])
def test_line_ends_of_other_systems_are_read_and_gone_on_with(version, tmp_path):
    path = write(tmp_path / "s", *ALL[:-1])
    if version == 2:
        version_2(path)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    before, past = path.read_bytes(), list(read(path))
    assert past[1:] == ALL[1:-1]
    log = Log.open(tmp_path / "s")
    assert log.past == past
    log.append(ALL[-1])
    log.close()
    assert path.read_bytes().startswith(before)
    assert list(read(path)) == [*past, ALL[-1]]
    reader = LogReader(path)
    list(reader.new())
    assert reader.offset == path.stat().st_size


def test_line_ends_of_a_lone_cr_are_refused_before_a_byte_is_written(tmp_path):
    path = write(tmp_path / "s", *ALL)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r"))
    before = path.read_bytes()
    with pytest.raises(ps.LogError, match=r"Line 1 of .*ends without a line's end"):
        Log.open(tmp_path / "s")
    assert path.read_bytes() == before


def test_characters_that_end_lines_elsewhere_stay_within_a_line(tmp_path):
    odd = "\r \n \x0b \x0c \x1c \x1d \x1e \x85 \u2028 \u2029 \x00"
    asked = Asked(0, {odd: odd}, 1, odd)
    path = write(tmp_path / "s", ALL[0], asked)
    assert list(read(path)) == [ALL[0], asked]
    lines = version_2(path)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))  # as another tool writes it
    assert list(read(path))[1] == asked


def test_a_file_that_is_no_log_is_refused_before_a_byte_is_written(tmp_path):
    (tmp_path / "s").mkdir()
    for junk in (b"my notes", b"\x89PNG", b'{"a": 1}', b"\n", bytes(range(256))):
        (tmp_path / "s" / "log.jsonl").write_bytes(junk)
        with pytest.raises(ps.LogError, match=r"Line 1 of .* is damaged"):
            Log.open(tmp_path / "s")
        assert (tmp_path / "s" / "log.jsonl").read_bytes() == junk


@pytest.mark.parametrize("tail", [b"\0\0\0", b'{"n":1', b"{", b'{"n":14,"event":"asked"\0\0'])
def test_a_tail_that_was_cut_off_while_it_was_written_is_cut(tail, tmp_path):
    path = write(tmp_path / "s", *ALL)
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert list(read(path)) == ALL
    Log.open(tmp_path / "s").close()
    assert path.read_bytes() == whole


# Lines without a sum that are JSON and make no sense


@pytest.mark.parametrize(
    ("event", "change", "why"),
    [
        ("opened", {"settings": 3}, "settings: expected an object, got 3"),
        ("opened", {"settings.metric": 3}, "metric: expected text, got 3"),
        ("opened", {"settings.mode": "mix"}, "mode: expected one of min, max, got 'mix'"),
        ("opened", {"settings.seed": None}, "seed: expected a whole number, got None"),
        ("opened", {"settings.deadline": float("nan")}, "deadline: expected a finite number, got nan"),
        ("asked", {"config": []}, r"config: expected an object, got \[\]"),
        ("asked", {"budget": True}, "budget: expected a whole number, got True"),
        ("asked", {"trial": 7}, "it asks for trial 7 from trial 7, and 0 trials are known"),
        ("asked", {"start_from": [9, 9]}, "it asks for trial 0 from trial 9"),
        ("asked", {"start_from": [0]}, "start_from"),
        ("placed", {"devices": "cpu"}, "devices: expected a list, got 'cpu'"),
        ("placed", {"state": {"file": "x"}}, "state: expected the fields file, unit, step, bytes"),
        ("placed", {"trial": -1}, "it is about trial -1, and 2 trials are known"),
        ("placed", {"clock": 10**400}, "clock: expected a finite number"),
        ("placed", {"state": {"file": "../1.pt", "unit": 1, "step": 1, "bytes": 1}}, "'../1.pt' is no state"),
        ("placed", {"share": 0}, "its share is 0"),
        ("measured", {"table": {"one": 1.0}}, "table: invalid literal"),
        ("measured", {"kind": "x"}, "kind: expected one of sharing, scaling"),
        ("devices", {"devices": [{}]}, "a device has no name or no type"),
        ("reported", {"metrics": {"loss": "x"}}, "metrics: expected a number, got 'x'"),
        ("reported", {"unit": 3}, "it reports unit 3 after unit 3"),
        ("reported", {"more": 3}, "expected the fields trial, attempt"),
        ("dropped", {"trials": [5]}, "it is about trial 5"),
        ("ended", {"event": ["x"]}, "there is no event"),
    ],
)
def test_a_value_that_its_field_cannot_hold_is_said(event, change, why, tmp_path):
    path = write(tmp_path / "s", *ALL)
    lines = version_2(path)
    line = next(line for line in lines if line["event"] == event)
    for name, value in change.items():
        *inside, last = name.split(".")
        (line[inside[0]] if inside else line)[last] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ps.LogError, match=rf"Line {lines.index(line) + 1} of .* is damaged \({why}"):
        History.of(read(path))


def test_a_time_beyond_all_measure_can_be_looked_at(tmp_path):
    path = write(tmp_path / "s", *ended(clock=4e75))
    version_2(path)
    path.write_bytes(path.read_bytes().replace(b'"clock":4.5}', b'"clock":4e75}'))
    look_at(tmp_path / "s")


def test_a_log_that_does_not_begin_with_its_settings_is_damaged(tmp_path):
    with pytest.raises(ps.LogError, match="a log begins with an opened event"):
        list(read(write(tmp_path / "s", ALL[1])))
