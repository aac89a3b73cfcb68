"""One learner update and one engine pass, rehearsed on the meta device: the model's own code, without any memory.

The bytes of weights, gradients, optimiser state and KV cache are exact. Those of a forward and backward pass are what
autograd would keep and allocate, operation by operation; kernels' own workspaces are not seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.config.schema import RunConfig
from asyncrl.models import shared_prefix
from asyncrl.models.loading import freeze_vision_tower, has_vision, special_token_ids
from asyncrl.models.processing import PLACEHOLDER_ID_NAMES
from asyncrl.models.published import published_tensors
from asyncrl.models.sampling_distribution import draw, entropies, gather_logprobs, sampling_logprobs
from asyncrl.models.shared_prefix import AttentionBatch, SharedPrefixLayout
from asyncrl.models.truncation import truncated_logprobs
from asyncrl.tools.memory_plan.adapters import with_adapters
from asyncrl.tools.memory_plan.attention import fused_attention
from asyncrl.tools.memory_plan.experts import grouped_experts
from asyncrl.tools.memory_plan.limits import PREFILL_TOKENS
from asyncrl.tools.memory_plan.live_bytes import LiveBytes, nbytes
from asyncrl.tools.memory_plan.shapes import META, meta_model, text_config
from asyncrl.tools.memory_plan.vision import image_features


@dataclass(frozen=True)
class LearnerBytes:
    """Of the learner's device."""

    weights: int
    gradients: int
    moments: int
    """AdamW's two averages."""
    passing: int
    """Most that a forward and backward pass adds to weights, gradients and moments."""
    stepping: int
    """Most that the optimiser's update adds to them."""
    published: int
    """Of one policy version on the wire."""
    parameters: int
    """How many, not bytes."""
    trained: int
    """How many of them are trained."""


@dataclass(frozen=True)
class EngineBytes:
    """Of the engine's device."""

    weights: int
    cache: int
    """Keys and values of rollout.max_concurrent_sequences sequences of the greatest length."""
    cache_per_sequence: int
    working: int
    """Most that prefill, decoding or sampling adds to weights and cache."""


# --- the learner ---------------------------------------------------------------------------------


def learner_model(config: RunConfig) -> Any:
    """As the learner trains it."""
    model = meta_model(config, text_attention=shared_prefix.SHARED_PREFIX_ATTENTION)
    if config.model.lora.rank:
        model = with_adapters(model, config.model)
    elif config.model.freeze_vision_tower:
        freeze_vision_tower(model)
    if config.learner.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def rehearse_learner(config: RunConfig, *, foreach: bool = True) -> LearnerBytes:
    """`foreach`: torch's default for AdamW on CUDA, which holds one more copy of what is trained during an update."""
    model = learner_model(config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = nbytes([*model.parameters(), *model.buffers()])
    optimizer = torch.optim.AdamW(trained, foreach=foreach)
    with LiveBytes("meta", known=[*model.parameters(), *model.buffers()]) as live, fused_attention(), grouped_experts():
        for parameter in trained:  # gradients of an earlier micro-batch are there, as they are from the second one on
            parameter.grad = torch.empty_like(parameter)
        gradients = live.live
        optimizer.step()
        moments = live.live - gradients
        rest = live.restart()
        optimizer.step()
        stepping = live.peak - rest
        live.restart()
        train_pass(model, config, META)
        passing = live.peak - rest
    return LearnerBytes(
        weights=weights,
        gradients=gradients,
        moments=moments,
        passing=passing,
        stepping=stepping,
        published=nbytes(trained if config.model.lora.rank else (t for _, t in published_tensors(model))),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in trained),
    )


def train_pass(model: Any, config: RunConfig, device: torch.device) -> None:
    """Forward and backward over a full micro-batch: every token's logits, and images in the place of every prompt."""
    tokens = config.batch.tokens_per_microbatch
    length = min(tokens, longest_group(config))
    prompts = math.ceil(tokens / length)
    embedded = _embed(model, (1, tokens), prompts * config.data.max_prompt_length, device)
    layout = _layout(tokens, length, device)
    hidden = _decode(model, embedded, shared_prefix=layout, use_cache=False)
    predict_from = torch.arange(tokens, device=device)
    logits = model.get_output_embeddings()(hidden[:, predict_from, :])[0]
    del hidden, embedded
    logprobs = _logprobs(model, logits, config.rollout.temperature)
    with torch.set_grad_enabled(config.algorithm.entropy_coeff > 0):
        entropy = entropies(logprobs)
    chosen = gather_logprobs(logprobs, torch.zeros(tokens, dtype=torch.long, device=device))
    del logits, logprobs
    (chosen.sum() - entropy.sum()).backward()


