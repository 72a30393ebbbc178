"""Ray's worker processes, forked from one that has imported torch: importing it takes each new process seconds.

A raylet of ``tests.clusters`` starts this file in place of Ray's ``default_worker.py``. It asks the nursery of its
node, another process of the node's session, to fork the worker, and ends with it. The worker goes on as a new process
would, with the arguments, environment, folder and path that this one was started with. It imports ray itself, which
reads its environment then.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

WHERE = "PENSTOCK_NURSERY"  # the variable with the path of the nursery's socket


def start(path: str, end: Callable[[], None]) -> None:
    """Fork a nursery with its socket at ``path``; it calls ``end`` when the process that started it has gone."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    os.environ[WHERE] = path
    gone, _held = os.pipe()  # `_held` stays open as long as this process lives, and no program inherits it
    if os.fork() > 0:
        listening.close()
        os.close(gone)
        return
    os.close(_held)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so nobody has to wait for workers that ended
    while gone not in select.select([listening.fileno(), gone], [], [])[0]:
        asking, _ = listening.accept()
        with asking:
            if os.fork() == 0:
                listening.close()
                os.close(gone)
                _work(*json.load(asking.makefile()))
                os._exit(0)
    end()
    os._exit(0)


def _work(words: list[str], environment: dict[str, str], folder: str, path: list[str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    program = str(Path(str(import_module("ray").__file__)).parent / "_private/workers/default_worker.py")
    sys.argv = [program, *words[1:]]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.connect(os.environ[WHERE])
        nursery.sendall(json.dumps([sys.argv, dict(os.environ), os.getcwd(), sys.path]).encode())
        nursery.shutdown(socket.SHUT_WR)
        nursery.recv(1)  # nothing, when the worker has ended
