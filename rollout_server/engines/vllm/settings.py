"""What vLLM is told: its arguments from our configuration, and its environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from asyncrl.config.engine_rules import vllm_device_problem
from asyncrl.config.schema import RunConfig
from asyncrl.config.suggest import close_names
from asyncrl.errors import UserError
from asyncrl.models.loading import resolve_device
from asyncrl.tools.memory_plan.plan import vllm_memory_utilization
from rollout_server.engines.vllm.names import BANNED_KEY
from rollout_server.engines.vllm.owner import LEASE_VARIABLE, OWNER_VARIABLE
from rollout_server.engines.vllm.versions import argument_names, check_installed

WORKER = "rollout_server.engines.vllm.worker"
"""The module that vLLM's processes import; this process need not."""
CPU_KV_BLOCK = 128
"""Tokens of one block of vLLM's key-value cache on a CPU."""
CPU_BATCH_TOKENS = 4096
"""Prompt tokens of one prefill step on a CPU, unless one sequence needs more."""

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
    "enable_sleep_mode": "Leave it out: it is on wherever vLLM can sleep",
    "disable_log_stats": "Leave it out: usage and metrics come from vLLM's statistics",
    "logits_processors": "Leave it out: placeholder ids are banned with one, and the learner knows of no other",
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "Leave it out: vLLM then ignores logits processors, so placeholder ids could be sampled",
    ),
    "watermark_config": "Leave it out: it changes what is sampled, and the learner knows of no watermark",
    **dict.fromkeys(
        ("quantization", "quantization_config", "kv_cache_dtype"),
        "Leave it out: rounded weights or caches sample from another policy than the one that the learner trains, and "
        "new weights cannot be put into rounded ones. Set model.dtype for both sides",
    ),
    "revision": "Set model.path to a folder of that revision",
    "tokenizer_revision": "Both sides use the tokenizer of model.path",
    "video_pruning_rate": "Leave it out: the learner trains on every token of a video",
    "worker_extension_cls": "Leave it out: weights arrive through one",
    "weight_transfer_config": "Set rollout.weights_channel",
    "additional_config": "Leave it out: the engine uses it",
    "generation_config": "Leave it out: the learner's tickets say how to sample",
    "mm_processor_kwargs": "Leave it out: the learner makes its pixels with the model folder's processor",
    "mm_processor_cache_gb": "Leave it out: a prompt is processed once here and submitted for every completion, "
    "which vLLM's two-sided cache does not expect",
    "mm_device_do_normalize": "Leave it out: the learner makes its pixels with the model folder's processor",
    "hf_overrides": "Change config.json in model.path, which the learner reads, too",
    "skip_tokenizer_init": "Leave it out",
}
"""Arguments of vLLM that `rollout.engine_args` may not set, and what to do instead."""

MEMORY_SETTINGS = ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "mm_ipc_gpu_memory_gb")
"""Arguments of vLLM that follow from gpu_memory.budget_gib where it is set."""


def check_vllm(config: RunConfig) -> bool:
    """Whether vLLM will use CUDA. Raises UserError for whatever is known to go wrong before it is even imported."""
    problem = vllm_device_problem(config)
    if problem:
        raise UserError(problem)
    cuda = resolve_device(config.rollout.device, "rollout.device").type == "cuda"
    check_settings(config, cuda=cuda)
    check_installed(cuda=cuda)
    check_known(config.rollout.engine_args, argument_names())
    return cuda


def check_settings(config: RunConfig, *, cuda: bool) -> None:
    """Raises UserError for what vLLM cannot honour, or would honour behind the learner's back."""
    rollout = config.rollout
    refused = [f"{name}. {fix}" for name, fix in NOT_YOURS.items() if name in rollout.engine_args]
    if refused:
        raise UserError(f"rollout.engine_args may not have {'; nor '.join(refused)}")
    if rollout.engine_args.get("load_format") == "dummy":
        raise UserError("rollout.engine_args has load_format: dummy, weights that are nobody's policy. Leave it out")
    _check_budget(config)
    if not cuda and rollout.engine_args.get("enable_chunked_prefill"):
        raise UserError(
            "rollout.engine_args has enable_chunked_prefill, which kills vLLM's CPU worker at the first seeded request "
            "(it rewinds the request's random generator, and a CPU generator has no offset). Leave it out"
        )
    devices = torch.cuda.device_count() if cuda else 1
    if rollout.tensor_parallel_size > devices:
        raise UserError(
            f"rollout.tensor_parallel_size is {rollout.tensor_parallel_size}, but this machine has {devices} "
            f"{'CUDA device(s)' if cuda else 'device (its CPU)'}. Set rollout.tensor_parallel_size={devices}"
        )


