"""Descriptions of the families, by the `model_type` of their config.json."""

from __future__ import annotations

from asyncrl.plugins import ModelFamily

_FAMILIES = "asyncrl_plugins.tiled_images.families"

GEMMA3 = ModelFamily(images=f"{_FAMILIES}:Gemma3Images")
IDEFICS3 = ModelFamily(images=f"{_FAMILIES}:Idefics3Images")
INTERNVL = ModelFamily(images=f"{_FAMILIES}:InternVLImages")
LFM2_VL = ModelFamily(images=f"{_FAMILIES}:Lfm2VlImages")
LLAMA4 = ModelFamily(images=f"{_FAMILIES}:Llama4Images")
LLAVA_NEXT = ModelFamily(images=f"{_FAMILIES}:LlavaNextImages")
LLAVA_ONEVISION = ModelFamily(images=f"{_FAMILIES}:LlavaOnevisionImages")
MISTRAL3 = ModelFamily(images=f"{_FAMILIES}:Mistral3Images")
SMOLVLM = ModelFamily(images=f"{_FAMILIES}:SmolVLMImages")
