"""One thread in every test, and in every process that a test starts: bits depend on it, and cores are few."""

import gc
import logging
import os
import signal
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

# No test can reach a real device's power limit. Whatever imports NVML, here or in a process that a test starts, gets a
# fake of it; and in case one did not, a variable forbids each setting. Tests of leases alone take that variable away.
sys.path.insert(0, str(Path(__file__).with_name("fake_nvml")))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
os.environ["PENSTOCK_OBSERVE_ONLY"] = "1"

import pytest


class Loggers(dict):
    """All loggers. Pytest goes through them at each test, and threads of a test before may add some meanwhile."""

    def values(self):
        return list(super().values())


logging.Logger.manager.loggerDict = Loggers(logging.Logger.manager.loggerDict)

# A shell's background ignores Ctrl-C, and so would every process that a test starts there.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests that share processes which take seconds to start, such as Ray's, stay in one process of pytest-xdist. Its marks
# for groups have no effect with pytest 9.
SHARING = {
    "ray": ("tests/executors/ray/",),
    "gangs": ("tests/training/spread/",),
    "another process": ("tests/training/test_another_process.py",),
    "programs": (
        "tests/cli/test_cli.py",
        "tests/cli/test_planning.py",
        "tests/cli/test_surrogate.py",
        "tests/engine/test_engine.py",
        "tests/report/test_notebook.py",
        "tests/surrogate/test_study.py",
        "tests/test_docs.py",
        "tests/test_examples.py",
        "tests/test_faults.py",
        "tests/test_ports.py",
        "tests/test_programs.py",
        "tests/test_reading.py",
        "tests/test_readme.py",
        "tests/training/kernels/test_compiling.py",
    ),
}


def sharing(nodeid):
    """The group that a test belongs to; None without one."""
    return next((group for group, files in SHARING.items() if nodeid.startswith(files)), None)


def pytest_configure(config):
    if not config.getoption("numprocesses", None):  # this process runs tests, and does not only deal them out
        import torch

        torch.set_num_threads(1)
        if not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton, which reads it


def pytest_collection_modifyitems(items):
    """Groups go first: the other tests then fill all processes to the end."""
    items.sort(key=lambda item: sharing(item.nodeid) is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return sharing(nodeid) or nodeid

        def mark_test_complete(self, node, item_index, duration=0):
            """Forget a group that is done: at each test, the scheduler counts what is left of all it has dealt out."""
            super().mark_test_complete(node, item_index, duration)
            group = self._split_scope(self.registered_collections[node][item_index])
            if all(self.assigned_work[node][group].values()):
                del self.assigned_work[node][group]

    config.option.loadscopereorder = False  # or it would not keep the order of the tests
    return Groups(config, log)


def pytest_collection_finish():
    """Python then never looks again for cycles among all tests and modules, which takes it half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def long_enough(monkeypatch):
    """Let studies of a few steps fuse, which would not repay the attempt."""
    from penstock.speed import model

    monkeypatch.setattr(model, "steps_to_try", lambda cost, captured: 0)
    monkeypatch.setattr(model, "steps_to_check", lambda cost, sharing, trials: 0)
