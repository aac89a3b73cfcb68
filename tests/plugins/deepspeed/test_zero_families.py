"""Steps of every family under ZeRO are those of one process.

Stage 1, which keeps whole gradients where stage 2 divides them, and a single rank are in test_zero.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.rigs.zero import HAS_ZERO, zero
from tests.system import test_families_on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_ZERO, reason="deepspeed is not installed")]
ZERO: dict[str, dict[str, Any]] = {f"ZeRO-{stage}": zero(stage) for stage in (2, 3)}


@pytest.fixture(scope="module")
def engines() -> dict[str, dict[str, Any]]:
    return ZERO


@pytest.fixture(scope="module")
def sizes() -> tuple[int, ...]:
    return (2,)


@pytest.fixture(params=[2])
def size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=ZERO)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


found = test_families_on_ranks.found
test_a_step_on_ranks_is_that_of_one_process = test_families_on_ranks.test_a_step_on_ranks_is_that_of_one_process
