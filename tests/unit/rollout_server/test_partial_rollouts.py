"""Another server goes on with the rollouts that one has begun: no token is sampled twice or changes its version."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from scripted_engine.engine import ScriptedEngine

from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from benchmarks.staleness.workload import OneForAll
from protocol.messages import Group, PartialRollout, Ticket, TicketReturned, TrajectoryRequest
from rollout_server.engines.base import Completion, GenerationRequest
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.production.group_producer import GroupProducer, partial_rollout
from rollout_server.tickets_in_work import DRAINING_S, TicketsInWork
from rollout_server.weights.policy_versions import PolicyVersions
from tests.rigs.policies import (
    MakeConfig,
    complete_all,
    gaps,
    initial_weights,
    moved,
    prompts,
    request_for,
    until_running,
)
from tests.unit.rollout_server.test_engine_death import written

__all__ = ["prompts"]
STOP = 7
DONE, HINT = (31, 32, STOP), (21, 22, 23)


async def interrupted(engine: HFEngine, *requests: GenerationRequest, tokens: int) -> list[Completion]:
    """What there is of the first request when about so many tokens are sampled; the others are not interrupted."""
    work = asyncio.create_task(complete_all(engine, requests))
    await until_running(engine)
    while engine.usage.tokens_generated < tokens:
        await asyncio.sleep(0.001)
    await engine.interrupt([requests[0].request_id])
    done = await work
    assert all(c.finish_reason is not None for c in done if c.request_id != requests[0].request_id)
    return [c for c in done if c.request_id == requests[0].request_id]


@pytest.mark.parametrize("weight_update", ["recompute", "keep"])
def test_a_group_goes_on_elsewhere_as_if_it_had_never_moved(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], weight_update: str
) -> None:
    config = make_config(rollout={"weight_update": weight_update})
    processor = PromptProcessor(config.model)
    policies = [initial_weights(config)]
    policies.append(moved(policies[0], 1))
    requests = (
        TrajectoryRequest(),
        TrajectoryRequest(prefix=HINT),
        TrajectoryRequest(prefix=DONE),
        TrajectoryRequest(),
    )
    request = replace(
        request_for(config, prompts[0], 0, tokens=120, size=4, stop_token_ids=(STOP,)), requests=requests, seed=3
    )
    neighbour = request_for(config, prompts[1], 1, tokens=40)

    async def scenario() -> tuple[list[Completion], list[Completion], list[Completion], list[Completion]]:
        first, second = HFEngine(config, processor), HFEngine(config, processor)
        await first.start()
        await second.start()
        whole = await complete_all(second, [request])
        begun = await interrupted(first, request, neighbour, tokens=24)
        going_on = replace(request, partial=partial_rollout(begun))
        same = await complete_all(second, [going_on])
        await second.update_weights(1, policies[1].items())
        newer = await complete_all(second, [going_on])
        await first.close()
        await second.close()
        return whole, begun, same, newer

    whole, begun, same, newer = asyncio.run(asyncio.wait_for(scenario(), 120))
    partial = partial_rollout(begun)
    in_order = [sorted(done, key=lambda c: c.index) for done in (whole, begun, same, newer)]
    assert any(c.finish_reason is None and len(c.token_ids) > len(requests[c.index].prefix) for c in begun)
    for uninterrupted, start, end, changed in zip(*in_order, strict=True):
        assert end.token_ids.tolist() == uninterrupted.token_ids.tolist(), "one random number per token, wherever it is"
        assert np.abs(end.behind(partial).logprobs - uninterrupted.logprobs).max() < 1e-4
        assert end.finish_reason is uninterrupted.finish_reason
        mixed, count = changed.behind(partial), len(start.token_ids)
        assert mixed.token_ids[:count].tolist() == start.token_ids.tolist()
        assert mixed.logprobs[:count].tolist() == start.logprobs.tolist()
        assert mixed.versions.tolist() == [0] * count + [1] * (len(mixed.token_ids) - count)
        sampled = slice(len(requests[start.index].prefix), None)
        if mixed.token_ids[sampled].size:
            assert gaps(config, policies, request, mixed)[sampled].max() < 1e-4, "the cache is of the newer weights"


def test_a_returned_ticket_becomes_one_group(make_config: MakeConfig) -> None:
    script = {"mean_length": 12, "length_sigma": 0.8, "seconds_per_token": 0.01}
    config = make_config(rollout={"engine": "scripted", "engine_args": script})
    processor = PromptProcessor(config.model)
    tickets = written(config, processor, 3)
    # One more sequence than slots: what waits for one is returned, too.
    small = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_concurrent_sequences": 3})})

    async def produced(producer: GroupProducer, *wanted: Ticket) -> list[Group | TicketReturned]:
        answers = [answer async for answer in producer.produce(wanted, tickets.blobs)]
        assert all(isinstance(answer, Group | TicketReturned) for answer in answers)
        return answers  # type: ignore[return-value]

    async def scenario() -> None:
        first, second = (
            GroupProducer(ScriptedEngine(c, processor), OneForAll(), processor, name)  # type: ignore[arg-type]
            for c, name in ((small, "first"), (config, "second"))
        )
        work = asyncio.create_task(produced(first, *tickets.tickets))
        await asyncio.sleep(0.06)
        await first.interrupt([tickets.tickets[0].ticket_id, tickets.tickets[2].ticket_id])
        answers = {answer.ticket_id: answer for answer in await work}
        for ticket in tickets.tickets:
            (whole,) = await produced(second, ticket)
            returned = answers[ticket.ticket_id]
            assert isinstance(whole, Group)
            assert isinstance(returned, Group) is (ticket is tickets.tickets[1])
            if isinstance(returned, Group):
                continue
            (group,) = await produced(second, ticket.going_on(returned.partial))
            assert isinstance(group, Group)
            for column in ("lengths", "token_ids", "source", "logprobs", "versions"):
                assert getattr(group, column).tolist() == getattr(whole, column).tolist(), column
            assert [t.turns for t in group.trajectories] == [t.turns for t in whole.trajectories]

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_ticket_that_the_engine_has_not_seen_is_given_back_as_it_came(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is being encoded, the second waits for weights, the third has a part from elsewhere and waits, too."""
    script = {"mean_length": 12, "seconds_per_token": 1.0}
    config = make_config(rollout={"engine": "scripted", "engine_args": script})
    processor = PromptProcessor(config.model)
    tickets = written(config, processor, 3)
    begun = np.asarray([2, 0, 0, 0], np.int32)
    partial = PartialRollout(
        lengths=begun,
        token_ids=np.full(2, 20, np.int32),
        logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int32),
    )
    first, second, third = (
        tickets.tickets[0],
        tickets.tickets[1].model_copy(update={"min_version": 1}),
        tickets.tickets[2].going_on(partial).model_copy(update={"min_version": 1}),
    )
    encode, encoding, goes_on = PromptProcessor.measure, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        encoding.set()
        assert goes_on.wait(30)
        return encode(*arguments)

    monkeypatch.setattr(PromptProcessor, "measure", slow)

    async def scenario() -> list[TicketReturned]:
        link = AsyncMock(unacknowledged={})
        versions = PolicyVersions(config.learner.wait_timeout_s, Mock(), link, Mock(), "first", nullcontext)
        versions._version = 0
        engine = ScriptedEngine(config, processor)
        producer = GroupProducer(engine, OneForAll(), processor, "server")  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as tasks:
            in_work = TicketsInWork(config.rollout, link, Mock(), versions, producer, tasks)
            for ticket in (first, second, third):
                in_work.begin(tickets.model_copy(update={"tickets": (ticket,)}))
            await asyncio.to_thread(encoding.wait, 30)
            leaving = asyncio.create_task(in_work.drain())
            await asyncio.sleep(0.1)
            goes_on.set()
            await asyncio.wait_for(leaving, DRAINING_S / 2)
            assert not in_work.held
            for task in in_work.tasks:
                task.cancel()
        return [call.args[0] for call in link.send.await_args_list]

    answers = {answer.ticket_id: answer.partial for answer in asyncio.run(asyncio.wait_for(scenario(), 60))}
    assert [answers[ticket.ticket_id].lengths.tolist() for ticket in (first, second, third)] == [
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        begun.tolist(),
    ]


