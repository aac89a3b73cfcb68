"""Gradients under ZeRO add up in fp32: chunks of the output layer in a micro-batch, and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from asyncrl.config.schema import RunConfig
from asyncrl.models import output_head
from asyncrl.processing.processor import PromptProcessor
from learner.training.engine import TorchEngine
from learner.training.packing import MicroBatch
from tests.rigs.made_up_batch import made_up_batch
from tests.rigs.zero import HAS_ZERO, zero

pytestmark = [
    pytest.mark.usefixtures("one_thread", "one_rank"),
    pytest.mark.skipif(not HAS_ZERO, reason="deepspeed is not installed"),
]
MakeConfig = Callable[..., RunConfig]
ROUNDED_ONCE = 0.0025
"""Part of a gradient's norm: numbers that are rounded to 16 bits once are off by 0.0017. A sum of 16 of them in 16 bits
is off by 0.004."""


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """One group for all: DeepSpeed keeps the first that it meets."""
    store: Any = HashStore()
    with pytest.MonkeyPatch.context() as patch:  # the engine sets these for its process, which is the tests' here
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv("LOCAL_SIZE", "1")
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()


def moment_after(make_config: MakeConfig, micro_batches: int, **learner: Any) -> torch.Tensor:
    """First moment of AdamW of the output layer after an update of 64 tokens, in chunks of 4 tokens and in so many
    micro-batches."""
    optim = {"lr": 1e-6, "max_grad_norm": 1e9}
    config = make_config(model={"dtype": "bfloat16"}, learner={"optim": optim, **learner})
    engine = TorchEngine(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    batch = made_up_batch(config, PromptProcessor(config.model))
    for micro_batch in in_parts(engine.pack(batch.train_groups), micro_batches):
        engine.backward(engine.forward(micro_batch).logprobs.sum() / 64)
    engine.optimizer_step()
    weight = engine.model.get_output_embeddings().weight
    updates: Any = engine.updates
    if "engine" in learner:
        return updates.part(weight, "exp_avg").elements.clone()
    masters = dict(zip(map(id, engine.trained), updates.masters.stepped(), strict=True))
    return updates.optimizer.state[masters[id(weight)]]["exp_avg"].flatten()


def in_parts(micro_batch: MicroBatch, number: int) -> Iterator[MicroBatch]:
    for first in range(0, 64, 64 // number):
        part = slice(first, first + 64 // number)
        yield replace(micro_batch, predict_from=micro_batch.predict_from[part], targets=micro_batch.targets[part])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_in_chunks_and_micro_batches_is_rounded_once(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """Against one process, which adds up all in fp32: 16 chunks in one micro-batch, and 2 in each of 8."""
    vocabulary = 384
    monkeypatch.setattr(output_head, "LOGITS_PER_CHUNK", 4 * vocabulary)
    for micro_batches in (1, 8):
        wanted = moment_after(make_config, micro_batches)
        found = moment_after(make_config, micro_batches, **zero(stage))
        assert float((found - wanted).norm() / wanted.norm()) < ROUNDED_ONCE, micro_batches