def _check_budget(config: RunConfig) -> None:
    over = [name for name in MEMORY_SETTINGS if name in config.rollout.engine_args]
    if over and config.gpu_memory.budget_gib:
        raise UserError(
            f"gpu_memory.budget_gib is {config.gpu_memory.budget_gib:g}, and rollout.engine_args has "
            f"{' and '.join(over)}, which would take vLLM out of that budget. Leave one of the two out"
        )


def check_known(engine_args: dict[str, Any], known: set[str]) -> None:
    """Raises UserError for a key of rollout.engine_args that vLLM does not have."""
    for name in engine_args:
        if name not in known:
            close = close_names(name, known)
            raise UserError(
                f"rollout.engine_args has {name}, which vLLM does not know"
                + (f"; did you mean {' or '.join(close)}?" if close else "")
            )


def check_heads(text_config: Any, supported: list[int]) -> None:
    """Raises UserError where vLLM's CPU attention has no kernel for the model's heads."""
    width = head_dim(text_config)
    if width not in supported:
        raise UserError(
            f"the model's attention heads are {width} wide, and vLLM on a CPU takes only {supported}. "
            "Use rollout.engine=hf, or a model with other heads"
        )


def engine_arguments(config: RunConfig, *, cuda: bool, text_config: Any, banned: list[int]) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs, without weight transfer; `rollout.engine_args` come last."""
    rollout = config.rollout
    tokens = config.data.max_prompt_length + config.data.max_response_length
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": config.model.dtype,
        "max_model_len": tokens,
        "max_num_seqs": rollout.max_concurrent_sequences,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "seed": config.trainer.seed,
        # Log-probs of the distribution that is sampled from: after bans, temperature and truncation.
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "mm_processor_cache_gb": 0,
        # On the device vLLM normalises videos as images, whatever the video processor says.
        "mm_device_do_normalize": False,
        "worker_extension_cls": f"{WORKER}.WorkerExtension",
        "logits_processors": [f"{WORKER}:BannedTokens"],
        "additional_config": {BANNED_KEY: banned},
        "enable_log_requests": False,
        "disable_log_stats": False,
    }
    if cuda:
        arguments["enable_sleep_mode"] = True  # vLLM's CPU platform refuses it
        if config.gpu_memory.budget_gib:
            total = torch.cuda.get_device_properties(0).total_memory
            arguments["gpu_memory_utilization"] = vllm_memory_utilization(config, total)
    else:
        arguments |= {
            "enforce_eager": True,  # compilation costs half a minute of start for a tenth of speed
            # A chunk's sampled token is discarded and its random number taken back, which a CPU generator cannot do.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(tokens, CPU_BATCH_TOKENS),
        }
        if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            arguments["kv_cache_memory_bytes"] = cpu_kv_bytes(text_config, config.model.dtype, config)
    return arguments | rollout.engine_args


def cpu_kv_bytes(text_config: Any, dtype: str, config: RunConfig) -> int:
    """Room for every concurrent sequence at full length, but no more than a quarter of the memory that is free.

    vLLM's own default on a CPU is nine tenths of all memory.
    """
    tokens = config.data.max_prompt_length + config.data.max_response_length
    blocks = -(-tokens // CPU_KV_BLOCK) * config.rollout.max_concurrent_sequences + 1  # vLLM keeps one for itself
    heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    itemsize = getattr(torch, dtype).itemsize
    per_token = 2 * text_config.num_hidden_layers * heads * head_dim(text_config) * itemsize
    return min(blocks * CPU_KV_BLOCK * per_token, psutil.virtual_memory().available // 4)


def head_dim(text_config: Any) -> int:
    return getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads


@contextmanager
def engine_environment(config: RunConfig, *, cuda: bool) -> Iterator[None]:
    """The environment in which vLLM starts its processes; what the user has set stays as it is.

    Ours is as before afterwards: vLLM preloads libraries into its workers through it, and processes that we start
    later, such as those of rewards, must not have them.
    """
    before = dict(os.environ)
    defaults = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    if not cuda:
        # Its first request with log-probs would wait seconds for a compiler, even with enforce_eager.
        defaults["TORCH_COMPILE_DISABLE"] = "1"
        if config.rollout.tensor_parallel_size == 1:
            # One process less, and threads that are not bound to cores which the learner needs, too.
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if config.rollout.cpu_threads:
        defaults["OMP_NUM_THREADS"] = str(config.rollout.cpu_threads)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # Forked processes would import nothing anew, and belong to nobody.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    if config.trainer.mode == "sync":
        os.environ[LEASE_VARIABLE] = str(config.run_path.absolute())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
