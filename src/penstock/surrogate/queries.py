"""The rows of parameters that make the queries of attention: scores that begin as zeros are alike at every width.

One layer often makes queries, keys and values, so its rows are told apart by gradients: of what stands on the left of
the product that gives the scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

Rows = tuple[int, ...]


def query_rows(
    own: Mapping[str, Tensor], wanted: Collection[str], attentions: Sequence[tuple[frozenset[str], Tensor]]
) -> dict[str, Rows]:
    """The rows of the wanted parameters that make queries; a parameter of several attentions has none.

    Of each attention there are the names of the parameters that make its scores, and the left side of their product.
    """
    uses = Counter(name for scores, _ in attentions for name in scores)
    found: dict[str, Rows] = {}
    for scores, left in attentions:
        names = [one for one in scores if one in wanted and uses[one] == 1]
        if not names or not left.requires_grad:
            continue
        draws = torch.randn(left.shape, dtype=left.dtype, device=left.device)
        gradients = torch.autograd.grad(
            (left * draws).sum(), [own[name] for name in names], retain_graph=True, allow_unused=True
        )
        for name, one in zip(names, gradients, strict=True):
            if one is not None:
                found[name] = tuple(one.reshape(len(one), -1).any(1).nonzero().flatten().tolist())
    return {name: rows for name, rows in found.items() if rows}
