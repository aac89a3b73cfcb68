"""Families with windows, chunks, experts or compressed keys: their own code, captured, samples as it does alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.sections import ModelConfig
from asyncrl.models.small_copy import family_of
from asyncrl_plugins.cuda_graphs.batch import GraphedBatch
from asyncrl_plugins.cuda_graphs.graphs import StepGraphs
from rollout_server.engines.hf.decode_check import decoding_problem
from tests.plugins.cuda_graphs.recorded_steps import RecordedCapture
from tests.rigs.family_matrix import make_folder


@pytest.mark.parametrize("family", ["mistral (window 6)", "gemma3_text", "llama4_text", "qwen3_moe", "deepseek_v3"])
def test_captured_steps_have_the_log_probs_of_each_row_alone(family: str, tmp_path: Path) -> None:
    config = ModelConfig(path=str(make_folder(family, tmp_path)), dtype="float32")
    made: list[GraphedBatch] = []

    def captured(model: Any, *others: Any) -> GraphedBatch:
        made.append(GraphedBatch(model, *others, most=(32, 64), graphs=StepGraphs(RecordedCapture)))
        return made[-1]

    assert decoding_problem(family_of(config), groups_queries=True, kind=captured) == ""
    assert made[0]._graphs.failure == ""
    assert any(step.is_checked for step in made[0]._graphs._steps.values())
