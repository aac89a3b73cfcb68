"""Warm starts: rows, micro-batches, adapters, and refusals before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.cli import main
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig, changed
from asyncrl.memory_plan.plan import longest_sequence
from asyncrl.memory_plan.token_choice import KEY
from asyncrl.telemetry.jsonl import read_lines
from asyncrl_plugins.sft.run import SupervisedRun
from asyncrl_plugins.sft.trainer import choose_tokens
from learner.ranks.group import Ranks
from tests.rigs.adapters import lora_config, spec_of
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import start, write_config
from tests.system.test_bad_input import BAD_ROWS, GOOD_ROW, write_rows
from tests.system.test_end_to_end import lines
from tests.system.test_lora_runs import weights
from tests.unit.asyncrl.test_model_checks import blinded
from tests.unit.asyncrl.test_token_choice import AUTO, CPU

MakeConfig = Callable[..., RunConfig]


def test_a_supervised_run_leaves_bad_rows_out(make_config: MakeConfig, tmp_path: Path) -> None:
    good = {**GOOD_ROW, "target": "x"}
    rows = [
        good,
        {**BAD_ROWS["long text"][0], "target": "x"},
        {**good, "target": ""},
        {**good, "target": "x" * 99},
        good,
    ]
    config = make_config(data=write_rows(tmp_path, rows), sft={"rows_per_step": 2})
    supervised = SupervisedRun(config)
    assert supervised.steps == 1
    supervised.run()
    assert (config.run_path / "export" / "config.json").is_file()
    named = read_lines(config.run_path / "bad_rows.jsonl")
    assert [row["row_id"] for row in named] == ["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"]
    assert "data.target_key" in named[1]["reason"]
    assert "over data.max_response_length = 8" in named[2]["reason"]


def test_a_warm_start_chooses_for_its_own_rows(make_config: MakeConfig) -> None:
    config = make_config(**AUTO, algorithm={"adv_estimator": "gae"}, sft={"rows_per_step": 4})
    assert choose_tokens(changed(config, {KEY: 640}), CPU, Ranks()) == 640
    whole = choose_tokens(changed(config, {"gpu_memory.budget_gib": 1.0}), CPU, Ranks())
    assert whole / 2 < 4 * longest_sequence(config.data) <= whole, "rows of one completion, without a critic"


def test_a_model_without_eyes_is_refused_before_the_run(
    make_config: MakeConfig, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(model={"path": str(blinded(tiny_model, tmp_path / "text"))})
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert main(["sft", str(file), "data.target_key=answer"]) == 2
    assert "no vision tower" in capsys.readouterr().err


@pytest.mark.slow
def test_a_warm_start_may_train_an_adapter(make_config: MakeConfig, digits_data: Path, tmp_path: Path) -> None:
    config = lora_config(
        make_config,
        data={"train_files": [str(digits_data / "sft.parquet")], "val_files": []},
        sft={"steps": 20, "rows_per_step": 8, "optim": {"lr": 1e-2}},
    )
    file = write_config(config, tmp_path / "run")
    assert start("asyncrl_plugins.sft.run", file).wait(timeout=90) == 0, logs(tmp_path / "run")
    losses = [step["loss"] for step in lines(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.3, losses
    base, trained = weights(config.model.path, config), weights(tmp_path / "run" / "export", config)
    moved = {name for name in base if not torch.equal(base[name], trained[name])}
    assert moved == {f"{layer}.weight" for layer in spec_of(config).target_modules}
