"""Does a trial that is full of NaN and infinities leave every bit of the others as it was?"""

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from penstock.training.fused.stacked import Stacked
from tests.training.alone import Own

SICK = 1


def isolated(function, *args, at=1, channels_last=False, **kwargs):
    """Outputs and gradients of the healthy trials, with and without a sick one among them, are the same bits."""
    healthy, sick = (_run(function, args, kwargs, at, channels_last, poison) for poison in (False, True))
    assert len(healthy) == len(sick) > 0
    for before, after in zip(healthy, sick, strict=True):
        for trial in range(len(before)):
            if trial != SICK:
                assert torch.equal(before[trial], after[trial])
    assert not torch.isfinite(sick[0][SICK]).all()


def _run(function, args, kwargs, at, channels_last, poison):
    leaves, spec = tree_flatten((args, kwargs))
    mine, tensors = list(leaves), []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Own):
            tensor = leaf.tensor.clone()
            if poison:
                tensor[SICK].view(-1)[0::2], tensor[SICK].view(-1)[1::2] = torch.nan, torch.inf
            tensors.append(tensor.requires_grad_())
            where = min(at, tensor.ndim - 1)
            inner = tensor.movedim(0, where)
            if channels_last and inner.ndim == 5 and len(tensors) == 1:
                inner = inner.permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)
            mine[i] = Stacked(inner, where)
    own_args, own_kwargs = tree_unflatten(mine, spec)
    outputs = [o.moved(0) for o in tree_flatten(function(*own_args, **own_kwargs))[0]]
    total = sum(o.double().square().sum() for o in outputs if o.requires_grad)
    grads = torch.autograd.grad(total, tensors, allow_unused=True)
    return [*outputs, *(grad for grad in grads if grad is not None)]
