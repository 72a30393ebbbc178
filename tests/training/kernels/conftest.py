"""Kernels run in Triton's interpreter where there is no GPU."""

import os
from collections.abc import Iterator
from typing import Any
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


@pytest.fixture(autouse=True, scope="session")
def _counting() -> Iterator[None]:
    """Triton's interpreter counts up to a number that a kernel is given, which numpy 2.4 makes no integer of."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with mock.patch.object(interpreter, "_patch_lang_tensor", patched):
        yield
