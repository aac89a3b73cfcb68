"""A sample of docs/families.md: every column of a family."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rigs.family_columns import COLUMNS, NOT_RUN, measure
from tests.rigs.family_matrix import SAME

pytestmark = pytest.mark.usefixtures("one_thread")
SAID = {"accepted": "packed", "learner = `hf`": "refused: the hf engine, .* keeps keys", "learner = vLLM": NOT_RUN}


def test_each_column_is_a_small_number_or_says_why(tmp_path: Path) -> None:
    cells = measure("lfm2 (convolutions)", tmp_path, vllm=False)
    assert list(cells) == list(COLUMNS)
    for column, cell in cells.items():
        if column in SAID:
            assert re.match(SAID[column], cell), (column, cell)
        else:
            assert max(map(float, cell.split("; rewritten: "))) <= SAME, (column, cell)
