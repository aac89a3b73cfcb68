"""The key-value cache of the `hf` engine: a step writes in place, and no bit of a sample changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Qwen2VLForConditionalGeneration

from asyncrl.config.schema import RunConfig
from asyncrl.models.loading import load_model
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from rollout_server.engines.hf.decode_batch import DecodeBatch, DecodeRow
from rollout_server.engines.hf.growing_cache import GrowingTensor
from tests.rigs.policies import CPU, MakeConfig, prompts, request_for

__all__ = ["prompts"]

MODULE = "rollout_server.engines.hf.growing_cache"


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


def sample(config: RunConfig, model: Any, prompts: Sequence[EncodedPrompt]) -> list[DecodeRow]:
    """Join, decode and leave at different times; a rebuild, which leaves gaps to close, is in between."""
    batch = DecodeBatch(model, PromptProcessor(config.model).placeholder_ids, CPU)
    done: list[DecodeRow] = []
    for number, prompt in enumerate(prompts):
        request = request_for(config, prompt, number, tokens=30 - 7 * number)
        done += batch.join(batch.prefill([request], version=0))
        for _ in range(4):
            done += batch.step(version=0)
    batch.rebuild_cache()
    while batch.rows:
        done += batch.step(version=1)
    return done


@pytest.mark.parametrize("key_heads", [1, 2], ids=["shared heads", "a head for each query"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_room_in_the_memory_changes_no_bit(
    make_config: MakeConfig,
    prompts: tuple[EncodedPrompt, ...],
    monkeypatch: pytest.MonkeyPatch,
    key_heads: int,
    dtype: torch.dtype,
) -> None:
    """Where each query has a head of its own, attention reads the memory itself, and not a copy."""
    config = make_config()
    shape = AutoConfig.from_pretrained(config.model.path)
    shape.text_config.num_key_value_heads = key_heads
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(shape).eval().requires_grad_(False).to(dtype)

    allocate = GrowingTensor._allocate
    monkeypatch.setattr(GrowingTensor, "_allocate", lambda *arguments: allocate(*arguments).fill_(torch.nan))
    with_room = sample(config, model, prompts)
    monkeypatch.setattr(f"{MODULE}.cache_columns", lambda tokens: tokens)  # as joined anew for every token
    without = sample(config, model, prompts)
    assert len(with_room) == 8
    assert [(row.token_ids, row.logprobs) for row in with_room] == [(row.token_ids, row.logprobs) for row in without]


def test_a_decode_step_writes_in_place(make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...]) -> None:
    """It copied the whole cache to append to it; memory that is full is replaced, and then has room for a while."""
    config = make_config()
    batch = DecodeBatch(load_model(config.model, device=CPU), PromptProcessor(config.model).placeholder_ids, CPU)
    requests = [request_for(config, prompt, number, tokens=101) for number, prompt in enumerate(prompts)]
    batch.join(batch.prefill(requests, version=0))
    moves = 0
    for _ in range(99):
        before = [layer.keys.data_ptr() for layer in batch._cache.layers]
        batch.step(version=0)
        moves += before != [layer.keys.data_ptr() for layer in batch._cache.layers]
    assert 1 <= moves <= 5
