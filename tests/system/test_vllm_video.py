"""Videos through the real vLLM on a CPU: what the embedded engine samples, and what the learner computes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.models.processing import PromptProcessor
from learner.network.parity_check import compare
from learner.tickets.ticket import PreparedTicket, ReceivedGroup
from protocol.messages import Group
from rollout_server.engines import create_engine
from rollout_server.production import GroupProducer
from tests.rigs.tiny_families import Family, make_family
from tests.rigs.vllm_rig import NEEDS_VLLM
from tests.system.test_video import FAMILIES, learner_engine, parity_tickets, verify, video_config

pytestmark = NEEDS_VLLM


def greedy(items: list[PreparedTicket]) -> list[PreparedTicket]:
    """The same prompts, for one completion of 30 tokens each."""
    made = []
    for item in items:
        sampling = item.ticket.sampling.model_copy(
            update={"temperature": 0.0, "max_new_tokens": 30, "stop_token_ids": ()}
        )
        ticket = item.ticket.model_copy(update={"group_size": 1, "sampling": sampling})
        made.append(dataclasses.replace(item, ticket=ticket))
    return made


def groups_of(config: RunConfig, processor: PromptProcessor, *batches: list[PreparedTicket]) -> list[list[Group]]:
    """What a server makes of the tickets, in their order."""

    async def produce() -> list[list[Group]]:
        engine = create_engine(config, processor)
        await engine.start()
        try:
            producer = GroupProducer(engine, cast(Any, None), processor, "server-1")
            made = []
            for items in batches:
                blobs = {d: memoryview(data) for item in items for d, data in item.blobs.items()}
                groups = [group async for group in producer.produce([item.ticket for item in items], blobs)]
                places = [item.ticket.ticket_id for item in items]
                made.append(sorted(groups, key=lambda group: places.index(group.ticket_id)))
            return made
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(produce(), 120))


@pytest.mark.parametrize("family", FAMILIES)
def test_videos_get_the_tokens_of_the_hf_engine_and_the_log_probs_of_the_learner(
    make_config: Callable[..., RunConfig], family: Family, tmp_path: Path
) -> None:
    """Several videos and an image in one prompt, an odd number of frames, another rate, in one batch."""
    hf = video_config(make_config, make_family(family, tmp_path / "model"), tmp_path, video_fps=0.7)
    rollout = hf.rollout.model_copy(update={"engine": "vllm", "cpu_threads": 1})
    config = hf.model_copy(update={"rollout": rollout})
    processor = PromptProcessor(config.model)
    items = parity_tickets(config, processor)
    assert [len(item.ticket.prompt.videos) for item in items] == [2, 1, 0, 0]
    sampled, ours = groups_of(config, processor, items, greedy(items))
    (theirs,) = groups_of(hf, processor, greedy(items))
    for done, expected in zip(ours, theirs, strict=True):
        assert len(done.token_ids) == 30
        assert done.token_ids.tolist() == expected.token_ids.tolist()
        assert np.abs(done.logprobs - expected.logprobs).max() < 1e-4
    received = [ReceivedGroup(item, group) for item, group in zip(items, sampled, strict=True)]
    for one in received:
        verify(one)
    parity = compare(learner_engine(config), processor, received, config.batch.tokens_per_microbatch)
    assert parity.largest < 1e-4, parity
