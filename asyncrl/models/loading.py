"""Loading of a Hugging Face folder into a model, the same way for 1 M and 7 B parameters."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncrl.attention.shared_prefix import SHARED_PREFIX_ATTENTION
from asyncrl.attention.stateful_layers import hand_on_layout
from asyncrl.attention.vision_attention import attend_by_length
from asyncrl.config.sections import ModelConfig
from asyncrl.devices.device import compute_in_full_float32
from asyncrl.errors import UserError
from asyncrl.model_files.folder import check_weights, describe_model, model_folder
from asyncrl.models.generation_settings import generation_config
from asyncrl.processing.model_inputs import place_text_after_videos
from asyncrl.run_folder.export_record import read_record

logger = logging.getLogger(__name__)

_PARTS = ("text_config", "vision_config", "connector_config")
"""Parts of a model's configuration that describe what is loaded."""
ALIGNMENT_BYTES = 64
"""Alignment of torch's own memory on a CPU."""
_DROPOUT = re.compile(r"^(?!summary_|classifier_|cls_).*(dropout|_pdrop$|drop_path|layer_?drop$|jitter)")
"""Configuration keys of dropout and of a router's noise, except those of heads that are not loaded."""


def load_model(
    config: ModelConfig, *, device: torch.device, text_attention: str | None = None, stays_mapped: bool = False
) -> nn.Module:
    """The model of the folder with `text_attention` in its language part (None: torch's, or the family's own where it
    takes no other), in `config.dtype` on `device`.

    `stays_mapped`: on a CPU, parameters that a file has in that dtype stay there until somebody reads them, and take no
    memory of this process's own: for a model whose parameters are copied into parts of it next. Raises UserError for
    weights that are not whole, and a generation_config.json with which it could not be saved again.
    """
    compute_in_full_float32()
    kind, _, options = _describe(config, text_attention)
    folder = model_folder(config)
    if (record := read_record(folder)) and record.form == "merged" and record.dtype != config.dtype:
        logger.warning(
            "the adapter in %s was merged in %s, and is rounded to model.dtype=%s: small updates are lost. Set "
            "model.dtype=%s",
            *(folder, record.dtype, config.dtype, record.dtype),
        )
    sampling_defaults = generation_config(config)
    check_weights(config)
    model, report = kind.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    if unfilled := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
        raise UserError(
            f"the weights in {folder} do not fill the model of its config.json: {len(unfilled)} parameters are missing "
            f"or have another shape, such as {unfilled[0]}, and would be random. Copy config.json and *.safetensors "
            "from the original model again"
        )
    if sampling_defaults is not None:
        model.generation_config = sampling_defaults
    place_text_after_videos(model)
    attend_by_length(model)
    if text_attention == SHARED_PREFIX_ATTENTION:
        hand_on_layout(model)
    if device.type == "cpu":
        _align(model.buffers() if stays_mapped else chain(model.parameters(), model.buffers()))
    model.to(device)
    if config.float32_head:
        compute_head_in_float32(model)
    return model


def skeleton(config: ModelConfig, *, text_attention: str | None = None) -> Any:
    """The folder's model without its weights, on torch's meta device."""
    kind, hf_config, options = _describe(config, text_attention)
    with torch.device("meta"):
        model = kind.from_config(hf_config, **options)
    attend_by_length(model)
    if config.float32_head:
        compute_head_in_float32(model)
    return model


def compute_head_in_float32(model: Any) -> None:
    """Let the output layer multiply in float32: its weight keeps its dtype, and is widened for each product."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)

    def forward(input: torch.Tensor) -> torch.Tensor:
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(input.float(), head.weight.float(), bias)

    head.forward = forward


def _describe(config: ModelConfig, text_attention: str | None) -> tuple[Any, Any, dict[str, Any]]:
    """The transformers class for a folder, its configuration, and how to make the model."""
    remote = config.trust_remote_code
    hf_config = describe_model(model_folder(config), trust_remote_code=remote)
    if text_attention == SHARED_PREFIX_ATTENTION:
        refuse_dropout(hf_config, config)
    attention = attention_of_parts(hf_config, text_attention)
    options = {"dtype": torch_dtype(config), "attn_implementation": attention, "trust_remote_code": remote}
    return model_class(hf_config), hf_config, options


def model_of_export(config: ModelConfig, folder: Path) -> ModelConfig:
    """`config` for a folder that is scored: what was merged in fp32 would be rounded in 16 bits, and is another model
    then. So it keeps its dtype, which is said."""
    record = read_record(folder)
    if record is None or record.form != "merged" or record.dtype == config.dtype:
        return config
    logger.warning(
        "%s was merged in %s, and model.dtype is %s: it is taken as it is", folder, record.dtype, config.dtype
    )
    return config.model_copy(update={"dtype": record.dtype})


def attention_of_parts(hf_config: Any, text_attention: str | None) -> Any:
    """transformers' `attn_implementation` for a model with `text_attention` in its language part."""
    return {"text_config": text_attention, "vision_config": "sdpa"} if has_vision(hf_config) else text_attention


def torch_dtype(config: ModelConfig) -> torch.dtype:
    """Raises ValueError for `auto`, which only the whole configuration resolves (`devices.resolve_dtype`)."""
    if config.dtype == "auto":
        raise ValueError("model.dtype is auto: resolve_dtype(config) comes before a model is loaded")
    return getattr(torch, config.dtype)


@torch.no_grad()
def _align(tensors: Iterable[torch.Tensor]) -> None:
    """Align them as torch's allocator would.

    Loaded ones lie as their file was mapped, behind a header of any length, and MKL rounds a product by where its
    factors lie: the same weights in other memory, after a sleep or out of another file, would have other log-probs.
    """
    for tensor in tensors:
        if tensor.data_ptr() % ALIGNMENT_BYTES:
            tensor.data = tensor.data.clone()


def refuse_dropout(hf_config: Any, config: ModelConfig) -> None:
    """Raise UserError if the model has dropout, or noise: training would compute it otherwise than generation does."""
    described = hf_config.to_dict()
    found = [f"{name}={value:g}" for name, value in _settings(described) if _DROPOUT.search(name.rpartition(".")[2])]
    if found:
        kind = "noise" if "jitter" in found[0] else "dropout"
        raise UserError(
            f"the model in {config.path} is configured with {kind} ({', '.join(found)}): its log-probs in "
            "training would differ from the engine's. Set "
            f"{'it' if len(found) == 1 else 'them'} to 0 in its config.json"
        )


def _settings(described: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers above 0 of a configuration and of the parts of it that are loaded, by their dotted names."""
    for key, value in described.items():
        if isinstance(value, Mapping) and (prefix or key in _PARTS):
            yield from _settings(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and value > 0:
            yield f"{prefix}{key}", value


def model_class(hf_config: Any) -> Any:
    """The transformers auto class for it: with a vision part or without."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if has_vision(hf_config) else AutoModelForCausalLM


def has_vision(hf_config: Any) -> bool:
    return getattr(hf_config, "vision_config", None) is not None
