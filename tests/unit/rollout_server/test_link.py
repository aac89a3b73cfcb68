"""The server's side of the conversation with the learner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from pydantic import ValidationError

from asyncrl.config.schema import RunConfig
from protocol.errors import ProtocolError
from protocol.messages import FinishReason, Group, GroupTimings, TrajectoryRecord, TrajectoryStatus
from rollout_server.link import LearnerLink
from tests.rigs.two_processes import with_ports


def large_group(tokens: int) -> Group:
    record = TrajectoryRecord(status=TrajectoryStatus.FINISHED, finish_reason=FinishReason.STOP, reward=1.0, turns=())
    return Group(
        ticket_id=5,
        server_id="s",
        prompt_ids=np.zeros(1, np.int32),
        image_grids=np.zeros((0, 3), np.int32),
        image_hashes=(),
        lengths=np.asarray([tokens], np.int32),
        token_ids=np.zeros(tokens, np.int32),
        loss_mask=np.ones(tokens, np.uint8),
        logprobs=np.zeros(tokens, np.float32),
        versions=np.zeros(tokens, np.int32),
        trajectories=(record,),
        timings=GroupTimings(queued_s=0, generate_s=0, reward_s=0),
    )


def test_a_group_that_cannot_travel_is_not_kept_for_sending_again(make_config: Callable[..., RunConfig]) -> None:
    config = with_ports(make_config())
    config = config.model_copy(update={"network": config.network.model_copy(update={"max_message_mib": 1})})

    async def send() -> None:
        link = LearnerLink(config, engine="hf", fingerprints=("m", "p"), in_work=tuple)
        try:
            with pytest.raises(ProtocolError, match="the limit is"):
                await link.send_group(large_group(100_000))
            assert link.unacknowledged == {}
            await link.resend_overdue()
        finally:
            link.close()

    asyncio.run(send())


def test_groups_that_would_not_fit_a_message_are_refused_at_the_start(make_config: Callable[..., RunConfig]) -> None:
    sizes = {"max_response_length": 32_000, "max_prompt_length": 1000}
    many = {"prompts_per_step": 4, "group_size": 64, "tokens_per_microbatch": 40_000}
    with pytest.raises(ValidationError, match=r"a group may have 33 MiB .* over half of network.max_message_mib = 16"):
        make_config(data=sizes, batch=many, network={"max_message_mib": 16})
    assert make_config(data=sizes, batch=many, network={"max_message_mib": 128})
