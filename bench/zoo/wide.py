"""Models that users have, as wide as it takes to make them narrower: for ``bench/surrogate.py models``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from bench.zoo import huggingface as hf
from bench.zoo.model import Model, classified, images

ADAM: dict[str, Any] = {"optimizer": "AdamW", "lr": 1e-3}
WIDTH: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = {**hf.TEXT, **WIDTH}
DECODER = {**ENCODER, **hf.SPECIAL, "num_key_value_heads": 2, "use_cache": False}
BOTH = {**hf.BOTH, "d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}


def models() -> Iterator[Model]:
    """Every model of the libraries that are here, without making it."""
    for library, own in (("torchvision", _vision), ("transformers", _transformers)):
        if find_spec(library) is None:
            print(f"{library} is not here: its models are left out.", file=sys.stderr)
            continue
        yield from own()


def _torchvision() -> Any:
    """torchvision's models; beside a CPU's torch its operators do not load, and their names are to be declared."""
    try:
        return import_module("torchvision.models")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return import_module("torchvision.models")


def _vision() -> Iterator[Model]:
    tv = _torchvision()

    def built(name: str, **given: Any) -> Callable[[Any], nn.Module]:
        return lambda config: tv.get_model(name, weights=None, num_classes=5, **given)

    def one(name: str, make: Callable[[Any], nn.Module], size: int = 32, **more: Any) -> Model:
        return Model("torchvision", name, make, images(size), classified, **more)

    yield one("ResNet-18", built("resnet18"))
    yield one("ResNet-50", built("resnet50"))
    yield one("VGG-11", built("vgg11_bn"))
    yield one("MobileNetV2", built("mobilenet_v2"))
    yield one("MobileNetV3", built("mobilenet_v3_small"))
    yield one("EfficientNet", built("efficientnet_b0"))
    yield one("DenseNet", built("densenet121"))
    yield one("ConvNeXt", built("convnext_tiny"), **ADAM)
    vit = {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
    yield one("ViT", lambda config: tv.VisionTransformer(**vit, num_classes=5), 16, **ADAM)
    swin = {"patch_size": [2, 2], "embed_dim": 64, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    yield one("Swin", lambda config: tv.SwinTransformer(**swin, num_classes=5, stochastic_depth_prob=0.0), **ADAM)
    yield one("ShuffleNet", built("shufflenet_v2_x1_0"))
    yield one("RegNet", built("regnet_y_400mf"))


def _transformers() -> Iterator[Model]:
    one = hf._model
    yield one("BERT", "Bert:ForSequenceClassification", {**ENCODER, **NO_DROPOUT, "num_labels": 3}, hf.sentences)
    yield one("BERT, eager", "Bert:ForSequenceClassification",
              {**ENCODER, **NO_DROPOUT, "num_labels": 3, "attn_implementation": "eager"}, hf.sentences)  # fmt: skip
    yield one("BERT, masked tokens", "Bert:ForMaskedLM", {**ENCODER, **NO_DROPOUT}, hf.masked)
    yield one("RoBERTa", "Roberta:ForMaskedLM", {**ENCODER, **hf.SPECIAL, **NO_DROPOUT}, hf.masked)
    yield one("DistilBERT", "DistilBert:ForSequenceClassification",
              {**hf.TEXT, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "num_labels": 3, "dropout": 0.0,
               "attention_dropout": 0.0, "seq_classif_dropout": 0.0}, hf.sentences)  # fmt: skip
    yield one("GPT-2", "GPT2:GPT2LMHeadModel",
              {"vocab_size": hf.VOCABULARY, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4,
               "use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
               "eos_token_id": 2}, hf.unmasked)  # fmt: skip
    yield one("T5", "T5:ForConditionalGeneration",
              {"vocab_size": hf.VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
               "dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}, hf.translations)  # fmt: skip
    yield one("BART", "Bart:ForConditionalGeneration", {**BOTH, "dropout": 0.0}, hf.translations)
    yield one("Llama", "Llama:ForCausalLM", DECODER, hf.following)
    yield one("Llama, tied", "Llama:ForCausalLM", {**DECODER, "tie_word_embeddings": True}, hf.unmasked)
    yield one("Qwen2", "Qwen2:ForCausalLM", DECODER, hf.unmasked)
    yield one("Mistral", "Mistral:ForCausalLM", DECODER, hf.unmasked)
    yield one("Gemma", "Gemma:ForCausalLM", {**DECODER, "head_dim": 16}, hf.unmasked)
    yield one("GPT-NeoX", "GPTNeoX:ForCausalLM", {**ENCODER, **hf.SPECIAL, "use_cache": False}, hf.unmasked)
    yield one("ViT", "ViT:ForImageClassification",
              {**WIDTH, **NO_DROPOUT, "image_size": 16, "patch_size": 4, "num_labels": 3}, hf.pictures)  # fmt: skip
    yield one("Swin", "Swin:ForImageClassification",
              {"image_size": 16, "patch_size": 2, "embed_dim": 64, "depths": [2, 2], "num_heads": [2, 4],
               "window_size": 4, "num_labels": 3, "drop_path_rate": 0.0}, hf.pictures)  # fmt: skip
