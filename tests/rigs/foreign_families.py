"""Random models of GLM-4V, whose images have no class here: they are told by its grids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.plugins.tiled_images import tiny_tiled
from tests.plugins.tiled_images.tiny_tiled import PATCH, TILE

GLM = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>",
    "video_start_token": "<|begin_of_video|>",
    "video_end_token": "<|end_of_video|>",
}


def make_glm4v(family: str, folder: Path) -> Path:
    """`glm4v` or `glm4v_moe`."""
    tokenizer = tiny_tiled._tokenizer(GLM)
    text = {**tiny_tiled._text(tokenizer, model_type=f"{family}_text"), "head_dim": 32}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    if family == "glm4v_moe":
        text["rope_parameters"] |= {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
        text |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
        text |= {"topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
    else:
        text["rope_parameters"]["partial_rotary_factor"] = 1.0
    vision = {"depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
    vision |= {"patch_size": PATCH, "image_size": 4 * TILE, "initializer_range": 0.1}
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in GLM.items()}
    name = {"glm4v": "Glm4v", "glm4v_moe": "Glm4vMoe"}[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **ids)
    size = {"shortest_edge": 4 * (2 * PATCH) ** 2 * 2, "longest_edge": 64 * (2 * PATCH) ** 2 * 2}
    processor = transformers.Glm4vProcessor(
        transformers.Glm4vImageProcessor(patch_size=PATCH, size=size),
        tokenizer,
        transformers.Glm4vVideoProcessor(patch_size=PATCH, size=size),
        chat_template=tiny_tiled._template("<|begin_of_image|><|image|><|end_of_image|>"),
    )
    return _saved(getattr(transformers, f"{name}ForConditionalGeneration")(config), processor, tokenizer, folder)


def _saved(model: Any, processor: Any, tokenizer: Any, folder: Path) -> Path:
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
