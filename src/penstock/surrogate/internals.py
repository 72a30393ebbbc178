"""The names that the trace needs of torch and that torch does not promise: all of them are here.

torch 2.11 to 2.13 have them. Another torch may not, and then a study says so before anything is spent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import transformer

from penstock.errors import TaskError

try:
    from torch._C import _get_mkldnn_enabled, _set_mkldnn_enabled
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map_only
except ImportError as error:
    raise TaskError(
        f"Surrogates need what torch {torch.__version__} does not have ({error}): use a torch from 2.11 to 2.13, or "
        "leave surrogate= out."
    ) from error

__all__ = [
    "ConstantSource",
    "DimDynamic",
    "FakeTensorMode",
    "ShapeEnv",
    "TorchDispatchMode",
    "enable_python_dispatcher",
    "tree_leaves",
    "tree_map_only",
    "without_looks",
    "without_onednn",
]


@contextmanager
def without_onednn() -> Iterator[None]:
    """Leave oneDNN out, whose recurrent layers take plain numbers alone; torch's own way to say so warns."""
    before = _get_mkldnn_enabled()
    _set_mkldnn_enabled(False)
    try:
        yield
    finally:
        _set_mkldnn_enabled(before)


@contextmanager
def without_looks() -> Iterator[None]:
    """Let torch's transformers take a mask as it is: they look at its values to find whether it is a causal one."""
    own: Any = transformer
    before = own._detect_is_causal_mask
    own._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        own._detect_is_causal_mask = before
