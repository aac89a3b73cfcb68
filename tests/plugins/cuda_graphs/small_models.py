"""A small language model, and what its batches sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl_plugins.cuda_graphs.batch import GraphedBatch
from asyncrl_plugins.cuda_graphs.graphs import Capture, StepGraphs
from protocol.messages import Sampling
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.hf.decode_batch import DecodeBatch, DecodeRow
from rollout_server.engines.hf.grouped_attention import GROUPED_ATTENTION, for_decoding

MOST = 24, 256
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "initializer_range": 0.15,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
TEXT: dict[str, Callable[[], Any]] = {
    "shared key heads": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES)),
    "a key head for each query": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=6, **SIZES)),
    "a window": lambda: MistralForCausalLM(MistralConfig(num_key_value_heads=2, sliding_window=5, **SIZES)),
    "a window in some layers": lambda: Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, **WINDOW, **SIZES)),
}


def text_model(name: str = "shared key heads", device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = TEXT[name]().eval().requires_grad_(False).to(device, dtype)
    model = for_decoding(model, groups_queries=True)
    assert model.config._attn_implementation == GROUPED_ATTENTION
    return model


def requests(*lengths: int, tokens: int, size: int = 3) -> list[GenerationRequest]:
    """Prompts of these lengths; the completions of each are five tokens longer than those of the one before."""
    return [
        GenerationRequest(
            number,
            EncodedPrompt.of_text(np.random.default_rng(number).integers(4, 97, length).astype(np.int32)),
            size,
            number,
            Sampling(temperature=1.0, max_new_tokens=tokens + 5 * number, stop_token_ids=()),
        )
        for number, length in enumerate(lengths)
    ]


def graphed(model: Any, make_capture: Callable[[], Capture] | None) -> GraphedBatch:
    """A batch whose steps are captured, or computed by Python where nothing captures."""
    return GraphedBatch(model, (), model.device, most=MOST, graphs=StepGraphs(make_capture))


def run(
    batch: DecodeBatch, waves: Sequence[Sequence[GenerationRequest]], between: Callable[[], None] = lambda: None
) -> list[DecodeRow]:
    """Let each wave join, with five steps after it. Call `between` once all have, and decode to the end."""
    rows: dict[int, DecodeRow] = {}
    for wave in waves:
        batch.join(batch.prefill(wave, 0))
        rows |= {id(row): row for row in batch.rows}
        for _ in range(5):
            batch.step(0)
    between()
    while batch.rows:
        batch.step(1)
    return list(rows.values())


def tokens_of(rows: Sequence[DecodeRow]) -> list[list[int]]:
    return [row.token_ids for row in rows]


def largest_difference(rows: Sequence[DecodeRow], expected: Sequence[DecodeRow]) -> float:
    """Largest difference of a log-prob in nats; the tokens are the same."""
    assert tokens_of(rows) == tokens_of(expected)
    return max(float(np.abs(np.subtract(a.logprobs, b.logprobs)).max()) for a, b in zip(rows, expected, strict=True))
