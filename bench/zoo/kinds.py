"""Kinds of training by hand: experts, generative models, contrastive and reinforcement learning, physics, branches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from bench.zoo.model import Model, images, vectors


def _mlp(width: int = 12, out: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, out))


class _Experts(nn.Module):
    """A row goes to its two best experts, by a mask of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(12, 3), nn.ModuleList(_mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros(len(x), 5, dtype=x.dtype)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).any(-1)
            if mine.any():
                out[mine] += expert(x[mine]) * (weights * (chosen == number)).sum(-1)[mine, None]
        return out


class _LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(12, 12) for _ in range(3)), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand(1).item() > 0.3:
                x = x + torch.tanh(layer(x))
        made: Tensor = self.last(x)
        return made


class _Parts(nn.Module):
    """Networks by name, which a loss puts together; some of them follow others and are not trained."""

    def __init__(self, frozen: str = "", **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        if frozen:
            getattr(self, frozen).requires_grad_(False)


class _Codes(nn.Module):
    """Vector quantization, whose codes are running averages."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 4), _mlp(4, 12)
        for name, value in {"codes": torch.randn(6, 4), "counts": torch.ones(6), "sums": torch.randn(6, 4)}.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Any:
        codes, counts, sums = (self.get_buffer(name) for name in ("codes", "counts", "sums"))
        z = self.encoder(x)
        place = torch.cdist(z, codes).argmin(-1)
        near = F.embedding(place, codes)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(place, 6).type_as(z)
                counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                sums.mul_(0.9).add_(hot.t() @ z, alpha=0.1)
                codes.copy_(sums / (counts + 1e-5).unsqueeze(1))
        return self.decoder(z + (near - z).detach()), F.mse_loss(z, near.detach())


def _elbo(model: Any, batch: Any, config: Any) -> Any:
    x = batch[0]
    mean, spread = model.encoder(x).chunk(2, -1)
    near = Normal(mean, F.softplus(spread) + 0.1)
    z = near.rsample() if model.training else mean
    prior = Normal(torch.zeros_like(mean), torch.ones_like(mean))
    return F.mse_loss(model.decoder(z), x) + 0.1 * kl_divergence(near, prior).sum(-1).mean()


def _coded(model: Any, batch: Any, config: Any) -> Any:
    made, lost = model(batch[0])
    return F.mse_loss(made, batch[0]) + 0.25 * lost


def _denoised(model: Any, batch: Any, config: Any) -> Any:
    x = batch[0]
    part = torch.rand(len(x), 1, 1, 1, dtype=x.dtype) if model.training else torch.full((1,), 0.5, dtype=x.dtype)
    noise = torch.randn_like(x) if model.training else x.flip(-1)
    return F.mse_loss(model(part * x + (1 - part) * noise), x - noise)


def _contrasted(model: Any, batch: Any, config: Any) -> Any:
    x = batch[0]
    other = x + 0.1 * torch.randn_like(x) if model.training else x.flip(-1)
    z = F.normalize(model(torch.cat([x, other])), dim=-1)
    alike = (z @ z.t() / 0.5).masked_fill(torch.eye(2 * len(x), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(alike, torch.arange(2 * len(x)).roll(len(x)))


def _followed(model: Any, batch: Any, config: Any) -> Any:
    x = batch[0]
    if model.training:
        for p, q in zip(model.own.parameters(), model.target.parameters(), strict=True):
            q.data = 0.9 * q.data + 0.1 * p.data
    return 2 - 2 * F.cosine_similarity(model.head(model.own(x)), model.target(x.flip(-1)), dim=-1).mean()


def _valued(model: Any, batch: Any, config: Any) -> Any:
    x, action = batch
    with torch.no_grad():
        value = x[:, 0] + 0.9 * model.target(x.flip(-1)).max(1)[0]
    if model.training:
        with torch.no_grad():
            for p, q in zip(model.own.parameters(), model.target.parameters(), strict=True):
                q.lerp_(p, 0.1)
    return F.smooth_l1_loss(model.own(x).gather(1, action[:, None]).squeeze(1), value)


def _physical(model: Any, batch: Any, config: Any) -> Any:
    with torch.enable_grad():
        x = batch[0].clone().requires_grad_()
        made = model(x)
        (slope,) = torch.autograd.grad(made, x, torch.ones_like(made), create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, :1], x, torch.ones_like(slope[:, :1]), create_graph=True)
        return (slope[:, 1:2] - 0.1 * bend[:, :1]).square().mean() + (made - x[:, :1].sin()).square().mean()


def _branching(model: Any, batch: Any, config: Any) -> Any:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss if loss.item() > 1.65 else loss.square()


def models() -> Iterator[Model]:
    """Every model."""
    made: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "experts by rows": (_Experts, {}),
        "layer drop": (_LayerDrop, {}),
        "a branch on the loss": (_mlp, {"loss": _branching}),
        "VAE": (lambda: _Parts(encoder=nn.Linear(12, 8), decoder=_mlp(4, 12)), {"loss": _elbo}),
        "VQ-VAE, EMA codebook": (_Codes, {"loss": _coded}),
        "diffusion": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(),
                                            nn.Conv2d(8, 3, 3, padding=1)),
                      {"loss": _denoised, "data": images(8)}),
        "contrastive": (_mlp, {"loss": _contrasted}),
        "momentum encoder, by data": (lambda: _followers(head=nn.Linear(5, 5)), {"loss": _followed}),
        "DQN, soft target": (_followers, {"loss": _valued}),
        "physics-informed": (lambda: _mlp(out=1), {"loss": _physical}),
        "compiled": (lambda: torch.compile(_mlp(), backend="eager"), {}),
    }  # fmt: skip
    for name, (make, more) in made.items():
        data = more.pop("data", vectors())
        yield Model("written", name, lambda config, make=make: make(), data, **more)  # type: ignore[misc]


def _followers(**parts: nn.Module) -> nn.Module:
    own = _mlp()
    return _Parts("target", own=own, target=copy.deepcopy(own), **parts)
