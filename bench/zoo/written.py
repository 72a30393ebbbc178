"""Models written by hand, as people write them: what they hold, draw, compute and read beside plain layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from bench.zoo import kinds
from bench.zoo.model import Model, classified, images, sequences, symbols, vectors


class Lambda(nn.Module):
    """Parts, and a function of them and the input."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def mlp(*between: nn.Module, width: int = 12, out: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 16), *(between or (nn.ReLU(),)), nn.Linear(16, out))


def pruned(layer: nn.Module) -> nn.Module:
    made: nn.Module = prune.l1_unstructured(layer, "weight", 0.5)  # type: ignore[no-untyped-call]
    return made


@dataclass
class Settings:
    slope: float = 0.2
    widths: tuple[int, ...] = (12, 16)


def _model(name: str, make: Callable[[], Any], data: Any = None, **more: Any) -> Model:
    return Model("written", name, lambda config: make(), data or vectors(), **more)


def models() -> Iterator[Model]:
    """Every model."""
    yield from _plain()
    yield from _holding()
    yield from _computing()
    yield from _losses()
    yield from kinds.models()


def _plain() -> Iterator[Model]:
    yield _model("perceptron", mlp)
    yield _model("dropout", lambda: mlp(nn.ReLU(), nn.Dropout(0.3)))
    yield _model("convolutions", lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)
    ), images(12))  # fmt: skip
    yield _model("BatchNorm, momentum None", lambda: mlp(nn.BatchNorm1d(16, momentum=None), nn.ReLU()))
    yield _model("RReLU", lambda: mlp(nn.RReLU()))
    for kind in (nn.LSTM, nn.GRU):
        yield _model(kind.__name__, lambda kind=kind: Lambda(  # type: ignore[misc]
            lambda m, x: m.out(m.rnn(x)[0][:, -1]), rnn=kind(6, 8, batch_first=True), out=nn.Linear(8, 5)
        ), sequences())  # fmt: skip
        yield _model(f"{kind.__name__}, dropout", lambda kind=kind: Lambda(  # type: ignore[misc]
            lambda m, x: m.out(m.rnn(x)[0][:, -1]), out=nn.Linear(8, 5),
            rnn=kind(6, 8, num_layers=2, dropout=0.3, batch_first=True),
        ), sequences())  # fmt: skip
    yield _model("packed sequences", lambda: Lambda(_packed, rnn=nn.GRU(6, 8, batch_first=True), out=nn.Linear(8, 5)),
                 sequences())  # fmt: skip
    yield _model("transformer encoder", lambda: Lambda(
        lambda m, x: m.out(m.body(x).mean(1)), out=nn.Linear(6, 5),
        body=nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 12, batch_first=True), 2),
    ), sequences(), optimizer="AdamW", lr=1e-3)  # fmt: skip
    yield _model("embedding", lambda: Lambda(lambda m, x: m.out(m.table(x).mean(1)), table=nn.Embedding(20, 8),
                                             out=nn.Linear(8, 5)), symbols())  # fmt: skip
    yield _model("embedding bag", lambda: Lambda(lambda m, x: m.out(m.table(x)), table=nn.EmbeddingBag(20, 8),
                                                 out=nn.Linear(8, 5)), symbols())  # fmt: skip
    yield _model("lazy layers", lambda: nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(5)))


def _packed(m: Any, x: Tensor) -> Tensor:
    lengths = 3 + 4 * (x[:, 0, 0] > 0)  # of a row, wherever it lies in its batch
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return m.out(m.rnn(packed)[1][-1])  # type: ignore[no-any-return]


