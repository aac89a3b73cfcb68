"""A model folder's model without its weights."""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.config.schema import RunConfig
from asyncrl.models import shared_prefix
from asyncrl.models.folder import model_folder
from asyncrl.models.loading import has_vision, model_class, refuse_dropout

META = torch.device("meta")


def text_config(hf_config: Any) -> Any:
    return getattr(hf_config, "text_config", None) or hf_config


def meta_model(config: RunConfig, *, text_attention: str) -> Any:
    """The folder's model with shapes and no memory."""
    from transformers import AutoConfig

    shared_prefix.register()
    remote = config.model.trust_remote_code
    hf_config = AutoConfig.from_pretrained(model_folder(config.model), trust_remote_code=remote)
    if text_attention == shared_prefix.SHARED_PREFIX_ATTENTION:
        refuse_dropout(hf_config, config.model)
    attention = {"text_config": text_attention, "vision_config": "sdpa"} if has_vision(hf_config) else text_attention
    dtype = getattr(torch, config.model.dtype)
    with META:
        return model_class(hf_config).from_config(
            hf_config, dtype=dtype, attn_implementation=attention, trust_remote_code=remote
        )
