"""A learned reward model in a process of its own: its scores, its failures, and mistakes that are found before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from asyncrl.config.sections import RewardConfig
from asyncrl.errors import UserError
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score
from asyncrl.rewards.scorer import RewardScorer
from asyncrl.rewards.spec import check_rewards
from tests.rigs.reward_pools import run_pool
from tests.rigs.tiny import make_tiny_classifier


def config_of(path: Path | str, **kwargs: Any) -> RewardConfig:
    functions = [{"function": "exact_match"}, {"function": "reward_model", "kwargs": {"path": str(path), **kwargs}}]
    return RewardConfig.model_validate({"functions": functions, "workers": 1})


def sample(completion: str) -> RewardSample:
    messages = [{"role": "user", "content": "What is the sum of the digits?"}]
    return RewardSample(completion, messages=messages, answer="4")


def by_itself(folder: Path, text: str) -> float:
    """The model's logit for one conversation, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    messages = [*sample(text).messages, {"role": "assistant", "content": text}]
    ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
    with torch.inference_mode():
        return model(ids).logits.item()


def test_scores_are_the_models_in_any_batch(tmp_path: Path) -> None:
    folder = make_tiny_classifier(tmp_path / "model")
    texts = ["4", "read 1 3 answer 4", "", "answer 0", "4 4 4 4"]

    async def scenario(pool: RewardScorer) -> list[Score]:
        return await asyncio.gather(*(pool.score(sample(text)) for text in [*texts, "4 " * 60]))

    scored = run_pool(config_of(folder, batch=4), scenario)
    *scored, too_long = scored
    assert [score.components["exact_match"] for score in scored] == [1, 0, 0, 0, 0]
    expected = [by_itself(folder, text) for text in texts]
    assert [score.components["reward_model"] for score in scored] == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == len(texts)
    assert scored[0].reward == pytest.approx(1.0 + expected[0], abs=1e-5)
    assert too_long.error_kind == "reward_exception"
    assert "tokens, and the model takes 64" in too_long.error_message


def test_mistakes_are_found_without_loading_the_model(tmp_path: Path) -> None:
    two = make_tiny_classifier(tmp_path / "two", labels=2)
    check_rewards(config_of(two, label=1))
    causal = make_tiny_classifier(tmp_path / "causal")
    config = (causal / "config.json").read_text()
    (causal / "config.json").write_text(config.replace("Qwen2ForSequenceClassification", "Qwen2ForCausalLM"))
    for path, kwargs, message in [
        (tmp_path / "none", {}, "reward reward_model: kwargs.path is '.*': there is no config.json"),
        (two, {}, "has 2 classes. Set kwargs.label"),
        (two, {"label": 2}, "kwargs.label is 2, but the model has classes 0 to 1"),
        (causal, {}, "a model of Qwen2ForCausalLM, but a reward model is a sequence classifier"),
        (two, {"label": 1, "device": "gpu"}, "kwargs.device is 'gpu'. Use cpu, or cuda:1"),
        (two, {"label": 1, "bacth": 2}, "unknown key kwargs.bacth. Did you mean 'batch'"),
    ]:
        with pytest.raises(UserError, match=message):
            check_rewards(config_of(path, **kwargs))
