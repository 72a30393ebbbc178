"""Kernels run in Triton's interpreter where there is no GPU. It is asked for before the first of them is imported."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


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
