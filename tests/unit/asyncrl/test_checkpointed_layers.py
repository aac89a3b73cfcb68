"""Layers that keep their activations while others are computed again: the same bits, planned, and as many as fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig, changed
from asyncrl.memory_plan import GIB
from asyncrl.memory_plan.live_bytes import LiveBytes
from asyncrl.memory_plan.plan import make_plan
from asyncrl.memory_plan.rehearsal import rehearse
from asyncrl.memory_plan.token_choice import LAYERS, settle_layers
from asyncrl.models import sampling_distribution
from asyncrl.processing.processor import PromptProcessor
from benchmarks import random_models
from learner.loop.trainer import Trainer
from learner.training.engine import TorchEngine
from tests.rigs.full_micro_batch import full_micro_batch
from tests.rigs.made_up_batch import made_up_batch
from tests.unit.asyncrl.test_memory_plan import ABOVE, SHAPE, planned

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]
NUMBER = 6
DEEP = {
    "text": {"hidden": 64, "inter": 128, "layers": NUMBER, "heads": 2, "kv": 1, "vocabulary": 512},
    "vision": {"hidden": 32, "inter": 64, "depth": 2, "heads": 2},
}
BF16 = {"dtype": "bfloat16"}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(random_models.SIZES, "deep", DEEP)
        yield random_models.make_model(tmp_path_factory.mktemp("model") / "deep", "deep")


def engine_of(config: RunConfig) -> TorchEngine:
    engine = TorchEngine(config.model_settings, config.learner.optim, 10)
    engine.prepare()
    return engine


def gradients_and_calls(config: RunConfig) -> tuple[list[torch.Tensor], int, int]:
    """Gradients of a pass, and how often layers of the language model and of the vision tower computed."""
    engine, calls = engine_of(config), {"Qwen2_5_VLDecoderLayer": 0, "Qwen2_5_VLVisionBlock": 0}

    def count(module: torch.nn.Module, *_: Any) -> None:
        calls[type(module).__name__] += 1

    for module in engine.model.modules():
        if type(module).__name__ in calls:
            module.register_forward_pre_hook(count)
    engine.backward(engine.forward(full_micro_batch(engine.model, SHAPE)).logprobs.sum())
    text, tower = calls.values()
    return [p.grad for p in engine.model.parameters() if p.grad is not None], text, tower


@pytest.mark.parametrize("model", [{"freeze_vision_tower": False}, BF16, {**BF16, "lora": {"rank": 4}}], ids=str)
def test_gradients_have_the_same_bits_whatever_layers_are_computed_again(
    make_config: MakeConfig, deep: Path, model: dict[str, Any]
) -> None:
    expected: list[torch.Tensor] = []
    for layers, again in ((False, 0), (True, NUMBER), (4, 4), (1, 1), (NUMBER + 1, NUMBER)):
        config = planned(make_config, deep, model=model, learner={"gradient_checkpointing": layers})
        found, text, tower = gradients_and_calls(config)
        assert text == NUMBER + again
        assert tower == 2 + 2 * (layers is not False and "freeze_vision_tower" in model)
        expected = expected or found
        assert len(found) == len(expected) > 0
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_activations_that_stay_are_planned(
    make_config: MakeConfig, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From above, and each layer that keeps them takes as much more."""
    monkeypatch.setattr(sampling_distribution, "CACHED_VALUES", 2**40)  # in one piece, as on the GPU that is planned
    passing: list[int] = []
    for layers in range(1, NUMBER + 1):
        config = planned(make_config, deep, model=BF16, learner={"gradient_checkpointing": layers})
        passing.append(rehearse(config).passing)
        if layers % 2:
            engine = engine_of(config)
            micro_batch = full_micro_batch(engine.model, SHAPE)
            engine.backward(engine.forward(micro_batch, entropy="value").logprobs.sum())
            held = [p.grad for p in engine.trained if p.grad is not None]
            with LiveBytes("cpu", known=[*engine.model.parameters(), *engine.model.buffers(), *held]) as live:
                engine.backward(engine.forward(micro_batch, entropy="value").logprobs.sum())
            assert live.peak <= passing[-1] <= ABOVE * live.peak
    saved = {more - less for more, less in pairwise(passing)}
    assert len(saved) == 1, "each layer keeps as much"
    assert saved.pop() > 0


def budgeted(config: RunConfig, layers: int, more: int = 0) -> RunConfig:
    """With a budget of what so many checkpointed layers take, and `more` bytes."""
    needed = make_plan(changed(config, {LAYERS: layers})).phases[0].nbytes
    return changed(config, {"gpu_memory.budget_gib": (needed + more) / GIB})


def test_as_few_layers_are_computed_again_as_the_budget_lets(make_config: MakeConfig, deep: Path) -> None:
    config = planned(make_config, deep, learner={"gradient_checkpointing": True, "device": "cpu"})
    for layers, more, expected in ((3, 0, 3), (3, -1, 4), (1, GIB, 1), (NUMBER, -1, NUMBER)):
        settled, said = settle_layers(budgeted(config, layers, more), 1)
        assert settled.learner.gradient_checkpointing == expected
        assert said.startswith(f"{LAYERS}: {expected} of {NUMBER} layers are computed again")


def test_nothing_changes_without_a_budget_or_a_choice(make_config: MakeConfig, deep: Path) -> None:
    config = planned(make_config, deep, learner={"gradient_checkpointing": True})
    for same in (
        config,
        changed(config, {"gpu_memory.budget_gib": 40, LAYERS: False}),
        changed(config, {"gpu_memory.budget_gib": 40, LAYERS: 2}),
    ):
        assert settle_layers(same, 1) == (same, "")


def test_a_learner_takes_the_number_and_says_it_in_its_metrics(make_config: MakeConfig, deep: Path) -> None:
    config = budgeted(planned(make_config, deep, learner={"gradient_checkpointing": True}), 4)
    processor = PromptProcessor(config.model)
    resumed, training = (Trainer(config, processor, num_rows=64) for _ in range(2))
    for each in (resumed, training):
        layers = each.engine.model.get_decoder().layers
        assert [layer.gradient_checkpointing for layer in layers] == [True] * 4 + [False] * 2
    values = training.learn(made_up_batch(config, processor).received)[1]
    assert values["memory/checkpointed_layers"] == 4
