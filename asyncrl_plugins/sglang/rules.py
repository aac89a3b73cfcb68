"""Rules of the sglang engine, checked before it is started: which versions it works with, and settings it refuses.

Unproven on a GPU: everything. On a CPU it was run with the model types in `COMPARED`.
"""

from __future__ import annotations

from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import resolve_device
from asyncrl.model_files.folder import read_config
from asyncrl_plugins.sglang.environment import look_into, python_of
from asyncrl_plugins.sglang.plugin import SGLangConfig

VERSIONS = {
    False: {"sglang": "0.5.23", "torch": "2.13.0", "transformers": "5.19.0"},
    True: {"sglang": "0.5.23", "transformers": "5.19.0"},
}
"""Versions that were run together on a CPU; on CUDA sglang brings the torch that it was built for."""
INSTALL = "make install-sglang"
COMPARED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Model types whose images and log-probs have been compared between SGLang and the learner."""

PATCH_VALUES = 3 * 2 * 14 * 14
"""Values of one image patch that SGLang's Qwen2.5-VL embeds."""

NOT_YOURS = {
    "model_path": "Set model.path",
    "tokenizer_path": "Both sides use the tokenizer of model.path",
    "dtype": "Set model.dtype, which the learner reads, too",
    "trust_remote_code": "Set model.trust_remote_code",
    "context_length": "It is data.max_prompt_length + data.max_response_length",
    "max_running_requests": "Set rollout.max_concurrent_sequences",
    **dict.fromkeys(("tp_size", "tensor_parallel_size", "pp_size"), "Leave it out: it has not been run"),
    **dict.fromkeys(("dp_size", "data_parallel_size"), "Set rollout.servers"),
    **dict.fromkeys(("host", "port", "api_key", "admin_api_key"), "Leave it out: the server alone talks to SGLang"),
    "device": "Set rollout.device",
    "weight_version": "Leave it out: versions are the learner's",
    "enable_metrics": "Leave it out: SGLang's metrics are on this server's endpoint",
    "sampling_defaults": "Leave it out: the learner's tickets say how to sample",
    "preferred_sampling_params": "Leave it out: the learner's tickets say how to sample",
    "mm_process_config": "Set model.min_pixels and model.max_pixels, which the learner reads, too",
    "json_model_override_args": "Change config.json in model.path, which the learner reads, too",
    "load_format": "Leave it out: the engine starts with the weights of model.path",
    "skip_tokenizer_init": "Leave it out: images need the tokenizer",
    "stream_interval": "Leave it out: nothing is streamed",
    **dict.fromkeys(
        ("speculative_algorithm", "speculative_draft_model_path"),
        "Leave it out: log-probs of drafted tokens have not been compared",
    ),
    "enable_watermark": "Leave it out: it changes what is sampled, and the learner knows of no watermark",
    **dict.fromkeys(
        ("quantization", "torchao_config"),
        "Leave it out: SGLang would load new versions into its quantised weights as if they were quantised. Set "
        "rollout.quantization with rollout.engine=vllm or hf",
    ),
    "kv_cache_dtype": "Leave it out: rounded caches sample from another policy than the one that the learner trains",
    **dict.fromkeys(("enable_lora", "lora_paths", "max_lora_rank"), "It takes no adapters here"),
    **dict.fromkeys(("enable_memory_saver", "enable_weights_cpu_backup"), "Leave it out: it is on in sync mode"),
}
"""Arguments of SGLang that `rollout.engine_args` may not set, and what to do instead."""


def problems(config: RunConfig) -> list[str]:
    """One line, with its fix, for each thing that would go wrong, or be ignored, once SGLang has started."""
    cuda = resolve_device(config.rollout.device, "rollout.device").type == "cuda"
    return model_problems(config) + argument_problems(config) + installation_problems(config, cuda=cuda)


def model_problems(config: RunConfig) -> list[str]:
    described = read_config(config.model)
    family, vision = described.get("model_type"), described.get("vision_config") or {}
    if family not in COMPARED:
        return [
            f"the model in {config.model.path} is of the family {family}, and what SGLang makes of its images has not "
            "been compared with what the learner makes of them. Set rollout.engine=vllm or hf"
        ]
    values = vision.get("in_channels", 3) * vision.get("temporal_patch_size", 2) * vision.get("patch_size", 14) ** 2
    if family == "qwen2_5_vl" and values != PATCH_VALUES:
        return [
            f"the model in {config.model.path} has image patches of {values} values, and SGLang's Qwen2.5-VL takes "
            f"those that have not {PATCH_VALUES} for embeddings. Set rollout.engine=vllm or hf"
        ]
    return []


def argument_problems(config: RunConfig) -> list[str]:
    names = {name.lstrip("-").replace("-", "_") for name in config.rollout.engine_args}
    refused = [f"{name}. {fix}" for name, fix in NOT_YOURS.items() if name in names]
    return [f"rollout.engine_args may not have {'; nor '.join(refused)}"] if refused else []


def installation_problems(config: RunConfig, *, cuda: bool) -> list[str]:
    """A missing or other SGLang, with the command that fixes it."""
    python = python_of(config.rollout.settings_of(SGLangConfig))
    found = look_into(python)
    if found is None:
        return [
            f"rollout.engine is sglang, but there is no Python at {python} to run it. Run: {INSTALL}, or set "
            "rollout.sglang.python to the Python of its environment"
        ]
    lines = [
        f"{name} {found.versions[name] or 'none'} is installed for {python}, and the sglang engine was built for "
        f"{name} {number}. Run: {INSTALL}"
        for name, number in VERSIONS[cuda].items()
        if found.versions[name].partition("+")[0] != number
    ]
    if cuda and found.has_stand_in and not lines:
        lines.append(
            f"SGLang for {python} has asyncrl's stand-in for its kernels, which is for CPUs. Run on this machine: "
            f"{INSTALL}"
        )
    return lines
