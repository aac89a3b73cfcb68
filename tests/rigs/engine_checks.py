"""Tests of a started engine that every real one passes: what it samples, and what new weights change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from asyncrl.data.dataset import open_train
from asyncrl.data.prompts import PromptRenderer
from protocol.messages import FinishReason, Sampling, TrajectoryRequest
from rollout_server.engines.base import Completion, GenerationRequest
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.production.group_producer import partial_rollout
from tests.rigs.engine_rig import FP32, QUESTION, START_S, Rig, gap_to
from tests.rigs.policies import complete_all, encoded_prompt, gaps, moved, picture

Completions = dict[tuple[int, int], Completion]
"""Completions by request id and index."""


async def _all_of(engine: Any, requests: Sequence[GenerationRequest]) -> Completions:
    await engine.start()
    try:
        return {(c.request_id, c.index): c for c in await complete_all(engine, requests)}
    finally:
        await engine.close()


def completions_of(engine: Any, rig: Rig, requests: Sequence[GenerationRequest]) -> Completions:
    """Completions of another engine, started for them alone."""
    return rig.run(_all_of(engine, requests), START_S)


def recorded_requests(rig: Rig, stops: tuple[int, ...]) -> list[GenerationRequest]:
    """Prompts of the digits task, and some with other numbers and sizes of images; the most probable tokens."""
    rows, renderer = open_train(rig.config.data), PromptRenderer(rig.config.data)
    requests = []
    for number in range(8):
        rendered = renderer.render(rows[number], rows.row_id(number))
        prompt = rig.processor.encode(rendered.prompt, rendered.blobs)
        sampling = Sampling(
            temperature=0, max_new_tokens=16, stop_token_ids=stops, banned_token_ids=rig.processor.placeholder_ids
        )
        requests.append(GenerationRequest(500 + number, prompt, 1, number, sampling))
    requests += [
        rig.request(QUESTION, picture(1), picture(2, 28, 84), picture(3, 42, 42)),
        rig.request("What is the largest digit?", picture(1), picture(1)),
        rig.request("answer 1 2 3"),
    ]
    assert sum(len(request.prompt.images) for request in requests) >= 13
    return requests


def check_same_completions(requests: Sequence[GenerationRequest], ours: Completions, theirs: Completions) -> None:
    """Greedy tokens are equal, and log-probs but for rounding."""
    for request in requests:
        done, expected = ours[request.request_id, 0], theirs[request.request_id, 0]
        assert done.token_ids.tolist() == expected.token_ids.tolist()
        assert np.abs(done.logprobs - expected.logprobs).max() < FP32
        assert done.finish_reason is expected.finish_reason


def check_recorded_prompts(rig: Rig, stops: tuple[int, ...]) -> None:
    requests = recorded_requests(rig, stops)
    theirs = completions_of(HFEngine(rig.config, rig.processor), rig, requests)
    check_same_completions(requests, rig.sample(*requests), theirs)


def check_requests(rig: Rig, stops: tuple[int, ...]) -> tuple[GenerationRequest, Completions]:
    """Requests for trajectories are followed as the hf engine follows them. Returns the request without them, and
    the completions of the one with them."""
    plain = rig.request(QUESTION, picture(1), tokens=16, size=5, temperature=0.8, stop_token_ids=stops, seed=7)
    other, hint = encoded_prompt(rig.processor, QUESTION, picture(9)), (21, 22, 23)
    wanted = (
        TrajectoryRequest(),
        TrajectoryRequest(prefix=hint),
        TrajectoryRequest(prefix=(31, 7)),
        TrajectoryRequest(greedy=True),
        TrajectoryRequest(greedy=True, prefix=hint, images=other.image_hashes),
    )
    seen = {other.image_hashes: other}
    request = replace(plain, request_id=700, requests=wanted, seen=seen)
    ours = rig.sample(request)
    assert ours[700, 2].token_ids.tolist() == [31, 7]
    theirs = completions_of(HFEngine(rig.config, rig.processor), rig, [request])
    for index, one in enumerate(wanted):
        done, count = ours[700, index], len(one.prefix)
        assert tuple(done.token_ids[:count].tolist()) == one.prefix
        assert not done.logprobs[:count].any()
        assert len(done.token_ids) <= 16
        if one.greedy:
            assert done.token_ids.tolist() == theirs[700, index].token_ids.tolist()
            assert np.abs(done.logprobs - theirs[700, index].logprobs).max() < FP32
        elif index != 2:
            policies = dict.fromkeys(done.versions.tolist(), rig.initial)
            assert gaps(rig.config, policies, request, done)[count:].max() < FP32
    return plain, ours


def check_stop_id(rig: Rig) -> int:
    """A stop id ends a completion and belongs to it. Returns the id."""
    free = rig.request(QUESTION, picture(1), tokens=20)
    ids = rig.sample(free)[free.request_id, 0].token_ids.tolist()
    stop = int(ids[9])
    stopped = rig.request(QUESTION, picture(1), tokens=20, stop_token_ids=(stop,))
    done = rig.sample(stopped)[stopped.request_id, 0]
    assert done.token_ids.tolist() == ids[: ids.index(stop) + 1]
    assert done.finish_reason is FinishReason.STOP
    return stop


def check_bans(rig: Rig) -> None:
    """A banned id is never sampled, even by a policy that wants nothing else."""
    banned = rig.processor.placeholder_ids
    assert len(banned) >= 2
    (tied,) = [name for name in rig.initial if "embed_tokens" in name]
    head = torch.zeros_like(rig.initial[tied])  # what is said is a sum of the images
    wish = 1000 * torch.randn(head.shape[1], generator=torch.Generator().manual_seed(0))
    head[banned[0]], head[banned[1]] = wish, -wish  # one of the two logits is always huge
    rig.run(rig.update({**rig.initial, tied: head}))
    requests = [
        rig.request(QUESTION, picture(1), tokens=50, size=4, temperature=1.0),
        rig.request(QUESTION, picture(1), tokens=50, temperature=0),
    ]
    for done in rig.sample(*requests).values():
        assert not set(done.token_ids.tolist()) & set(banned)
        # All others are equally probable, to the last bit of the distribution: nothing was left for a banned one.
        np.testing.assert_allclose(done.logprobs, -np.log(head.shape[0] - len(banned)), atol=1e-5)


async def behind_begun(
    rig: Rig, request: GenerationRequest, begun: list[Completion]
) -> dict[int, tuple[Completion, Completion]]:
    """Go on behind the tokens of an interrupted request. Returns both parts by index, the second with the first."""
    partial = partial_rollout(begun)
    going_on = replace(request, request_id=710, partial=partial)
    ends = {done.index: done.behind(partial) for done in await complete_all(rig.engine, [going_on])}
    return {start.index: (start, ends[start.index]) for start in begun}


def check_goes_on(rig: Rig, request: GenerationRequest, parts: dict[int, tuple[Completion, Completion]]) -> None:
    """Assert that interrupted completions went on behind their own tokens."""
    for start, end in parts.values():
        count = len(start.token_ids)
        assert end.finish_reason is not None
        assert end.token_ids[:count].tolist() == start.token_ids.tolist()
        assert end.logprobs[:count].tolist() == start.logprobs.tolist()
        assert gap_to(rig, rig.initial, request, end) < FP32


def check_drain(rig: Rig, tokens: int) -> None:
    """Completions that run are finished with the old policy, with so many tokens."""
    rig.mode("drain")
    request = rig.request(QUESTION, picture(1), tokens=tokens, size=2, temperature=0.8)
    old, new = rig.version, moved(rig.initial, 3)
    done = rig.run(rig.update_after(new, 40, [request]))
    assert {int(v) for c in done.values() for v in c.versions} == {old}
    assert rig.engine.version == old + 1
    later = replace(request, request_id=903)
    assert gap_to(rig, new, later, rig.sample(later)[903, 0]) < FP32
