"""Ten deaths in a chain of servers that send weights on, and every prompt is trained exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.chaos import check_ten_kills

pytestmark = pytest.mark.slow


def test_ten_kills_among_relays_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    check_ten_kills(tmp_path, fleet=True)
