"""Does an operator do for stacked trials what it does for each alone? Outputs and gradients, in every layout."""

import itertools

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import penstock.training.fused.operators  # noqa: F401  registers the rules
from penstock.training.fused.stacked import Stacked


class Own:
    """An argument of which every trial has its own: the trials along the first dimension."""

    def __init__(self, tensor):
        self.tensor = tensor


def own(*shape, trials=3, seed=0, dtype=torch.float64):
    return Own(shared(trials, *shape, seed=seed + 100, dtype=dtype))


def shared(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape) + 7 * len(shape) + 1000 * seed)
    return (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def check(function, *args, tolerance=1e-10, layouts=None, **kwargs):
    """``function`` on stacked arguments equals it on each trial's own; arguments may be nested in lists and tuples."""
    leaves, spec = tree_flatten((args, kwargs))
    which = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Own)]
    trials = len(leaves[which[0]].tensor)
    choices = [range(min(leaves[i].tensor.ndim, layouts or 2)) for i in which]
    floating = [i for i in which if leaves[i].tensor.is_floating_point()]
    plain = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor) and v.is_floating_point()]

    expected, gradients = [], []
    for trial in range(trials):
        mine = list(leaves)
        for i in which:
            mine[i] = leaves[i].tensor[trial].clone().requires_grad_(i in floating)
        for i in plain:
            mine[i] = leaves[i].clone().requires_grad_()
        outputs = _outputs(function, tree_unflatten(mine, spec))
        expected.append(outputs)
        gradients.append(_gradients(outputs, [mine[i] for i in floating]))

    for layout in itertools.product(*choices):
        mine, leaf_tensors = list(leaves), {}
        for i, at in zip(which, layout, strict=True):
            leaf_tensors[i] = leaves[i].tensor.clone().requires_grad_(i in floating)
            mine[i] = Stacked(leaf_tensors[i].movedim(0, at), at)
        outputs = _outputs(function, tree_unflatten(mine, spec))
        assert all(isinstance(o, Stacked) for o in outputs if isinstance(o, torch.Tensor)), outputs
        moved = [o.moved(0) if isinstance(o, Stacked) else o for o in outputs]
        for place, output in enumerate(moved):
            for trial in range(trials):
                alone = expected[trial][place]
                assert outputs[place].shape == alone.shape, (layout, place, outputs[place].shape, alone.shape)
                assert outputs[place].dtype == alone.dtype, (layout, place)
                torch.testing.assert_close(output[trial], alone, rtol=tolerance, atol=tolerance, equal_nan=True)
        found = _gradients(moved, [leaf_tensors[i] for i in floating], per_trial=True)
        for n, grad in enumerate(found):
            for trial in range(trials):
                alone = gradients[trial][n]
                if grad is None or alone is None:
                    assert alone is None or not alone.any(), (layout, n)
                    assert grad is None or not grad.any(), (layout, n)
                else:
                    torch.testing.assert_close(grad[trial], alone, rtol=tolerance, atol=tolerance, equal_nan=True)


def _outputs(function, call):
    args, kwargs = call
    return [o for o in tree_flatten(function(*args, **kwargs))[0] if isinstance(o, torch.Tensor)]


def _gradients(outputs, leaves, per_trial=False):
    """Of a sum over the outputs that treats no two elements of a trial alike; trials are along the first dimension."""
    total = None
    for output in outputs:
        if output.is_floating_point() and output.requires_grad:
            rows = output if per_trial else output.unsqueeze(0)
            rows = rows.reshape(len(rows), -1)
            weights = torch.linspace(0.5, 1.5, rows.shape[1], dtype=rows.dtype).sin()
            total = (rows * weights).sum() + (0 if total is None else total)
    if total is None or not leaves:
        return [None] * len(leaves)
    return torch.autograd.grad(total, leaves, allow_unused=True)
