"""The networks of the fusion bench, each a plain task as a user would write it, and the floor of each.

rn18/8            CIFAR ResNet-18 with base width 8, batch 256, SGD with momentum
rn18              the same at its full width of 64; rn18/2, rn18/4 and rn18/16 at parts of it, if they are asked for
mlp512            3072-512-512-10, batch 256, SGD with momentum
char transformer  4 layers, width 64, 4 heads, 64 windows of 128 characters of tinyshakespeare, Adam
mobilenet/8       depthwise-separable convolutions from width 8, batch 256, Adam
gpt2 small        4 layers, width 256, 8 heads, 16 windows of 128 of 8192 tokens, tied output, AdamW
bert small        the same size in both directions, with padding, 15% of the tokens to be guessed, AdamW

The last two are the architectures of Hugging Face's GPT-2 and BERT in plain torch, as a machine with a GPU may not have
that library, without dropout: the public ways draw otherwise than a trial alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

import penstock as ps
from penstock.trial import Config

Split = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


@cache
def images(rows: int = 2560) -> Split:
    """Ten classes of noisy 3×32×32 images, in the shape of CIFAR's: their content does not change the speed."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (rows,), generator=generator)
    x = torch.randn(10, 3, 32, 32, generator=generator)[y] / 2 + torch.randn(rows, 3, 32, 32, generator=generator)
    return (x[:2048], y[:2048]), (x[2048:], y[2048:])


@cache
def characters(context: int = 128) -> Split:
    """Windows of tinyshakespeare, each with the next character for every character."""
    folder = Path(os.environ.get("PENSTOCK_DATA") or Path(__file__).parents[2] / "shared" / "data")
    path = folder / "text" / "tinyshakespeare.txt"
    if path.exists():
        text = path.read_text()
        number = {character: i for i, character in enumerate(sorted(set(text)))}
        codes = torch.tensor([number[character] for character in text])
    else:
        print(f"char transformer: no {path}, random characters instead", file=sys.stderr)
        codes = torch.randint(CharTransformer.vocabulary, (2**20,), generator=torch.Generator().manual_seed(0))
    rows = (len(codes) - 1) // context
    x, y = (codes[shift : shift + rows * context].view(rows, context) for shift in (0, 1))
    cut = rows * 9 // 10
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


class Images(ps.Task):
    batch_size = 256

    def data(self, config: Config) -> Split:
        return images()

    def optimizer(self, params: Iterable[Parameter], config: Config) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=config["lr"], momentum=config["momentum"])

    def loss(self, model: nn.Module, batch: Any, config: Config) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any, config: Config) -> dict[str, Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(-1) == y).float().mean()}


class BasicBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet18(Images):
    width = 8

    def model(self, config: Config) -> nn.Module:
        widths = [self.width * 2**stage for stage in range(4)]
        layers: list[nn.Module] = [nn.Conv2d(3, self.width, 3, 1, 1, bias=False), nn.BatchNorm2d(self.width), nn.ReLU()]
        for before, width in zip([self.width, *widths], widths, strict=False):
            layers += [BasicBlock(before, width, 1 if width == self.width else 2), BasicBlock(width, width, 1)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


class FullResNet18(ResNet18):
    def __init__(self, width: int = 64) -> None:
        self.width = width


class Mlp512(Images):
    def model(self, config: Config) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(3072, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )


class MobileNet(Images):
    width = 8

    def model(self, config: Config) -> nn.Module:
        w = self.width
        layers = convolution(3, w, 3)
        inside = w
        for outside, stride in [(2 * w, 1), (4 * w, 2), (4 * w, 1), (8 * w, 2), (8 * w, 1), (16 * w, 2), (16 * w, 1)]:
            layers += convolution(inside, inside, 3, stride, groups=inside) + convolution(inside, outside, 1)
            inside = outside
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))

    def optimizer(self, params: Iterable[Parameter], config: Config) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=config["lr"])


def convolution(inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outside), nn.ReLU6()]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))  # type: ignore[no-any-return]


