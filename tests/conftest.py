"""One thread in every test, and in every process that a test starts: bits depend on it, and cores are few."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

torch.set_num_threads(1)

# The files that take longest, which go first: two processes that take one file after another then end at one time.
LONGEST = ("executors/test_ray.py", "training/test_fused.py", "executors/test_ray_scaling.py", "test_readme.py")


def pytest_configure(config):
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files that have most tests


def pytest_collection_modifyitems(items):
    last = len(LONGEST)
    items.sort(key=lambda item: next((i for i, end in enumerate(LONGEST) if str(item.path).endswith(end)), last))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
