"""optuna-dashboard over a study's log, on this machine only; a running study is shown live."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from socketserver import ThreadingMixIn
from threading import Lock
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from penstock.algorithms.storage import LogStorage
from penstock.errors import StudyError
from penstock.log.events import LogReader
from penstock.report.summary import LOG, history_of


class LiveStorage(LogStorage):
    """A study's storage that reads the new lines of the log each time the dashboard asks."""

    def __init__(self, study: Path) -> None:
        history = history_of(study)
        super().__init__(study.name, history.metric, history.mode, None)
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
    app: Callable[..., object] = wsgi(LiveStorage(study))
    try:
        return make_server("127.0.0.1", port, app, server_class=_Server, handler_class=_Quiet)  # type: ignore[arg-type]
    except OSError as error:
        raise StudyError(
            f"Cannot listen on 127.0.0.1:{port} ({error.strerror}): choose another port with --port, or 0 for any."
        ) from None
