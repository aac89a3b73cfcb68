"""The plan of a learner of several ranks against what two of them take on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.parts import LEARNER_ENGINES
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.memory_plan.plan import MemoryPlan, check_plan, make_plan
from benchmarks import random_models
from benchmarks.random_models import make_model
from tests.rigs.full_micro_batch import Shape
from tests.rigs.rank_rig import run_ranks
from tests.unit.asyncrl.test_memory_plan import SHAPE, planned

MakeConfig = Callable[..., RunConfig]
ABOVE = 1.6
"""A plan is for the worst micro-batch: at most so many times what a usual one takes, and never below it."""
RANKS: dict[str, Any] = {"engine": "fsdp2", "num_processes": 2}
FEW: Shape = (16, 4, 2, 1)
"""A micro-batch beside whose activations the gathered weights of `heavy` are large."""
BF16 = {"dtype": "bfloat16"}
CHECKPOINTED = {"gradient_checkpointing": True}
HEAVY = {
    "text": {"hidden": 256, "inter": 1024, "layers": 4, "heads": 4, "kv": 2, "vocabulary": 8000},
    "vision": {"hidden": 128, "inter": 256, "depth": 2, "heads": 4},
}
CASES: dict[str, tuple[str, Shape, dict[str, Any]]] = {
    "fp32": ("tiny", SHAPE, {}),
    "bf16, frozen tower": ("tiny", SHAPE, {"model": {**BF16, "freeze_vision_tower": True}}),
    "bf16, adapter, checkpointing": ("tiny", SHAPE, {"model": {**BF16, "lora": {"rank": 4}}, "learner": CHECKPOINTED}),
    "bf16, critic and reference": (
        "tiny",
        SHAPE,
        {"model": BF16, "algorithm": {"adv_estimator": "gae", "kl_loss_coef": 0.1}},
    ),
    "heavy, fp32": ("heavy", FEW, {}),
    "heavy, bf16, checkpointing": ("heavy", FEW, {"model": BF16, "learner": CHECKPOINTED}),
    "heavy, fp32, reduced once": ("heavy", FEW, {}),
    "heavy, bf16, reduced once": ("heavy", FEW, {"model": BF16, "learner": CHECKPOINTED}),
    "heavy, bf16, critic and reference": (
        "heavy",
        FEW,
        {"model": BF16, "algorithm": {"adv_estimator": "gae", "kl_loss_coef": 0.1}},
    ),
}


def config_of(make_config: MakeConfig, folder: Path, shape: Shape, sections: dict[str, Any]) -> RunConfig:
    prompt, response, group, groups = shape
    base: dict[str, dict[str, Any]] = {
        "model": {"freeze_vision_tower": False},
        "learner": RANKS,
        "data": {"max_prompt_length": prompt, "max_response_length": response},
        "batch": {"group_size": group, "tokens_per_microbatch": groups * (prompt + group * response)},
    }
    given = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    return planned(make_config, folder, **given)


def lines(plan: MemoryPlan) -> dict[str, int]:
    """Those of the learner, which come before the engine's."""
    return {line.name: line.nbytes for line in reversed(plan.phases[0].lines)}


def plans_and_measured(
    make_config: MakeConfig, tmp_path: Path, cases: dict[str, tuple[str, Shape, dict[str, Any]]], **learner: Any
) -> dict[str, tuple[MemoryPlan, dict[str, int]]]:
    folders = {size: make_model(tmp_path / size, size) for size in ("tiny", "heavy")}
    configs = {
        name: config_of(make_config, folders[size], shape, {**more, "learner": {**learner, **more.get("learner", {})}})
        for name, (size, shape, more) in cases.items()
    }
    shapes = {name: shape for name, (_, shape, _) in cases.items()}
    once = [name for name in cases if name.endswith("reduced once")]
    found = run_ranks(tmp_path / "two", configs, module="rank_memory", shapes=shapes, once=once)
    return {name: (make_plan(config), found[name]) for name, config in configs.items()}


def test_two_ranks_take_what_was_planned(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(random_models.SIZES, "heavy", HEAVY)
    for name, (plan, measured) in plans_and_measured(make_config, tmp_path, CASES).items():
        of_rank = lines(plan)
        parts = sum(nbytes for line, nbytes in of_rank.items() if line.startswith("parts of"))
        assert parts == measured["weights"] + measured["gradients"] + measured["moments"], name
        whole = 4 * plan.model.trained if name.endswith("reduced once") else 0  # as learner/loop/trainer.py counts it
        passing = of_rank["gathered layers"] + of_rank["working memory"] + whole
        assert measured["passing"] <= passing <= ABOVE * measured["passing"], name


def test_an_engine_whose_placement_is_not_known_is_not_planned_as_another(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LEARNER_ENGINES.built_in, "fsdp2", replace(LEARNER_ENGINES["fsdp2"], memory=""))
    config = make_config(learner=RANKS, gpu_memory={"budget_gib": 1})
    with pytest.raises(UserError, match=r"learner\.engine=fsdp2, only for torch.*\. Leave gpu_memory"):
        check_plan(config)
