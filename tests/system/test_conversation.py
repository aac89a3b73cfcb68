"""Conversations with an environment that shows images: sampled, verified, trained, and replayed without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.environments.interface import Start
from asyncrl.environments.observation import Message, Observation, StepResult
from asyncrl.journal.writer import TicketSlot
from asyncrl.models.published import published_tensors
from asyncrl.processing.bridge import TurnBridge
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.scorer import RewardScorer
from learner.groups.group_verification import verify_group
from learner.groups.recorded_batch import as_journaled
from learner.groups.ticket import PreparedTicket, ReceivedGroup
from learner.loop.trainer import Trainer
from learner.tickets.ticket_writer import TicketWriter
from protocol.messages import ConversationLimits, FinishReason, Group, TrajectoryStatus
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.production.environments import Environments
from rollout_server.production.group_producer import GroupProducer
from tests.rigs.journal_groups import issue_and_add, throwaway_journal
from tests.rigs.pictures import picture

LIMITS = ConversationLimits(turns=3, tokens_per_turn=8, images=3)
WIDE, TALL = picture(42, 28), picture(28, 56)
STEPS = 2


@dataclass
class Gate:
    """What the environments of a test do besides answering."""

    delays_s: tuple[float, ...] = (0.0,)
    """Before an answer, by the trajectory's index."""
    opened: asyncio.Event | None = None
    """Awaited before each answer."""
    asked: int = 0
    fails: bool = False
    hangs_until: int = 0
    """The environment of trajectory 1 does not answer before the others have been asked so often."""
    asked_others: int = 0
    others: asyncio.Condition = field(default_factory=asyncio.Condition)


class Lamp:
    """Shows a picture at the beginning and after each turn; the third turn ends it."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._turns = 0

    async def reset(self, start: Start) -> Observation:
        self._index = start.index
        return Observation((Message("user", (f"lamp {start.seed % 10}: ", WIDE)),))

    async def step(self, text: str) -> StepResult:
        self._turns += 1
        self._gate.asked += 1
        async with self._gate.others:
            self._gate.asked_others += self._index != 1
            self._gate.others.notify_all()
            if self._index == 1:
                await self._gate.others.wait_for(lambda: self._gate.asked_others >= self._gate.hangs_until)
        await asyncio.sleep(self._gate.delays_s[self._index % len(self._gate.delays_s)])
        if self._gate.opened is not None:
            await self._gate.opened.wait()
        if self._gate.fails and self._index == 1:
            raise RuntimeError("the lamp broke")
        shown = Observation((Message("tool", (f"{len(text)} signs, <|im_end|>", (TALL, WIDE)[self._turns % 2])),))
        return StepResult(shown, 0.5, self._turns == 3, state_key=bytes([self._turns]))

    async def close(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_turns_are_right_token_by_token_and_replay_asks_no_environment(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(
        data={"max_response_length": 120}, batch={"prompts_per_step": 2}, trainer={"max_steps": STEPS, "seed": 3}
    )
    processor = PromptProcessor(config.model)
    weights, groups = asyncio.run(converse_and_train(config, processor))

    journal = throwaway_journal()
    issue_and_add(journal, *groups)
    writer, trainer = writer_of(config, processor), Trainer(config, processor, 64)
    for version in range(STEPS):
        items = [conversation_ticket(writer, processor, number, version) for number in (2 * version, 2 * version + 1)]
        trainer.learn([as_journaled(item, journal.group(item.ticket.ticket_id)) for item in items])
    again = dict(published_tensors(trainer.engine.model))
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())


async def converse_and_train(
    config: RunConfig, processor: PromptProcessor
) -> tuple[dict[str, torch.Tensor], list[Group]]:
    """A run's steps in one process: weights in the end, and the groups that they were made of."""
    torch.manual_seed(config.trainer.seed)
    writer, trainer = writer_of(config, processor), Trainer(config, processor, 64)
    engine, rewards, gate = HFEngine(config, processor), RewardScorer(config.reward), Gate()
    await rewards.start()
    await engine.start()
    producer = GroupProducer(engine, rewards, processor, "s", Environments(lambda: Lamp(gate), capacity=4))

    async def produce(*items: PreparedTicket, version: int) -> list[ReceivedGroup]:
        blobs = {digest: memoryview(data) for item in items for digest, data in item.blobs.items()}
        made = {group.ticket_id: group async for group in producer.produce([i.ticket for i in items], blobs)}
        received = []
        for item in items:
            group = made[item.ticket.ticket_id]
            assert isinstance(group, Group), group
            measured, names = item.measured_of(group), config.reward.component_names
            arguments = {"sender": "s", "version": version, "vocabulary": 500, "components": names}
            verify_group(group, item.ticket, measured, bridge=item.bridge, **arguments)
            received.append(ReceivedGroup(item, group))
        return received

    groups: list[Group] = []
    for version in range(STEPS):
        items = [conversation_ticket(writer, processor, number, version) for number in (2 * version, 2 * version + 1)]
        received = await produce(*items, version=version)
        groups += [item.group for item in received]
        _, metrics = trainer.learn(received)
        assert metrics["logprob_diff_max"] < 1e-4, "engine against learner in fp32, behind images of tools too"
        await engine.update_weights(version + 1, trainer.engine.published_state())
    weights = {name: tensor.clone() for name, tensor in trainer.engine.published_state()}
    turns = [len(record.turns) for group in groups for record in group.trajectories]
    assert max(turns) == 3
    assert min(turns) == 1, "some first turns are cut"
    for record in (record for group in groups for record in group.trajectories):
        assert record.reward == record.rewards["short"] + sum(turn.reward or 0.0 for turn in record.turns)

    await look_at_the_waits(config, writer, processor, engine, gate, produce)
    await engine.close()
    await rewards.close()
    return weights, groups


