"""Fixture of a real SGLang server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import small_config
from tests.plugins.sglang.sglang_rig import SGLangRig
from tests.rigs.policies import initial_weights
from tests.rigs.tiny_families import make_family


@pytest.fixture(scope="session")
def started_sglang(digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangRig]:
    """One real SGLang for the whole session: a start takes a minute. SGLang's Qwen2.5-VL knows patches of 14 pixels."""
    folder = tmp_path_factory.mktemp("sglang")
    model = make_family("qwen2_5_vl", folder / "model", tied=True, patch=14)
    rollout = {"engine": "sglang", "max_concurrent_sequences": 32}
    config = small_config(model, digits_data, folder / "run", data={"max_response_length": 384}, rollout=rollout)
    rig = SGLangRig(config, initial_weights(config))
    yield rig
    rig.close()


@pytest.fixture
def sglang(started_sglang: SGLangRig) -> SGLangRig:
    """The session's SGLang with the initial weights and the default mode, started again if an earlier test has ended
    it."""
    started_sglang.revive()
    started_sglang.mode("recompute")
    started_sglang.run(started_sglang.update(started_sglang.initial))
    started_sglang.answers.clear()
    return started_sglang
