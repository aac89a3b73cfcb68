"""Parity tickets of rows with two images, a server's answer to them, and the learner's look at it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import max_logprob_difference
from asyncrl.processing.processor import PromptProcessor
from learner.groups.group_verification import verify_group
from learner.groups.ticket import PreparedTicket, ReceivedGroup
from learner.loop.logprob_parity import ParityJudge
from learner.tickets.ticket_writer import TicketWriter
from learner.training.engine import TorchEngine
from protocol.messages.groups import TicketFailed
from rollout_server.production.group_producer import GroupProducer
from tests.system.test_bad_input import png, write_rows

MakeConfig = Callable[..., RunConfig]
Blobs = Mapping[str, bytes]


@pytest.fixture
def pair_config(make_config: MakeConfig, tmp_path: Path) -> RunConfig:
    """Rows of two images of one size: only their content tells them apart."""
    names = []
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(png((56, 56), number))
        names.append(f"{number}.png")
    rows = [{"prompt": "<image> or <image>?", "images": names[i : i + 2]} for i in (0, 2)]
    return make_config(
        data={**write_rows(tmp_path, [{"prompt": "no image"}, *rows]), "max_prompt_length": 120},
        rollout={"temperature": 0.8},
    )


def limit_of(config: RunConfig) -> float:
    return max_logprob_difference(config.model, config.learner, config.rollout, config.alignment)


def parity_judge(config: RunConfig, *parts: Any) -> ParityJudge:
    sections = (config.algorithm, config.rollout, config.alignment)
    return ParityJudge(*sections, limit_of(config), config.batch.microbatch_tokens, *parts)


def parity_tickets(config: RunConfig, processor: PromptProcessor) -> list[PreparedTicket]:
    return TicketWriter(config.ticket_settings, processor, processor.ends.stop_token_ids).write_parity()


async def answers(
    engine: Any, processor: PromptProcessor, items: Sequence[PreparedTicket], swap: Callable[[Blobs], Blobs] = dict
) -> list[ReceivedGroup]:
    """Groups that a started engine's server makes of the tickets, all in one batch; `swap` may mix up the images."""
    producer = GroupProducer(engine, cast(Any, None), processor, "server-1")
    blobs = {digest: memoryview(data) for item in items for digest, data in swap(item.blobs).items()}
    groups = {g.ticket_id: g async for g in producer.produce([item.ticket for item in items], blobs)}
    failed = [g for g in groups.values() if isinstance(g, TicketFailed)]
    assert not failed, f"{failed[0].error_kind}: {failed[0].error_message}"
    return [ReceivedGroup(item, groups[item.ticket.ticket_id]) for item in items]


def answer(engine: Any, *arguments: Any) -> list[ReceivedGroup]:
    """Groups of an engine that is started for them."""

    async def live() -> list[ReceivedGroup]:
        await engine.start()
        try:
            return await answers(engine, *arguments)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(live(), 60))


def verify(received: ReceivedGroup, version: int = 0) -> None:
    item = received.prepared
    verify_group(
        received.group, item.ticket, item.measured, sender="server-1", version=version, vocabulary=500, components=()
    )


def learner_engine(config: RunConfig) -> TorchEngine:
    engine = TorchEngine(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    return engine
