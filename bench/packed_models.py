"""The models of Pack's evaluation (§4.1) as plain torch modules: MLP-3, MobileNet, ResNet-50 and DenseNet-121.

Each takes images of any size from 32×32 on, and the activation that Pack's Hyperband chooses (table 3).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Activation = Callable[[], nn.Module]


def mlp3(classes: int, image: int, activation: Activation = nn.ReLU) -> nn.Module:
    """Three hidden layers of 512: the paper does not say their width."""
    layers, inside = list[nn.Module]([nn.Flatten()]), 3 * image * image
    for _ in range(3):
        layers += [nn.Linear(inside, 512), activation()]
        inside = 512
    return nn.Sequential(*layers, nn.Linear(inside, classes))


def mobilenet(classes: int, image: int, activation: Activation = nn.ReLU) -> nn.Module:
    """Howard et al., 2017, table 1: depthwise 3×3 and pointwise convolutions."""
    shapes = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    layers, inside = _convolution(3, 32, 3, 2, activation=activation), 32
    for outside, stride in shapes:
        layers += _convolution(inside, inside, 3, stride, groups=inside, activation=activation)
        layers += _convolution(inside, outside, 1, activation=activation)
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


def _convolution(
    inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1, activation: Activation | None = None
) -> list[nn.Module]:
    conv = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outside), *([] if activation is None else [activation()])]


class Bottleneck(nn.Module):
    """A block of ResNet-50: 1×1, 3×3 and 1×1 convolutions beside a shortcut."""

    def __init__(self, inside: int, width: int, stride: int, activation: Activation) -> None:
        super().__init__()
        narrow = _convolution(inside, width, 1, activation=activation)
        middle = _convolution(width, width, 3, stride, activation=activation)
        self.body = nn.Sequential(*narrow, *middle, *_convolution(width, 4 * width, 1))
        same = stride == 1 and inside == 4 * width
        self.shortcut = nn.Sequential() if same else nn.Sequential(*_convolution(inside, 4 * width, 1, stride))
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x) + self.shortcut(x))  # type: ignore[no-any-return]


def resnet50(classes: int, image: int, activation: Activation = nn.ReLU) -> nn.Module:
    """He et al., 2016, with the stride in the 3×3 convolutions."""
    layers, inside = [*_convolution(3, 64, 7, 2, activation=activation), nn.MaxPool2d(3, 2, 1)], 64
    for width, count, stride in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]:
        for place in range(count):
            layers.append(Bottleneck(inside, width, stride if place == 0 else 1, activation))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


class Dense(nn.Module):
    """A layer of DenseNet: what it computes is put beside what it was given."""

    def __init__(self, inside: int, growth: int, activation: Activation) -> None:
        super().__init__()
        wide = nn.Conv2d(inside, 4 * growth, 1, bias=False)
        new = nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)
        self.body = nn.Sequential(
            nn.BatchNorm2d(inside), activation(), wide, nn.BatchNorm2d(4 * growth), activation(), new
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet121(classes: int, image: int, activation: Activation = nn.ReLU) -> nn.Module:
    """Huang et al., 2017, with growth 32 and transitions that halve."""
    layers, inside = [*_convolution(3, 64, 7, 2, activation=activation), nn.MaxPool2d(3, 2, 1)], 64
    for count in (6, 12, 24, 16):
        if len(layers) > 4:
            half = nn.Conv2d(inside, inside // 2, 1, bias=False)
            layers += [nn.BatchNorm2d(inside), activation(), half, nn.AvgPool2d(2, 2)]
            inside //= 2
        for _ in range(count):
            layers.append(Dense(inside, 32, activation))
            inside += 32
    layers += [nn.BatchNorm2d(inside), activation()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp3": mlp3,
    "mobilenet": mobilenet,
    "resnet50": resnet50,
    "densenet121": densenet121,
}
ACTIVATIONS: dict[str, Activation] = {
    "sigmoid": nn.Sigmoid,
    "leaky": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
}
