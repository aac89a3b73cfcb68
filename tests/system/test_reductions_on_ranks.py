"""Gradients that ranks reduce once in an update are those that they reduce after each micro-batch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.schema import RunConfig
from asyncrl.processing.processor import PromptProcessor
from learner.training.engine import ENGINE_FILE
from learner.training.rank_plan import plan_shares
from learner.training.sharded_files import named_values, read_whole_state
from tests.conftest import small_config
from tests.rigs.made_up_batch import made_up_batch
from tests.rigs.rank_cases import BF16
from tests.rigs.rank_rig import run_ranks
from tests.system.test_bad_input import image_rows, write_rows

pytestmark = pytest.mark.slow
IMAGES = {"batch": {"prompts_per_step": 8, "group_size": 4, "tokens_per_microbatch": 90}}
"""The tower of the vision model has a gradient from the first of four micro-batches alone."""
CASES: dict[str, dict[str, Any]] = {
    "images, checkpointing": {**IMAGES, "learner": {"gradient_checkpointing": True}},
    "images, offload": {**IMAGES, "learner": {"cpu_offload": True}},
    "images, adapter, bf16": {**IMAGES, "model": {**BF16, "lora": {"rank": 4}}},
    "critic, an idle rank, bf16": {
        "model": BF16,
        "algorithm": {"adv_estimator": "gae", "kl_loss_coef": 0.1},
        "batch": {"prompts_per_step": 1, "group_size": 3, "tokens_per_microbatch": 60},
        "data": {"max_prompt_length": 20, "max_response_length": 40},
    },
}
REDUCTIONS = {
    "images, checkpointing": ([4 + 3 * 3], [4]),  # two layers, one of the tower, and all that belongs to none
    "images, offload": ([4 + 3 * 3], [4]),
    "images, adapter, bf16": ([4 * 2], [2]),  # of two layers, for each micro-batch
    "critic, an idle rank, bf16": ([2 * (3 + 4)], [3 + 4]),  # the critic's value head is a unit of its own
}


def config_of(model: Path, data: Path, folder: Path, case: dict[str, Any]) -> RunConfig:
    folder.mkdir()
    plain, shown, _ = image_rows(folder, [(28, 40), (56, 28), (28, 28), (70, 42)])
    rows = write_rows(folder, [shown, *[plain] * 7] if "data" not in case else [plain])
    lengths = {"max_prompt_length": 64, "max_response_length": 24, "shuffle": False, **case.get("data", {})}
    learner = {"num_processes": 2, "engine": "fsdp2", "optim": {"lr": 1e-3, "weight_decay": 0.01}}
    sections = {**case, "data": {**rows, **lengths}, "learner": {**learner, **case.get("learner", {})}}
    return small_config(model, data, folder / "run", **sections)


def test_an_update_is_the_same_with_one_reduction_for_each_layer(
    tiny_model: Path, digits_data: Path, tmp_path: Path
) -> None:
    """Sums in another order: gradients and weights differ by rounding."""
    configs = {name: config_of(tiny_model, digits_data, tmp_path / name, case) for name, case in CASES.items()}
    ways = {f"{name}, {way}": config for name, config in configs.items() for way in ("each", "once")}
    found = run_ranks(tmp_path / "two", ways, steps=1, once=[name for name in ways if name.endswith("once")])
    for name, config in configs.items():
        groups = made_up_batch(config, PromptProcessor(config.model)).train_groups
        plan = plan_shares(groups, config.batch.microbatch_tokens, 2)
        idle = [any(share.is_idle for share in shares) for shares in plan]
        assert idle == [False] * (len(plan) - 1) + ["idle" in name]
        shown = [any(len(g.prompt.image_grids) for share in shares for g in share.groups) for shares in plan]
        assert shown == ([True, False, False, False] if "images" in name else [False, False])

        each, once = (found[f"{name}, {way}"]["reductions"] for way in ("each", "once"))
        assert (each, once) == REDUCTIONS[name]
        folders = [tmp_path / "two" / f"{name}, {way}" for way in ("each", "once")]
        for file in [file.relative_to(folders[0]) for file in folders[0].rglob(ENGINE_FILE)]:
            check_close(*(named_values(read_whole_state(folder / file)) for folder in folders))
        check_close(*(load_file(folder / "1.safetensors").items() for folder in folders))


def check_close(*states: Iterable[tuple[str, Any]]) -> None:
    """Compare each tensor by its norm: masters or weights, and moments, which are gradients after one update."""
    each, once = map(dict, states)
    assert each.keys() == once.keys()
    tensors = {name: value for name, value in each.items() if isinstance(value, torch.Tensor)}
    assert tensors
    for name, value in tensors.items():
        assert (value - once[name]).float().norm() <= 1e-6 * value.float().norm(), name
