"""The digits task with the real SGLang, by the command that a user types: two services, live updates, images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncrl.config.schema import RunConfig
from tests.plugins.sglang.sglang_rig import NEEDS_SGLANG
from tests.rigs.engine_run import check_digits_run

pytestmark = NEEDS_SGLANG


def test_the_digits_task_trains_through_sglang_and_its_reward_rises(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Processes: learner, server, rewards; SGLang's HTTP server, scheduler, detokenizer."""
    check_digits_run(make_config, tmp_path, "sglang", processes=6, timeout_s=400)
