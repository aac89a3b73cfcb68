"""Requests that engines follow: greedy rows, completions that begin with a prefix, and demonstrations."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from scripted_engine.engine import ScriptedEngine

from asyncrl.models.loading import load_model
from asyncrl.models.published import load_published
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from benchmarks.staleness.workload import OneForAll
from protocol.messages import FinishReason, Group, Ticket, TokenSource, TrajectoryRequest
from rollout_server.engines.base import Completion, GenerationRequest
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.production.group_producer import GroupProducer
from tests.rigs.policies import (
    CPU,
    MakeConfig,
    complete_all,
    fresh_logits,
    gaps,
    initial_weights,
    moved,
    prompts,
    request_for,
    updated_in_flight,
)
from tests.unit.rollout_server.test_engine_death import written

__all__ = ["prompts"]
STOP = 7
HINT, DEMONSTRATION, LONG = (21, 22, 23), (31, 32, STOP), (41, *range(60, 72))
REQUESTS = (
    TrajectoryRequest(),
    TrajectoryRequest(prefix=HINT),
    TrajectoryRequest(prefix=DEMONSTRATION),
    TrajectoryRequest(greedy=True),
    TrajectoryRequest(prefix=LONG),
    TrajectoryRequest(prefix=(51,), greedy=True),
)


def with_requests(request: GenerationRequest, requests: tuple[TrajectoryRequest, ...] = REQUESTS) -> GenerationRequest:
    return replace(request, requests=requests, group_size=len(requests))


async def generated(engine: HFEngine, *requests: GenerationRequest) -> dict[tuple[int, int], Completion]:
    await engine.start()
    try:
        return {(done.request_id, done.index): done for done in await complete_all(engine, requests)}
    finally:
        await engine.close()


def test_requests_are_followed_and_other_rows_are_sampled_as_before(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...]
) -> None:
    config = make_config()
    processor = PromptProcessor(config.model)
    stopping = {"tokens": 20, "stop_token_ids": (STOP,)}
    plain = [
        request_for(config, prompt, number, size=len(REQUESTS), **stopping) for number, prompt in enumerate(prompts)
    ]
    requests = [plain[0], *[with_requests(request) for request in plain[1:]]]
    before = asyncio.run(generated(HFEngine(config, processor), *plain))
    done = asyncio.run(generated(HFEngine(config, processor), *requests))
    model, initial = load_model(config.model, device=CPU), initial_weights(config)
    for request in requests:
        for index, asked in enumerate(request.requests or [TrajectoryRequest()] * len(REQUESTS)):
            completion, count = done[request.request_id, index], len(asked.prefix)
            ids = completion.token_ids.tolist()
            assert tuple(ids[:count]) == asked.prefix
            assert not completion.logprobs[:count].any()
            if asked == TrajectoryRequest():
                assert ids == before[request.request_id, index].token_ids.tolist()
            if asked.prefix == DEMONSTRATION:
                assert (len(ids), completion.finish_reason) == (count, FinishReason.STOP)
                continue
            assert len(ids) == 20 or ids[-1] == STOP, "the prefix counts in max_new_tokens"
            request_of_row = replace(request, sampling=request.sampling_of(index))
            assert gaps(config, [initial], request_of_row, completion)[count:].max() < 1e-4
            if asked.greedy:
                load_published(model, initial.items())
                logits = fresh_logits(model, request.encoded_prompt(index), ids[:-1])
                logits[:, list(processor.placeholder_ids)] = -torch.inf
                assert ids[count:] == logits.argmax(-1)[count:].tolist()


@pytest.mark.parametrize("weight_update", ["recompute", "keep"])
def test_a_prefix_goes_through_weight_updates_as_sampled_tokens_do(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], weight_update: str
) -> None:
    config = make_config(rollout={"weight_update": weight_update})
    initial = initial_weights(config)
    policies = [initial, moved(initial, 1)]
    short = request_for(config, prompts[0], 0, tokens=4)
    late = with_requests(request_for(config, prompts[1], 1, tokens=60))
    engine = HFEngine(config, PromptProcessor(config.model))
    done = asyncio.run(asyncio.wait_for(updated_in_flight(engine, [short, late], policies), 120))
    mixed = 0
    for completion in done:
        count = len(late.requests[completion.index].prefix) if completion.request_id == 1 else 0
        assert not completion.versions[:count].any(), "put there before the update"
        assert (np.diff(completion.versions) >= 0).all()
        mixed += bool(completion.versions[-1])
        if weight_update == "recompute" and completion.request_id == 1:
            request = replace(late, sampling=late.sampling_of(completion.index))
            assert gaps(config, policies, request, completion)[count:].max() < 1e-4
    assert mixed >= 4


def test_a_group_says_what_its_requests_put_there(make_config: MakeConfig) -> None:
    config = make_config(rollout={"engine": "scripted"})
    processor = PromptProcessor(config.model)
    tickets = written(config, processor, 1)
    stop = tickets.tickets[0].sampling.stop_token_ids[0]
    requests = (
        TrajectoryRequest(prefix=HINT),
        TrajectoryRequest(prefix=(31, stop)),
        *[TrajectoryRequest(greedy=True)] * 2,
        *[TrajectoryRequest()] * 4,
    )
    changes = {"group_size": len(requests), "requests": requests}
    ticket = Ticket.model_validate(tickets.tickets[0].model_dump() | changes)

    async def scenario() -> Group:
        producer = GroupProducer(ScriptedEngine(config, processor), OneForAll(), processor, "s")  # type: ignore[arg-type]
        (group,) = [group async for group in producer.produce([ticket], tickets.blobs)]
        assert isinstance(group, Group)
        return group

    group = asyncio.run(scenario())
    sources = np.split(group.source, np.cumsum(group.lengths)[:-1])
    ids = np.split(group.token_ids, np.cumsum(group.lengths)[:-1])
    inserted = [(source == TokenSource.INSERTED).tolist() for source in sources]
    assert inserted == [[i < n for i in range(len(s))] for n, s in zip([3, 2, 0, 0, 0, 0, 0, 0], sources, strict=True)]
    roles = [record.role for record in group.trajectories]
    assert roles == ["train", "demonstration", "baseline", "baseline", "train", "train", "train", "train"]
    assert ids[0][:3].tolist() == list(HINT)
    assert len(ids[0]) == len(ids[4]) == ticket.sampling.max_new_tokens, "the prefix counts"
    assert group.trajectories[0].turns[0].start == 3
    assert group.trajectories[1].turns == ()
    assert ids[2].tolist() == ids[3].tolist() != ids[4].tolist()