def _holding() -> Iterator[Model]:
    held = lambda m, x: m.body(F.leaky_relu(x, m.held.slope))  # noqa: E731
    yield _model("holds a dataclass", lambda: Lambda(held, held=Settings(), body=mlp()))
    yield _model("holds a namespace", lambda: Lambda(held, held=SimpleNamespace(slope=0.1), body=mlp()))
    yield _model("holds a logger", lambda: Lambda(lambda m, x: m.body(x), log=logging.getLogger("zoo"), body=mlp()))

    def local() -> nn.Module:
        class Local(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = mlp()

            def forward(self, x: Tensor) -> Tensor:
                return self.body(x).tanh()  # type: ignore[no-any-return]

        return Local()

    yield _model("class made in model()", local)
    yield _model("scripted", lambda: torch.jit.script(mlp()))


def _computing() -> Iterator[Model]:
    yield _model("weight_norm", lambda: mlp(nn.ReLU(), parametrizations.weight_norm(nn.Linear(16, 16))))
    yield _model("weight_norm, old style", lambda: mlp(nn.ReLU(), nn.utils.weight_norm(nn.Linear(16, 16))))
    yield _model("spectral_norm", lambda: mlp(nn.ReLU(), parametrizations.spectral_norm(nn.Linear(16, 16))))
    yield _model("spectral_norm, old style", lambda: mlp(nn.ReLU(), nn.utils.spectral_norm(nn.Linear(16, 16))))
    yield _model("orthogonal", lambda: mlp(nn.ReLU(), parametrizations.orthogonal(nn.Linear(16, 16))))
    yield _model("pruned", lambda: mlp(nn.ReLU(), pruned(nn.Linear(16, 16))))
    yield _model("checkpointing", lambda: Lambda(lambda m, x: checkpoint(m.body, x, use_reentrant=False), body=mlp()))
    yield _model("checkpointing, dropout", lambda: Lambda(
        lambda m, x: checkpoint(m.body, x, use_reentrant=False), body=mlp(nn.ReLU(), nn.Dropout(0.2))))  # fmt: skip
    yield _model(
        "noise", lambda: Lambda(lambda m, x: m.body(x + 0.1 * torch.randn_like(x) if m.training else x), body=mlp())
    )
    yield _model("writes by index", lambda: Lambda(_written, body=mlp(out=16), out=nn.Linear(16, 5)))
    yield _model("experts by mask", lambda: Lambda(_experts, one=mlp(), two=mlp(), gate=nn.Linear(12, 1)))
    yield _model("soft experts", lambda: Lambda(
        lambda m, x: torch.stack([m.one(x), m.two(x)], -1) @ m.gate(x).softmax(-1).unsqueeze(-1) @ x.new_ones(1),
        one=mlp(), two=mlp(), gate=nn.Linear(12, 2)))  # fmt: skip


def _written(m: Any, x: Tensor) -> Tensor:
    made = m.body(x)
    whole = torch.zeros_like(made)
    whole[:, ::2] = made[:, ::2]
    whole[:, 1] += made[:, 1]
    return m.out(whole)  # type: ignore[no-any-return]


def _experts(m: Any, x: Tensor) -> Tensor:
    first = m.gate(x) > 0
    return torch.where(first, m.one(x), m.two(x))


def _losses() -> Iterator[Model]:
    def smoothed(model: Any, batch: Any, config: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=config["smoothing"])

    def weighed(model: Any, batch: Any, config: Any) -> Any:
        made = model(batch[0])
        return config["alpha"] * F.cross_entropy(made, batch[1]) + made.square().mean()

    def focal(model: Any, batch: Any, config: Any) -> Any:
        lost = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return ((1 - (-lost).exp()) ** config["gamma"] * lost).mean()

    def penalized(model: Any, batch: Any, config: Any) -> Any:
        if not model.training:
            return classified(model, batch, config)
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return classified(model, batch, config) + 0.1 * slope.square().mean()

    def mixed(model: Any, batch: Any, config: Any) -> Any:
        x, y = batch
        if not model.training:
            return classified(model, batch, config)
        order, part = torch.randperm(len(x)), torch.rand(())
        made = model(part * x + (1 - part) * x[order])
        return part * F.cross_entropy(made, y) + (1 - part) * F.cross_entropy(made, y[order])

    yield _model("label smoothing", mlp, loss=smoothed, space={"smoothing": (0.0, 0.1, 0.2, 0.3)})
    yield _model("loss weight", mlp, loss=weighed, space={"alpha": (0.5, 1.0, 1.5, 2.0)})
    yield _model("focal loss", mlp, loss=focal, space={"gamma": (1.0, 1.5, 2.0, 2.5)})
    yield _model("gradient penalty", lambda: mlp(nn.Tanh()), loss=penalized)
    yield _model("mixup", mlp, loss=mixed)
    yield Model("written", "dropout of its own rate", lambda config: mlp(nn.ReLU(), nn.Dropout(config["p"])), vectors(),
                space={"p": (0.1, 0.2, 0.3, 0.4)})  # fmt: skip
