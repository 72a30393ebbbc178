"""The real dashboard over a log, by http."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from penstock.algorithms.storage import LogStorage
from penstock.errors import StudyError
from penstock.log.events import Ended, Event
from penstock.log.writer import Log
from penstock.report import dashboard
from tests.report.studies import reported, story, write


@contextmanager
def serving(study: Path) -> Iterator[str]:
    with dashboard.make_dashboard(study, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def get(url: str) -> Any:
    with urlopen(url, timeout=30) as answer:
        return json.load(answer)


def test_a_running_study_is_served_as_it_runs(tmp_path: Path) -> None:
    study = write(tmp_path, "digits-1", story())
    with serving(study) as url:
        (one,) = get(f"{url}/api/studies")["study_summaries"]
        assert one["study_name"] == "digits-1"
        assert one["directions"] == ["maximize"]
        trials = get(f"{url}/api/studies/0?after=0")["trials"]
        assert [trial["state"] for trial in trials] == ["Complete", "Complete", "Fail", "Running", "Running"]
        assert trials[0]["values"] == [0.875]  # its best report
        assert [(i["step"], i["value"]) for i in trials[0]["intermediate_values"]] == [(1, 0.5), (2, 0.875), (3, 0.75)]
        assert {param["name"]: param["param_external_value"] for param in trials[0]["params"]}["lr"] == "0.1"
        with urlopen(f"{url}/dashboard/", timeout=30) as page:
            assert b"html" in page.read()

    storage = dashboard.LiveStorage(study)
    assert storage.get_all_trials(0)[3].value is None
    log = Log.open(study)
    log.append(reported(3, 1, 9.0, accuracy=0.25))
    assert [trial.value for trial in storage.get_all_trials(0)[3:]] == [0.25, None]
    log.append(reported(4, 1, 9.5, accuracy=0.5))
    log.append(Ended("done", 10.0))
    log.close()
    assert [trial.value for trial in storage.get_all_trials(0)[3:]] == [0.25, 0.5]
    assert storage.get_all_studies()[0].study_name == "digits-1"


def test_threads_that_look_at_once_read_each_event_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [*story(), *(reported(0, unit, 4.0, accuracy=0.5) for unit in range(4, 5000))]
    storage = dashboard.LiveStorage(write(tmp_path, "digits-1", iter(events)))
    applied: list[Event] = []
    monkeypatch.setattr(LogStorage, "apply", lambda self, event: applied.append(event))
    together = threading.Barrier(8)

    def look() -> None:
        together.wait()
        storage.get_all_trials(0)

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(look) for _ in range(8)]:
            done.result()
    assert len(applied) == len(events)


def test_only_this_machine_can_look(tmp_path: Path) -> None:
    with dashboard.make_dashboard(write(tmp_path, "digits-1", story()), 0) as server:
        assert server.server_address[0] == "127.0.0.1"


def refused(url: str, **settings: Any) -> tuple[int, str]:
    """The code and the reason of a request that is not answered."""
    with pytest.raises(HTTPError) as error:
        urlopen(Request(url, **settings), timeout=30)
    return error.value.code, json.load(error.value)["reason"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost@evil", ""])
def test_a_page_under_another_name_sees_nothing(tmp_path: Path, host: str) -> None:
    """A name of somebody's own that points to 127.0.0.1 makes a browser send requests here (DNS rebinding)."""
    with serving(write(tmp_path, "digits-1", story())) as url:
        for path in ("/api/studies", "/dashboard/", "/csv/0"):
            code, reason = refused(url + path, headers={"Host": host})
            assert (code, "answers to http://127.0.0.1 only" in reason) == (403, True)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "[::1]:80", "127.0.0.1"])
def test_every_name_of_this_machine_is_answered(tmp_path: Path, host: str) -> None:
    with serving(write(tmp_path, "digits-1", story())) as url:
        assert urlopen(Request(f"{url}/api/studies", headers={"Host": host}), timeout=30).status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/studies"),
        ("POST", "/api/studies/0/rename"),
        ("DELETE", "/api/studies/0"),
        ("PUT", "/api/studies/0/note"),
        ("POST", "/api/trials/3/tell"),
        ("POST", "/api/trials/3/user-attrs"),
    ],
)
def test_a_button_that_writes_has_a_reason_as_its_answer_and_nothing_else_happens(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str, path: str
) -> None:
    study = write(tmp_path, "digits-1", story())
    before = (study / "log.jsonl").read_bytes()
    body = json.dumps({"study_name": "x", "directions": ["minimize"], "state": "Fail", "body": "", "version": 1})
    with serving(study) as url:
        code, reason = refused(url + path, data=body.encode(), method=method)
    assert (code, "only Penstock writes its log" in reason) == (403, True)
    assert (study / "log.jsonl").read_bytes() == before
    assert capfd.readouterr().err == ""


def test_a_log_that_is_damaged_while_it_is_shown_makes_no_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    study = write(tmp_path, "digits-1", story())
    with serving(study) as url:
        with (study / "log.jsonl").open("a") as log:
            log.write("no event\n")
        assert refused(f"{url}/api/studies/0?after=0")[0] == 500
        assert "damaged" in refused(f"{url}/csv/0")[1]
    assert "Traceback" not in (said := capfd.readouterr().err)
    assert 'File "' not in said


def test_the_table_that_a_browser_loads_is_that_of_the_export(tmp_path: Path) -> None:
    study = write(tmp_path, "digits-1", story())
    with serving(study) as url:
        with urlopen(f"{url}/csv/0", timeout=30) as answer:
            assert answer.read().decode().splitlines()[0].startswith("number,rank,state,budget,config.")
        with urlopen(f"{url}/csv/0?trial_ids=1,3", timeout=30) as answer:
            assert [line.split(",")[0] for line in answer.read().decode().splitlines()] == ["number", "1", "3"]


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    study = write(tmp_path, "digits-1", story())
    with dashboard.make_dashboard(study, 0) as server, pytest.raises(StudyError, match=r"127.0.0.1:\d+ .*--port"):
        dashboard.make_dashboard(study, server.server_port)


def test_without_its_package_the_dashboard_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    with pytest.raises(StudyError, match=r"pip install 'penstock\[dashboard\]'"):
        dashboard.make_dashboard(write(tmp_path, "digits-1", story()), 0)
