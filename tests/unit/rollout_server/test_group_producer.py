"""Groups leave one by one, and fail one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from scripted_engine.engine import ScriptedEngine

from asyncrl.config.schema import RunConfig
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.scorer import RewardScorer
from benchmarks.staleness.workload import OneForAll
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Goodbye, Group, TicketFailed
from rollout_server import service
from rollout_server.engines.base import Completion, FailedRequest, GenerationRequest
from rollout_server.engines.hf import decode_batch
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.production.group_producer import GroupProducer
from tests.rigs.policies import prompts, request_for
from tests.unit.rollout_server.test_engine_death import learner_with, written

__all__ = ["prompts"]
MakeConfig = Callable[..., RunConfig]


class PausingEngine(ScriptedEngine):
    """Finishes its first group, and nothing more until it may."""

    def __init__(self, config: RunConfig, processor: PromptProcessor):
        super().__init__(config, processor)
        self.may_go_on = asyncio.Event()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        for number, request in enumerate(requests):
            if number == 1:
                await self.may_go_on.wait()
            for index in range(request.group_size):
                yield await self._complete(request, index)


def test_a_group_leaves_when_it_is_finished_whatever_else_runs(make_config: MakeConfig) -> None:
    config = make_config(rollout={"engine": "scripted"})
    processor = PromptProcessor(config.model)
    tickets = written(config, processor, 2)

    async def scenario() -> list[int]:
        engine, rewards = PausingEngine(config, processor), OneForAll()
        producer = GroupProducer(engine, rewards, processor, "s")  # type: ignore[arg-type]
        groups = aiter(producer.produce(tickets.tickets, tickets.blobs))
        async with asyncio.timeout(5):
            first = await anext(groups)
        engine.may_go_on.set()
        return [first.ticket_id, *[group.ticket_id async for group in groups]]

    assert asyncio.run(scenario()) == [ticket.ticket_id for ticket in tickets.tickets]


SHAPES = """
def share(sample, score):
    return score - sample.num_tokens / sample.max_tokens

def shortest(samples, score):
    lengths = [sample.num_tokens for sample in samples]
    return [before + (length == min(lengths)) for before, length in zip(score, lengths)]
"""


def test_a_groups_rewards_see_all_of_it_and_its_lengths(make_config: MakeConfig, tmp_path: Path) -> None:
    file = tmp_path / "shapes.py"
    file.write_text(SHAPES)
    functions = [
        {"function": "regex_match", "name": "any", "kwargs": {"pattern": ""}},
        {"function": f"{file}:share", "shapes": "any"},
        {"function": f"{file}:shortest", "group": True, "shapes": "share"},
    ]
    config = make_config(rollout={"engine": "scripted"}, reward={"functions": functions, "workers": 1})
    processor = PromptProcessor(config.model)
    tickets = written(config, processor, 2)

    async def scenario() -> list[Group | TicketFailed]:
        rewards = RewardScorer(config.reward)
        await rewards.start()
        try:
            producer = GroupProducer(ScriptedEngine(config, processor), rewards, processor, "s")
            return [group async for group in producer.produce(tickets.tickets, tickets.blobs)]
        finally:
            await rewards.close()

    groups = asyncio.run(scenario())
    assert len(groups) == 2
    for group in groups:
        assert isinstance(group, Group)
        lengths = group.lengths.tolist()
        for record, length in zip(group.trajectories, lengths, strict=True):
            share = 1.0 - length / config.data.max_response_length
            assert record.rewards["share"] == pytest.approx(share)
            assert record.reward == pytest.approx(share + (length == min(lengths)))


def test_an_engine_that_makes_its_own_pixels_gets_prompts_without(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(rollout={"engine": "scripted"})
    processor = PromptProcessor(config.model)
    tickets = written(config, processor, 2)
    assert all(ticket.prompt.image_hashes for ticket in tickets.tickets)
    pixels: list[object] = []
    monkeypatch.setattr(type(processor.processor.image_processor), "__call__", lambda *a, **_: pixels.append(a))

    async def scenario() -> list[Group | TicketFailed]:
        producer = GroupProducer(ScriptedEngine(config, processor), OneForAll(), processor, "s")  # type: ignore[arg-type]
        return [group async for group in producer.produce(tickets.tickets, tickets.blobs)]

    groups = asyncio.run(scenario())
    assert pixels == []
    assert all(isinstance(group, Group) and len(group.image_grids) for group in groups)


class ChoosyEngine(ScriptedEngine):
    """Fails at its second request, after one completion of it."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        yield await self._complete(requests[1], 0)
        yield FailedRequest(requests[1].request_id, ValueError("a bad row"))
        async for completion in super().generate(requests):
            yield completion


