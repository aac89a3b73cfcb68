"""Fixtures of the system tests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import small_config
from tests.rigs.policies import initial_weights
from tests.rigs.tiny_families import make_family
from tests.rigs.two_processes import run_both
from tests.rigs.vllm_rig import MAX_PIXELS, Rig, vllm_config
from tests.system.test_resume import resume_config


@pytest.fixture(scope="session")
def on_policy(tiny_model: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run of `resume_config`, undisturbed, on two devices."""
    run = tmp_path_factory.mktemp("on-policy") / "run"
    config = resume_config(partial(small_config, tiny_model, digits_data, run), run)
    assert run_both(config, run) == (0, 0)
    return run


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("qwen2_5_vl", tmp_path_factory.mktemp("tied") / "model", tied=True)


@pytest.fixture(scope="session")
def started_vllm(tied_model: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One real vLLM for the whole session: a start takes half a minute. Its model is of the family whose positions
    depend on frames per second, with an output layer of which vLLM keeps a packed copy; images are made small. Runs in
    test_vllm_end_to_end.py and adapters in test_vllm_lora.py are of a qwen2_vl without either."""
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
def rig(started_vllm: Rig) -> Rig:
    """The session's vLLM with the initial weights and the default mode, started again if an earlier test has ended it:
    workers take tests in any order."""
    started_vllm.revive()
    started_vllm.mode("recompute")
    started_vllm.run(started_vllm.update(started_vllm.initial))
    return started_vllm
