"""Two processes and two steps with a family whose positions count tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from tests.rigs.small_runs import logs
from tests.rigs.tiny_families import make_llava
from tests.rigs.trained_parts import changed, largest_difference
from tests.rigs.two_processes import run_both
from tests.system.test_bad_input import image_rows, write_rows

pytestmark = pytest.mark.slow
SIZES = [(150, 40), (28, 28), (40, 90), (200, 160)]
"""Of the images in the rows: height and width in pixels."""


def test_a_family_is_trained_by_two_services(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    check_run(make_config, tmp_path, make_llava(tmp_path / "model"))


def check_run(make_config: Callable[..., RunConfig], tmp_path: Path, model: Path) -> None:
    """Train a model for two steps, and compare its log-probs and what was trained."""
    run = tmp_path / "run"
    rows = [
        *image_rows(tmp_path, SIZES),
        {"prompt": "And <image> that?", "images": ["3.png"]},
    ]
    config = make_config(
        model={"path": str(model)},
        data={**write_rows(tmp_path, rows), "val_files": [], "max_prompt_length": 400},
        batch={"tokens_per_microbatch": 1024},
        alignment={"rows": 4},
        trainer={"max_steps": 2},
    )
    assert run_both(config, run) == (0, 0), logs(run)
    assert "is aligned: log-probs" in logs(run, whole=True)
    assert largest_difference(run) < 1e-4
    assert changed(model, run / "export") == {"vision_tower", "connector", "language_model"}
