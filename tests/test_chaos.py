"""A short version of `make chaos`: ten deaths, and every prompt is trained exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import run_chaos

pytestmark = pytest.mark.slow


def test_ten_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    (result,) = run_chaos(tmp_path, kills=10, rows=40, servers=[2], seed=7, per_round=10, tell=lines.append)
    assert result.kills.total() >= 10
    assert any(name.startswith("learner") for name in result.kills)
    assert result.trained == 40
    assert result.acknowledged >= 30
    assert result.checks >= 1
