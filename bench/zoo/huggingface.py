"""Models of Hugging Face transformers, small, made from their configs: each gives its own loss from its labels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bench.zoo.model import ROWS, Data, Model, own_loss

VOCABULARY, LENGTH = 40, 9
WIDTH: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
ENCODER = {**TEXT, **WIDTH}
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**ENCODER, **SPECIAL, "num_key_value_heads": 1, "use_cache": False}
BOTH: dict[str, Any] = {
    **TEXT, **SPECIAL, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 1,
    "forced_eos_token_id": 2, "use_cache": False,
}  # fmt: skip
VISION: dict[str, Any] = {**WIDTH, "image_size": 16, "patch_size": 8, "num_labels": 3}
SPEECH: dict[str, Any] = {
    **WIDTH, "vocab_size": 12, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer", "pad_token_id": 0, "mask_time_length": 2, "mask_feature_length": 2,
    "classifier_proj_size": 8, "num_labels": 3, "mask_time_prob": 0.0,
}  # fmt: skip


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH))


def mask() -> torch.Tensor:
    """Of lengths from 3 to all."""
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1))
    return (torch.arange(LENGTH) < lengths).long()


def sentences() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "attention_mask": mask(), "labels": torch.randint(3, (ROWS,))}


def scores() -> Data:
    return {**sentences(), "labels": torch.randn(ROWS)}


def tagged() -> Data:
    """A label for each token, and none for padding."""
    ids, there = tokens(), mask()
    return {"input_ids": ids, "attention_mask": there, "labels": torch.where(there == 1, ids % 3, -100)}


def masked() -> Data:
    """Some of the tokens are to be guessed."""
    ids, there = tokens(), mask()
    wanted = (torch.rand(ids.shape) < 0.4) & (there == 1)
    return {
        "input_ids": torch.where(wanted, 3, ids), "attention_mask": there, "labels": torch.where(wanted, ids, -100),
    }  # fmt: skip


def following() -> Data:
    """Each token is to be guessed from the ones before."""
    ids, there = tokens(), mask()
    return {"input_ids": ids, "attention_mask": there, "labels": torch.where(there == 1, ids, -100)}


def unmasked() -> Data:
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def answers() -> Data:
    ids, there = tokens(), mask()
    return {"input_ids": ids, "attention_mask": there, "start_positions": torch.randint(3, (ROWS,)),
            "end_positions": torch.randint(3, (ROWS,))}  # fmt: skip


def choices() -> Data:
    ids = torch.randint(3, VOCABULARY, (ROWS, 3, LENGTH))
    return {"input_ids": ids, "labels": torch.randint(3, (ROWS,))}


def translations() -> Data:
    ids, there = tokens(), mask()
    return {"input_ids": ids, "attention_mask": there, "labels": torch.randint(3, VOCABULARY, (ROWS, 6))}


def pictures(size: int = 16) -> Data:
    return {"pixel_values": torch.randn(ROWS, 3, size, size), "labels": torch.randint(3, (ROWS,))}


def captioned() -> Data:
    return {"input_ids": tokens(), "attention_mask": mask(), "pixel_values": torch.randn(ROWS, 3, 16, 16)}


def segmented() -> Data:
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.randint(3, (ROWS, 32, 32))}


def spoken() -> Data:
    return {"input_values": torch.randn(ROWS, 400), "labels": torch.randint(3, (ROWS,))}


def transcribed() -> Data:
    return {"input_values": torch.randn(ROWS, 400), "labels": torch.randint(1, 12, (ROWS, 4))}


def spectra() -> Data:
    return {"input_features": torch.randn(ROWS, 8, 20), "labels": torch.randint(3, VOCABULARY, (ROWS, 6))}


def series() -> Data:
    return {"past_values": torch.randn(ROWS, 16, 2), "future_values": torch.randn(ROWS, 4, 2)}


def _made(kind: str, settings: dict[str, Any], parts: dict[str, tuple[str, dict[str, Any]]], config: Any) -> Any:
    import transformers

    kinds: Any = transformers
    named, model = kind.split(":")
    own = {name: getattr(kinds, part)(**given) for name, (part, given) in parts.items()}
    return getattr(kinds, model)(getattr(kinds, named)(**copy.deepcopy(settings), **own))


def _model(
    name: str, kind: str, settings: dict[str, Any], data: Callable[[], Data],
    parts: dict[str, tuple[str, dict[str, Any]]] | None = None, **more: Any,
) -> Model:  # fmt: skip
    """A model of transformers; ``kind`` names its config and its class."""
    config, _, model = kind.partition(":")
    whole = f"{config}Config:{config if model[:3] == 'For' else ''}{model}"
    given = {"loss": own_loss, "optimizer": "AdamW", "lr": 1e-3, **more}
    return Model("transformers", name, partial(_made, whole, settings, parts or {}), data, **given)


def models() -> Iterator[Model]:
    """Every model, without making it."""
    eager = {"attn_implementation": "eager"}
    yield _model("BERT", "Bert:ForSequenceClassification", {**ENCODER, "num_labels": 3}, sentences)
    yield _model(
        "BERT, eager attention", "Bert:ForSequenceClassification", {**ENCODER, **eager, "num_labels": 3}, sentences
    )
    yield _model("BERT, regression", "Bert:ForSequenceClassification", {**ENCODER, "num_labels": 1}, scores)
    yield _model("BERT, masked tokens", "Bert:ForMaskedLM", ENCODER, masked)
    yield _model("BERT, tokens", "Bert:ForTokenClassification", {**ENCODER, "num_labels": 3}, tagged)
    yield _model("BERT, answers", "Bert:ForQuestionAnswering", ENCODER, answers)
    yield _model("BERT, choices", "Bert:ForMultipleChoice", ENCODER, choices)
    yield _model("RoBERTa", "Roberta:ForSequenceClassification", {**ENCODER, **SPECIAL, "num_labels": 3}, sentences)
    yield _model("RoBERTa, masked tokens", "Roberta:ForMaskedLM", {**ENCODER, **SPECIAL}, masked)
    yield _model("DistilBERT", "DistilBert:ForSequenceClassification",
                 {**TEXT, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "num_labels": 3},
                  sentences)  # fmt: skip
    yield _model(
        "ALBERT", "Albert:ForSequenceClassification", {**ENCODER, "embedding_size": 8, "num_labels": 3}, sentences
    )
    yield _model(
        "ELECTRA", "Electra:ForSequenceClassification", {**ENCODER, "embedding_size": 8, "num_labels": 3}, sentences
    )
    yield _model("DeBERTa", "Deberta:ForSequenceClassification",
                 {**ENCODER, "relative_attention": True, "pos_att_type": "c2p|p2c", "num_labels": 3},
                  sentences)  # fmt: skip
    yield _model("DeBERTa-v2", "DebertaV2:ForSequenceClassification",
                 {**ENCODER, "relative_attention": True, "pos_att_type": "c2p|p2c", "position_buckets": 4,
                  "num_labels": 3},
                 sentences)  # fmt: skip
    yield _model("MPNet", "MPNet:ForSequenceClassification", {**ENCODER, "num_labels": 3}, sentences)
    yield _model("XLNet", "XLNet:ForSequenceClassification",
                 {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "num_labels": 3},
                 sentences)  # fmt: skip
    yield _model("Longformer", "Longformer:ForSequenceClassification",
                 {**ENCODER, "attention_window": [4, 4], "num_labels": 3}, sentences)  # fmt: skip
    yield _model("BigBird", "BigBird:ForSequenceClassification",
                 {**ENCODER, "attention_type": "original_full", "num_labels": 3}, sentences)  # fmt: skip
    yield _model("SqueezeBERT", "SqueezeBert:ForSequenceClassification",
                 {**ENCODER, "embedding_size": 16, "num_labels": 3, "q_groups": 2, "k_groups": 2, "v_groups": 2,
                  "post_attention_groups": 1, "intermediate_groups": 2, "output_groups": 2}, sentences)  # fmt: skip
    yield _model("MobileBERT", "MobileBert:ForSequenceClassification",
                 {**ENCODER, "embedding_size": 8, "intra_bottleneck_size": 8, "num_feedforward_networks": 2,
                  "num_labels": 3},
                 sentences)  # fmt: skip
    yield _model("ConvBERT", "ConvBert:ForSequenceClassification",
                 {**ENCODER, "embedding_size": 16, "conv_kernel_size": 3, "num_labels": 3}, sentences)  # fmt: skip
    yield _model(
        "RoFormer", "RoFormer:ForSequenceClassification", {**ENCODER, "embedding_size": 8, "num_labels": 3}, sentences
    )
    yield _model("FNet", "FNet:ForSequenceClassification", {**ENCODER, "type_vocab_size": 2, "num_labels": 3},
                 lambda: {k: v for k, v in sentences().items() if k != "attention_mask"})  # fmt: skip
    yield _model("Funnel", "Funnel:ForSequenceClassification",
                 {"vocab_size": VOCABULARY, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24,
                  "block_sizes": [1, 1],
                  "num_decoder_layers": 1, "num_labels": 3}, sentences)  # fmt: skip
    yield _model("ModernBERT", "ModernBert:ForSequenceClassification",
                 {**ENCODER, **SPECIAL, "cls_token_id": 1, "sep_token_id": 2, "num_labels": 3}, sentences)  # fmt: skip
    yield _model("CANINE", "Canine:ForSequenceClassification",
                 {**WIDTH, "max_position_embeddings": 64, "num_hash_buckets": 16, "num_hash_functions": 2,
                  "local_transformer_stride": 4, "downsampling_rate": 2, "num_labels": 3}, sentences)  # fmt: skip
    yield _model("XLM-RoBERTa", "XLMRoberta:ForTokenClassification", {**ENCODER, **SPECIAL, "num_labels": 3}, tagged)
    yield _model("CamemBERT", "Camembert:ForMaskedLM", {**ENCODER, **SPECIAL}, masked)
    yield _model("ESM", "Esm:ForMaskedLM", {**ENCODER, **SPECIAL, "mask_token_id": 3}, masked)
    yield _model("GPT-2", "GPT2:GPT2LMHeadModel",
                 {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2,
                  "use_cache": False},
                 following)  # fmt: skip
    yield _model("GPT-2, eager attention", "GPT2:GPT2LMHeadModel",
                 {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2,
                  "use_cache": False,
                  **eager}, following)  # fmt: skip
    yield _model("GPT-2, sentences", "GPT2:ForSequenceClassification",
                 {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2,
                  "use_cache": False,
                  "pad_token_id": 0, "num_labels": 3}, sentences)  # fmt: skip
    yield _model("GPT-2, cache left on", "GPT2:GPT2LMHeadModel",
                 {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2},
                  unmasked)  # fmt: skip
    yield _model("GPT-Neo", "GPTNeo:ForCausalLM",
                 {**TEXT, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global",
                  "local"], 1]],
                  "window_size": 4, "use_cache": False}, following)  # fmt: skip
    yield _model("GPT-J", "GPTJ:ForCausalLM",
                 {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4,
                  "use_cache": False}, following)  # fmt: skip
    yield _model("GPT-NeoX", "GPTNeoX:ForCausalLM", {**ENCODER, "use_cache": False}, following)
    yield _model("BLOOM", "Bloom:ForCausalLM",
                 {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2, "use_cache": False},
                  following)  # fmt: skip
    yield _model("OPT", "OPT:ForCausalLM",
                 {**TEXT, "hidden_size": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 2,
                  "num_attention_heads": 2,
                  "ffn_dim": 24, "use_cache": False, **SPECIAL}, following)  # fmt: skip
    for name, kind in {
        "Llama": "Llama", "Mistral": "Mistral", "Qwen2": "Qwen2", "Gemma": "Gemma", "Gemma2": "Gemma2", "Phi": "Phi",
        "Phi-3": "Phi3", "StableLM": "StableLm", "Starcoder2": "Starcoder2", "OLMo": "Olmo", "OLMo 2": "Olmo2",
        "Cohere": "Cohere", "Granite": "Granite", "Qwen3": "Qwen3", "SmolLM3": "SmolLM3", "Helium": "Helium",
        "Gemma3": "Gemma3Text",
    }.items():  # fmt: skip
        more = {"head_dim": 8} if kind in ("Gemma", "Gemma2", "Gemma3Text", "Qwen3", "Helium") else {}
        model = "Gemma3ForCausalLM" if kind == "Gemma3Text" else "ForCausalLM"
        yield _model(name, f"{kind}:{model}", {**DECODER, **more}, following)
    yield _model("Llama, eager attention", "Llama:ForCausalLM", {**DECODER, **eager}, following)
    yield _model("Llama, tied weights", "Llama:ForCausalLM", {**DECODER, "tie_word_embeddings": True}, following)
    yield _model("Llama, sentences", "Llama:ForSequenceClassification", {**DECODER, "num_labels": 3}, sentences)
    yield _model("Falcon", "Falcon:ForCausalLM",
                 {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                  "use_cache": False}, following)  # fmt: skip
    yield _model("MPT", "Mpt:ForCausalLM",
                 {"vocab_size": VOCABULARY, "d_model": 16, "n_layers": 2, "n_heads": 2, "expansion_ratio": 2,
                  "max_seq_len": 32, "use_cache": False}, following)  # fmt: skip
    yield _model("CodeGen", "CodeGen:ForCausalLM",
                 {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 2,
                  "use_cache": False}, following)  # fmt: skip
    yield _model("BioGPT", "BioGpt:ForCausalLM", {**ENCODER, **SPECIAL, "use_cache": False}, following)
    yield _model("Mamba", "Mamba:ForCausalLM",
                 {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4,
                  "use_cache": False},
                 unmasked)  # fmt: skip
    yield _model("Mamba 2", "Mamba2:ForCausalLM",
                 {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "expand": 2,
                  "head_dim": 8, "num_heads": 4, "n_groups": 1, "chunk_size": 4, "use_cache": False},
                   unmasked)  # fmt: skip
    yield _model(
        "Mixtral",
        "Mixtral:ForCausalLM",
        {**DECODER, "num_local_experts": 3, "experts_implementation": "eager"},
        following,
    )
    yield _model("T5", "T5:ForConditionalGeneration",
                 {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
                  "decoder_start_token_id": 0, "use_cache": False}, translations)  # fmt: skip
    yield _model("mT5", "MT5:ForConditionalGeneration",
                 {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
                  "decoder_start_token_id": 0, "use_cache": False}, translations)  # fmt: skip
    for name, kind in {"BART": "Bart", "mBART": "MBart", "Pegasus": "Pegasus", "Blenderbot": "Blenderbot",
                       "M2M-100": "M2M100"}.items():  # fmt: skip
        yield _model(name, f"{kind}:ForConditionalGeneration", BOTH, translations)
    yield _model("Marian", "Marian:MarianMTModel", {**BOTH, "pad_token_id": 0}, translations)
    yield _model("LED", "LED:ForConditionalGeneration",
                 {**{k: v for k, v in BOTH.items() if k != "max_position_embeddings"},
                  "max_encoder_position_embeddings": 32,
                  "max_decoder_position_embeddings": 32, "attention_window": [4]}, translations)  # fmt: skip
    yield from _others()


def _others() -> Iterator[Model]:
    """Models of images, speech, several inputs, and series."""
    yield _model("ViT", "ViT:ForImageClassification", VISION, pictures)
    yield _model(
        "ViT, eager attention", "ViT:ForImageClassification", {**VISION, "attn_implementation": "eager"}, pictures
    )
    yield _model("DeiT", "DeiT:ForImageClassification", VISION, pictures)
    yield _model("BEiT", "Beit:ForImageClassification", VISION, pictures)
    yield _model("DINOv2", "Dinov2:ForImageClassification", {**VISION, "mlp_ratio": 2}, pictures)
    yield _model("Swin", "Swin:ForImageClassification",
                 {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [1, 2],
                  "window_size": 2,
                  "num_labels": 3}, pictures)  # fmt: skip
    yield _model("Swin v2", "Swinv2:ForImageClassification",
                 {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [1, 2],
                  "window_size": 2,
                  "num_labels": 3}, pictures)  # fmt: skip
    yield _model("ConvNeXT", "ConvNext:ForImageClassification",
                 {"hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2, "num_labels": 3}, pictures)  # fmt: skip
    yield _model("ResNet", "ResNet:ForImageClassification",
                 {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "num_labels": 3},
                  pictures)  # fmt: skip
    yield _model("MobileViT", "MobileViT:ForImageClassification",
                 {"image_size": 32, "hidden_sizes": [8, 12, 12], "neck_hidden_sizes": [4, 4, 8, 8, 8, 12, 12],
                  "num_attention_heads": 2, "num_labels": 3}, partial(pictures, 32))  # fmt: skip
    yield _model("PoolFormer", "PoolFormer:ForImageClassification",
                 {"depths": [1, 1, 1, 1], "hidden_sizes": [4, 8, 8, 8], "num_labels": 3}, partial(pictures,
                  32))  # fmt: skip
    yield _model("LeViT", "Levit:ForImageClassification",
                 {"image_size": 32, "hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
                  "key_dim": [4, 4, 4], "num_labels": 3, "down_ops": [["Subsample", 4, 4, 4, 2, 2], ["Subsample", 4,
                   4, 4, 2, 2]]},
                 partial(pictures, 32))  # fmt: skip
    yield _model("SegFormer", "Segformer:ForSemanticSegmentation",
                 {"depths": [1, 1, 1, 1], "hidden_sizes": [4, 8, 8, 8], "num_attention_heads": [1, 1, 2, 2],
                  "decoder_hidden_size": 8, "num_labels": 3}, segmented)  # fmt: skip
    text, vision = {**WIDTH, **TEXT, **SPECIAL}, {**WIDTH, "image_size": 16, "patch_size": 8}
    contrasted = {"loss": _contrast}
    yield _model("CLIP", "CLIP:CLIPModel", {"projection_dim": 8}, captioned,
                 {"text_config": ("CLIPTextConfig", text), "vision_config": ("CLIPVisionConfig", vision)},
                 **contrasted)  # fmt: skip
    yield _model("SigLIP", "Siglip:SiglipModel", {}, captioned,
                 {"text_config": ("SiglipTextConfig", {**text, "max_position_embeddings": LENGTH}),
                  "vision_config": ("SiglipVisionConfig", vision)}, **contrasted)  # fmt: skip
    yield _model("Whisper", "Whisper:ForConditionalGeneration",
                 {**{k: v for k, v in BOTH.items() if "max_position" not in k}, "num_mel_bins": 8,
                  "max_source_positions": 10, "max_target_positions": 16}, spectra)  # fmt: skip
    for name, kind in {"Wav2Vec2": "Wav2Vec2", "HuBERT": "Hubert", "WavLM": "WavLM"}.items():
        yield _model(name, f"{kind}:ForSequenceClassification", SPEECH, spoken)
    masked_time = {**SPEECH, "mask_time_prob": 0.05}  # drawn by numpy
    yield _model("Wav2Vec2, masked in time", "Wav2Vec2:ForSequenceClassification", masked_time, spoken)
    yield _model("Wav2Vec2, transcribed", "Wav2Vec2:ForCTC", {**SPEECH, "ctc_loss_reduction": "mean"}, transcribed)
    yield _model("PatchTST", "PatchTST:ForPrediction",
                 {"num_input_channels": 2, "context_length": 16, "prediction_length": 4, "patch_length": 4,
                  "patch_stride": 4,
                  "d_model": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 8}, series)  # fmt: skip


def _contrast(model: Any, batch: Any, config: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, return_loss=True).loss
    return loss
