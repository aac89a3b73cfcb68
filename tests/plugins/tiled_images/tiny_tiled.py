"""Random models of the families that cut images into tiles, small enough for a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast

from asyncrl.demo.model import build_tokenizer

TILE, PATCH = 28, 7
"""Pixels of the side of a tile, and of a patch: a tile is 16 patches."""
PINPOINTS = [[28, 56], [56, 28], [56, 56], [28, 84], [84, 28]]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""IMAGE becomes the family's placeholder."""
SQUARE: Any = {"height": TILE, "width": TILE}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": PATCH,
}


def make_tiled(family: str, folder: Path) -> Path:
    """A Hugging Face folder: model, tokenizer, and the family's processor."""
    tokens, maker = _MAKERS[family]
    tokenizer = _tokenizer(tokens)
    torch.manual_seed(0)
    model, processor = maker(tokenizer, {name: tokenizer.convert_tokens_to_ids(text) for name, text in tokens.items()})
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _tokenizer(tokens: dict[str, str]) -> Any:
    """The demo's tokenizer with named tokens of the family."""
    plain = build_tokenizer()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        eos_token=plain.eos_token,
        pad_token=plain.pad_token,
        extra_special_tokens=tokens,
    )


def _text(tokenizer: Any, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": (len(tokenizer) + 63) // 64 * 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **more,
    }


def _template(placeholder: str) -> str:
    return CHAT_TEMPLATE.replace("IMAGE", placeholder)


def _gemma3(tokenizer: Any, ids: dict[str, int]) -> tuple[Any, Any]:
    """Sliding window, which is shorter than a prompt, and shorter than an image and the text behind it."""
    text = _text(tokenizer, model_type="gemma3_text", head_dim=32, query_pre_attn_scalar=32, sliding_window=12)
    config = transformers.Gemma3Config(
        vision_config={**VISION, "image_size": TILE, "vision_use_head": False},
        text_config={**text, "layer_types": ["sliding_attention", "full_attention"]},
        mm_tokens_per_image=4,
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
        initializer_range=0.1,
    )
    part = transformers.Gemma3ImageProcessor(size=SQUARE)
    template = _template("<start_of_image>")
    processor = transformers.Gemma3Processor(part, tokenizer, image_seq_length=4, chat_template=template)
    return transformers.Gemma3ForConditionalGeneration(config), processor


def _internvl(tokenizer: Any, ids: dict[str, int]) -> tuple[Any, Any]:
    vision = {**VISION, "image_size": [TILE, TILE], "patch_size": [PATCH, PATCH], "initializer_range": 0.1}
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=_text(tokenizer), image_token_id=ids["context_image_token"]
    )
    processor = transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(size=SQUARE, max_patches=4),
        tokenizer=tokenizer,
        video_processor=transformers.InternVLVideoProcessor(size=SQUARE),
        image_seq_length=4,
        chat_template=_template(tokenizer.context_image_token + "\n"),
    )
    return transformers.InternVLForConditionalGeneration(config), processor


def _idefics3(tokenizer: Any, ids: dict[str, int]) -> tuple[Any, Any]:
    config = transformers.Idefics3Config(**_split(tokenizer, ids))
    part = transformers.Idefics3ImageProcessor(size={"longest_edge": 4 * TILE}, max_image_size={"longest_edge": TILE})
    template = _template("<image>")
    processor = transformers.Idefics3Processor(part, tokenizer, image_seq_len=4, chat_template=template)
    return transformers.Idefics3ForConditionalGeneration(config), processor


def _smolvlm(tokenizer: Any, ids: dict[str, int]) -> tuple[Any, Any]:
    config = transformers.SmolVLMConfig(**_split(tokenizer, ids))
    sizes: Any = {"size": {"longest_edge": 4 * TILE}, "max_image_size": {"longest_edge": TILE}}
    processor = transformers.SmolVLMProcessor(
        transformers.SmolVLMImageProcessor(**sizes),
        tokenizer,
        transformers.SmolVLMVideoProcessor(**sizes),
        image_seq_len=4,
        chat_template=_template("<image>"),
    )
    return transformers.SmolVLMForConditionalGeneration(config), processor


def _split(tokenizer: Any, ids: dict[str, int]) -> dict[str, Any]:
    return {
        "vision_config": {**VISION, "image_size": TILE, "initializer_range": 0.1},
        "text_config": _text(tokenizer),
        "image_token_id": ids["image_token"],
        "scale_factor": 2,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _llava_next(tokenizer: Any, ids: dict[str, int]) -> tuple[Any, Any]:
    vision = {"model_type": "clip_vision_model", **VISION, "image_size": TILE, "projection_dim": 32}
    config = transformers.LlavaNextConfig(
        vision_config=vision,
        text_config=_text(tokenizer),
        image_token_index=ids["image_token"],
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-2,
    )
    sizes: Any = {"size": {"shortest_edge": TILE}, "crop_size": SQUARE, "image_grid_pinpoints": PINPOINTS}
    processor = transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessor(**sizes),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=_template("<image>\n"),
        num_additional_image_tokens=1,
    )
    return transformers.LlavaNextForConditionalGeneration(config), processor


