"""Decoding without repeated keys and values: the values of transformers' own attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from asyncrl.processing.encoded_prompt import EncodedPrompt
from protocol.messages import Sampling
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.hf import grouped_attention
from rollout_server.engines.hf.decode_batch import DecodeBatch
from rollout_server.engines.hf.grouped_attention import GROUPED_ATTENTION, for_decoding

ROWS, HEADS, KEY_HEADS, WIDTH, SIZE = 5, 6, 2, 11, 8


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_token_attends_as_with_repeated_keys(padded: bool, dtype: torch.dtype) -> None:
    query = torch.randn(ROWS, HEADS, 1, SIZE, dtype=dtype)
    key, value = torch.randn(2, ROWS, KEY_HEADS, WIDTH, SIZE, dtype=dtype)
    mask = None
    if padded:
        mask = torch.ones(ROWS, 1, 1, WIDTH, dtype=torch.bool)
        mask[:3, ..., :4] = False
    module: Any = SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS)
    mine, _ = grouped_attention.grouped_attention(module, query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert mine.shape == theirs.shape == (ROWS, 1, HEADS, SIZE)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12 if dtype == torch.float64 else 0.02)


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "num_hidden_layers": 3,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, intermediate_size=64, **sizes)).eval().requires_grad_(False)


def sampled(model: Any) -> list[tuple[list[int], list[float]]]:
    """Rows of unequal prompts, which leave the batch at unequal lengths."""
    batch = DecodeBatch(model, (), torch.device("cpu"))
    requests = [
        GenerationRequest(
            number,
            EncodedPrompt.of_text(np.arange(4, 4 + length, dtype=np.int32)),
            3,
            number,
            Sampling(temperature=1.0, max_new_tokens=6 + number, stop_token_ids=()),
        )
        for number, length in enumerate((9, 3, 14))
    ]
    batch.join(batch.prefill(requests, 0))
    rows = list(batch.rows)
    while batch.rows:
        batch.step(0)
    return [(row.token_ids, row.logprobs) for row in rows]


def test_a_batch_of_unequal_rows_samples_the_tokens_of_transformers_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    attend: Any = grouped_attention.scaled_dot_product_attention

    def counted(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(tensors[0].shape[1])
        return attend(*tensors, **options)

    monkeypatch.setattr(grouped_attention, "scaled_dot_product_attention", counted)
    theirs, plain = sampled(small_model()), len(calls)
    model = for_decoding(small_model(), groups_queries=True)
    assert model.config._attn_implementation == GROUPED_ATTENTION
    mine = sampled(model)
    assert plain == 0
    assert set(calls) == {KEY_HEADS}
    assert [tokens for tokens, _ in mine] == [tokens for tokens, _ in theirs]
    for (_, ours), (_, others) in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(ours, others, rtol=0, atol=2e-5)


def test_prompts_do_not_copy_the_output_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of a slice with the layer's weight would copy that for every row in bfloat16."""
    model = for_decoding(small_model(), groups_queries=True)
    inputs: list[torch.Tensor] = []
    model.get_output_embeddings().register_forward_hook(lambda _, states, __: inputs.append(states[0]))
    sampled(model)
    assert all(states.is_contiguous() for states in inputs)
    assert {states.shape[1] for states in inputs} == {1}
