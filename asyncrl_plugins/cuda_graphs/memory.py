"""Memory of CUDA graphs, and of a cache that stays, in the plan of the `hf` engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncrl.config.installed_methods import chosen_hooks
from asyncrl.config.schema import RunConfig
from asyncrl.memory_plan.lines import MemoryItem, prefilled_prompts, sampling_bytes
from asyncrl.memory_plan.rehearsal import ModelBytes
from asyncrl.model_files.folder import describe_model, model_folder
from asyncrl_plugins.cuda_graphs.graphs import MOST_GRAPHS
from asyncrl_plugins.cuda_graphs.plugin import EAGER

LAYER_BYTES = 256 << 10
"""Device memory that CUDA takes for a captured layer, of some 50 kernels. An estimate."""


def lines(model: ModelBytes, config: RunConfig, copies: int) -> Iterator[MemoryItem]:
    """Memory beside the cache, whose slots are those of the plan: none where no step is captured."""
    rollout, data = config.rollout, config.data
    if rollout.device == "cpu" or rollout.engine_args.get(EAGER) or chosen_hooks("token_trace", config.algorithm):
        return
    tokens = data.max_prompt_length + config.longest_completion
    width = 4 if config.model.float32_head else getattr(torch, config.model.dtype).itemsize
    described = describe_model(model_folder(config.model), trust_remote_code=config.model.trust_remote_code)
    text = described.get_text_config(decoder=True)
    captured = 2 * rollout.max_concurrent_sequences * model.vocabulary * width  # logits in the pool and outside of it
    if config.model.float32_head:  # the output layer, widened in the pool
        captured += 4 * model.vocabulary * text.hidden_size
    captured += MOST_GRAPHS * text.num_hidden_layers * LAYER_BYTES
    why = f"{MOST_GRAPHS} steps, an estimate; none with {EAGER} in rollout.engine_args"
    yield MemoryItem("CUDA graphs", copies * captured, why)
    # The core's plan takes a quarter of the cache for free while prompts are prefilled. Here it stays.
    quarter = rollout.max_concurrent_sequences * tokens * model.cache_per_token // 4
    prefill = prefilled_prompts(config) * (model.prefill + data.max_prompt_length * model.cache_per_token)
    others = max(rollout.max_concurrent_sequences * tokens * model.decode_per_token, sampling_bytes(model, rollout))
    kept = max(prefill, others) - max(prefill - quarter, others)
    yield MemoryItem("KV cache during prefill", copies * kept, "its memory stays where sequences have ended")
