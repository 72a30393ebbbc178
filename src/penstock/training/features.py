"""A frozen module whose outputs are computed once for all trials (Pack §3.4): ``Task.features``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from penstock.errors import TaskError
from penstock.task import Task, task_name
from penstock.training.comparing import compared
from penstock.training.random.generators import own_randomness
from penstock.trial import Config

AGAIN = 2  # samples of the first batch that are computed again, by themselves


class Features:
    """A task's frozen module on a device; equal to another of the same values."""

    def __init__(self, task: Task, module: nn.Module, device: torch.device) -> None:
        self.task, self.device = task, device
        self.module = module.to(device).eval()
        self._checked = False
        if reason := _unfrozen(module):
            raise self._error(reason)

    @staticmethod
    def of(task: Task, config: Config, device: torch.device) -> Features | None:
        """The features that a task gives for a config, if it gives any."""
        module = task.features(config)
        if module is None:
            return None
        if not isinstance(module, nn.Module):
            raise TaskError(
                f"{task_name(task)}.features must return an nn.Module or None, got a {type(module).__name__}."
            )
        return Features(task, module, device)

    @cached_property
    def _values(self) -> str:
        return compared(self.module)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Features) and (self.module is other.module or self._values == other._values)

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, batch: Any) -> Any:
        """A batch with the features in place of its first input."""
        if isinstance(batch, Mapping):
            first = next(iter(batch))
            return {**batch, first: self._computed(batch[first])}
        if isinstance(batch, tuple | list) and batch:
            parts = [self._computed(batch[0]), *batch[1:]]
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        return self._computed(batch)

    def all(self, inputs: torch.Tensor, size: int) -> torch.Tensor:
        """The features of all samples, so many at a time; where the inputs are."""
        parts = [self._computed(some.to(self.device)).to(inputs.device) for some in torch.split(inputs, size)]
        return torch.cat(parts)

    @torch.no_grad()
    def _computed(self, inputs: Any) -> torch.Tensor:
        outputs = self._forward(inputs)
        rows = len(inputs) if isinstance(inputs, torch.Tensor) else None
        if not isinstance(outputs, torch.Tensor) or not outputs.ndim or rows not in (None, len(outputs)):
            got = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else f"a {type(outputs).__name__}"
            raise self._error(f"that gives a tensor with a row for each of {rows} samples, got {got}")
        if not self._checked and rows is not None:
            self._checked = True
            again = self._forward(inputs[: min(AGAIN, max(1, rows - 1))])
            near = 1e-3 if self.task.precision == "fp32" else 5e-2
            scale = float(outputs.nan_to_num().abs().max()) if outputs.numel() else 1.0
            if not torch.allclose(outputs[: len(again)], again, rtol=near, atol=near * scale, equal_nan=True):
                raise self._error("whose output for a sample is the same in any batch, but it differs")
        return outputs

    def _forward(self, inputs: Any) -> Any:
        dtype = torch.bfloat16 if self.task.precision == "bf16" else torch.float16
        plain = self.task.precision == "fp32"
        with own_randomness(), nullcontext() if plain else torch.autocast(self.device.type, dtype=dtype):
            return self.module(inputs)

    def _error(self, expected: str) -> TaskError:
        return TaskError(
            f"{task_name(self.task)}.features must return a frozen module {expected}: return it with "
            "requires_grad_(False) and without layers that train, and put what is to be trained into model()."
        )


def _unfrozen(module: nn.Module) -> str:
    """What of a module in evaluation is not frozen."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            return f"without gradients, but {name} requires one"
    for name, one in module.named_modules():
        where = f"{type(one).__name__} {name}".rstrip()
        if one.training:
            return f"in evaluation, but {where} stays in training"
        if isinstance(one, _NormBase) and one.running_mean is None:
            return f"that takes each sample by itself, but {where} normalizes by the batch"
    return ""
