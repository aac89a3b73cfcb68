"""Channel `nccl` into the real vLLM on a CPU, over Gloo: learner here, vLLM's core and worker in their own process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import UserError
from protocol.messages import WeightsLoaded
from rollout_server.weights.receiver import WeightReceiver
from tests.plugins.device_channels.device_channel_rig import DirectSocket, LearnerHalf
from tests.plugins.vllm.vllm_rig import NEEDS_VLLM
from tests.rigs.engine_rig import Rig
from tests.rigs.policies import Weights, moved

pytestmark = NEEDS_VLLM


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[LearnerHalf]:
    half = LearnerHalf(tmp_path)
    yield half
    half.close()


async def load(rig: Rig, learner: LearnerHalf, weights: Weights) -> WeightsLoaded:
    """As the server does it."""
    rig.version += 1
    receiver = WeightReceiver(
        rig.config.model.path,
        rig.config.network,
        rig.config.first_meeting_s,
        rig.engine,
        "nccl",
        "tcp://127.0.0.1:9",
    )
    receiver.close()
    socket: Any = DirectSocket(learner)
    receiver._socket = socket
    return await receiver.load(learner.publish(rig.version, weights))


def greedy(rig: Rig) -> list[Any]:
    requests = [rig.request("What is the sum of the digits?", tokens=24), rig.request("answer 1 2 3", tokens=24)]
    return [(done.token_ids.tolist(), done.logprobs.tolist()) for _, done in sorted(rig.sample(*requests).items())]


def test_what_it_samples_is_bit_for_bit_what_it_samples_after_shared_memory(rig: Rig, learner: LearnerHalf) -> None:
    weights = moved(rig.initial, 1)
    before = greedy(rig)
    loaded = rig.run(load(rig, learner, weights))
    assert (loaded.version, loaded.channel) == (rig.version, "nccl")
    over_nccl = greedy(rig)
    rig.run(rig.update(moved(rig.initial, 2)))
    assert greedy(rig) != over_nccl
    rig.run(rig.update(weights))
    assert greedy(rig) == over_nccl != before


def test_sequences_run_on_while_weights_arrive_and_stand_still_only_while_they_are_loaded(
    rig: Rig, learner: LearnerHalf
) -> None:
    async def scenario() -> tuple[WeightsLoaded, int, Any]:
        request = rig.request("answer 1 2 3", tokens=300, temperature=1.0)
        sampling = asyncio.create_task(rig.complete([request]))
        started, paused = rig.engine.usage.tokens_generated, rig.engine.usage.update_pause_s
        while rig.engine.usage.tokens_generated < started + 5:
            await asyncio.sleep(0.001)
        before = rig.engine.version
        loaded = await load(rig, learner, moved(rig.initial, 3))
        (done,) = (await sampling).values()
        assert 0 < rig.engine.usage.update_pause_s - paused < loaded.transfer_s + loaded.load_s
        return loaded, before, done

    loaded, before, done = rig.run(scenario())
    assert sorted(set(done.versions.tolist())) == [before, loaded.version]


def test_a_damaged_transfer_leaves_the_engine_as_it_was(rig: Rig, learner: LearnerHalf) -> None:
    rig.run(load(rig, learner, rig.initial))
    before, version = greedy(rig), rig.engine.version
    answer, places = learner.device_weights.answer, iter(range(10))

    def damaged(identity: bytes, request: Any) -> Any:
        kept = learner.device_weights._kept
        assert kept is not None
        kept[1][next(places)] ^= 1
        return answer(identity, request)

    learner.device_weights.answer = damaged
    with pytest.raises(UserError, match="have wrong checksums, first"):
        rig.run(load(rig, learner, moved(rig.initial, 4)))
    assert (greedy(rig), rig.engine.version) == (before, version)
    learner.device_weights.answer = answer
    assert rig.run(load(rig, learner, moved(rig.initial, 4))).version == rig.engine.version > version
    assert greedy(rig) != before
