"""Parity tickets of rows with two images, a server's answer to them, and the learner's look at it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.models.loading import stop_token_ids
from asyncrl.models.processing import PromptProcessor
from learner.network.group_verification import verify_group
from learner.tickets.ticket import PreparedTicket, ReceivedGroup
from learner.tickets.ticket_writer import TicketWriter
from learner.training.engines.torch_engine import TorchEngine
from protocol.messages import Group
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.production import GroupProducer
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


def parity_tickets(config: RunConfig, processor: PromptProcessor) -> list[PreparedTicket]:
    return TicketWriter(config, processor, stop_token_ids(config.model, processor.tokenizer)).write_parity()


def answer(
    engine: HFEngine, processor: PromptProcessor, items: Sequence[PreparedTicket], swap: Callable[[Blobs], Blobs] = dict
) -> list[ReceivedGroup]:
    """What a started engine's server makes of the tickets; `swap` may mix up the images on their way."""

    async def produce() -> list[Group]:
        producer = GroupProducer(engine, cast(Any, None), processor, "server-1")
        return [
            group
            for item in items
            async for group in producer.produce(
                [item.ticket], {digest: memoryview(data) for digest, data in swap(item.blobs).items()}
            )
        ]

    groups = asyncio.run(asyncio.wait_for(produce(), 60))
    return [ReceivedGroup(item, group) for item, group in zip(items, groups, strict=True)]


def verify(received: ReceivedGroup, version: int = 0) -> None:
    item = received.prepared
    verify_group(
        received.group, item.ticket, item.facts, sender="server-1", version=version, vocabulary=500, components=()
    )


class Started:
    """An engine with its thread, closed at the end of a test."""

    def __init__(self) -> None:
        self.engines: list[HFEngine] = []

    def __call__(self, engine: HFEngine) -> HFEngine:
        asyncio.run(engine.start())
        self.engines.append(engine)
        return engine


@pytest.fixture
def started() -> Any:
    start = Started()
    yield start
    for engine in start.engines:
        asyncio.run(engine.close())


def learner_engine(config: RunConfig) -> TorchEngine:
    engine = TorchEngine(config, config.learner.optim, 1)
    engine.prepare()
    return engine
