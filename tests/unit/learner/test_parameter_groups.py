"""Parts of a model that are frozen, or step by a learning rate of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.models.parts import part_of
from asyncrl.processing.processor import PromptProcessor
from learner.training.engine import TorchEngine
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from tests.rigs.made_up_batch import made_up_batch
from tests.rigs.tiny_families import make_llava
from tests.system.test_bad_input import image_rows, write_rows

MakeConfig = Callable[..., RunConfig]


def prepared(make_config: MakeConfig, model: dict[str, Any] | None = None, **optim: Any) -> TorchEngine:
    optim = {"lr": 1e-2, "weight_decay": 0.0, "max_grad_norm": 1e9, **optim}
    config = make_config(model=model or {}, learner={"optim": optim})
    engine = TorchEngine(config.model_settings, config.learner.optim, 100)
    engine.prepare()
    return engine


def moved(engine: TorchEngine) -> dict[str, float]:
    """Largest movement of each part's weights after one step of gradients of 1: AdamW's first step is the rate."""
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    for parameter in engine.trained:
        parameter.grad = torch.ones_like(parameter)
    engine.optimizer_step()
    found: dict[str, float] = {}
    for name, parameter in engine.model.named_parameters():
        part = part_of(name.split("."))
        found[part] = max(found.get(part, 0.0), float((parameter.detach() - before[name]).abs().max()))
    return found


FREEZE = "freeze_vision_tower", "freeze_connector", "freeze_language_model"


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_parts_step_by_rates_of_their_own_or_not_at_all(make_config: MakeConfig, tmp_path: Path, family: str) -> None:
    check_rates(make_config, {"path": str(make_llava(tmp_path))} if family == "llava" else {})


def check_rates(make_config: MakeConfig, model: dict[str, Any]) -> None:
    """Compare the movement of each part with its rate."""
    rates = moved(prepared(make_config, model, connector_lr=3e-2, vision_tower_lr=1e-3))
    assert rates == pytest.approx({"vision_tower": 1e-3, "connector": 3e-2, "language_model": 1e-2}, rel=1e-3)
    alone = {**model, "freeze_vision_tower": True, "freeze_language_model": True}
    rates = moved(prepared(make_config, alone, connector_lr=3e-2))
    assert rates == pytest.approx({"vision_tower": 0, "connector": 3e-2, "language_model": 0}, rel=1e-3)
    rates = moved(prepared(make_config, {**model, "freeze_connector": True}))
    assert rates == pytest.approx({"vision_tower": 1e-2, "connector": 0, "language_model": 1e-2}, rel=1e-3)
    with pytest.raises(UserError, match=r"nothing of the model .* with model.freeze_vision_tower, .*_connector, "):
        prepared(make_config, {**model, **dict.fromkeys(FREEZE, True)})


@pytest.mark.parametrize(
    ("frozen", "rows"),
    [
        (("language_model",), [0, 1, 2]),
        (("language_model", "vision_tower"), [0, 1, 2]),
        (("language_model", "connector"), [2, 0, 0]),
        (("language_model",), [0, 0, 0]),
    ],
    ids=str,
)
def test_text_rows_of_a_frozen_language_model_give_no_gradient_and_stop_nothing(
    make_config: MakeConfig, tmp_path: Path, frozen: tuple[str, ...], rows: list[int]
) -> None:
    """Each row is a micro-batch of its own; what is trained moves where there is an image, and only then."""
    given = image_rows(tmp_path, [(28, 28)] * 4)
    config = make_config(
        model=dict.fromkeys((f"freeze_{part}" for part in frozen), True),
        data={**write_rows(tmp_path, [given[row] for row in rows]), "max_prompt_length": 200},
        batch={"prompts_per_step": 3},
        learner={"vision_features_mib": 0},
    )
    engine = TorchEngine(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    step = LearnerStep(Roles(engine), config.step_settings)
    step.budget.tokens = 1
    metrics = step(made_up_batch(config, PromptProcessor(config.model)), 2)
    moved = {part_of(n.split(".")) for n, p in engine.model.named_parameters() if not torch.equal(p, before[n])}
    trained = {"vision_tower", "connector", "language_model"} - set(frozen)
    assert moved == (trained if any(rows) else set())
    assert (metrics["grad_norm"] > 0) == any(rows)


def test_moments_of_other_groups_are_not_taken(make_config: MakeConfig, tmp_path: Path) -> None:
    """Moments are kept by place: with other groups they would be other tensors'."""
    engine = prepared(make_config, connector_lr=3e-2)
    moved(engine)
    engine.files(copies=False)(tmp_path)
    other = prepared(make_config, connector_lr=1e-3)
    other.load(tmp_path)
    assert sorted({group["lr"] for group in other.updates.optimizer.param_groups}) == [1e-3, 1e-2]
    with pytest.raises(UserError, match=r"holds moments of groups of \[.*connector_lr of the optimiser"):
        prepared(make_config).load(tmp_path)
