"""Qwen2.5-VL-shaped models with random weights, made here: no network, any size.

python -m benchmarks.random_models --size 4b --out runs/random-4b [--device cuda] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

PATCH_SIZE = 7
"""Patch size of the digits' processor, which the models share."""
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "tiny": {
        "text": {"hidden": 64, "inter": 128, "layers": 2, "heads": 2, "kv": 1, "vocabulary": 512},
        "vision": {"hidden": 32, "inter": 64, "depth": 2, "heads": 2},
    },
    "100m": {
        "text": {"hidden": 640, "inter": 2560, "layers": 10, "heads": 10, "kv": 2, "vocabulary": 32_000},
        "vision": {"hidden": 128, "inter": 256, "depth": 4, "heads": 4},
    },
    "1b": {
        "text": {"hidden": 2048, "inter": 11_008, "layers": 10, "heads": 16, "kv": 2, "vocabulary": 151_936},
        "vision": {"hidden": 1280, "inter": 3420, "depth": 4, "heads": 16},
    },
    # Qwen2.5-VL-3B with 39 layers in place of 36: 4.0 billion parameters, tied embeddings as there.
    "4b": {
        "text": {"hidden": 2048, "inter": 11_008, "layers": 39, "heads": 16, "kv": 2, "vocabulary": 151_936},
        "vision": {"hidden": 1280, "inter": 3420, "depth": 32, "heads": 16},
    },
}


def make_model(folder: Path, size: str, *, dtype: str = "float32", device: str = "cpu", seed: int = 0) -> Path:
    """Write config, weights, tokenizer and processor. `device` only draws the weights faster."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    from asyncrl.demo.model import build_processor, build_tokenizer

    tokenizer = build_tokenizer()
    config = build_config(size, tokenizer)
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = Qwen2_5_VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(default)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    build_processor(tokenizer).save_pretrained(folder)
    return folder


def build_config(size: str, tokenizer: Any) -> Any:
    from transformers import Qwen2_5_VLConfig

    text, vision = SIZES[size]["text"], SIZES[size]["vision"]
    half = text["hidden"] // text["heads"] // 2
    side = half * 3 // 8
    ids = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        }.items()
    }
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": text["vocabulary"],
            "hidden_size": text["hidden"],
            "intermediate_size": text["inter"],
            "num_hidden_layers": text["layers"],
            "num_attention_heads": text["heads"],
            "num_key_value_heads": text["kv"],
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,  # vLLM looks here, transformers at the whole
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [half - 2 * side, side, side],
            },
        },
        vision_config={
            "depth": vision["depth"],
            "hidden_size": vision["hidden"],
            "intermediate_size": vision["inter"],
            "num_heads": vision["heads"],
            "out_hidden_size": text["hidden"],
            "patch_size": PATCH_SIZE,
            "window_size": 8 * PATCH_SIZE,
            "fullatt_block_indexes": [vision["depth"] - 1],
        },
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        **ids,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    arguments = parser.parse_args()
    print(make_model(arguments.out, arguments.size, dtype=arguments.dtype, device=arguments.device))


if __name__ == "__main__":
    main()
