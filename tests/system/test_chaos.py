"""A short version of `make chaos`: ten deaths, and every prompt is trained exactly once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.rigs.chaos import run_chaos

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fleet", [False, True])
def test_ten_kills_lose_nothing_and_double_nothing(tmp_path: Path, fleet: bool) -> None:
    lines: list[str] = []
    servers = [3 if fleet else 2]
    rounds = run_chaos(
        tmp_path, kills=10, rows=60, servers=servers, seed=7, per_round=10, fleet=fleet, tell=lines.append
    )
    kills = sum((round.kills for round in rounds), Counter[str]())
    assert kills.total() >= 10, lines
    assert {name.split()[0] for name in kills} == {"learner", "rollout_server"}
    assert all(round.trained == 60 for round in rounds)
    # Groups that were journaled before a death and acknowledged by nobody are not counted.
    assert all(round.acknowledged >= 45 for round in rounds)
    assert all(round.checks >= 1 for round in rounds)
