"""Fixtures of a real vLLM, which tests of several plug-ins sample with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def started_vllm(tied_model: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One real vLLM for the whole session: a start takes half a minute. Its model is of the family whose positions
    depend on frames per second, with an output layer of which vLLM keeps a packed copy; images are made small. Runs in
    test_vllm_end_to_end.py and adapters in test_vllm_lora.py are of a qwen2_vl without either."""
    from tests.plugins.vllm_rig import MAX_PIXELS, Rig, vllm_config
    from tests.rigs.policies import initial_weights

    config = vllm_config(
        tied_model,
        digits_data,
        tmp_path_factory.mktemp("vllm") / "run",
        model={"max_pixels": MAX_PIXELS},
        learner={"wait_timeout_s": 60},
        network={"timeout_s": 10},
    )
    rig = Rig(config, initial_weights(config))
    yield rig
    rig.close()


@pytest.fixture
def rig(started_vllm: Any) -> Any:
    """The session's vLLM with the initial weights and the default mode, started again if an earlier test has ended it:
    workers take tests in any order."""
    started_vllm.revive()
    started_vllm.mode("recompute")
    started_vllm.run(started_vllm.update(started_vllm.initial))
    return started_vllm
