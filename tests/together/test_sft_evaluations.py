"""Evaluations of a warm start score what `asyncrl eval` scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import changed
from asyncrl_plugins.evaluation.plain_scores import evaluate
from tests.plugins.sft.test_sft_resumed import STEPS, MakeConfig, config_of, run, same_weights
from tests.system.test_end_to_end import lines


def test_evaluations_score_what_eval_scores_and_change_nothing(
    make_config: MakeConfig, digits_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The best model is kept, and the curve is logged. A whole model that is killed, with evaluations and checkpoints,
    ends as one that has neither."""
    config = changed(config_of(make_config, digits_data, evaluate_every=4, save_freq=2), {"model.dtype": "float32"})
    run(config, monkeypatch, kill_at=4)
    with caplog.at_level("INFO"):
        run(config, monkeypatch, resume=True)
    records = lines(config.run_path / "evaluations.jsonl")
    assert [record["step"] for record in records] == [0, STEPS]
    assert records[-1]["loss"] < records[0]["loss"]
    assert sum(value for key, value in records[-1].items() if key.startswith("rows/kind=")) == 4
    best = max(records, key=lambda record: (record["accuracy"], -record["loss"]))
    assert evaluate(config, config.run_path / "best").accuracy == pytest.approx(best["accuracy"])
    assert "held-out loss   accuracy" in caplog.text
    assert f"the best is of step {best['step']}" in caplog.text
    plain = changed(config, {"run_dir": str(tmp_path / "plain"), "sft.evaluate_every": 0, "sft.save_freq": 0})
    run(plain, monkeypatch)
    assert same_weights(config, plain, "export", "model.safetensors")
    assert not any((plain.run_path / name).exists() for name in ("best", "checkpoints"))
