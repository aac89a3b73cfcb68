"""The model: its folder, its dtype, and what of it is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from asyncrl.config.section import Section


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685): only they are trained, and only they travel."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains the model itself."""
    alpha: int = Field(default=0, ge=0)
    """The adapters' output is scaled by alpha / rank; 0 means twice the rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Linear layers with an adapter: `all-linear`, a list of ends of their names, or one regular expression of whole
    names. Never the output layer."""
    vision_tower: bool = False
    """Let target_modules reach the vision tower and the connector, too."""

    @property
    def effective_alpha(self) -> int:
        return self.alpha or 2 * self.rank


class ModelConfig(Section):
    path: str
    """Hugging Face folder with model, tokenizer and processor."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights on both sides and on the wire; adapters are always float32."""
    freeze_vision_tower: bool = True
    """Leave the vision tower (not the connector) out of training; with lora, only adapters are trained anyway."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    lora: LoraConfig = LoraConfig()

    @model_validator(mode="after")
    def _vision_tower_is_free(self) -> ModelConfig:
        if self.lora.rank and self.lora.vision_tower and self.freeze_vision_tower:
            raise ValueError(
                "model.lora.vision_tower is true, but model.freeze_vision_tower (its default) leaves the vision tower "
                "out of training. Set model.freeze_vision_tower=false, or model.lora.vision_tower=false"
            )
        return self