def test_scripted_sequences_that_begin_while_they_are_interrupted_go_on(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...]
) -> None:
    config = make_config(rollout={"engine": "scripted", "engine_args": {"mean_length": 12}})
    request = request_for(config, prompts[0], 0, tokens=20, size=2, stop_token_ids=(STOP,))

    async def scenario() -> list[Completion]:
        engine = ScriptedEngine(config, PromptProcessor(config.model))
        interrupting = asyncio.create_task(engine.interrupt([request.request_id]))
        sampling = asyncio.create_task(complete_all(engine, [request]))
        await interrupting
        return await sampling

    done = asyncio.run(asyncio.wait_for(scenario(), 30))
    assert [completion.finish_reason is not None for completion in done] == [True, True]


def test_of_two_samples_of_a_trajectory_the_first_stays_and_is_gone_on_from() -> None:
    def partial(version: int, *rows: list[int]) -> PartialRollout:
        ids = np.asarray([token for row in rows for token in row], np.int32)
        logprobs = np.full(ids.size, -1.0 - version, np.float32)
        lengths = np.asarray([len(row) for row in rows], np.int32)
        return PartialRollout(
            lengths=lengths, token_ids=ids, logprobs=logprobs, versions=np.full(ids.size, version, np.int32)
        )

    first = partial(0, [1, 2], [], [3], [4, 5])
    second = partial(1, [1, 2, 6], [7], [8, 9, 9, 9], [4])
    joined = first.joined(second)
    assert joined.lengths.tolist() == [3, 1, 1, 2]
    assert joined.token_ids.tolist() == [1, 2, 6, 7, 3, 4, 5], "the longer one is no reason"
    assert joined.versions.tolist() == [1, 1, 1, 1, 0, 0, 0]
    assert joined.logprobs.tolist() == [-2.0] * 4 + [-1.0] * 3


