"""A model of two towers, a resampler and a language model: the resampler is trained alone, then all of it by the two
services."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import main as asyncrl
from asyncrl.config.schema import RunConfig
from examples.modular_digits import make_parts
from tests.rigs.small_runs import logs
from tests.rigs.trained_parts import changed, largest_difference
from tests.rigs.two_processes import run_both, start, write_config
from tests.rigs.waiting import exit_codes

pytestmark = pytest.mark.slow


def test_a_composed_model_learns_part_by_part(
    make_config: Callable[..., RunConfig], digits_data: Path, tmp_path: Path
) -> None:
    make_parts(tmp_path, seed=1)
    composed, alone, run = tmp_path / "composed", tmp_path / "alone", tmp_path / "run"
    parts = [f"vision_tower={tmp_path}/tower", f"language_model={tmp_path}/language", "image_token=<|image_pad|>"]
    parts += [f"second_vision_tower={tmp_path}/tower", "connector=resampler", "connector_layers=1", "queries=6"]
    assert asyncrl(["compose", str(composed), *parts]) == 0

    model: dict[str, Any] = {"path": str(composed), "freeze_vision_tower": True, "freeze_language_model": True}
    config = make_config(
        model=model,
        data={"train_files": [str(digits_data / "sft.parquet")]},
        sft={"steps": 2, "rows_per_step": 4},
    ).model_copy(update={"run_dir": str(alone)})
    assert exit_codes([start("asyncrl_plugins.sft.run", write_config(config, alone))], 120) == [0], logs(alone)
    assert changed(composed, alone / "export") == {"connector"}

    config = make_config(model={"path": str(alone / "export")}, trainer={"max_steps": 2}, alignment={"rows": 2})
    assert run_both(config, run) == (0, 0), logs(run)
    assert "is aligned: log-probs" in logs(run, whole=True)
    assert changed(alone / "export", run / "export") >= {"connector", "language_model"}
    assert largest_difference(run) < 1e-4
    assert (run / "export" / "modular_vlm.py").is_file()
