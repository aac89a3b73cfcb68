"""DeepSpeed's ZeRO takes the steps of one process, at each stage, on one rank and on two, and a run goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from learner.ranks.group import ALONE
from tests.conftest import small_config
from tests.rigs.rank_rig import run_ranks, take_steps
from tests.system.test_bad_input import image_rows, write_rows
from tests.system.test_ranks import (
    STEPS,
    TOLERANCE,
    check_run_with_a_killed_rank,
    check_stopped_before_an_update,
    check_weights,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]
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
        "algorithm": {"adv_estimator": "gae", "kl_loss_coef": 0.1, "papo": {"kl_coef": 0.01}},
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
PLACED = {
    1: [(FULL, 1), (FULL, 2), (FULL, 3)],
    2: [
        *((case, stage) for case in (FULL, CRITIC) for stage in (1, 2, 3)),
        (ADAPTER, 3),
        (EXACT, 2),
        (EXACT, 3),
        (OFFLOAD, 2),
    ],
}
"""Cases and stages by the number of ranks."""
RESUMED = [(FULL, 3), (CRITIC, 1), (ADAPTER, 3), (OFFLOAD, 3)]
"""Those that two ranks continue from the checkpoint of one process."""
POISONED = {
    f"poisoned, {dtype}, stage {stage}": (dtype, stage)
    for dtype, stage in (("float32", 2), ("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 3))
}


@dataclass(frozen=True)
class Compared:
    folder: Path
    configs: dict[str, RunConfig]
    """Of one process, by cases."""
    metrics: dict[str, Any]
    """By names of folders in `folder`."""

    def check(self, case: str, alone: str, divided: str) -> None:
        """Compare metrics, published weights and checkpoints."""
        config = self.configs[case]
        tolerance = TOLERANCE[config.model.dtype]
        for mine, theirs in zip(self.metrics[alone], self.metrics[divided], strict=True):
            assert theirs == pytest.approx(mine, rel=tolerance, abs=tolerance, nan_ok=True)
        check_weights(config, self.folder / alone, self.folder / divided)


@pytest.fixture(scope="module")
def compared(tiny_model: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """All cases, alone and on ranks, which are started once for each number of them."""
    folder = tmp_path_factory.mktemp("zero")
    rows = image_rows(folder, SIZES)
    data = {**write_rows(folder, [rows[0], *rows]), "max_prompt_length": 400, "shuffle": False}

    def make(sections: dict[str, Any], **learner: Any) -> RunConfig:
        optim = {"lr": 1e-3, "weight_decay": 0.01}
        settings = {"optim": optim, **sections.get("learner", {}), **learner}
        return small_config(tiny_model, digits_data, folder / "run", **{**sections, "data": data, "learner": settings})

    def divided(case: str, stage: int) -> RunConfig:
        return make(CASES[case], engine="deepspeed", zero_stage=stage)

    found: dict[str, Any] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    configs = {case: make(sections, cpu_offload=False) for case, sections in CASES.items()}
    for case, config in configs.items():
        found[case] = take_steps(config, folder / case, ALONE, STEPS)
    for case, _ in RESUMED:
        found[f"{case}, again"] = take_steps(
            configs[case], folder / f"{case}, again", ALONE, STEPS, start=folder / case
        )
    torch.set_num_threads(threads)
    for size, placed in PLACED.items():
        on_ranks = {f"{case}, stage {stage}": divided(case, stage) for case, stage in placed}
        if size == 2:
            on_ranks |= {f"{case}, again": divided(case, stage) for case, stage in RESUMED}
            on_ranks |= {
                name: make({"model": {"dtype": dtype}}, engine="deepspeed", zero_stage=stage)
                for name, (dtype, stage) in POISONED.items()
            }
        starts = {f"{case}, again": folder / case for case, _ in RESUMED}
        results = run_ranks(
            folder / str(size), on_ranks, size=size, steps=STEPS, starts=starts, poisoned=list(POISONED)
        )
        found |= {f"{size}/{name}": result for name, result in results.items()}
    return Compared(folder, configs, {name: result.get("metrics") for name, result in found.items()})


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("size", "case", "stage"), [(n, *place) for n, places in PLACED.items() for place in places])
def test_steps_are_those_of_one_process(compared: Compared, size: int, case: str, stage: int) -> None:
    compared.check(case, case, f"{size}/{case}, stage {stage}")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", [case for case, _ in RESUMED])
def test_the_checkpoint_of_one_process_is_continued(compared: Compared, case: str) -> None:
    compared.check(case, f"{case}, again", f"2/{case}, again")


@pytest.mark.parametrize("name", POISONED)
def test_one_ranks_gradient_that_is_not_finite_stops_all(compared: Compared, name: str) -> None:
    check_stopped_before_an_update(compared.folder / "2" / name)


def test_a_rank_that_is_killed_costs_nothing(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    learner = {"engine": "deepspeed", "zero_stage": 3, "num_processes": 2, "optim": {"lr": 1e-3}}
    check_run_with_a_killed_rank(make_config, tmp_path, learner, steps=6)
