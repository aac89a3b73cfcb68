"""Random models of the Qwen-VL families that read videos, and of LLaVA, small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from asyncrl.demo.model import CHAT_TEMPLATE, build_tokenizer

Family = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
HIDDEN, VISION, PATCH = 64, 32, 7
IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def make_family(family: Family, folder: Path, *, tied: bool = False, patch: int = PATCH) -> Path:
    """A Hugging Face folder: model, tokenizer, processor with image and video parts. With `tied`, the output layer
    shares its weight with the embedding. Image patches are `patch` pixels wide."""
    tokenizer = build_tokenizer()
    common: dict[str, Any] = {name: tokenizer.convert_tokens_to_ids(text) for name, text in IDS.items()}
    common |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": patch, "initializer_range": 0.1}
    text = _text_config(tokenizer)
    torch.manual_seed(0)
    if family == "qwen2_vl":
        vision |= {"embed_dim": VISION, "hidden_size": HIDDEN, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": VISION, "intermediate_size": 64, "out_hidden_size": HIDDEN}
    if family == "qwen2_5_vl":
        vision |= {"window_size": 4 * patch, "fullatt_block_indexes": [1]}
    if family == "qwen3_vl":
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        text["rope_parameters"]["mrope_interleaved"] = True
        text["head_dim"] = 32
    if family != "qwen3_vl" or tied:
        common["tie_word_embeddings"] = text["tie_word_embeddings"] = tied
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **common)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 4 * (2 * patch) ** 2, "longest_edge": 64 * (2 * patch) ** 2}
    video: Any = transformers.Qwen3VLVideoProcessor if family == "qwen3_vl" else Qwen2VLVideoProcessor
    processor = getattr(transformers, f"{name}Processor")(
        image_processor=Qwen2VLImageProcessor(patch_size=patch, size=size),
        tokenizer=tokenizer,
        video_processor=video(patch_size=patch, size=size),
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)
    return folder


def make_expert_or_recurrent(family: Literal["qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"], folder: Path) -> Path:
    """Qwen3-VL with experts, and Qwen3.5 with recurrences, or both, as `make_family` has Qwen3-VL."""
    make_family("qwen3_vl", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = {**_text_config(tokenizer), "head_dim": 32, "num_hidden_layers": 4}
    text["rope_parameters"]["mrope_interleaved"] = True
    if family.endswith("moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        text |= {"shared_expert_intermediate_size": 32} if family == "qwen3_5_moe" else {}
    vision = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "initializer_range": 0.1, "hidden_size": VISION}
    vision |= {"intermediate_size": 64, "out_hidden_size": HIDDEN, "num_position_embeddings": 64}
    if family == "qwen3_vl_moe":
        vision["deepstack_visual_indexes"] = [0]
    else:
        heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
        text |= {**heads, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
        text["rope_parameters"] |= {"partial_rotary_factor": 1.0}
    name = {"qwen3_vl_moe": "Qwen3VLMoe", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[family]
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in IDS.items()}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **ids)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    return folder


def make_llava(folder: Path, tower: Literal["siglip", "clip", "dinov2"] = "siglip") -> Path:
    """A Hugging Face folder: tower, two-layer connector, Qwen2, and a processor for images of 4 x 4 patches."""
    tokenizer = build_tokenizer()
    has_class = tower != "siglip"
    vision = {
        "model_type": {"siglip": "siglip_vision_model", "clip": "clip_vision_model"}.get(tower, tower),
        "hidden_size": VISION,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": PATCH,
    }
    strategy = "default" if has_class else "full"
    text = {key: value for key, value in _text_config(tokenizer).items() if key != "rope_parameters"}
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config={"model_type": "qwen2", **text},
        image_token_index=tokenizer.convert_tokens_to_ids(IDS["image_token_id"]),
        image_seq_length=16,
        vision_feature_select_strategy=strategy,
        vision_feature_layer=-1,
    )
    model: Any = transformers.LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    kinds = {"siglip": transformers.SiglipImageProcessor, "clip": transformers.CLIPImageProcessor}
    part: Any = kinds.get(tower, transformers.BitImageProcessor)
    square = {"height": 28, "width": 28}
    sizes = {"size": square} if tower == "siglip" else {"size": {"shortest_edge": 30}, "crop_size": square}
    transformers.LlavaProcessor(
        image_processor=part(**sizes),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy=strategy,
        image_token=IDS["image_token_id"],
        num_additional_image_tokens=int(has_class),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def _text_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": (len(tokenizer) + 63) // 64 * 64,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }


def make_recurrent(folder: Path) -> Path:
    """A Qwen3-Next folder: three layers of four are recurrences and convolutions."""
    tokenizer = build_tokenizer()
    config = transformers.Qwen3NextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        mlp_only_layers=[0, 1, 2, 3],  # a router's choice may change by a rounding
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3NextForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
