"""Kernels run in Triton's interpreter where there is no GPU."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch


@pytest.fixture(autouse=True)
def _exactly() -> Iterator[None]:
    """Products of float32 are not rounded to TF32."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(autouse=True)
def _untimed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No block sizes are known from another test, and none are kept for the user."""
    from penstock.training.kernels import tuning

    folder = {"XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp())}
    with mock.patch.object(tuning, "_KNOWN", {}), mock.patch.dict(os.environ, folder):
        yield
