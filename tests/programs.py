"""Commands run as a shell would run them, in processes forked from one that has imported torch and Penstock already.

``PENSTOCK`` and ``PYTHON`` are the real entry points, each of which some test starts as a new process.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from subprocess import CompletedProcess

from penstock.executors.processes.forking import fork
from penstock.executors.processes.server import fork_on_request
from penstock.executors.processes.worker import NEEDED

PYTHON = sys.executable
PENSTOCK = str(Path(sys.executable).with_name("penstock"))
IMPORTED = (
    *NEEDED,
    "optuna",
    "penstock.cli.app",
    "penstock.report.progress",
    "penstock.study",
    "sklearn.datasets",
)


def run(command: str, code: int = 0) -> CompletedProcess[str]:
    """What a command in this folder shows, which begins with ``python`` or ``penstock`` and ends with a code."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = fork("tests.programs")
        files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (output, errors)]
        process.connection.send((shlex.split(command), *files))
        status = process.wait()
        process.close()
        shown = [_text(file) for file in (output, errors)]
    assert status == code, "\n".join([command, f"ended with {status}", *shown])
    return CompletedProcess(command, code, *shown)


def _text(file: tempfile._TemporaryFileWrapper[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _main(words: list[str], output: str, errors: str) -> None:
    for stream, file in ((1, output), (2, errors)):
        opened = os.open(file, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, stream)
        os.close(opened)
    program, *sys.argv = words
    if program == "penstock":
        sys.argv.insert(0, program)
        import_module("penstock.cli.app").main()
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    for name in IMPORTED:
        import_module(name)
    driver = fork_on_request(int(sys.argv[1]))
    _main(*driver.recv())
