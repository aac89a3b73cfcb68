"""A sample of docs/families.md: every column of two families whose parts differ from the others'."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rigs.family_columns import COLUMNS, NOT_RUN, measure
from tests.rigs.family_matrix import SAME

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("family", "said"),
    [
        (
            "qwen3_next",
            {
                "accepted": "packed",
                "learner = `hf`": "refused: the hf engine, .* keeps keys",
                "learner = vLLM": NOT_RUN,
            },
        ),
        (
            "llama4_text",
            {
                "accepted": "row by row: log-probs differ",
                "learner = vLLM": NOT_RUN,
                "several turns": r"\S+; rewritten: refused: .* each row alone",
            },
        ),
    ],
)
def test_each_column_is_a_small_number_or_says_why(family: str, said: dict[str, str], tmp_path: Path) -> None:
    """Recurrences beside fused experts that have adapters; chunks of attention under a base of another name."""
    cells = measure(family, tmp_path, vllm=False)
    assert list(cells) == list(COLUMNS)
    for column, cell in cells.items():
        number, _, rewritten = cell.partition("; rewritten: ")
        if column in said:
            assert re.match(said[column], cell), (column, cell)
        else:
            assert max(float(number), float(rewritten or 0)) <= SAME, (column, cell)