def test_a_partial_rollout_that_does_not_fit_its_ticket_is_refused(make_config: MakeConfig) -> None:
    config = make_config()
    (ticket,) = written(config, PromptProcessor(config.model), 1).tickets
    size, stop = ticket.group_size, ticket.sampling.stop_token_ids[0]
    banned, most = ticket.sampling.banned_token_ids[0], ticket.sampling.max_new_tokens

    def partial(*rows: list[int]) -> PartialRollout:
        lengths = np.asarray([len(row) for row in rows], np.int32)
        ids = np.asarray([token for row in rows for token in row], np.int32)
        return PartialRollout(
            lengths=lengths, token_ids=ids, logprobs=np.zeros(ids.size, np.float32), versions=np.zeros_like(ids)
        )

    empty: list[list[int]] = [[] for _ in range(size - 1)]
    assert ticket.going_on(partial([20, 21], *empty)).partial is not None
    for rows, reason in (
        ([[20]], "1 partial trajectories for a group"),
        ([[20] * (most + 1), *empty], f"{most + 1} tokens"),
        ([[20, banned], *empty], "banned"),
        ([[20, stop, 21], *empty], "goes on behind the stop"),
    ):
        with pytest.raises(ValueError, match=reason):
            ticket.going_on(partial(*rows))
    hinted = ticket.model_copy(update={"requests": (TrajectoryRequest(prefix=HINT),) * size})
    with pytest.raises(ValueError, match="does not begin as its request has it"):
        hinted.going_on(partial(*[[20, 21, 22]] * size))
