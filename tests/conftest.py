"""One thread in every test, and in every process that a test starts: bits depend on it, and cores are few."""

import gc
import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

torch.set_num_threads(1)
# A shell's background ignores Ctrl-C, and so would every process that a test starts there.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests that share processes which take seconds to start, such as Ray's, stay in one process of pytest-xdist. Its marks
# for groups have no effect with pytest 9.
SHARING = ("tests/executors/ray/", "tests/training/spread/", "tests/test_ports.py")


def sharing(nodeid):
    """The first part of a test's name that it has in common with the tests of its group; None without a group."""
    return next((group for group in SHARING if nodeid.startswith(group)), None)


def pytest_collection_modifyitems(items):
    """Groups go first: the other tests then fill all processes to the end."""
    items.sort(key=lambda item: sharing(item.nodeid) is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return sharing(nodeid) or nodeid

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

    monkeypatch.setattr(model, "steps_to_try", lambda cost: 0)
    monkeypatch.setattr(model, "steps_to_check", lambda cost, sharing, trials: 0)
