"""Bytes of one learner update and of one engine pass, without any memory.

Weights, gradients, AdamW's moments, KV cache and publications are counted. What a pass adds at its peak is rehearsed on
torch's meta device through the model's own code; kernels' own workspaces are not seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.config.engine_rules import PREFILL_TOKENS
from asyncrl.config.schema import RunConfig
from asyncrl.models import shared_prefix
from asyncrl.models.folder import model_folder
from asyncrl.models.loading import freeze_vision_tower, has_vision, model_class, refuse_dropout
from asyncrl.models.lora import add_adapter, resolve_adapter
from asyncrl.models.processing import PLACEHOLDER_ID_NAMES, special_token_ids
from asyncrl.models.published import published_tensors
from asyncrl.models.sampling_distribution import entropies, gather_logprobs, sampling_logprobs
from asyncrl.models.shared_prefix import AttentionBatch, SharedPrefixLayout
from asyncrl.tools.memory_plan.live_bytes import LiveBytes, cuda_kernels, nbytes

META = torch.device("meta")
SAMPLING_BYTES, TRUNCATION_BYTES = 28, 60
"""Per logit while tokens are drawn (fp32 log-probs, fp64 cumulative distribution), and with top-k, top-p or min-p."""


@dataclass(frozen=True)
class LearnerBytes:
    """What the learner's device holds."""

    weights: int
    gradients: int
    passing: int
    """Most that a forward and backward pass adds to weights, gradients and moments."""
    published: int
    """Bytes of one policy version on the wire."""
    parameters: int
    """Number of parameters."""
    trained: int
    """Number of parameters that are trained."""

    @property
    def moments(self) -> int:
        """AdamW's two averages."""
        return 2 * self.gradients

    @property
    def stepping(self) -> int:
        """Most that AdamW's update adds: with torch's default on CUDA one more copy of what is trained."""
        return self.gradients


@dataclass(frozen=True)
class EngineBytes:
    """What the engine's device holds."""

    weights: int
    cache_per_sequence: int
    """Keys and values of one sequence of the greatest length."""
    working: int
    """Most that prefill, decoding or sampling adds to weights and cache."""


# --- the learner ---------------------------------------------------------------------------------


def rehearse_learner(config: RunConfig) -> LearnerBytes:
    model = _meta_model(config, shared_prefix.SHARED_PREFIX_ATTENTION)
    if config.model.freeze_vision_tower and not config.model.lora.rank:
        freeze_vision_tower(model)
    if config.learner.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:  # gradients of an earlier micro-batch are there, as they are from the second one on
        parameter.grad = torch.empty_like(parameter)
    weights = [*model.parameters(), *model.buffers()]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    with LiveBytes("meta", known=[*weights, *gradients]) as live, cuda_kernels():
        train_pass(model, config, META)
    return LearnerBytes(
        weights=nbytes(weights),
        gradients=nbytes(gradients),
        passing=live.peak,
        published=nbytes(trained if config.model.lora.rank else (t for _, t in published_tensors(model))),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in trained),
    )


def train_pass(model: Any, config: RunConfig, device: torch.device) -> None:
    """Forward and backward over a full micro-batch: every token's logits, and images in the place of every prompt."""
    tokens = config.batch.tokens_per_microbatch
    length = min(tokens, longest_group(config))
    groups = math.ceil(tokens / length)
    packed = torch.arange(tokens, device=device)
    batch = AttentionBatch(  # groups of `length` tokens, the last one shorter, as shared_prefix.make_layout makes it
        gather=torch.zeros((groups, length), dtype=torch.long, device=device),
        scatter=torch.zeros_like(packed),
        mask=torch.ones((groups, 1, length, length), dtype=torch.bool, device=device),
    )
    layout = SharedPrefixLayout((batch,), torch.zeros_like(packed))
    seen_alone = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)  # else the model makes a mask, from values
    hidden = _hidden(model, (1, tokens), groups * config.data.max_prompt_length, seen_alone, shared_prefix=layout)
    logits = model.get_output_embeddings()(hidden[:, packed, :])[0]
    del hidden
    banned = sorted(special_token_ids(model.config, PLACEHOLDER_ID_NAMES))
    banned = torch.tensor(banned, dtype=torch.long, device=device)
    logprobs = sampling_logprobs(logits, temperature=config.rollout.temperature, banned=banned)
    with torch.set_grad_enabled(config.algorithm.entropy_coeff > 0):
        entropy = entropies(logprobs)
    chosen = gather_logprobs(logprobs, torch.zeros_like(packed))
    del logits, logprobs
    (chosen.sum() - entropy.sum()).backward()


def longest_group(config: RunConfig) -> int:
    """Packed tokens of a prompt and its completions."""
    return config.data.max_prompt_length + config.batch.group_size * config.data.max_response_length


# --- the engine ----------------------------------------------------------------------------------


