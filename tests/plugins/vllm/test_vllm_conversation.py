"""Conversations through the real vLLM on a CPU: each later turn is a request whose prompt is the whole row, with images
that were shown between turns. The engine is the session's."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from asyncrl.data.images import decode_image
from asyncrl.environments.interface import Start
from asyncrl.environments.observation import Message, Observation, StepResult
from learner.groups.group_verification import verify_group
from learner.groups.ticket import PreparedTicket, ReceivedGroup
from learner.loop.trainer import Trainer
from protocol.messages import Group, TicketFailed
from rollout_server.engines.base import Completion, FailedRequest, GenerationRequest
from rollout_server.production.environments import Environments
from rollout_server.production.group_producer import GroupProducer
from tests.plugins.vllm.vllm_rig import NEEDS_VLLM
from tests.rigs.engine_rig import FP32, Rig
from tests.rigs.pictures import picture
from tests.rigs.policies import Weights, gaps, moved
from tests.system.test_conversation import conversation_ticket, writer_of
from tests.unit.rollout_server.test_conversations import NoRewards

pytestmark = NEEDS_VLLM
BLOCK = 128
"""Tokens of a block of vLLM's prefix cache on a CPU."""
LONG = "0 1 2 3 4 5 6 7 8 9 " * 5
WIDE, TALL = picture(42, 28), picture(28, 56)


