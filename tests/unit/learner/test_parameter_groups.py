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
from learner.training.engine import TorchEngine
from tests.rigs.tiny_families import make_llava

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
