"""A narrower twin of a model: the user's own modules, with narrower parameters, buffers and numbers.

Its initial values are the target's own, every S-th of them, so that whatever the user's initialisation draws is kept:
constants, zeros, the gates of a recurrent layer. ``parametrize`` says by which factors they are rescaled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from penstock.surrogate.trace import Place, Traced


@torch.no_grad()
def shrink(model: nn.Module, traced: Traced, scale: float) -> nn.Module:
    """Make a model ``scale`` times narrower, in place."""
    made: dict[int, Any] = {}
    for path, module in model.named_modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                if id(p) not in made:
                    values = _narrow(p, path, name, traced, scale)
                    made[id(p)] = nn.Parameter(values, requires_grad=p.requires_grad)
                setattr(module, name, made[id(p)])  # recurrent layers keep a list of theirs, which follows
        for name, b in list(module._buffers.items()):
            if b is not None:
                module._buffers[name] = made.setdefault(id(b), _narrow(b, path, name, traced, scale))
    modules = dict(model.named_modules())
    for place, size in traced.attributes.items():
        held: Any = vars(modules[place.module])
        held[place.name] = _changed(modules[place.module], place, traced.at(size, scale))
    for module in modules.values():
        module.__dict__.update(_said(module))
    return model


def _narrow(tensor: Tensor, path: str, name: str, traced: Traced, scale: float) -> Tensor:
    narrow = tensor.detach().clone()
    for part, size in enumerate(tensor.shape):
        left = traced.at(traced.sizes.get(Place(path, name, part), size), scale)
        if left != size:
            narrow = narrow.index_select(part, torch.arange(left, device=tensor.device) * size // left)
    return narrow


def _changed(module: nn.Module, place: Place, size: int) -> Any:
    if place.part is None:
        return size
    old = vars(module)[place.name]
    parts = [*old[: place.part], size, *old[place.part + 1 :]]
    return parts if isinstance(old, list) else tuple(parts)


def _said(module: nn.Module) -> dict[str, int]:
    """The numbers of torch's modules that only say the sizes of their parameters."""
    if isinstance(module, _ConvNd):
        first, second = module.weight.shape[:2]
        given, made = (first, second * module.groups) if module.transposed else (second * module.groups, first)
        return {"in_channels": given, "out_channels": made}
    if isinstance(module, nn.Linear):
        return {"in_features": module.weight.shape[1], "out_features": module.weight.shape[0]}
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return {"embedding_dim": module.weight.shape[1]}
    if isinstance(module, nn.GroupNorm) and module.affine:
        return {"num_channels": len(module.weight)}
    if isinstance(module, _NormBase) and (held := module.weight if module.affine else module.running_mean) is not None:
        return {"num_features": len(held)}
    if isinstance(module, nn.MultiheadAttention):
        both = {"kdim", "vdim"} if module._qkv_same_embed_dim else set()
        return {"head_dim": module.embed_dim // module.num_heads, **dict.fromkeys(both, module.embed_dim)}
    return {}
