"""The model: its folder, its dtype, and what of it is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.config.section import Section


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685): only they are trained, and only they travel."""

    rank: int = Field(default=0, ge=0)
    """Of the adapters; 0 trains the model itself."""
    alpha: int = Field(default=0, ge=0)
    """The adapters' output is scaled by alpha / rank; 0 means twice the rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Linear layers with an adapter: `all-linear`, the ends of their names, or one regular expression of names."""
    vision_tower: bool = False
    """Let target_modules reach the vision tower and the connector, too."""


class ModelConfig(Section):
    path: str
    """Hugging Face folder with model, tokenizer and processor."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights on both sides and on the wire."""
    freeze_vision_tower: bool = True
    """Leave the vision tower (not the connector) out of training."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    lora: LoraConfig = LoraConfig()
