"""Models of torchvision, narrow: their public classes take widths and depths, their builders the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bench.zoo.model import ROWS, Data, Model, images

CLASSES: dict[str, Any] = {"num_classes": 5}


def _model(name: str, make: Callable[[], nn.Module], size: int = 32, **more: Any) -> Model:
    return Model("torchvision", name, lambda config: make(), more.pop("data", images(size)), **more)


def models() -> Iterator[Model]:
    """Every model, without making it."""
    from torchvision import models as tv
    from torchvision.models import resnet, vgg

    def built(name: str, **given: Any) -> Callable[[], nn.Module]:
        return lambda: tv.get_model(name, weights=None, **{**CLASSES, **given})

    def narrow_resnet(block: Any, layers: list[int], **given: Any) -> Callable[[], nn.Module]:
        return lambda: _narrow(resnet.ResNet(block, layers, **CLASSES, **given), 8)

    yield _model("ResNet, basic blocks", narrow_resnet(resnet.BasicBlock, [1, 1, 1, 1]))
    yield _model("ResNet, bottlenecks", narrow_resnet(resnet.Bottleneck, [1, 1, 1, 1]))
    yield _model("ResNet, zero init", narrow_resnet(resnet.BasicBlock, [1, 1, 1, 1], zero_init_residual=True))
    yield _model("ResNet, dilated", narrow_resnet(resnet.Bottleneck, [1, 1, 1, 1],
                                                  replace_stride_with_dilation=[False, True, True]))  # fmt: skip
    yield _model("ResNet, GroupNorm", narrow_resnet(resnet.BasicBlock, [1, 1, 1, 1],
                                                    norm_layer=partial(nn.GroupNorm, 4)))  # fmt: skip
    for norm in (False, True):
        plan = [4, "M", 8, "M", 8, 8, "M", 8, 8, "M"]
        layers = partial(vgg.make_layers, plan, batch_norm=norm)
        yield _model(f"VGG{', BatchNorm' if norm else ''}", partial(_vgg, layers))
    yield _model("SqueezeNet 1.0", built("squeezenet1_0"), 48)
    yield _model("SqueezeNet 1.1", built("squeezenet1_1"), 48)
    dense = {"growth_rate": 4, "block_config": (2, 2, 2), "num_init_features": 8}
    yield _model("DenseNet", lambda: tv.DenseNet(**dense, **CLASSES))
    yield _model("DenseNet, dropout", lambda: tv.DenseNet(**dense, drop_rate=0.2, **CLASSES))
    yield _model("MobileNet v2", built("mobilenet_v2", width_mult=0.1))
    yield _model("MobileNet v3 small", _mobilenet_v3)
    yield _model("MnasNet", lambda: tv.MNASNet(0.2, **CLASSES))
    yield _model("ShuffleNet v2", lambda: tv.ShuffleNetV2([1, 2, 1], [8, 16, 24, 32, 48], **CLASSES))
    yield _model("EfficientNet", partial(_efficientnet, 0.0))
    yield _model("EfficientNet, stochastic depth", partial(_efficientnet, 0.2))
    yield _model("ConvNeXt", partial(_convnext, 0.0), optimizer="AdamW", lr=1e-3)
    yield _model("ConvNeXt, stochastic depth", partial(_convnext, 0.3), optimizer="AdamW", lr=1e-3)
    yield _model("RegNet X", partial(_regnet, None))
    yield _model("RegNet Y", partial(_regnet, 0.25))
    vit = {"image_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
    yield _model("ViT", lambda: tv.VisionTransformer(**vit, **CLASSES), 16, optimizer="AdamW", lr=1e-3)
    yield _model("ViT, dropout", lambda: tv.VisionTransformer(**vit, dropout=0.1, attention_dropout=0.1, **CLASSES), 16,
                 optimizer="AdamW", lr=1e-3)  # fmt: skip
    swin = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": [4, 4]}
    for part in (0.0, 0.2):
        yield _model(f"Swin{', stochastic depth' if part else ''}", partial(
            tv.SwinTransformer, **swin, stochastic_depth_prob=part, **CLASSES), optimizer="AdamW", lr=1e-3)  # fmt: skip
    yield _model("Swin v2", _swin_v2, optimizer="AdamW", lr=1e-3)
    yield _model("MaxViT", _maxvit, optimizer="AdamW", lr=1e-3)
    yield _model("GoogLeNet", lambda: _narrow(tv.GoogLeNet(aux_logits=False, init_weights=False, **CLASSES), 8), 64)
    yield _model(
        "Inception v3", lambda: _narrow(tv.Inception3(aux_logits=False, init_weights=False, **CLASSES), 16), 96
    )
    yield _model("AlexNet", lambda: _narrow(tv.AlexNet(**CLASSES), 16), 64)
    yield _model("FCN", partial(_segmentation, "FCN"), data=_masks, loss=_by_pixel)
    yield _model("DeepLab v3", partial(_segmentation, "DeepLabV3"), data=_masks, loss=_by_pixel)
    yield _model("LR-ASPP", partial(_segmentation, "LRASPP"), data=_masks, loss=_by_pixel)
    for name in ("r3d_18", "mc3_18", "r2plus1d_18"):
        yield _model(f"video {name}", partial(_video, name), data=_clips)
    yield _model("feature pyramid", _Pyramid)


def _narrow(model: nn.Module, factor: int) -> nn.Module:
    """A model with convolutions, norms and linear layers of fewer channels, for classes that take no widths."""
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
    for module in model.modules():
        for name, child in list(module.named_children()):
            if (made := _narrowed(child, factor, last=child in last)) is not None:
                setattr(module, name, made)
    return model


def _narrowed(child: nn.Module, factor: int, *, last: bool) -> nn.Module | None:
    def less(width: int) -> int:
        return width if width <= 3 else max(1, width // factor)

    if isinstance(child, nn.Conv2d | nn.Conv3d):
        kind: Any = nn.Conv3d if isinstance(child, nn.Conv3d) else nn.Conv2d  # torchvision's own take other settings
        groups = 1 if child.groups == 1 else less(child.groups)
        more: dict[str, Any] = {"bias": child.bias is not None, "groups": groups, "dilation": child.dilation}
        made: nn.Module = kind(less(child.in_channels), less(child.out_channels), child.kernel_size, child.stride,
                               child.padding, **more)  # fmt: skip
        return made
    if isinstance(child, nn.BatchNorm2d | nn.BatchNorm3d):
        return type(child)(less(child.num_features), eps=child.eps, momentum=child.momentum)
    if isinstance(child, nn.GroupNorm):
        return nn.GroupNorm(child.num_groups, less(child.num_channels))
    if isinstance(child, nn.Linear):
        out = child.out_features if last else less(child.out_features)
        return nn.Linear(less(child.in_features), out, bias=child.bias is not None)
    return None


def _vgg(layers: Callable[[], nn.Module]) -> nn.Module:
    pooled = nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(
        layers(), pooled, nn.Flatten(), nn.Linear(32, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, 5)
    )


def _mobilenet_v3() -> Any:
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    part = partial(InvertedResidualConfig, width_mult=1.0)
    plan = [
        part(8, 3, 8, 8, True, "RE", 2, 1),
        part(8, 3, 24, 12, False, "RE", 2, 1),
        part(12, 5, 32, 16, True, "HS", 1, 1),
    ]
    return MobileNetV3(plan, last_channel=24, **CLASSES)


def _efficientnet(depth: float) -> Any:
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig

    part = partial(MBConvConfig, width_mult=1.0, depth_mult=1.0)
    plan = [FusedMBConvConfig(1, 3, 1, 8, 8, 2), part(4, 3, 2, 8, 12, 2), part(4, 5, 1, 12, 16, 1)]
    return EfficientNet(plan, 0.2, stochastic_depth_prob=depth, last_channel=24, **CLASSES)


def _convnext(depth: float) -> Any:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    plan = [CNBlockConfig(8, 12, 1), CNBlockConfig(12, 16, 2), CNBlockConfig(16, None, 1)]
    return ConvNeXt(plan, stochastic_depth_prob=depth, **CLASSES)


def _regnet(squeeze: float | None) -> Any:
    from torchvision.models.regnet import BlockParams, RegNet

    widths = {
        "depths": [1, 1, 2],
        "widths": [8, 16, 16],
        "group_widths": [4, 8, 8],
        "bottleneck_multipliers": [1.0] * 3,
    }
    return RegNet(BlockParams(**widths, strides=[2, 2, 2], se_ratio=squeeze), stem_width=8, **CLASSES)


def _swin_v2() -> Any:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    return SwinTransformer(
        patch_size=[2, 2], embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=[4, 4],
         block=SwinTransformerBlockV2,
        downsample_layer=PatchMergingV2, stochastic_depth_prob=0.0, **CLASSES,
    )  # fmt: skip


def _maxvit() -> Any:
    from torchvision.models.maxvit import MaxVit

    return MaxVit(
        input_size=(32, 32), stem_channels=8, partition_size=4, block_channels=[8, 16], block_layers=[1, 1], head_dim=4,
        stochastic_depth_prob=0.0, **CLASSES,
    )  # fmt: skip


def _segmentation(kind: str) -> Any:
    from torchvision.models.segmentation import deeplabv3, fcn, lraspp

    backbone = _Backbone()
    if kind == "FCN":
        return fcn.FCN(backbone, fcn.FCNHead(16, 3), fcn.FCNHead(8, 3))
    if kind == "LRASPP":
        return lraspp.LRASPP(_Backbone("low", "high"), 8, 16, 3, inter_channels=8)
    return _narrow(deeplabv3.DeepLabV3(backbone, deeplabv3.DeepLabHead(16, 3)), 1)


class _Backbone(nn.Module):
    """Two stages of convolutions under the names that torchvision's heads ask for."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names or ("aux", "out")
        self.low = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.high = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        low = self.low(x)
        return dict(zip(self.names, (low, self.high(low)), strict=True))


class _Pyramid(nn.Module):
    """torchvision's feature pyramid over a small backbone."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.ops import FeaturePyramidNetwork

        self.backbone, self.pyramid = _Backbone(), FeaturePyramidNetwork([8, 16], 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.pyramid(self.backbone(x))
        pooled: torch.Tensor = sum(level.mean((2, 3)) for level in made.values())
        return self.head(pooled)  # type: ignore[no-any-return]


def _video(name: str) -> nn.Module:
    from torchvision import models as tv

    return _narrow(tv.get_model(name, weights=None, **CLASSES), 16)


def _masks() -> Data:
    return torch.randn(ROWS, 3, 16, 16), torch.randint(3, (ROWS, 16, 16))


def _clips() -> Data:
    return torch.randn(ROWS, 3, 4, 16, 16), torch.randint(5, (ROWS,))


def _by_pixel(model: Any, batch: Any, config: Any) -> torch.Tensor:
    x, y = batch
    made = model(x)
    loss = F.cross_entropy(made["out"], y)
    return loss + 0.5 * F.cross_entropy(made["aux"], y) if "aux" in made else loss