@torch.no_grad()
def rehearse_engine(config: RunConfig) -> EngineBytes:
    """The hf engine; for vllm, its profiling pass with the same model's layers (an estimate from above)."""
    from transformers import DynamicCache

    model = _meta_model(config, "sdpa").eval()
    text, rollout, weights = _text_config(model.config), config.rollout, [*model.parameters(), *model.buffers()]
    per_sequence = cache_bytes_per_token(model.config, config) * longest_sequence(config)
    cache, decoding = rollout.max_concurrent_sequences * per_sequence, 0
    rows, length, inputs = prefilled_prompts(config), config.data.max_prompt_length, {}
    if rollout.engine == "vllm":
        rows, length = 1, scheduled_tokens(config)
    else:  # a step copies a layer's keys and values to append to them, and again for every head that shares them
        decoding = cache // text.num_hidden_layers * (1 + text.num_attention_heads // _key_heads(text))
        inputs = {"past_key_values": DynamicCache(), "use_cache": True}
    with LiveBytes("meta", known=weights) as live, cuda_kernels():
        mask = torch.ones((rows, 1, length, length), dtype=torch.bool, device=META)
        _hidden(model, (rows, length), rows * length, mask, **inputs)
    # The hf engine takes prompts while at most three quarters of its sequences run; vllm has its cache from the start.
    prefilling = live.peak - (0 if rollout.engine == "vllm" else cache // 4)
    truncated = rollout.top_p < 1 or rollout.top_k or rollout.min_p
    per_logit = TRUNCATION_BYTES if truncated else SAMPLING_BYTES
    sampling = rollout.max_concurrent_sequences * text.vocab_size * per_logit
    return EngineBytes(nbytes(weights), per_sequence, max(prefilling, decoding, sampling))


def longest_sequence(config: RunConfig) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def cache_bytes_per_token(hf_config: Any, config: RunConfig) -> int:
    """Keys and values of every layer: 2 * layers * key heads * head width * bytes of the dtype."""
    text = _text_config(hf_config)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * _key_heads(text) * width * getattr(torch, config.model.dtype).itemsize


def _key_heads(text: Any) -> int:
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def prefilled_prompts(config: RunConfig) -> int:
    """Prompts that the hf engine takes through the model in one pass."""
    smallest = min([config.batch.group_size] + [config.evaluation.group_size] * bool(config.data.val_files))
    together = max(1, config.rollout.max_concurrent_sequences // smallest)
    rebuilds = config.trainer.mode == "async" and config.rollout.weight_update == "recompute"
    return together if rebuilds else min(together, max(1, PREFILL_TOKENS // config.data.max_prompt_length))


def scheduled_tokens(config: RunConfig) -> int:
    """Most tokens that vLLM takes through the model in one step."""
    return int(config.rollout.engine_args.get("max_num_batched_tokens", 8192))


# --- the model -----------------------------------------------------------------------------------


def _meta_model(config: RunConfig, text_attention: str) -> Any:
    """The folder's model with its adapters, if it gets any: shapes and no memory."""
    from transformers import AutoConfig

    shared_prefix.register()
    remote = config.model.trust_remote_code
    hf_config = AutoConfig.from_pretrained(model_folder(config.model), trust_remote_code=remote)
    if text_attention == shared_prefix.SHARED_PREFIX_ATTENTION:
        refuse_dropout(hf_config, config.model)
    attention = {"text_config": text_attention, "vision_config": "sdpa"} if has_vision(hf_config) else text_attention
    dtype = getattr(torch, config.model.dtype)
    with META:
        model = model_class(hf_config).from_config(
            hf_config, dtype=dtype, attn_implementation=attention, trust_remote_code=remote
        )
    spec = resolve_adapter(config.model)
    if spec is not None:
        add_adapter(model, spec)
    return model.to(META)


def _text_config(hf_config: Any) -> Any:
    return getattr(hf_config, "text_config", None) or hf_config


def _hidden(model: Any, shape: tuple[int, int], image_tokens: int, mask: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """[R, P, D] of R rows of P tokens after the text layers, with images in the place of as many tokens."""
    device = mask.device
    embedded = model.get_input_embeddings()(torch.zeros(shape, dtype=torch.long, device=device))
    if has_vision(model.config):
        places = torch.zeros(embedded.shape, dtype=torch.bool, device=device)
        features = image_features(model, min(image_tokens, math.prod(shape)), device)
        embedded = embedded.masked_scatter(places, features)
        del features, places
    mrope = "mrope_section" in (getattr(_text_config(model.config), "rope_parameters", None) or {})
    inputs["position_ids"] = torch.zeros((3, *shape) if mrope else shape, dtype=torch.long, device=device)
    inputs = {"use_cache": False, **inputs, "inputs_embeds": embedded, "attention_mask": mask}
    return model.get_decoder()(**inputs).last_hidden_state


def image_features(model: Any, image_tokens: int, device: torch.device) -> torch.Tensor:
    """[N, D] of at least `image_tokens` tokens, through the model's own tower and connector."""
    vision = model.config.vision_config
    if hasattr(vision, "temporal_patch_size"):  # Qwen's towers take flat patches: one image that is nearly square
        side = vision.spatial_merge_size  # one token is side x side patches
        height = math.isqrt(image_tokens)
        grid = torch.tensor([[1, side * height, side * -(-image_tokens // height)]])
        patches = int(grid.prod())
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.empty((patches, width), device=device)
        windows: dict[str, torch.Tensor] = {}
        if getattr(vision, "window_size", 0):  # one window: the tensors of thousands are as large together
            windows["window_index"] = torch.arange(patches // side**2, device=device)
            windows["cu_window_seqlens"] = torch.tensor([0, patches])
        tower = model.model.visual
        return tower(pixels.type(tower.dtype), grid_thw=grid, **windows).pooler_output
    # CLIP's and SigLIP's towers take whole images of the size in the configuration.
    height, width = vision.image_size if not isinstance(vision.image_size, int) else [vision.image_size] * 2

    def features(images: int) -> torch.Tensor:
        pixels = torch.empty((images, vision.num_channels, height, width), device=device, dtype=model.dtype)
        output = model.get_image_features(pixels).pooler_output
        return output.flatten(0, -2) if isinstance(output, torch.Tensor) else torch.cat(tuple(output))

    with torch.no_grad():
        tokens_per_image = len(features(1))
    return features(-(-image_tokens // tokens_per_image))
