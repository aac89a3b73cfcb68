"""The server's side of the conversation with the learner."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
from pydantic import ValidationError

from asyncrl.config.schema import RunConfig
from asyncrl.errors import WaitTimeoutError
from asyncrl.run_folder.lock import LEARNER_LOCK, LearnerLock, holder
from asyncrl.telemetry.recorder import STATUS_FILE
from protocol.errors import ProtocolError
from protocol.messages import FinishReason, Group, GroupTimings, TrajectoryRecord, TrajectoryStatus
from rollout_server import link as link_module
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
        source=np.zeros(tokens, np.uint8),
        logprobs=np.zeros(tokens, np.float32),
        versions=np.zeros(tokens, np.int32),
        trajectories=(record,),
        timings=GroupTimings(generate_s=0, reward_s=0),
    )


def test_a_group_that_cannot_travel_is_not_kept_for_sending_again(make_config: Callable[..., RunConfig]) -> None:
    config = with_ports(make_config())
    config = config.model_copy(update={"network": config.network.model_copy(update={"max_message_mib": 1})})

    async def send() -> None:
        link = LearnerLink(config.link_settings, engine="hf", fingerprints=("m", "p"), in_work=tuple)
        try:
            with pytest.raises(ProtocolError, match="the limit is"):
                await link.send_group(large_group(100_000))
            assert link.unacknowledged == {}
            await link.resend_overdue()
        finally:
            link.close()

    asyncio.run(send())


@pytest.mark.parametrize("is_at_work", [False, True])
def test_a_learner_that_starts_is_waited_for_as_long_as_its_process_lives(
    make_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_at_work: bool,
) -> None:
    """Looking at a million rows takes longer than a server waits for a learner that is not there."""
    monkeypatch.setattr(link_module, "HELLO_EVERY_S", 0.02)
    config = with_ports(make_config(network={"start_timeout_s": 0.1}))

    async def is_there_at_the_end() -> bool:
        link = LearnerLink(config.link_settings, engine="hf", fingerprints=("m", "p"), in_work=tuple)
        with ExitStack() as learner:
            learner.enter_context(LearnerLock(config.run_path))
            if is_at_work:  # it does not answer because this server asks at another address
                (config.run_path / STATUS_FILE).write_text(json.dumps({"time": time.time() + 1}))
            else:
                asyncio.get_running_loop().call_later(0.5, learner.close)
            try:
                with pytest.raises(WaitTimeoutError, match="no learner answered"):
                    await link.connect()
            finally:
                link.close()
            return bool(holder(config.run_path, LEARNER_LOCK))

    with caplog.at_level("INFO"):
        assert asyncio.run(is_there_at_the_end()) == is_at_work
    assert ("it looks at its rows, or loads its model" in caplog.text) != is_at_work


def test_groups_that_would_not_fit_a_message_are_refused_at_the_start(make_config: Callable[..., RunConfig]) -> None:
    sizes = {"max_response_length": 32_000, "max_prompt_length": 1000}
    many = {"prompts_per_step": 4, "group_size": 64, "tokens_per_microbatch": 40_000}
    with pytest.raises(ValidationError, match=r"a group may have 33 MiB .* over half of network.max_message_mib = 16"):
        make_config(data=sizes, batch=many, network={"max_message_mib": 16})
    assert make_config(data=sizes, batch=many, network={"max_message_mib": 128})
