"""A supervised warm start over ranks is that of one process, however the ranks are started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.schema import RunConfig
from tests.rigs.one_process import in_one_process
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import start, write_config
from tests.rigs.waiting import exit_codes
from tests.system.test_bad_input import image_rows, write_rows
from tests.system.test_end_to_end import lines
from tests.system.test_families_on_ranks import FLIPPED, FSDP2
from tests.system.test_ranks import TOLERANCE
from tests.system.test_torchrun import end, start_ranks

pytestmark = pytest.mark.slow
MakeConfig = Callable[..., RunConfig]
LR, STEPS = 1e-3, 3
SIZES = [(28, 40), (56, 28), (28, 28), (70, 42)]


def config_of(make_config: MakeConfig, folder: Path, learner: dict[str, Any], model: dict[str, Any]) -> RunConfig:
    """Rows of no, one and three images; a step has two of each, in several micro-batches."""
    rows = [{**row, "target": f"{number} apples"} for number, row in enumerate(image_rows(folder, SIZES) * 2)]
    return make_config(
        model=model,
        data={**write_rows(folder, rows), "target_key": "target", "max_prompt_length": 400, "max_response_length": 32},
        batch={"tokens_per_microbatch": 432},
        learner={"num_processes": 2, **learner},
        sft={"steps": STEPS, "rows_per_step": 6, "optim": {"lr": LR, "weight_decay": 0.01}},
    )


def run_alone(config: RunConfig, folder: Path) -> Path:
    alone = in_one_process(config).model_copy(update={"run_dir": str(folder / "alone")})
    assert exit_codes([start("asyncrl_plugins.sft.run", write_config(alone, folder / "one"))]) == [0], logs(
        folder / "one"
    )
    return Path(alone.run_dir)


def check(one: Path, two: Path) -> None:
    """The same losses, and the same exported weights."""
    tolerance = TOLERANCE["float32"]
    for mine, theirs in zip(lines(one / "metrics.jsonl"), lines(two / "metrics.jsonl"), strict=True):
        for name in ("loss", "tokens", "grad_norm", "lr"):
            assert theirs[name] == pytest.approx(mine[name], rel=tolerance, abs=tolerance), name
        assert all(theirs[f"rank_tokens/{rank}"] > 0 for rank in range(2))
    mine, theirs = (load_file(run / "export" / "model.safetensors") for run in (one, two))
    assert mine.keys() == theirs.keys()
    flipped = sum(int((~torch.isclose(t, theirs[n], rtol=1e-2, atol=0.01 * LR)).sum()) for n, t in mine.items())
    assert flipped <= FLIPPED * sum(tensor.numel() for tensor in mine.values())


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4}}], ids=["full", "an adapter"])
def test_two_ranks_learn_what_one_process_does(make_config: MakeConfig, tmp_path: Path, model: dict[str, Any]) -> None:
    check_two_ranks(make_config, tmp_path, FSDP2, model)


def check_two_ranks(make_config: MakeConfig, tmp_path: Path, learner: dict[str, Any], model: dict[str, Any]) -> None:
    """Compare a warm start on two ranks with that of one process."""
    config = config_of(make_config, tmp_path, learner, model)
    assert exit_codes([start("asyncrl_plugins.sft.run", write_config(config, tmp_path / "two"))], 240) == [0], logs(
        tmp_path / "two"
    )
    assert "asyncrl_plugins.sft.run-rank1" in logs(tmp_path / "two", whole=True)
    check(run_alone(config, tmp_path), config.run_path)


def test_torchruns_ranks_do_as_well(make_config: MakeConfig, tmp_path: Path) -> None:
    config = config_of(make_config, tmp_path, FSDP2, {})
    log = tmp_path / "torchrun.log"
    ranks = start_ranks(write_config(config, tmp_path / "two"), log, 0, words=("sft",))
    try:
        assert ranks.wait(timeout=240) == 0, log.read_text()[-6000:]
    finally:
        end(ranks)
    check(run_alone(config, tmp_path), config.run_path)


def test_a_rank_without_memory_names_the_budget_to_start_again_with(make_config: MakeConfig, tmp_path: Path) -> None:
    """A warm start has no checkpoint to go on from."""
    first = tmp_path / "first.py"
    first.write_text(
        "import os, torch\nfrom learner.training.engine import TorchEngine\n"
        "def fail(*_, **__):\n    raise torch.OutOfMemoryError('CUDA out of memory')\nTorchEngine.forward = fail\n"
    )
    config = config_of(make_config, tmp_path, FSDP2, {})
    file = write_config(config, tmp_path / "two")
    assert exit_codes([start("asyncrl_plugins.sft.run", file, first=str(first))], 240) == [3], logs(tmp_path / "two")
    assert "Start again with batch.tokens_per_microbatch=" in logs(tmp_path / "two", whole=True)
