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
from urllib.request import urlopen

import pytest

from penstock.algorithms.storage import LogStorage
from penstock.errors import StudyError
from penstock.log.events import Ended, Event, Log
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
        assert trials[0]["values"] == [0.75]  # the deepest value
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


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    study = write(tmp_path, "digits-1", story())
    with dashboard.make_dashboard(study, 0) as server, pytest.raises(StudyError, match=r"127.0.0.1:\d+ .*--port"):
        dashboard.make_dashboard(study, server.server_port)


def test_without_its_package_the_dashboard_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    with pytest.raises(StudyError, match=r"pip install 'penstock\[dashboard\]'"):
        dashboard.make_dashboard(write(tmp_path, "digits-1", story()), 0)
