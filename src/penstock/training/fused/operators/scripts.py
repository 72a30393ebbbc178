"""Functions compiled by ``torch.jit.script``: their Python code runs, or torch's for one trial after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from penstock.training.fused.stacked import Stacked, Unfusable, by_rows

_plain = torch._C.ScriptFunction.__call__


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """TorchScript asks no rule before it runs, so a call is looked at here."""
    if any(isinstance(leaf, Stacked) for leaf in tree_flatten((args, kwargs))[0]):
        written = getattr(self, "_torchdynamo_inline", None)  # the function that was scripted
        if written is not None:
            return written(*args, **kwargs)

        def script(*own: Any, **named: Any) -> Any:
            return _plain(self, *own, **named)

        script.__name__ = str(self.name)
        return by_rows(script, *args, **kwargs)
    return _plain(self, *args, **kwargs)


torch._C.ScriptFunction.__call__ = _call  # type: ignore[method-assign]


def refuse_scripts(model: nn.Module) -> None:
    """Refuse a model with a compiled module: its code reads its own parameters, and nothing can be put in their place.

    >>> refuse_scripts(nn.Linear(1, 1))
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"the module {path}" if path else "the model"
            raise Unfusable(f"{what} is compiled by torch.jit.script or trace, which reads one trial's parameters: "
                            "leave it as it was written")  # fmt: skip
