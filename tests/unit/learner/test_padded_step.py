"""An optimiser step of every family is that of ordinary training: whole sequences side by side, padded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.models.output_head import TokenOutputs
from asyncrl.models.parts import part_of
from asyncrl.models.sampling_distribution import entropies, gather_logprobs, sampling_logprobs
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.model_inputs import media_inputs
from asyncrl.processing.processor import PromptProcessor
from learner.training.engine import TorchEngine
from learner.training.packing import MicroBatch, plan_micro_batches
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from tests.rigs.made_up_batch import made_up_batch
from tests.rigs.tiny_families import make_family, make_llava
from tests.system.test_bad_input import image_rows, write_rows
from tests.system.test_video import mixed_rows

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen2_vl": lambda folder: make_family("qwen2_vl", folder),
    "qwen2_5_vl": lambda folder: make_family("qwen2_5_vl", folder),
    "qwen3_vl": lambda folder: make_family("qwen3_vl", folder),
    "llava": make_llava,
}
SIZES = [(28, 40), (56, 28), (28, 28), (70, 42)]
"""Of the images in the rows: height and width in pixels."""
LR = 1e-2


class SteppingEngine(TorchEngine):
    """An engine that keeps what the optimiser got and where it went from there."""

    def optimizer_step(self) -> dict[str, float]:
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        taken = super().optimizer_step()
        self.weights = {name: self.model.get_parameter(name).detach() for name in self.gradients}
        return taken


class PaddedEngine(SteppingEngine):
    """Each completion behind its prompt in a row of its own, filled up on the right, with the model's own attention,
    positions and logits."""

    def prepare(self) -> None:
        super().prepare()
        self.model.set_attn_implementation({"text_config": "sdpa"})

    def forward(self, micro_batch: MicroBatch, **asked: Any) -> TokenOutputs:
        rows = [(group.prompt, each) for group in micro_batch.groups for each in group.completions]
        begin = {each.row: (number, len(prompt.token_ids)) for number, (prompt, each) in enumerate(rows)}
        number, first = torch.tensor([begin[row] for row in micro_batch.row.tolist()]).T
        inputs = padded_inputs(self.model, [(prompt, each.token_ids) for prompt, each in rows])
        logits = self.model(**inputs, use_cache=False).logits[number, first + micro_batch.column - 1]
        banned = torch.tensor(sorted(PromptProcessor(self.settings.model).placeholder_ids))
        logprobs = sampling_logprobs(logits, temperature=self.settings.rollout.temperature, banned=banned)
        return TokenOutputs(gather_logprobs(logprobs, micro_batch.targets), entropies=entropies(logprobs))


def padded_inputs(model: Any, rows: Sequence[tuple[EncodedPrompt, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Keyword arguments of the model for prompts and completions; each row has its images once more."""

    def padded(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> torch.Tensor:
        columns = [torch.from_numpy(np.concatenate(part)).long() for part in parts]
        return torch.nn.utils.rnn.pad_sequence(columns, batch_first=True)

    prompts = [prompt for prompt, _ in rows]
    types = padded((prompt.token_types, np.zeros_like(ids)) for prompt, ids in rows)
    seconds = [each for prompt in prompts for each in prompt.seconds_per_grid]
    return {
        "input_ids": padded((prompt.token_ids, ids) for prompt, ids in rows),
        "attention_mask": padded((np.ones_like(prompt.token_ids), np.ones_like(ids)) for prompt, ids in rows),
        **media_inputs(model, prompts, types),
        **({"second_per_grid_ts": torch.tensor(seconds)} if seconds else {}),
    }


def rows_of(family: str, folder: Path) -> list[dict[str, Any]]:
    """No image, one and three of different sizes; and videos where the family has them."""
    videos = mixed_rows(folder)[:2] if family.startswith("qwen") else []
    return [
        *image_rows(folder, SIZES),
        *videos,
        {"prompt": "no image either"},
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_that_of_padded_rows_in_one_micro_batch_and_in_many(
    make_config: MakeConfig, tmp_path: Path, family: str
) -> None:
    check_step(make_config, tmp_path, family, FAMILIES[family](tmp_path / "model"))


def check_step(make_config: MakeConfig, tmp_path: Path, family: str, model: Path) -> None:
    """Compare the loss, every gradient, and the weights after AdamW's step."""
    rows = rows_of(family, tmp_path) * 2
    whole, small = 8192, 160 if family.startswith("qwen") else 88
    sections: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {**write_rows(tmp_path, rows), "shuffle": False, "max_prompt_length": small - 8},
        "rollout": {"temperature": 0.8},
        "learner": {"optim": {"lr": LR, "weight_decay": 0.01}},
        "algorithm": {"entropy_coeff": 0.01},
    }
    done: list[tuple[float, SteppingEngine]] = []
    for kind, budget in itertools.product((SteppingEngine, PaddedEngine), (small, whole)):
        config = make_config(
            **sections, batch={"prompts_per_step": len(rows), "group_size": 4, "tokens_per_microbatch": budget}
        )
        batch = made_up_batch(config, PromptProcessor(config.model))
        parts = len(plan_micro_batches(batch.train_groups, budget))
        assert parts == 1 if budget == whole else parts >= 4
        engine = kind(config.model_settings, config.learner.optim, 1)
        engine.prepare()
        done.append((LearnerStep(Roles(engine), config.step_settings)(batch, 3)["loss"], engine))
    (loss, expected), *others = reversed(done)
    largest = max(float(grad.abs().max()) for grad in expected.gradients.values())
    assert {part_of(name.split(".")) for name in expected.gradients} == {"vision_tower", "connector", "language_model"}
    for its_loss, engine in others:
        compared = 0
        assert its_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert engine.gradients.keys() == expected.gradients.keys()
        for name, grad in expected.gradients.items():
            torch.testing.assert_close(engine.gradients[name], grad, rtol=1e-3, atol=1e-5 * largest, msg=name)
            # AdamW's first step is the sign of a gradient that is none but for rounding, as that of a key's bias.
            clear = grad.abs() > max(1e-5 * largest, 1e-2 * float(grad.abs().max()))
            apart = engine.weights[name] - expected.weights[name]
            assert float((apart * clear).abs().max()) < 1e-2 * LR, name
            compared += int(clear.sum())
        assert compared > 1000
