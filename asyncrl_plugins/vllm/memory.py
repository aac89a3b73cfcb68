"""Memory of vLLM in the memory plan, and its share of a device where there is a budget."""

from __future__ import annotations

import math
from collections.abc import Iterator

from asyncrl.config.parts import ROLLOUT_WEIGHTS
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.memory_plan import GIB
from asyncrl.memory_plan.lines import (
    CONTEXT_BYTES,
    WORKING,
    EngineMemory,
    MemoryItem,
    allocator,
    context,
    nccl_of_ranks,
    sampling_bytes,
    servers_text,
)
from asyncrl.memory_plan.plan import arriving_lines, device_sharing, learner_lines, servers_per_gpu
from asyncrl.memory_plan.rehearsal import ModelBytes, rehearse
from asyncrl.models.loading import skeleton
from asyncrl.plugins import implementation

GRAPHS_BYTES, GRAPHS_LEFT_BYTES = 2 * GIB, GIB // 2
"""vLLM's CUDA graphs (1 to 3 GiB), and what CUDA itself keeps of them when vLLM takes them to the host. Estimates."""
OFFLOADS_GRAPHS = "sleep_mode_offload_cudagraph"
"""Argument of vLLM, on in sync mode unless rollout.engine_args say otherwise: graphs sleep in host memory, too."""
STEP_TOKENS = 8192
"""Prompt and image tokens of one step on a GPU, unless rollout.engine_args have max_num_batched_tokens."""
KV_CACHE = "KV cache"


def _lines(model: ModelBytes, config: RunConfig, copies: int) -> Iterator[MemoryItem]:
    """Upper estimate of vLLM's profiling pass, by the same model's layers."""
    rollout, parts, held, weights = (
        config.rollout,
        config.rollout.tensor_parallel_size,
        config.model.dtype,
        model.weights,
    )
    if precision := ROLLOUT_WEIGHTS.find(rollout.quantization):
        held += f", linear layers in {rollout.quantization}"
        weights -= implementation(precision.held_by["vllm"]["saved_bytes"])(skeleton(config.model))
    tokens = config.data.max_prompt_length + config.longest_completion
    scheduled = step_tokens(config)
    prefill = math.ceil(scheduled / config.data.max_prompt_length) * model.prefill
    most = copies * max(prefill, sampling_bytes(model, config.rollout))
    why = f"one sequence of {tokens} tokens at least; vllm takes the rest of its share for more"
    yield MemoryItem("weights", copies * weights // parts, held + servers_text(copies))
    yield MemoryItem(KV_CACHE, copies * tokens * model.cache_per_token // parts, why)
    yield MemoryItem(WORKING, most, f"a step of {scheduled} tokens")
    yield allocator(most)
    yield from _graphs(config, copies)


def step_tokens(config: RunConfig) -> int:
    """Most tokens of one step on a GPU, of prompts and, apart from these, of images: without chunks a whole prompt."""
    given, rollout = config.rollout.engine_args, config.rollout
    whole = (
        0 if given.get("enable_chunked_prefill", True) else config.data.max_prompt_length + config.longest_completion
    )
    return int(given.get("max_num_batched_tokens", max(STEP_TOKENS, rollout.max_concurrent_sequences, whole)))


def graph_sizes(most: int) -> list[int]:
    """Numbers of sequences for which vLLM captures a decode step, up to the most: steps of a half from 16 on, where its
    own are of 8 and 16. Each is captured at every start."""
    sizes = [1, 2, 4, 8, *(size for power in range(4, 14) for size in (1 << power, 3 << power - 1))]
    return [*(size for size in sizes if size < most), most]


def _graphs(config: RunConfig, copies: int = 1) -> list[MemoryItem]:
    """CUDA graphs: vLLM captures its decode steps unless it runs eagerly."""
    if config.rollout.device == "cpu" or config.rollout.engine_args.get("enforce_eager"):
        return []
    return [
        MemoryItem("CUDA graphs", copies * GRAPHS_BYTES, "an estimate; none with enforce_eager in rollout.engine_args")
    ]


def _offloads_graphs(config: RunConfig) -> bool:
    return bool(_graphs(config)) and config.rollout.engine_args.get(OFFLOADS_GRAPHS, True)


def _asleep(config: RunConfig) -> list[MemoryItem]:
    what = "CUDA graphs of the sleeping engine"
    if _offloads_graphs(config):
        return [MemoryItem(what, GRAPHS_LEFT_BYTES, "an estimate of what CUDA keeps; the rest is in host memory")]
    return [
        MemoryItem(what, line.nbytes, f"an estimate; they stay without {OFFLOADS_GRAPHS}") for line in _graphs(config)
    ]


def _asleep_on_host(config: RunConfig) -> list[MemoryItem]:
    if not _offloads_graphs(config):
        return []
    return [MemoryItem("engine's CUDA graphs asleep", GRAPHS_BYTES, "an estimate, pinned")]


MEMORY = EngineMemory(_lines, _asleep, _asleep_on_host, fills_device=True)


def memory_utilization(config: RunConfig, device_bytes: int) -> float:
    """vLLM's `gpu_memory_utilization`: the part of a whole device that the budget leaves to one engine.

    `device_bytes` is the device's total memory. vLLM counts its own context in its share, but not what arrives beside
    its model: that is taken off, and what the learner holds meanwhile.
    """
    sharing = device_sharing(config)
    learner = arriving = 0
    if sharing == "turns":
        asleep = (*context(config.learner.device, "learner"), *nccl_of_ranks(config.learner))
        learner = sum(line.nbytes for line in asleep)
    elif sharing == "together" or config.rollout.uses_device_channel:
        model = rehearse(config)
        arriving = sum(line.nbytes for line in arriving_lines(model, config.rollout, servers_per_gpu(config)))
        if sharing == "together":
            learner = sum(line.nbytes for line in learner_lines(model, config))
    budget = min(config.gpu_memory.budget_gib * GIB, device_bytes)
    share = math.floor((budget - learner - arriving) / servers_per_gpu(config) / device_bytes * 1000) / 1000
    if share <= 0:
        raise UserError(
            f"gpu_memory.budget_gib is {config.gpu_memory.budget_gib:g}, of which the learner holds "
            f"{learner / GIB:.1f} GiB while vLLM works, and new weights take {arriving / GIB:.1f}: nothing is left for "
            f"vLLM. Raise it, or use another device{' or rollout.weights_channel=shm' if arriving else ''}"
        )
    return share


def cache_bytes(config: RunConfig, device_bytes: int) -> int:
    """vLLM's `kv_cache_memory_bytes` where the learner has memory on the same GPU: its share without its context and
    what the plan has for weights, a step and graphs.

    Raises UserError where that is no room for one sequence.
    """
    lines = list(_lines(rehearse(config), config, 1))
    share = math.floor(memory_utilization(config, device_bytes) * device_bytes)
    room = share - CONTEXT_BYTES - sum(line.nbytes for line in lines if line.name != KV_CACHE)
    needed = sum(line.nbytes for line in lines if line.name == KV_CACHE)
    if room < needed:
        raise UserError(
            f"gpu_memory.budget_gib is {config.gpu_memory.budget_gib:g}, and vLLM has {share / GIB:.1f} GiB of it. "
            f"Beside its weights, a step of {step_tokens(config)} tokens and its graphs {room / GIB:.2f} GiB are left "
            f"for sequences, and one of the longest takes {needed / GIB:.2f}. Raise it, or set "
            "rollout.engine_args={max_num_batched_tokens: 2048}"
        )
    return room