def test_a_ticket_that_fails_fails_alone(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt, the engine, or its group's size on the wire: the tickets that came with it are answered."""
    config = make_config(rollout={"engine": "scripted"}, network={"heartbeat_s": 0.1})
    tickets = written(config, PromptProcessor(config.model), 5)
    good, unreadable, unsampled, too_large, good_too = tickets.tickets
    (digest,) = unreadable.prompt.image_hashes
    assert all(digest not in ticket.prompt.image_hashes for ticket in tickets.tickets if ticket is not unreadable)
    tickets = tickets.model_copy(update={"blobs": {**tickets.blobs, digest: memoryview(b"no image")}})
    link = learner_with(tickets)
    groups: list[Group] = []
    hand_out = link.next_message

    async def send_group(group: Group) -> None:
        if group.ticket_id == too_large.ticket_id:
            raise ProtocolError(ErrorCode.TOO_LARGE, "more than a message takes")
        groups.append(group)

    def failures() -> list[TicketFailed]:
        return [call.args[0] for call in link.send.mock_calls if isinstance(call.args[0], TicketFailed)]

    async def next_message() -> Any:
        if hand_out.__self__.empty():
            while len(groups) + len(failures()) < len(tickets.tickets):
                await asyncio.sleep(0.01)
            return Goodbye(reason="done", expected=True)
        return await hand_out()

    link.send_group, link.next_message = send_group, next_message
    monkeypatch.setattr(service, "LearnerLink", lambda *_, **__: link)
    monkeypatch.setattr(service.PolicyVersions, "at_least", lambda *_: nullcontext())
    monkeypatch.setattr(service, "create_engine", ChoosyEngine)
    asyncio.run(asyncio.wait_for(service.RolloutServer(config).run(), 20))
    assert sorted(group.ticket_id for group in groups) == [good.ticket_id, good_too.ticket_id]
    said = {failed.ticket_id: failed.error_message for failed in failures()}
    assert sorted(said) == [unreadable.ticket_id, unsampled.ticket_id, too_large.ticket_id]
    assert said[unsampled.ticket_id] == "a bad row"
    assert "more than a message takes" in said[too_large.ticket_id]
    assert unreadable.prompt.row_id in said[unreadable.ticket_id]


def test_the_hf_engine_tells_a_bad_prompt_from_those_that_are_computed_with_it(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode step of several tickets that fails once fails none of them: they go on one by one."""
    config = make_config(rollout={"max_concurrent_sequences": 4})
    requests = [request_for(config, prompt, i, tokens=3) for i, prompt in enumerate(prompts)]
    bad = prompts[1]
    right = decode_batch.prefill

    def prefill(model: Any, several: Sequence[EncodedPrompt], device: Any) -> Any:
        if any(prompt is bad for prompt in several):
            raise ValueError("a prompt that cannot be computed")
        return right(model, several, device)

    async def scenario() -> tuple[list[Any], list[Any]]:
        engine = HFEngine(config, PromptProcessor(config.model))
        await engine.start()
        try:
            monkeypatch.setattr(decode_batch, "prefill", prefill)
            first = [item async for item in engine.generate(requests)]
            monkeypatch.setattr(decode_batch, "prefill", right)
            step, failures = decode_batch.DecodeBatch.step, [RuntimeError("out of memory")]

            def once(batch: Any, version: int) -> Any:
                if failures:
                    raise failures.pop()
                return step(batch, version)

            monkeypatch.setattr(decode_batch.DecodeBatch, "step", once)
            return first, [item async for item in engine.generate(requests)]
        finally:
            await engine.close()

    first, second = asyncio.run(asyncio.wait_for(scenario(), 60))

    def outcome(items: list[Any]) -> dict[int, int | str]:
        """Number of completions of each request, or its error."""
        found: dict[int, int | str] = {}
        for item in items:
            failed = isinstance(item, FailedRequest)
            found[item.request_id] = str(item.error) if failed else int(found.get(item.request_id, 0)) + 1
        return found

    assert outcome(first) == {0: 2, 1: "a prompt that cannot be computed", 2: 2, 3: 2}
    assert outcome(second) == {0: 2, 1: 2, 2: 2, 3: 2}
