"""Arguments, environment and model folder that SGLang is started with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.models.loading import torch_dtype
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.sglang.launch import OWNER_VARIABLE

SPARE_TOKENS = 8
"""Tokens by which SGLang's context is longer than the longest sequence: it cuts a request that fills its context."""


def server_arguments(
    config: RunConfig, folder: Path, port: int, *, device: torch.device, image_size: Mapping[str, int], text_config: Any
) -> dict[str, Any]:
    """Flags of `launch_server` by their names without dashes; `rollout.engine_args` come last.

    `image_size` is the `size` of our own image processor.
    """
    rollout = config.rollout
    tokens = config.data.max_prompt_length + config.longest_completion
    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "host": "127.0.0.1",
        "port": port,
        "device": device.type,
        "dtype": str(torch_dtype(config.model)).removeprefix("torch."),
        "trust_remote_code": config.model.trust_remote_code,
        "context_length": tokens + SPARE_TOKENS,
        "max_running_requests": rollout.max_concurrent_sequences,
        "weight_version": "0",
        "sampling_defaults": "openai",  # not generation_config.json's: the learner's tickets say how to sample
        "grammar_backend": "none",
        # A prompt of a group is computed once: the others of the group wait until it is in the prefix cache.
        "schedule_policy": "lpm",
        "enable_multimodal": True,
        "enable_metrics": True,
        "skip_server_warmup": True,
        "log_level": "warning",
    }
    if image_size:
        # SGLang gives the Qwen2-VL family limits of its own in place of the folder's.
        arguments["mm_process_config"] = json.dumps({"image": {"size": dict(image_size)}})
    if device.type == "cpu":
        arguments |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "mm_attention_backend": "sdpa",
            "disable_overlap_schedule": True,
            "sleep_on_idle": True,  # else it asks for requests without a pause, on a core that the learner may need
            "mem_fraction_static": 0.8,  # a limit; max_total_tokens decides
            "max_total_tokens": cpu_cache_tokens(config, text_config),
        }
    else:
        arguments["base_gpu_id"] = device.index or 0
        if config.trainer.mode == "sync":
            arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": rollout.sleep_level == 1}
    return arguments | rollout.engine_args


def image_size_of(processor: PromptProcessor) -> dict[str, int]:
    """Limits of an image's pixels in our own processor; empty for a processor of another kind."""
    size = dict(getattr(getattr(processor.processor, "image_processor", None), "size", None) or {})
    return {name: size[name] for name in ("shortest_edge", "longest_edge") if size.get(name)}


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Command line of arguments: true is a flag alone, false and None are left out, a list is several words."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is False or value is None:
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, (list, tuple)):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def cpu_cache_tokens(config: RunConfig, text_config: Any) -> int:
    """Tokens of the key-value cache on a CPU: every concurrent sequence at full length, but no more than a quarter of
    the memory that is free."""
    tokens = config.data.max_prompt_length + config.longest_completion + SPARE_TOKENS
    queries = text_config.num_attention_heads
    heads = getattr(text_config, "num_key_value_heads", None) or queries
    width = getattr(text_config, "head_dim", None) or text_config.hidden_size // queries
    per_token = 2 * text_config.num_hidden_layers * heads * width * torch_dtype(config.model).itemsize
    fitting = psutil.virtual_memory().available // 4 // per_token
    return min(tokens * config.rollout.max_concurrent_sequences, max(tokens, fitting))


def server_environment(config: RunConfig, *, cuda: bool) -> dict[str, str]:
    """The environment of SGLang's processes; what the user has set of SGLang's own stays, but for what versions and
    images depend on."""
    # Of this Python and its packages nothing is to be found over there.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if not cuda:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        if not config.rollout.engine_args.get("enable_torch_compile"):
            # Its first image would wait seconds for a compiler, of one small function.
            environment.setdefault("TORCH_COMPILE_DISABLE", "1")
    if config.rollout.cpu_threads:
        environment["OMP_NUM_THREADS"] = str(config.rollout.cpu_threads)
    environment["SGLANG_MM_AVOID_RETOKENIZE"] = "1"  # else it decodes our ids and encodes the text again
    # Its cache of image embeddings outlives weight updates, flushed or not.
    environment["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    for dump in ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
        environment.setdefault(dump, "0")  # it would answer nothing for a minute before it ends
    environment[OWNER_VARIABLE] = str(os.getpid())
    return environment


def served_folder(folder: Path, described: Mapping[str, Any], scratch: Path) -> Path:
    """The model folder as SGLang reads it: itself, or links to its files in `scratch` with another config.json.

    SGLang's Qwen2-VL wants `vision_config.in_chans`, which transformers 5 does not write.
    """
    vision = described.get("vision_config") or {}
    if described.get("model_type") != "qwen2_vl" or "in_chans" in vision:
        return folder
    for file in folder.iterdir():
        if file.name != "config.json":
            (scratch / file.name).symlink_to(file.resolve())
    channels = {**vision, "in_chans": vision.get("in_channels", 3)}
    (scratch / "config.json").write_text(json.dumps({**described, "vision_config": channels}), encoding="utf-8")
    return scratch