def _llava_onevision(tokenizer: Any, ids: dict[str, int]) -> tuple[Any, Any]:
    vision = {"model_type": "siglip_vision_model", **VISION, "image_size": TILE, "vision_use_head": False}
    config = transformers.LlavaOnevisionConfig(
        vision_config=vision,
        text_config=_text(tokenizer),
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
        image_grid_pinpoints=PINPOINTS,
    )
    processor = transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessor(size=SQUARE, image_grid_pinpoints=PINPOINTS),
        tokenizer,
        transformers.LlavaOnevisionVideoProcessor(size=SQUARE),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=_template("<image>\n"),
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config), processor


def _mistral3(tokenizer: Any, ids: dict[str, int]) -> tuple[Any, Any]:
    vision = {**VISION, "model_type": "pixtral", "image_size": 4 * TILE, "head_dim": 16, "initializer_range": 0.1}
    config = transformers.Mistral3Config(
        vision_config=vision,
        text_config=_text(tokenizer, model_type="mistral", head_dim=32),
        image_token_index=ids["image_token"],
        tie_word_embeddings=False,
    )
    processor = transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(
            size={"longest_edge": 4 * TILE}, patch_size={"height": PATCH, "width": PATCH}
        ),
        tokenizer,
        patch_size=PATCH,
        spatial_merge_size=2,
        chat_template=_template("[IMG]"),
    )
    return transformers.Mistral3ForConditionalGeneration(config), processor


def _llama4(tokenizer: Any, ids: dict[str, int]) -> tuple[Any, Any]:
    """One layer with rotary positions and chunks that are shorter than a prompt, one without either, with experts."""
    text = _text(tokenizer, model_type="llama4_text", head_dim=32, intermediate_size_mlp=128, num_local_experts=4)
    config = transformers.Llama4Config(
        text_config={**text, "no_rope_layers": [1, 0], "moe_layers": [1], "attention_chunk_size": 16},
        vision_config={
            **VISION,
            "image_size": TILE,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "initializer_range": 0.1,
        },
        image_token_index=ids["patch_token"],
        boi_token_index=ids["image_start_token"],
        eoi_token_index=ids["image_end_token"],
    )
    processor = transformers.Llama4Processor(
        transformers.Llama4ImageProcessor(size=SQUARE, max_patches=4),
        tokenizer,
        patch_size=PATCH,
        chat_template=_template("<|image|>"),
    )
    return transformers.Llama4ForConditionalGeneration(config), processor


def _lfm2_vl(tokenizer: Any, ids: dict[str, int], layers: Sequence[str] = ("full_attention",) * 2) -> tuple[Any, Any]:
    config = transformers.Lfm2VlConfig(
        vision_config={**VISION, "num_patches": 16, "vision_use_head": False, "initializer_range": 0.1},
        text_config=_text(tokenizer, model_type="lfm2", layer_types=list(layers)),
        image_token_id=ids["image_token"],
        projector_hidden_size=64,
    )
    part = transformers.Lfm2VlImageProcessor(
        encoder_patch_size=PATCH, tile_size=TILE, min_image_tokens=4, max_image_tokens=16, max_tiles=4
    )
    processor = transformers.Lfm2VlProcessor(part, tokenizer, chat_template=_template("<image>"))
    return transformers.Lfm2VlForConditionalGeneration(config), processor


def _lfm2_vl_convolutions(tokenizer: Any, ids: dict[str, int]) -> tuple[Any, Any]:
    return _lfm2_vl(tokenizer, ids, ("conv", "full_attention"))


_LFM2_VL = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
    **{f"row_{row}_col_{col}_token": f"<|img_row_{row}_col_{col}|>" for row in range(1, 5) for col in range(1, 5)},
}
_FENCES = {f"row_{row}_col_{col}_token": f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)}
_SPLIT = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    **_FENCES,
}
_MAKERS: dict[str, Any] = {
    "gemma3": (
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        _gemma3,
    ),
    "idefics3": (_SPLIT, _idefics3),
    "internvl": (
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        _internvl,
    ),
    "lfm2_vl": (_LFM2_VL, _lfm2_vl),
    "lfm2_vl (convolutions)": (_LFM2_VL, _lfm2_vl_convolutions),
    "llama4": (
        {
            "placeholder_token": "<|image|>",
            "patch_token": "<|patch|>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "tile_x_token": "<|tile_x_separator|>",
            "tile_y_token": "<|tile_y_separator|>",
        },
        _llama4,
    ),
    "llava_next": ({"image_token": "<image>"}, _llava_next),
    "llava_onevision": ({"image_token": "<image>", "video_token": "<video>"}, _llava_onevision),
    "mistral3": (
        {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        _mistral3,
    ),
    "smolvlm": ({**_SPLIT, "video_token": "<video>"}, _smolvlm),
}
TILED = tuple(_MAKERS)
NOT_SAMPLED = ("lfm2_vl (convolutions)",)
"""Families with layers that the hf engine does not sample from."""