def longest_group(config: RunConfig) -> int:
    """Packed tokens of a prompt and its completions."""
    return config.data.max_prompt_length + config.batch.group_size * config.data.max_response_length


def _layout(tokens: int, length: int, device: torch.device) -> SharedPrefixLayout:
    """Of groups of `length` tokens, the last one shorter. As `shared_prefix.make_layout` makes it."""
    groups = math.ceil(tokens / length)
    batch = AttentionBatch(
        gather=torch.zeros((groups, length), dtype=torch.long, device=device),
        scatter=torch.zeros(tokens, dtype=torch.long, device=device),
        mask=torch.ones((groups, 1, length, length), dtype=torch.bool, device=device),
    )
    return SharedPrefixLayout((batch,), torch.zeros(tokens, dtype=torch.long, device=device))


# --- the engine ----------------------------------------------------------------------------------


@torch.no_grad()
def rehearse_engine(config: RunConfig) -> EngineBytes:
    """The hf engine; for vllm, its profiling pass with the same model's layers (an estimate from above)."""
    model = with_adapters(meta_model(config, text_attention="sdpa"), config.model).eval().requires_grad_(False)
    sequences = config.rollout.max_concurrent_sequences
    per_sequence = cache_bytes_per_token(model.config, config) * longest_sequence(config)
    cache = sequences * per_sequence
    weights = nbytes([*model.parameters(), *model.buffers()])
    with LiveBytes("meta", known=[*model.parameters(), *model.buffers()]) as live, fused_attention(), grouped_experts():
        if config.rollout.engine == "vllm":
            _forward_once(model, (1, scheduled_tokens(config)), scheduled_tokens(config))
            working = live.peak
            live.restart()
            _sample(model, sequences, config)
            return EngineBytes(weights, cache, per_sequence, max(working, live.peak))
        rows = prefilled_prompts(config)
        start = live.restart()
        _prefill(model, rows, config)
        prefilling = live.peak - start
        start = live.restart()
        decoding = _decode_step(model, config, live)
        # Prefill happens with an empty cache, or while at most three quarters of the sequences run.
        working = max(prefilling - cache // 4, decoding)
    return EngineBytes(weights, cache, per_sequence, working)


def longest_sequence(config: RunConfig) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def cache_bytes_per_token(hf_config: Any, config: RunConfig) -> int:
    """Keys and values of every layer: 2 * layers * key heads * head width * bytes of the dtype."""
    layers, heads, width = _cache_shape(hf_config)
    return 2 * layers * heads * width * getattr(torch, config.model.dtype).itemsize


def _cache_shape(hf_config: Any) -> tuple[int, int, int]:
    """Layers, key heads, width of a head."""
    text = text_config(hf_config)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_hidden_layers, getattr(text, "num_key_value_heads", None) or text.num_attention_heads, width


def prefilled_prompts(config: RunConfig) -> int:
    """Prompts that the hf engine takes through the model in one pass."""
    smallest = min([config.batch.group_size] + [config.evaluation.group_size] * bool(config.data.val_files))
    together = max(1, config.rollout.max_concurrent_sequences // smallest)
    rebuilds = config.trainer.mode == "async" and config.rollout.weight_update == "recompute"
    return together if rebuilds else min(together, max(1, PREFILL_TOKENS // config.data.max_prompt_length))


def scheduled_tokens(config: RunConfig) -> int:
    """Most tokens that vLLM takes through the model in one step."""
    return int(config.rollout.engine_args.get("max_num_batched_tokens", 8192))


def _prefill(model: Any, rows: int, config: RunConfig) -> None:
    from transformers import DynamicCache

    length = config.data.max_prompt_length
    embedded = _embed(model, (rows, length), rows * length, META)
    mask = torch.ones((rows, 1, length, length), dtype=torch.bool, device=META)
    hidden = _decode(model, embedded, attention_mask=mask, past_key_values=DynamicCache(), use_cache=True)
    model.get_output_embeddings()(hidden[:, -1:])


def _forward_once(model: Any, shape: tuple[int, int], image_tokens: int) -> None:
    embedded = _embed(model, shape, image_tokens, META)
    mask = torch.ones((shape[0], 1, 1, 1), dtype=torch.bool, device=META).expand(-1, -1, shape[1], shape[1])
    _decode(model, embedded, attention_mask=mask, use_cache=False)


def _decode_step(model: Any, config: RunConfig, live: LiveBytes) -> int:
    """The last step of the longest sequences. Returns the bytes over those of the cache that it leaves."""
    from transformers import DynamicCache

    rows, length = config.rollout.max_concurrent_sequences, longest_sequence(config)
    layers, heads, width = _cache_shape(model.config)
    cache = DynamicCache()
    for layer in range(layers):
        for_keys = torch.empty((rows, heads, length - 1, width), dtype=model.dtype, device=META)
        cache.update(for_keys, torch.empty_like(for_keys), layer)
    for_keys = None  # from now on they are the cache's alone
    live.restart()
    embedded = _embed(model, (rows, 1), 0, META)
    mask = torch.ones((rows, 1, 1, length), dtype=torch.bool, device=META)
    _decode(model, embedded, attention_mask=mask, past_key_values=cache, use_cache=True)
    _sample(model, rows, config)
    return live.peak - rows * length * cache_bytes_per_token(model.config, config)


def _sample(model: Any, rows: int, config: RunConfig) -> None:
    """One token for each row, as DecodeBatch does it."""
    rollout = config.rollout
    hidden = torch.empty((rows, text_config(model.config).hidden_size), dtype=model.dtype, device=META)
    logprobs = _logprobs(model, model.get_output_embeddings()(hidden), torch.ones(rows, device=META))
    if rollout.top_p < 1 or rollout.top_k or rollout.min_p:
        column = torch.ones(rows, dtype=torch.float64, device=META)
        logprobs = truncated_logprobs(logprobs, top_k=column, top_p=column, min_p=column)
    tokens = torch.where(torch.ones(rows, dtype=torch.bool, device=META), logprobs.argmax(-1), 0)
    draw(logprobs, torch.empty(rows, device=META))
    gather_logprobs(logprobs, tokens)


# --- both ----------------------------------------------------------------------------------------


def _embed(model: Any, shape: tuple[int, int], image_tokens: int, device: torch.device) -> torch.Tensor:
    """[R, P, D] embeddings of token ids, with images in the place of as many tokens where the model has eyes."""
    embedded = model.get_input_embeddings()(torch.zeros(shape, dtype=torch.long, device=device))
    image_tokens = min(image_tokens, shape[0] * shape[1])
    if not has_vision(model.config) or image_tokens == 0:
        return embedded
    places = torch.zeros(embedded.shape, dtype=torch.bool, device=device)
    return embedded.masked_scatter(places, image_features(model, image_tokens, device))


def _decode(model: Any, embedded: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs: Any) -> Any:
    """[R, P, D] -> [R, P, D] through the text layers."""
    rows, length = embedded.shape[:2]
    mrope = "mrope_section" in (getattr(text_config(model.config), "rope_parameters", None) or {})
    positions = torch.zeros((3, rows, length) if mrope else (rows, length), dtype=torch.long, device=embedded.device)
    if attention_mask is None:  # with its own mask the model makes none, which it could not without reading values
        attention_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=embedded.device)
    inputs |= {"attention_mask": attention_mask, "position_ids": positions}
    return model.get_decoder()(inputs_embeds=embedded, **inputs).last_hidden_state


def _logprobs(model: Any, logits: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    banned = sorted(special_token_ids(model.config, PLACEHOLDER_ID_NAMES))
    return sampling_logprobs(
        logits, temperature=temperature, banned=torch.tensor(banned, dtype=torch.long, device=logits.device)
    )
