"""An engine that can sample no more ends its server, and nobody counts it against the tickets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from scripted_engine.engine import ScriptedEngine

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.scorer import RewardScorer
from learner.tickets.ticket_writer import TicketWriter
from protocol.messages import ServerHeartbeat, Tickets, Welcome
from rollout_server import service
from rollout_server.engines.base import Completion, EngineDied, GenerationRequest
from rollout_server.engines.hf.decode_loop import DecodeLoop
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.production.group_producer import GroupProducer


class DyingEngine(ScriptedEngine):
    """Dies at its first request: who waits for a completion is told, or nobody is."""

    died: EngineDied | None = None
    tells = True
    cause: Exception | None = None

    def check_alive(self) -> None:
        if self.died:
            raise self.died

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        self.died = EngineDied("its process has died")
        self.died.__cause__ = self.cause
        if not self.tells:
            await asyncio.Event().wait()
        self.check_alive()
        yield  # type: ignore[misc]


def learner_with(tickets: Tickets) -> Any:
    """A link to a learner that hands out `tickets`, once."""
    welcome = Welcome(
        run_id="r", incarnation="i", version=0, host_id="host", weights_port=1, heartbeat_s=1.0, timeout_s=5.0
    )
    link = AsyncMock(server_id="host", host_id="host", learner_is_silent=False, heard_at=0.0, unacknowledged={})
    link.connect.return_value = welcome
    messages = asyncio.Queue[Tickets]()
    messages.put_nowait(tickets)
    link.next_message, link.close = messages.get, Mock()
    return link


def written(config: RunConfig, processor: PromptProcessor, count: int) -> Tickets:
    writer = TicketWriter(config.ticket_settings, processor, (1,))
    made = [writer.write(TicketSlot(number, number, version=0, bound=0)) for number in range(count)]
    blobs: dict[str, Any] = {digest: blob for one in made for digest, blob in one.blobs.items()}
    return Tickets(tickets=tuple(one.ticket for one in made), blobs=blobs)


@pytest.mark.parametrize(
    ("tells", "cause", "raised"),
    [(True, None, EngineDied), (False, BadStateError("its process has died: damaged"), BadStateError)],
)
def test_a_dead_engine_ends_its_server_and_its_tickets_go_back(
    make_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    tells: bool,
    cause: Exception | None,
    raised: type[Exception],
) -> None:
    config = make_config(rollout={"engine": "scripted"}, network={"heartbeat_s": 0.1})
    tickets = written(config, PromptProcessor(config.model), 2)
    link = learner_with(tickets)
    monkeypatch.setattr(service, "LearnerLink", lambda *_, **__: link)
    monkeypatch.setattr(service.PolicyVersions, "at_least", lambda *_: nullcontext())
    monkeypatch.setattr(DyingEngine, "tells", tells)
    monkeypatch.setattr(DyingEngine, "cause", cause)
    monkeypatch.setattr(service, "create_engine", DyingEngine)

    with pytest.raises(raised, match="its process has died"):
        asyncio.run(asyncio.wait_for(service.RolloutServer(config).run(), 20))
    (reason,), farewell = link.goodbye.call_args
    assert farewell["expected"] is False
    assert "its process has died" in reason
    sent = {type(call.args[0]) for call in link.send.mock_calls}
    assert sent == {ServerHeartbeat}, "no ticket has failed"


def test_an_hf_engine_whose_thread_ends_has_died(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests in work, commands between two steps, and later calls get the same error."""
    config = make_config()
    processor = PromptProcessor(config.model)

    def broken(loop: DecodeLoop) -> None:
        raise RuntimeError("an error nobody foresaw")

    async def scenario() -> None:
        engine: Any = HFEngine(config, processor)
        await engine.start()
        engine.check_alive()
        monkeypatch.setattr(DecodeLoop, "_take_admissible", broken)
        message = written(config, processor, 1)
        producer = GroupProducer(engine, RewardScorer(config.reward), processor, "s")
        requests: Any = [producer._request(ticket, message.blobs) for ticket in message.tickets]
        said = "the hf engine has stopped: an error nobody foresaw"
        for _ in range(2):
            with pytest.raises(EngineDied, match=said):
                await anext(aiter(engine.generate(requests)))
        with pytest.raises(EngineDied, match=said):
            engine.check_alive()
        with pytest.raises(EngineDied, match=said):
            await engine.update_weights(1, ())
        await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))
