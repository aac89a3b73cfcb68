"""Random vision towers and language models, small enough for a test, and what `asyncrl compose` makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from asyncrl.cli import main as asyncrl
from asyncrl.demo.model import build_tokenizer

WIDTH = 32
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TOWER: dict[str, Any] = {**SIZES, "image_size": 28, "patch_size": 7}
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}\n{% endfor %}assistant:"
SQUARE = {"height": 28, "width": 28}
LANGUAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "llama": ("Llama", {}),
    "phi": ("Phi", {}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "wide": ("Llama", {"hidden_size": 64}),
    "capped": ("Gemma2", {"head_dim": 16, "final_logit_softcapping": 0.01}),
}
"""Language models by the name of their folder: transformers' class, and settings of its configuration."""
COMPOSED: dict[str, list[str]] = {
    "resampler": ["connector=resampler", "queries=5", "connector_layers=1"],
    "qformer": ["connector=qformer", "queries=5", "connector_layers=2"],
    "channels": ["second_vision_tower=dinov2", "feature_layer=-1"],
    "tokens": ["second_vision_tower=dinov2", "mix=tokens"],
    "bias": ["language_model=phi"],
}
"""Settings of composed models that transformers' LLaVA cannot hold."""


def make_towers(folder: Path) -> None:
    """Folders `clip` (the whole model, with its text part), `siglip` and `dinov2`, which has other patches."""
    torch.manual_seed(1)
    clip = transformers.CLIPConfig(text_config={**SIZES, "vocab_size": 64}, vision_config=TOWER, projection_dim=WIDTH)
    transformers.CLIPModel(clip).save_pretrained(folder / "clip")
    siglip = transformers.SiglipVisionConfig(**TOWER)
    transformers.SiglipVisionModel(siglip).save_pretrained(folder / "siglip")
    dinov2 = transformers.Dinov2Config(**{**TOWER, "patch_size": 14}, layerscale_value=0.5)
    transformers.Dinov2Model(dinov2).save_pretrained(folder / "dinov2")
    crop: Any = {"size": {"shortest_edge": 28}, "crop_size": SQUARE}
    transformers.CLIPImageProcessor(**crop).save_pretrained(folder / "clip")
    transformers.SiglipImageProcessor(size=SQUARE).save_pretrained(folder / "siglip")
    transformers.BitImageProcessor(**crop).save_pretrained(folder / "dinov2")


def make_language(folder: Path, name: str) -> Path:
    """One of LANGUAGES with its tokenizer and chat template, in a folder of its name."""
    kind, settings = LANGUAGES[name]
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    words = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    sizes = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.1}
    torch.manual_seed(2)
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **words, **settings})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    if model.lm_head.bias is not None:
        torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    return folder / name


def compose(parts: Path, target: Path, *words: str) -> int:
    """Exit code of `asyncrl compose` with parts by the names of their folders in `parts`."""
    named = ("vision_tower=", "language_model=", "second_vision_tower=")
    given = [word.replace("=", f"={parts}/", 1) if word.startswith(named) else word for word in words]
    return asyncrl(["compose", str(target), *given])


def make_composed(name: str, folder: Path) -> Path:
    """One of COMPOSED, of SigLIP and Qwen2 where it says nothing else; or a LLaVA of SigLIP and one of LANGUAGES."""
    make_towers(folder)
    words = ["vision_tower=siglip", "language_model=qwen2", *COMPOSED.get(name, [f"language_model={name}"])]
    for word in words:
        if word.startswith("language_model="):
            make_language(folder, word.partition("=")[2])
    assert compose(folder, folder / "vlm", *words) == 0
    return folder / "vlm"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with towers and language models, all random."""
    folder = tmp_path_factory.mktemp("parts")
    make_towers(folder)
    for name in LANGUAGES:
        make_language(folder, name)
    return folder
