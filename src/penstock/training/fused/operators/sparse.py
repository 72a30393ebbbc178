"""Products with a sparse matrix that all trials share, such as a graph's: the trials are columns of the other."""

from __future__ import annotations

from typing import Any

import torch

from penstock.training.fused.stacked import Stacked, refusal, rule


def sparse_product(matrix: torch.Tensor, x: Stacked) -> Stacked:
    """A sparse [n, m] times each trial's [m, k], or [m]."""
    inner = x.moved(1)
    made = torch.sparse.mm(matrix, inner.reshape(len(inner), -1))
    return Stacked(made.reshape(len(made), *inner.shape[1:]), 1)


@rule("_sparse_mm", "smm", "hspmm", "spmm", "_sparse_sparse_matmul")
def mm(func: Any, a: Any, b: Any, *reduce: Any) -> Any:
    """A sparse matrix of all trials times a trial's own."""
    if isinstance(a, Stacked) or reduce:
        raise refusal("torch.sparse.mm", "its sparse matrix would be each trial's own: multiply by a dense one")
    return sparse_product(a, b)
