"""Features of images are kept under ZeRO as they are with FSDP2. Stage 1 has the passes of stage 2."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rigs.zero import HAS_ZERO, zero
from tests.system import test_vision_on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_ZERO, reason="deepspeed is not installed")]
ZERO: dict[str, dict[str, Any]] = {f"ZeRO-{stage}": zero(stage) for stage in (2, 3)}


@pytest.fixture(scope="module")
def engines() -> dict[str, dict[str, Any]]:
    return ZERO


@pytest.fixture(params=ZERO)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


found = test_vision_on_ranks.found
test_steps_are_those_of_one_process = test_vision_on_ranks.test_steps_are_those_of_one_process_that_keeps_nothing
test_the_tower_runs_less_often = test_vision_on_ranks.test_the_tower_runs_less_often_and_on_ranks_that_gather_it_alike
