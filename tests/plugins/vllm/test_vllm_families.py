"""Images of families that vLLM prepares in its own way: it samples from what the learner computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.family_columns import Family, by_vllm

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["smolvlm", "internvl"])
def test_rows_of_none_one_and_three_images_are_sampled_as_the_learner_computes_them(
    family: str, tmp_path: Path
) -> None:
    made = Family.made(family, tmp_path, sees=True)
    assert float(by_vllm(made, made.engine())) < 1e-4
