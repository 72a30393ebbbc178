"""The general way to run a task's own loss for all trials of a bundle: under ``torch.vmap``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from penstock.training.data import handed_out
from penstock.training.fused.keys import MappedKeys, NoKeys
from penstock.training.fused.stacked import Unfusable
from penstock.training.fused.ways import Function, Tensors, Way
from penstock.training.fused.wording import line_of, plainly
from penstock.training.random.keyed import Keyed
from penstock.trial import Config


class General(Way):
    """The whole function under ``torch.vmap``."""

    name = "general"

    def __init__(self, template: nn.Module, config: Config) -> None:
        super().__init__(template, config)
        self._may_draw = True
        self._call = _Call(self.template)
        self._places = {name: f"model.{name}" for name, _ in self.template.named_parameters()}
        self._places.update({name: f"model.{name}" for name, _ in self.template.named_buffers()})

    def run(
        self,
        function: Function,
        params: Tensors,
        buffers: Tensors,
        batch: Any,
        shared: bool,
        keys: torch.Tensor | None,
        numbers: Sequence[torch.Tensor],
    ) -> Any:
        state = {self._places[name]: tensor for name, tensor in {**params, **buffers}.items()}
        drawing = Keyed(NoKeys(0, 0))

        def one(state: Tensors, batch: Any, key: torch.Tensor | None, numbers: Sequence[torch.Tensor]) -> Any:
            for site, value in zip(self._sites, numbers, strict=True):
                site.give(value)
            kind = MappedKeys if self.template.training else NoKeys
            drawing.draw_by(kind(0, 0) if key is None else kind(key[0], key[1]))
            with drawing:
                return functional_call(self._call, dict(state), (function, handed_out(batch), self.config))

        in_dims = (0, None if shared else 0, None if keys is None else 0, 0 if numbers else None)
        try:
            made = torch.vmap(one, in_dims=in_dims)(state, batch, keys, numbers)
        except Unfusable:
            raise
        except Exception as error:
            raise Unfusable(f"the loss{line_of(error)}: {plainly(error)}") from error
        self._drew(drawing, function)
        return made


class _Call(nn.Module):
    """The called module, of which the model is a submodule, so that a loss may touch the model's own submodules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Function, batch: Any, config: Config) -> Any:
        return function(self.model, batch, config)
