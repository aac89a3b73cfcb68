"""Configurations whose steps on ranks are compared with those of one process, their rows, and a comparison of
checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from learner.training.engine import ENGINE_FILE
from learner.training.reference import AVERAGES_FILE
from learner.training.sharded_files import named_values, read_whole_state
from tests.system.test_bad_input import image_rows, write_rows

BF16 = {"dtype": "bfloat16"}
SIZES = [(28, 40), (56, 28), (28, 28), (70, 42)]
"""Height and width of the images: two rows have none and are the first update, then one has one, and one has three."""
CASES: dict[str, dict[str, Any]] = {
    "text and images, two updates": {
        "batch": {"tokens_per_microbatch": 410},
        "algorithm": {"updates_per_batch": 2, "kl_loss_coef": 0.1},
        "reference": {"reset_every_steps": 1, "reset_optimizer": True},
        "learner": {"gradient_checkpointing": True},
    },
    "critic and moving reference, bf16": {
        "batch": {"tokens_per_microbatch": 1640},
        "algorithm": {"adv_estimator": "gae", "kl_loss_coef": 0.1},
        "reference": {"ema": 0.9},
        "model": BF16,
    },
    "adapter, bf16": {
        "batch": {"tokens_per_microbatch": 410},
        "model": {**BF16, "lora": {"rank": 4}},
        "algorithm": {"kl_loss_coef": 0.1},
    },
    "exact KL": {
        "batch": {"tokens_per_microbatch": 410},
        "algorithm": {"kl_loss_coef": 0.1, "kl_reward_coef": 0.05, "kl_estimator": "full"},
    },
    "offload": {
        "batch": {"tokens_per_microbatch": 410},
        "algorithm": {"updates_per_batch": 2},
        "learner": {"cpu_offload": True},
    },
}
FULL, CRITIC, ADAPTER, EXACT, OFFLOAD = CASES


def rows_of_sizes(folder: Path) -> dict[str, Any]:
    """The section `data` of rows with images of SIZES, in their order."""
    rows = image_rows(folder, SIZES)
    return {**write_rows(folder, [rows[0], *rows]), "max_prompt_length": 400, "shuffle": False}


def check_same_checkpoint(one: Path, other: Path) -> None:
    """Compare models and states of all roles that the first has."""
    states = [file.relative_to(one) for file in one.rglob("*.pt") if file.name in (ENGINE_FILE, AVERAGES_FILE)]
    assert Path(ENGINE_FILE) in states
    for file in states:
        mine, theirs = (dict(named_values(read_whole_state(folder / file))) for folder in (one, other))
        for name, value in mine.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, theirs[name]), name
        assert mine.get("schedule.last_epoch") == theirs.get("schedule.last_epoch")
    (weights,) = (one / "model").glob("*.safetensors")  # of a model, or of an adapter
    mine, theirs = (load_file(folder / "model" / weights.name) for folder in (one, other))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