class TiedGpt(Gpt):
    """As GPT-2: the output's weights are the table of tokens, and weights begin small."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__(vocabulary, context, width, heads, layers)
        self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)


class BertBlock(nn.Module):
    """A layer of BERT, whose norms come after the sums."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal=False)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.ln1(x + self.attention(x, mask))
        return self.ln2(x + self.mlp(x))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """As BERT for masked tokens: token 0 is padding."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.ln = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(BertBlock(width, heads) for _ in range(layers))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0)[:, None, None]
        x = self.ln(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.transform(x))  # type: ignore[no-any-return]


class Gpt2Small(ps.Task):
    batch_size = 16
    vocabulary, context, rows = 8192, 128, 288

    def data(self, config: Config) -> Split:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(3, self.vocabulary, (self.rows, self.context + 1), generator=generator)
        x, y = tokens[:, :-1], tokens[:, 1:]
        return (x[:256], y[:256]), (x[256:], y[256:])

    def model(self, config: Config) -> nn.Module:
        return TiedGpt(self.vocabulary, self.context, width=256, heads=8, layers=4)

    def optimizer(self, params: Iterable[Parameter], config: Config) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any, config: Config) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


class BertSmall(Gpt2Small):
    def data(self, config: Config) -> Split:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(3, self.vocabulary, (self.rows, self.context), generator=generator)
        there = torch.arange(self.context) < torch.randint(64, self.context + 1, (self.rows, 1), generator=generator)
        guessed = there & (torch.rand(tokens.shape, generator=generator) < 0.15)
        x = torch.where(guessed, 1, torch.where(there, tokens, 0))
        y = torch.where(guessed, tokens, -100)  # the loss is the mean over these tokens alone
        return (x[:256], y[:256]), (x[256:], y[256:])

    def model(self, config: Config) -> nn.Module:
        return Bert(self.vocabulary, self.context, width=256, heads=8, layers=4)


class CharTransformer(ps.Task):
    batch_size = 64
    vocabulary = 65

    def data(self, config: Config) -> Split:
        return characters()

    def model(self, config: Config) -> nn.Module:
        return Gpt(self.vocabulary, context=128, width=64, heads=4, layers=4)

    def optimizer(self, params: Iterable[Parameter], config: Config) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any, config: Config) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


TASKS: dict[str, tuple[ps.Task, dict[str, float]]] = {
    "rn18/8": (ResNet18(), {"lr": 0.01, "momentum": 0.9}),
    "mlp512": (Mlp512(), {"lr": 0.01, "momentum": 0.9}),
    "char transformer": (CharTransformer(), {"lr": 1e-3}),
    "mobilenet/8": (MobileNet(), {"lr": 2e-3}),
    "gpt2 small": (Gpt2Small(), {"lr": 3e-4}),
    "bert small": (BertSmall(), {"lr": 3e-4}),
    "rn18": (FullResNet18(), {"lr": 0.01, "momentum": 0.9}),
    "rn18/2": (FullResNet18(32), {"lr": 0.01, "momentum": 0.9}),
    "rn18/4": (FullResNet18(16), {"lr": 0.01, "momentum": 0.9}),
    "rn18/16": (FullResNet18(4), {"lr": 0.01, "momentum": 0.9}),
}
"""Each network's task, and the config that the bench's trials have."""
NARROWER = ("rn18/2", "rn18/4", "rn18/16")  # which bench/fusion.py times where they are asked for

Batch = tuple[Tensor, Tensor]
BANDWIDTH = 4.8e12  # bytes a second, H200


class Network:
    """A task, its batches on a device, and the initial weights of its trials."""

    profiled = False  # whether to print the kernels that its steps spend their time on

    def __init__(
        self,
        name: str,
        device: torch.device,
        batch_size: int | None,
        seconds: float,
        task: tuple[ps.Task, Config] | None = None,
    ) -> None:
        self.name, self.device, self.seconds = name, device, seconds
        self.task: ps.Task
        self.config: Config
        self.task, self.config = task or TASKS[name]
        self.batch_size = batch_size or self.task.batch_size
        self.precisions = ("fp32",) if name == "mlp512" else ("fp32", "bf16")
        self.convolutional = any(isinstance(module, nn.Conv2d) for module in self.model("meta").modules())
        self._initial: list[dict[str, Tensor]] = []

    def model(self, device: torch.device | str | None = None) -> nn.Module:
        with torch.device(device or self.device):
            return self.task.model(self.config)

    def initial(self, trial: int) -> dict[str, Tensor]:
        while len(self._initial) <= trial:
            torch.manual_seed(len(self._initial))
            self._initial.append({name: value.detach() for name, value in self.model().state_dict().items()})
        return self._initial[trial]

    def skip(self, trials: int) -> None:
        """Make no weights for the first trials, which other processes train."""
        self._initial = [{}] * trials

    def stacked(self, size: int) -> dict[str, Tensor]:
        states = [self.initial(trial) for trial in range(size)]
        return {name: torch.stack([state[name] for state in states]) for name in states[0]}

    @cache  # noqa: B019
    def batches(self, precision: str) -> list[Batch]:
        (x, y), _ = self.task.data(self.config)
        pairs = zip(x.split(self.batch_size), y.split(self.batch_size), strict=True)
        return [(self.laid_out(x, precision), y.to(self.device)) for x, y in islice(pairs, 8)]

    def laid_out(self, x: Tensor, precision: str) -> Tensor:
        """A tensor on the device, in channels-last where the network and the precision need that."""
        last = self.convolutional and precision == "bf16"
        return x.to(self.device, memory_format=torch.channels_last if last else torch.preserve_format)

    def autocast(self, precision: str) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16")

    @cache  # noqa: B019
    def floor(self, precision: str) -> float:
        """Model steps a second at the memory's bandwidth."""
        model = self.model("meta")
        traffic = Traffic(2 if precision == "bf16" else 4)
        x, y = self.batches(precision)[0]
        with traffic:
            self.task.loss(model, (x.to("meta"), y.to("meta")), self.config)
        tensors = 3 if isinstance(self.task.optimizer(model.parameters(), self.config), torch.optim.Adam) else 2
        parameters = 4 * sum(parameter.numel() for parameter in model.parameters())
        return BANDWIDTH / (traffic.bytes + parameters * (2 + 2 * tensors))


class Traffic(TorchFunctionMode):
    """Counts the bytes that a step's activations and their gradients move, by the rules at the top of fusion.py."""

    def __init__(self, itemsize: int) -> None:
        super().__init__()
        self.itemsize, self.bytes = itemsize, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        # Neither parameters, which are counted apart, nor the batch, which needs no gradient, count here.
        read = sum(
            value.numel()
            for value in args
            if isinstance(value, Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)
        )
        if name in ("conv2d", "linear", "batch_norm", "layer_norm", "scaled_dot_product_attention"):
            self.bytes += self.itemsize * (3 * read + 2 * result.numel())
        elif name == "embedding":
            self.bytes += self.itemsize * 2 * result.numel()
        elif name == "cross_entropy":
            self.bytes += self.itemsize * 2 * read
        return result