async def look_at_the_waits(config, writer, processor, engine, gate, produce) -> None:  # type: ignore[no-untyped-def]
    """What environments' times, new weights and failures change, and what not."""
    item = conversation_ticket(writer, processor, 9, STEPS)
    (plain,) = await produce(item, version=STEPS)
    gate.delays_s = (0.2, 0.0, 0.3, 0.1)
    (late,) = await produce(item, version=STEPS)
    assert late.group.token_ids.tolist() == plain.group.token_ids.tolist(), "who answers first decides nothing"

    gate.delays_s, gate.asked_others = (0.0,), 0
    gate.hangs_until = sum(
        turn.finish_reason is not FinishReason.LENGTH
        for record in (*plain.group.trajectories[:1], *plain.group.trajectories[2:])
        for turn in record.turns
    )
    (beside,) = await asyncio.wait_for(produce(item, version=STEPS), 20)
    assert gate.asked_others == gate.hangs_until > 0, "the others have taken all of their turns beside one that hangs"
    assert beside.group.token_ids.tolist() == plain.group.token_ids.tolist()
    gate.hangs_until = 0

    gate.delays_s, gate.opened, gate.asked = (0.0,), asyncio.Event(), 0
    producing = asyncio.create_task(produce(item, version=STEPS + 1))
    waiting = sum(len(record.turns) > 1 for record in plain.group.trajectories)
    while gate.asked < waiting:
        await asyncio.sleep(0.01)
    await asyncio.wait_for(engine.update_weights(STEPS + 1, published_tensors(engine._model)), 20)
    gate.opened.set()
    (updated,) = await producing
    assert updated.group.token_ids.tolist() == plain.group.token_ids.tolist(), "the weights are the same"
    starts = np.cumsum(updated.group.lengths) - updated.group.lengths
    for start, record in zip(starts, updated.group.trajectories, strict=True):
        versions = [set(updated.group.versions[start + t.start : start + t.end].tolist()) for t in record.turns]
        assert versions == [{STEPS}, {STEPS + 1}, {STEPS + 1}][: len(versions)], "they change between turns"

    gate.opened, gate.fails = None, True
    (failed,) = await produce(item, version=STEPS + 1)
    statuses = [record.status for record in failed.group.trajectories]
    asked = len(plain.group.trajectories[1].turns) > 1
    assert (statuses[1] is TrajectoryStatus.ERROR) == asked
    if asked:
        assert failed.group.trajectories[1].error_kind == "environment_exception"
        assert failed.group.trajectories[1].reward is None


def stops(processor: PromptProcessor) -> tuple[int, ...]:
    """Every third token: a policy that knows nothing ends its turns, too."""
    return (*range(0, 330, 3), processor.tokenizer.eos_token_id)


def writer_of(config: RunConfig, processor: PromptProcessor) -> TicketWriter:
    return TicketWriter(config.ticket_settings, processor, stops(processor))


def conversation_ticket(writer: TicketWriter, processor: PromptProcessor, number: int, version: int) -> PreparedTicket:
    item = writer.write(TicketSlot(number, number, version, bound=1))
    ticket = item.ticket.model_copy(update={"conversation": LIMITS})
    return replace(item, ticket=ticket, bridge=TurnBridge(processor, stops(processor)))
