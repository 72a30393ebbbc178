"""The public ways to train many trials on one GPU that bench/fusion.py compares, and Penstock's own."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.networks import Batch, Network
from penstock.training.data import Data
from penstock.training.fused.bundle import Fused
from penstock.training.fused.inductor import inductor
from penstock.training.fused.recipe import Recipe
from penstock.training.loop import Training
from penstock.training.sources import Source

Step = Callable[[Batch], Tensor]  # trains every trial on a batch; gives the losses before the update


# One trial alone


def alone(network: Network, precision: str, trial: int) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    model = network.model()
    model.load_state_dict(network.initial(trial))
    if network.convolutional and precision == "bf16":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = network.task.optimizer(model.parameters(), network.config)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with network.autocast(precision):
            loss = network.task.loss(model, batch, network.config)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach().view(1)

    return model, optimizer, step


def eager(network: Network, size: int, precision: str) -> Step:
    return alone(network, precision, size - 1)[2]


def graph(network: Network, size: int, precision: str) -> Step:
    model, optimizer, train = alone(network, precision, size - 1)
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    static = tuple(value.clone() for value in network.batches(precision)[0])
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train(static)  # type: ignore[arg-type]
    torch.cuda.current_stream().wait_stream(stream)
    # The initial weights are put back in place: a graph keeps the addresses that it captured.
    model.load_state_dict(network.initial(size - 1))
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    optimizer.zero_grad()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        loss = train(static)  # type: ignore[arg-type]

    def step(batch: Batch) -> Tensor:
        for into, value in zip(static, batch, strict=True):
            into.copy_(value)
        captured.replay()
        return loss

    return step


# Many trials as one


class Loss(nn.Module):
    """The task's loss as a module, which `functional_call` gives other parameters."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network, self.model = network, network.model()

    def forward(self, batch: Batch) -> Tensor:
        return self.network.task.loss(self.model, batch, self.network.config)


def vmap(network: Network, size: int, precision: str, backends: Sequence[SDPBackend] = ()) -> Step:
    module = Loss(network)
    stacked = {f"model.{name}": value for name, value in network.stacked(size).items()}
    names = {name for name, _ in module.named_parameters()}
    parameters = {name: value.requires_grad_() for name, value in stacked.items() if name in names}
    buffers = {name: value for name, value in stacked.items() if name not in names}
    optimizer = network.task.optimizer(parameters.values(), network.config)  # type: ignore[arg-type]

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Batch) -> Tensor:
        return torch.func.functional_call(module, (parameters, buffers), (batch,))  # type: ignore[no-any-return]

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with network.autocast(precision), sdpa_kernel(list(backends)) if backends else nullcontext():
            losses: Tensor = torch.func.vmap(loss, in_dims=(0, 0, None))(parameters, buffers, batch)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return losses.detach()

    return step


def math_vmap(network: Network, size: int, precision: str) -> Step:
    return vmap(network, size, precision, [SDPBackend.MATH])


class GroupedLinear(nn.Module):
    """F linear layers as one batched product. Takes (B, in), shared by all layers, or (B, F·in), or (F, B, in)."""

    def __init__(self, linear: nn.Linear, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.new_empty(size, linear.in_features, linear.out_features))
        self.bias = nn.Parameter(linear.weight.new_empty(size, 1, linear.out_features))

    def forward(self, x: Tensor) -> Tensor:
        size, inside, _ = self.weight.shape
        if x.dim() == 2:
            x = x.view(len(x), -1, inside).transpose(0, 1)
        return torch.baddbmm(self.bias, x.expand(size, -1, -1), self.weight)


def grouped_layer(layer: nn.Module, size: int) -> nn.Module | None:
    if isinstance(layer, nn.Conv2d):
        return nn.Conv2d(
            size * layer.in_channels,
            size * layer.out_channels,
            layer.kernel_size,  # type: ignore[arg-type]
            layer.stride,  # type: ignore[arg-type]
            layer.padding,  # type: ignore[arg-type]
            groups=size * layer.groups,
            bias=layer.bias is not None,
            device=layer.weight.device,
        )
    if isinstance(layer, nn.BatchNorm2d):
        return nn.BatchNorm2d(size * layer.num_features, device=layer.weight.device)
    return GroupedLinear(layer, size) if isinstance(layer, nn.Linear) else None


def grouped(network: Network, size: int, precision: str) -> Step:
    """The network with its layers replaced by grouped ones, as HFTA's users write it."""
    model = network.model()
    for name, layer in list(model.named_modules()):
        if (exchanged := grouped_layer(layer, size)) is not None:
            model.set_submodule(name, exchanged)
    stacked = network.stacked(size)
    with torch.no_grad():
        for name, layer in model.named_modules():
            for part, value in layer.named_parameters(prefix=name, recurse=False):
                turned = isinstance(layer, GroupedLinear) and part.endswith("weight")
                plain = stacked[part].transpose(1, 2) if turned else stacked[part]
                value.copy_(plain.reshape(value.shape))
    last = network.convolutional and precision == "bf16"
    if last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = network.task.optimizer(model.parameters(), network.config)

    def step(batch: Batch) -> Tensor:
        x, y = batch
        if last:
            x = x.permute(0, 2, 3, 1).repeat(1, 1, 1, size).permute(0, 3, 1, 2)
        elif network.convolutional:
            x = x.repeat(1, size, 1, 1)
        optimizer.zero_grad()
        with network.autocast(precision):
            logits = model(x)
            losses = F.cross_entropy(logits.flatten(0, 1), y.repeat(size), reduction="none").view(size, -1).mean(1)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return losses.detach()

    return step


class Fed(Source):
    """A training source that gives the last batch it was handed."""

    batch: Batch

    def batches(self, epoch: int, start: int, size: int, cut: object = None) -> Iterator[Batch]:
        while True:
            yield self.batch

    def all(self, size: int, first: int = 0, every: int = 1) -> Iterator[tuple[Batch, int]]:
        yield self.batch, size


def penstock(
    network: Network, size: int, precision: str, faster: Literal["compiled", "captured"] | None = None
) -> Step:
    """The fused mode itself, on plain trials: each with its own optimizer, as a worker trains them."""
    task = copy.copy(network.task)
    task.precision = precision  # type: ignore[assignment]
    feed = Fed(0, 10**9)
    fused = Fused(Recipe())
    for trial in range(size):
        data = Data(feed, feed, {})
        one = Training(
            task, trial, network.config, data, seed=0, device=network.device, metric="loss", mode="min"
        )  # fmt: skip
        one.model.load_state_dict(network.initial(trial))
        fused.enter(one)

    def step(batch: Batch) -> Tensor:
        feed.batch = batch
        if fused.recipe.way is not None and not fused.fast and not fused.recipe.refusals and faster is not None:
            fused.speeding.meet(list(fused.trials))
            fused.speeding.expect(10**9)
            fused.speeding.consider(10**9, 1.0)  # a step of a second, so often, repays everything
            fused.speeding.wanted = faster
        fused.step()
        while fused.speeding.compiles and inductor().failed is None:
            inductor().wait()
            fused.speeding.look()
            fused.step()
        refused = [said for said in fused.recipe.refusals if not said.startswith(("kernels", "compiled: a step of"))]
        if refused:
            raise RuntimeError("; ".join(refused))
        if fused.recipe.refusals:
            print(f"not {fused.recipe.refusals.pop()}", file=sys.stderr)
        return fused.losses

    return step
