"""Fixtures of the system tests."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.conftest import small_config
from tests.rigs.two_processes import run_both
from tests.system.test_resume import resume_config


@pytest.fixture(scope="session")
def on_policy(tiny_model: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run of `resume_config`, undisturbed, on two devices."""
    run = tmp_path_factory.mktemp("on-policy") / "run"
    config = resume_config(partial(small_config, tiny_model, digits_data, run), run)
    assert run_both(config, run) == (0, 0)
    return run
