"""The console of tables and progress, and warnings while a study runs: no text in them can command the terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.segment import Segment

from penstock.report.format import visible
from penstock.saying import say

MOST = 20  # warnings of one run that are shown


class Careful(Console):
    """A console that leaves out the characters that a terminal obeys, unless they are rich's own."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(one if one.control else Segment(visible(one.text), one.style) for one in buffer)


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._left = MOST

    def emit(self, record: logging.LogRecord) -> None:
        if self._left > 0:
            say(visible(record.getMessage()))
        elif self._left == 0:
            say("More warnings are not shown: `penstock show` tells of failed trials.")
        self._left -= 1


@contextmanager
def warnings_shown() -> Iterator[None]:
    """Show Penstock's warnings on standard error, unless the program has configured logging for itself."""
    logger, handler = logging.getLogger("penstock"), _Warnings()
    if logging.root.handlers or any(not isinstance(one, logging.NullHandler) for one in logger.handlers):
        yield
        return
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
