"""What the model's folder, the data and the engine must have in common, read from small files: no weights, no torch
unless several devices are asked for. Each mistake says how to mend it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import RowSource
from asyncrl.errors import UserError

ROWS_LOOKED_AT = 64
"""Of each data source, to tell whether it has images."""
VLLM_LOWEST_TEMPERATURE = 0.01
"""vLLM samples at this where a lower temperature above 0 is asked for (vllm/sampling_params.py, _MAX_TEMP)."""


def check_model_folder(config: RunConfig) -> dict[str, Any]:
    """config.json, a tokenizer, and for a model with eyes an image processor are there. Returns config.json."""
    folder = Path(config.model.path)
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise UserError(
                f"model.path is {config.model.path!r}, a folder with an adapter only. Name its base model, or merge "
                "the two: asyncrl export RUN TARGET, without --adapter"
            )
        raise UserError(f"model.path is {config.model.path!r}, which is no Hugging Face model folder (no config.json)")
    described = _read_json(folder / "config.json")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise UserError(
            f"{folder} has no tokenizer. Copy tokenizer.json and tokenizer_config.json from the original model into it"
        )
    if has_eyes(described) and not _has_image_processor(folder):
        raise UserError(
            f"{folder} has a vision model but no image processor. Copy preprocessor_config.json (or "
            "processor_config.json) from the original model into the folder"
        )
    return described


def check_images(config: RunConfig, described: Mapping[str, Any], *sources: RowSource | None) -> None:
    """A model that reads text only is given no images."""
    if has_eyes(described):
        return
    for rows in sources:
        if rows is None or config.data.image_key not in rows.columns:
            continue
        for index in range(min(len(rows), ROWS_LOOKED_AT)):
            images = rows[index].get(config.data.image_key)
            if images is not None and (not hasattr(images, "__len__") or len(images)):
                raise UserError(
                    f"row {rows.row_id(index)} has images in column {config.data.image_key!r}, but the model in "
                    f"{config.model.path} has no vision tower (no vision_config in config.json): it reads text only. "
                    "Use a vision-language model, or set data.image_key to a column that the data has not"
                )


def check_engine(config: RunConfig, described: Mapping[str, Any]) -> None:
    """The engine can do what `rollout` and `data` ask for."""
    _check_lengths(config, described)
    _check_devices(config)
    _check_sampling(config)


def has_eyes(described: Mapping[str, Any]) -> bool:
    """By the model folder's config.json."""
    return described.get("vision_config") is not None


def _check_lengths(config: RunConfig, described: Mapping[str, Any]) -> None:
    text = described.get("text_config") or described
    positions = text.get("max_position_embeddings") or described.get("max_position_embeddings")
    longest = config.data.max_prompt_length + config.data.max_response_length
    if isinstance(positions, int) and longest > positions:
        raise UserError(
            f"one sample may have {longest} tokens (data.max_prompt_length + data.max_response_length), but the model "
            f"in {config.model.path} knows {positions} positions (max_position_embeddings). Lower one of the former"
        )


def _check_devices(config: RunConfig) -> None:
    rollout = config.rollout
    wanted = rollout.tensor_parallel_size
    if wanted == 1:
        return
    if rollout.engine != "vllm":
        raise UserError(
            f"rollout.tensor_parallel_size is {wanted}, but the {rollout.engine} engine runs on one device. Set "
            "rollout.engine=vllm or rollout.tensor_parallel_size=1"
        )
    devices, kind = _devices(rollout.device)
    if wanted > devices:
        raise UserError(
            f"rollout.tensor_parallel_size is {wanted}, but this machine has {devices} {kind}. Set "
            f"rollout.tensor_parallel_size={devices}, or start the rollout server where there are more"
        )


def _devices(name: str) -> tuple[int, str]:
    """How many vLLM could spread a model over."""
    import torch

    if name != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count(), "CUDA device(s)"
    return 1, "device (its CPU)"


def _check_sampling(config: RunConfig) -> None:
    rollout = config.rollout
    if rollout.engine == "hf" and rollout.engine_args:
        raise UserError(
            f"rollout.engine_args has {sorted(rollout.engine_args)}, but the hf engine takes no arguments. Leave them "
            "out"
        )
    if rollout.engine == "hf" and rollout.logprobs == "raw":
        raise UserError(
            "rollout.logprobs is raw, but the hf engine returns those of the distribution it samples from. Set "
            "rollout.logprobs=processed or rollout.engine=vllm"
        )
    temperatures = {"rollout.temperature": rollout.temperature, "evaluation.temperature": config.evaluation.temperature}
    for key, temperature in temperatures.items():
        if rollout.engine == "vllm" and 0 < temperature < VLLM_LOWEST_TEMPERATURE:
            raise UserError(
                f"{key} is {temperature:g}, but vllm samples at {VLLM_LOWEST_TEMPERATURE} instead: its log-probs would "
                f"be those of another policy. Set {key}={VLLM_LOWEST_TEMPERATURE} or more"
                + (", or 0 for greedy" if key.startswith("evaluation") else "")
            )


def _has_image_processor(folder: Path) -> bool:
    if (folder / "preprocessor_config.json").is_file():
        return True
    file = folder / "processor_config.json"
    return file.is_file() and "image_processor" in _read_json(file)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"cannot read {os.fspath(file)}: {error}. Copy it from the original model again") from None
    if not isinstance(value, dict):
        raise UserError(f"{os.fspath(file)} holds no mapping. Copy it from the original model again")
    return value