@dataclass
class Watched:
    """The rig's engine; what it is asked, what it answers, and which tokens of a prompt vLLM did not compute again."""

    rig: Rig
    turns: list[tuple[GenerationRequest, Completion]] = field(default_factory=list)
    cached: list[tuple[int, int]] = field(default_factory=list)
    """Length of each prompt that vLLM got, and tokens of it that were in its prefix cache."""
    show_another: bytes | None = None
    """An image in place of the last one of a later turn."""

    @property
    def cached_of_third_turns(self) -> list[int]:
        """A block where the row before has filled one."""
        return [cached for length, cached in self.cached if length > 1.5 * BLOCK]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rig.engine, name)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        for request in requests:  # one at most: the first turns of the ticket, or a later one
            if self.show_another and request.stream:
                images = (*request.prompt.images[:-1], self.show_another)
                request = dataclasses.replace(request, prompt=dataclasses.replace(request.prompt, images=images))
            async for item in self.rig.engine.generate([request]):
                if isinstance(item, Completion):
                    self.turns.append((request, item))
                yield item

    async def generate_in_vllm(self, generate: Any, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        answer: Any = None
        async for answer in generate(*arguments, **named):
            yield answer
        self.cached.append((len(answer.prompt_token_ids), answer.num_cached_tokens))


@dataclass
class Reader:
    """Shows a picture and a long text after each turn; waits before it answers the second one."""

    second: asyncio.Event
    """Awaited before that."""
    asked: list[int]
    """Numbers of the turns that were asked about, of all trajectories."""
    turns: int = 0

    async def reset(self, start: Start) -> Observation:
        return Observation((Message("user", ("read: ", WIDE)),))

    async def step(self, text: str) -> StepResult:
        self.turns += 1
        self.asked.append(self.turns)
        if self.turns == 2:
            await self.second.wait()
        shown = Observation((Message("tool", (LONG, (TALL, WIDE)[self.turns % 2], "<|im_end|> or <|image_pad|>")),))
        return StepResult(shown, done=self.turns == 3)

    async def close(self) -> None:
        pass


@pytest.fixture
def watched(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched, generate = Watched(rig), rig.engine._llm.generate
    monkeypatch.setattr(rig.engine._llm, "generate", partial(watched.generate_in_vllm, generate))
    return watched


async def converse(
    watched: Watched, number: int, policy: Weights | None = None, keep_images: int = 0
) -> tuple[PreparedTicket, Group | TicketFailed]:
    """A ticket and its answer; the policy comes when all trajectories wait behind their second turns."""
    rig, second, asked = watched.rig, asyncio.Event(), list[int]()
    item = conversation_ticket(writer_of(rig.config, rig.processor), rig.processor, number, rig.version)
    assert item.ticket.conversation is not None
    rule = item.ticket.conversation.model_copy(update={"keep_images": keep_images})
    item = dataclasses.replace(item, ticket=item.ticket.model_copy(update={"conversation": rule}))
    environments = Environments(lambda: Reader(second, asked))
    producer = GroupProducer(cast(Any, watched), cast(Any, NoRewards()), rig.processor, "s", environments)

    async def produce() -> Group | TicketFailed:
        blobs = {digest: memoryview(data) for digest, data in item.blobs.items()}
        (answer,) = [answer async for answer in producer.produce([item.ticket], blobs)]
        return answer

    producing = asyncio.create_task(produce())
    while policy and asked.count(2) < item.ticket.group_size:
        assert not producing.done(), "with these seeds no turn is cut"
        await asyncio.sleep(0.01)
    if policy:
        await rig.update(policy)
    second.set()
    return item, await producing


def verified(rig: Rig, item: PreparedTicket, answer: Group | TicketFailed) -> ReceivedGroup:
    """The group, when the learner has derived its bridges, placeholders and grids again."""
    assert isinstance(answer, Group), answer
    checks: dict[str, Any] = {"sender": "s", "version": rig.version, "vocabulary": 500, "components": ("short",)}
    verify_group(answer, item.ticket, item.measured_of(answer), bridge=item.bridge, **checks)
    return ReceivedGroup(item, answer)


def gap_of(rig: Rig, policies: dict[int, Weights], request: GenerationRequest, done: Completion) -> float:
    """Largest |engine - one plain forward pass of the whole row| over the tokens of a turn."""
    pictures = [decode_image(data, "here") for data in request.prompt.images]
    pixels = rig.processor.processor.image_processor(images=pictures, return_tensors="pt")["pixel_values"]
    request = dataclasses.replace(request, prompt=dataclasses.replace(request.prompt, pixel_values=pixels))
    return float(gaps(rig.config, policies, request, done).max())


def test_turns_behind_images_of_tools_have_the_learners_log_probs_and_find_their_row_in_the_cache(
    watched: Watched,
) -> None:
    rig = watched.rig
    item, answer = rig.run(converse(watched, 0))
    received = verified(rig, item, answer)
    assert max(len(record.turns) for record in received.group.trajectories) == 3
    _, metrics = Trainer(rig.config, rig.processor, 64).learn([received])
    assert metrics["logprob_diff_max"] < FP32, "the learner's packed rows, before its first update"
    assert all(gap_of(rig, {rig.version: rig.initial}, *turn) < FP32 for turn in watched.turns)
    assert BLOCK in watched.cached_of_third_turns


def test_segments_without_older_images_have_the_learners_log_probs(watched: Watched) -> None:
    rig = watched.rig
    item, answer = rig.run(converse(watched, 0, keep_images=1))
    received = verified(rig, item, answer)
    turns = [turn for record in received.group.trajectories for turn in record.turns]
    assert any(turn.context for turn in turns)
    assert max(len(request.prompt.images) for request, _ in watched.turns) == 2 + len(item.ticket.prompt.image_hashes)
    _, metrics = Trainer(rig.config, rig.processor, 64).learn([received])
    assert metrics["logprob_diff_max"] < FP32


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_new_weights_between_turns_sample_the_next_one_and_nothing_of_the_cache_is_left(
    watched: Watched, mode: str
) -> None:
    rig = watched.rig
    rig.mode(mode)
    old, new = rig.version, moved(rig.initial, 6)
    item, answer = rig.run(converse(watched, 0, new))
    group = verified(rig, item, answer).group
    policies = {old: rig.initial, rig.version: new}
    assert all(gap_of(rig, policies, *turn) < FP32 for turn in watched.turns)
    starts = np.cumsum(group.lengths) - group.lengths
    versions = [
        [set(group.versions[start + turn.start : start + turn.end].tolist()) for turn in record.turns]
        for start, record in zip(starts, group.trajectories, strict=True)
    ]
    assert versions == [[{old}, {old}, {rig.version}]] * len(versions)
    assert set(watched.cached_of_third_turns) == {0}


def test_a_row_that_vllm_expands_otherwise_in_a_later_turn_fails_its_ticket(watched: Watched) -> None:
    watched.show_another = picture(28, 28)
    item, answer = watched.rig.run(converse(watched, 0))
    assert isinstance(answer, TicketFailed)
    assert answer.error_kind == "UserError"
    assert f"{item.ticket.prompt.row_id}: vLLM and the processor make different" in answer.error_message
