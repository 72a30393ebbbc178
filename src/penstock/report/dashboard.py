"""optuna-dashboard over a study's log, on this machine only; a running study is shown live.

A page of another site can make a browser here send requests: by a name of its own that it lets point to 127.0.0.1, or
by a form. So the dashboard answers only to the names of this machine, and only to requests that read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable
from logging import LogRecord, getLogger
from pathlib import Path
from socketserver import ThreadingMixIn
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from optuna.distributions import FloatDistribution
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from penstock.algorithms.seen import SeenStorage
from penstock.algorithms.storage import StoredTrial
from penstock.errors import PenstockError, StudyError
from penstock.log.ranking import ranks
from penstock.log.reader import LogReader
from penstock.report.export import trials_csv
from penstock.report.format import visible
from penstock.report.summary import LOG, history_of

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)


class LiveStorage(SeenStorage):
    """A study's storage that reads the new lines of the log each time the dashboard asks, with rounded numbers."""

    def __init__(self, study: Path) -> None:
        history = history_of(study)
        super().__init__(study.name, history.metric, history.mode)
        self._reader, self._reading = LogReader(study / LOG), Lock()

    def _read_on(self) -> None:
        with self._reading:  # requests come in several threads, and each event must be applied once
            for event in self._reader.new():
                self.apply(event)

    def get_all_studies(self) -> list[FrozenStudy]:
        self._read_on()
        return super().get_all_studies()

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        self._read_on()
        return super().get_all_trials(study_id, deepcopy, states)

    def _freeze(self, trial: StoredTrial) -> FrozenTrial:
        frozen = super()._freeze(trial)
        frozen.params = {name: _rounded(one, frozen.distributions.get(name)) for name, one in frozen.params.items()}
        frozen.value = None if frozen.value is None else _rounded(frozen.value)
        frozen.intermediate_values = {unit: _rounded(one) for unit, one in frozen.intermediate_values.items()}
        return frozen


def _rounded(value: Any, within: object = None) -> Any:
    """A number as a person reads it, with six digits; a parameter stays within its distribution.

    >>> _rounded(0.123456789), _rounded("relu")
    (0.123457, 'relu')
    """
    if not isinstance(value, float):
        return value
    rounded = float(f"{value:.6g}")
    return min(max(rounded, within.low), within.high) if isinstance(within, FloatDistribution) else rounded


class Guarded:
    """The dashboard for requests that read, under a name of this machine; every other one has a reason as its answer.

    Its table of trials is Penstock's own, whose cells are no formulas.
    """

    def __init__(self, app: WSGIApplication, study: Path) -> None:
        self._app, self._study = app, study

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST", "")
        if HOST.fullmatch(host) is None:
            return _answer(start, "403 Forbidden", f"The dashboard answers to http://127.0.0.1 only, not to {host!r}.")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _answer(start, "403 Forbidden", "The dashboard only shows the study: only Penstock writes its log.")
        environ.setdefault("HTTP_ACCEPT_ENCODING", "")  # optuna-dashboard takes it for granted
        try:
            if environ["PATH_INFO"].startswith("/csv/"):
                return self._csv(environ, start)
            return self._app(environ, start)
        except PenstockError as error:
            return _answer(start, "500 Internal Server Error", str(error))

    def _csv(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        chosen = parse_qs(environ.get("QUERY_STRING", "")).get("trial_ids", [""])[0]
        numbers = {one.strip() for one in chosen.split(",") if one.strip()}
        every = history_of(self._study).trials
        trials = [one for one in every if not numbers or str(one.number) in numbers]
        text = trials_csv(trials, ranks(every)).encode(errors="backslashreplace")
        start(
            "200 OK",
            [("Content-Type", "text/csv; charset=utf-8"), ("Content-Disposition", 'attachment; filename="trials.csv"')],
        )
        return [text]


def _answer(start: StartResponse, status: str, reason: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "application/json")])
    return [json.dumps({"reason": reason}).encode()]


def _brief(record: LogRecord) -> bool:
    """Cut the traceback from the message of a request that failed."""
    record.msg = visible(record.getMessage().partition("\n")[0])
    record.args = ()
    return True


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def make_dashboard(study: Path, port: int) -> WSGIServer:
    """A server for one study on 127.0.0.1, bound and not yet serving; port 0 takes a free port."""
    try:
        from optuna_dashboard import wsgi
    except ImportError:
        raise StudyError("The dashboard's package is not installed: pip install 'penstock[dashboard]'.") from None
    getLogger("optuna_dashboard._bottle_util").addFilter(_brief)
    app = Guarded(wsgi(LiveStorage(study)), study)
    try:
        return make_server("127.0.0.1", port, app, server_class=_Server, handler_class=_Quiet)
    except OSError as error:
        raise StudyError(
            f"Cannot listen on 127.0.0.1:{port} ({error.strerror}): choose another port with --port, or 0 for any."
        ) from None
