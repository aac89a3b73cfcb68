"""Fixtures of the system tests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import small_config
from tests.rigs.policies import initial_weights
from tests.rigs.two_processes import run_both
from tests.rigs.vllm_rig import Rig, vllm_config
from tests.system.test_resume import resume_config


@pytest.fixture(scope="session")
def on_policy(tiny_model: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run of `resume_config`, undisturbed, on two devices."""
    run = tmp_path_factory.mktemp("on-policy") / "run"
    config = resume_config(partial(small_config, tiny_model, digits_data, run), run)
    assert run_both(config, run) == (0, 0)
    return run


@pytest.fixture(scope="session")
def started_vllm(tiny_model: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One real vLLM for the whole session: a start takes half a minute."""
    folder = tmp_path_factory.mktemp("vllm") / "run"
    config = vllm_config(tiny_model, digits_data, folder, learner={"wait_timeout_s": 60}, network={"timeout_s": 10})
    rig = Rig(config, initial_weights(config))
    yield rig
    rig.close()


@pytest.fixture
def vllm_rig(started_vllm: Rig) -> Rig:
    """The session's vLLM, started again if an earlier test has ended it: workers take tests in any order."""
    started_vllm.revive()
    return started_vllm
