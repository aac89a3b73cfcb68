"""Memory of rollout engines: the formula that a plug-in's engine may have, and that of the hf engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from asyncrl.config.parts import CACHE_BLOCK, PREFILL_TOKENS, ROLLOUT_ENGINES, cache_columns
from asyncrl.config.schema import RunConfig
from asyncrl.config.service_sections import RolloutConfig
from asyncrl.memory_plan.items import WORKING, MemoryItem, allocator, servers_text
from asyncrl.memory_plan.rehearsal import ModelBytes
from asyncrl.plugins import implementation

SAMPLING_BYTES, TRUNCATION_BYTES = 28, 60
"""Per logit while tokens are drawn (fp32 log-probs, fp64 cumulative distribution), and with top-k, top-p or min-p."""


@dataclass(frozen=True)
class EngineMemory:
    """Formula of the memory of a rollout engine (`RolloutEngine.memory`)."""

    lines: Callable[[ModelBytes, RunConfig, int], Iterator[MemoryItem]]
    """Memory of a number of engines on one device, without their contexts."""
    asleep: Callable[[RunConfig], list[MemoryItem]] = lambda config: []
    """Device memory that an engine keeps while it sleeps, beside its context."""
    asleep_on_host: Callable[[RunConfig], list[MemoryItem]] = lambda config: []
    """Host memory of a sleeping engine beside its weights."""
    fills_device: bool = False
    """True if the engine takes all that is left for its cache, and the lines have the least of it."""


def memory_of_engine(engine: str) -> EngineMemory:
    return implementation(ROLLOUT_ENGINES[engine].memory)


def sampling_bytes(model: ModelBytes, rollout: RolloutConfig) -> int:
    """Bytes of logits and probabilities while all sequences draw a token."""
    per_logit = TRUNCATION_BYTES if rollout.truncates else SAMPLING_BYTES
    return rollout.max_concurrent_sequences * model.vocabulary * per_logit


def prefilled_prompts(config: RunConfig) -> int:
    """Prompts of the largest length whose tokens the hf engine takes through the model in one pass."""
    most, longest = config.rollout.max_concurrent_sequences, config.data.max_prompt_length
    smallest = min([config.trajectories_per_group] + [config.evaluation.group_size] * bool(config.data.val_files))
    together = max(1, most // smallest)
    admitted = min(together, max(1, PREFILL_TOKENS // longest))
    if config.environment.is_used:  # a later turn is a prompt of its own, with all turns before it
        row = longest + config.longest_completion
        admitted = max(admitted, -(-min(most, max(1, PREFILL_TOKENS // row)) * row // longest))
    rebuilds = config.trainer.mode == "async" and config.rollout.weight_update == "recompute"
    return max(together, admitted) if rebuilds else admitted


def _hf_lines(model: ModelBytes, config: RunConfig, copies: int) -> Iterator[MemoryItem]:
    tokens, sequences = (
        config.data.max_prompt_length + config.longest_completion,
        config.rollout.max_concurrent_sequences,
    )
    prompts, decode = prefilled_prompts(config), sequences * tokens * model.decode_per_token
    # It takes prompts while at most three quarters of its sequences run.
    prefill = prompts * (model.prefill + config.data.max_prompt_length * model.cache_per_token)
    prefill -= sequences * tokens * model.cache_per_token // 4
    most = copies * max(prefill, decode, sampling_bytes(model, config.rollout))
    why = f"{sequences} sequences (rollout.max_concurrent_sequences) of {tokens} tokens, in blocks of {CACHE_BLOCK}"
    cache = sequences * cache_columns(tokens) * model.cache_per_token
    yield MemoryItem("weights", copies * model.weights, config.model.dtype + servers_text(copies))
    yield MemoryItem("KV cache", copies * cache, why)
    yield MemoryItem(WORKING, most, f"prefill of {prompts} prompts, or sampling")
    yield allocator(most)


HF_MEMORY = EngineMemory(_hf_lines)
