"""One thread in every test, and in every process that a test starts: bits depend on it, and cores are few."""

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

torch.set_num_threads(1)
# A shell's background ignores Ctrl-C, and so would every process that a test starts there.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    config.option.loadscopereorder = False  # pytest-xdist would not keep the order below


def pytest_collection_modifyitems(items):
    """What shares a Ray cluster stays in one process, and goes first: the rest then fills both processes to the end."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
