"""Models of timm, small: the ones that timm makes for tests, and others by the sizes that their builders take."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from torch import nn

from bench.zoo.model import Model, images

SIZE = 32
TINY = [
    "test_byobnet",
    "test_convnext",
    "test_convnext2",
    "test_convnext3",
    "test_efficientnet",
    "test_efficientnet_evos",
    "test_efficientnet_gn",
    "test_efficientnet_ln",
    "test_mambaout",
    "test_nfnet",
    "test_resnet",
    "test_vit",
    "test_vit2",
    "test_vit3",
    "test_vit4",
    "test_vit_relpos",
]  # timm's own models for tests, by names that it knows
SMALL: dict[str, Any] = {"img_size": SIZE, "patch_size": 8}
TINY_SETTINGS = {name: SMALL for name in TINY if "_vit" in name}
PLAIN: dict[str, Any] = {"embed_dim": 16, "depth": 2, "num_heads": 2}
STAGES: dict[str, Any] = {"embed_dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1)}


def models() -> Iterator[Model]:
    """Every model, without making it."""
    for name in TINY:
        yield _model(name, name)
    yield _model("test_vit, drop path", "test_vit", drop_path_rate=0.2, **SMALL)
    yield _model("test_convnext, drop path", "test_convnext", drop_path_rate=0.2)
    yield _model("test_resnet, dropout", "test_resnet", drop_rate=0.3)
    vit = {**PLAIN, "img_size": 16, "patch_size": 8}
    yield _model("DeiT", "deit_tiny_patch16_224", size=16, **vit)
    yield _model("DeiT, distilled", "deit_tiny_distilled_patch16_224", size=16, **vit)
    yield _model("DeiT III", "deit3_small_patch16_224", size=16, **vit)
    yield _model("BEiT", "beit_base_patch16_224", size=16, **vit)
    yield _model("CaiT", "cait_xxs24_224", size=16, **vit)
    yield _model("XCiT", "xcit_nano_12_p8_224", size=32, **PLAIN, img_size=32, patch_size=8)
    mixed: dict[str, Any] = {"size": 16, "img_size": 16, "patch_size": 8, "embed_dim": 16, "num_blocks": 2}
    yield _model("MLP-Mixer", "mlp_mixer:MlpMixer", **mixed)
    yield _model("ConvMixer", "convmixer:ConvMixer", dim=8, depth=2, kernel_size=3, patch_size=4)
    for name, kind in {
        "Swin": "swin_tiny_patch4_window7_224", "Swin v2": "swinv2_tiny_window8_256",
        "Swin v2 CR": "swinv2_cr_tiny_ns_224",
    }.items():  # fmt: skip
        yield _model(name, kind, img_size=32, patch_size=4, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(1, 2),
                     drop_path_rate=0.0)  # fmt: skip
    yield _model("PVT v2", "pvt_v2_b0", **STAGES, num_heads=(1, 1, 2, 2))
    four: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
    yield _model("MetaFormer", "metaformer:MetaFormer", **four)
    yield _model("EdgeNeXt", "edgenext_xx_small", **four, heads=(1, 1, 2, 2))
    yield _model("FastViT", "fastvit_t8", layers=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16))
    yield _model("RepViT", "repvit_m0_9", embed_dim=(8, 8, 16, 16), depth=(1, 1, 1, 1))
    yield _model("TinyViT", "tiny_vit_5m_224", embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2),
                 window_sizes=(4, 4, 2, 1))  # fmt: skip
    yield _model("InceptionNeXt", "inception_next_tiny", depths=(1, 1, 1, 1), dims=(16, 16, 16, 16))
    yield _model("FocalNet", "focalnet:FocalNet", depths=(1, 1, 1, 1), embed_dim=8)
    yield _model("CoaT", "coat_lite_tiny", img_size=32, embed_dims=(8, 8, 16, 16), serial_depths=(1, 1, 1, 1))
    yield _model("Twins", "twins_svt_small", img_size=32, embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1),
                 num_heads=(1, 1, 2, 2), wss=(4, 4, 2, 1))  # fmt: skip
    yield _model("ConvNeXt v2", "convnext:ConvNeXt", **four, use_grn=True, ls_init_value=None)
    yield _model("GhostNet", "ghostnet:GhostNet", cfgs=[[[3, 8, 8, 0, 1]], [[3, 16, 8, 0.25, 2]]], width=1.0)


def _model(name: str, kind: str, size: int = SIZE, **given: Any) -> Model:
    """A model by its name in timm's registry, or by its module and class there."""

    def make(config: Any) -> nn.Module:
        import timm

        module, _, made = kind.partition(":")
        if made:
            return getattr(import_module(f"timm.models.{module}"), made)(num_classes=5, **given)  # type: ignore[no-any-return]
        return timm.create_model(kind, num_classes=5, pretrained=False, **given)  # type: ignore[no-any-return]

    if kind in TINY_SETTINGS and not given:
        given = TINY_SETTINGS[kind]
    return Model("timm", name, make, images(size), optimizer="AdamW", lr=1e-3)
