"""A learned reward model in a process of its own: its scores, its failures, and mistakes that are found before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Gemma2Config, Phi3Config

from asyncrl.config.sections import RewardConfig
from asyncrl.demo.model import build_tokenizer
from asyncrl.errors import UserError
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score
from asyncrl.rewards.scorer import RewardScorer
from asyncrl.rewards.spec import check_rewards
from asyncrl_plugins.judges.reward_model import RewardModel
from asyncrl_plugins.judges.reward_model_settings import RewardModelSettings
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


def test_a_classifiers_scores_have_its_caps_and_its_rotary_frequencies(tmp_path: Path) -> None:
    """Gemma 2 caps scores of attention, which PyTorch's does not; a long row would change frequencies of its batch."""
    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": len(tokenizer)}
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_labels": 1,
        "pad_token_id": tokenizer.pad_token_id,
    }
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    until = {"original_max_position_embeddings": 40}
    kinds: dict[str, Any] = {
        "gemma2": Gemma2Config(head_dim=8, attn_logit_softcapping=0.1, **sizes, **heads),
        "phi3": Phi3Config(rope_parameters=rotary | until, max_position_embeddings=64, **until, **sizes, **heads),
    }
    models: dict[str, RewardModel] = {}
    for name, config in kinds.items():
        torch.manual_seed(0)
        whole = AutoModelForSequenceClassification.from_config(config)
        for parameter in whole.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        whole.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        models[name] = RewardModel(RewardModelSettings(path=str(tmp_path / name)))
    ids = models["gemma2"].encode(sample("read 1 3 answer 4"))
    plain, uncapped = (
        AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "gemma2", attn_implementation=attention, dtype=torch.float32
        )(torch.tensor([ids])).logits.item()
        for attention in ("eager", "sdpa")
    )
    assert models["gemma2"].scores([ids]) == pytest.approx([plain], abs=1e-5)
    assert abs(uncapped - plain) > 1e-3
    with pytest.raises(ValueError, match="tokens, and the model takes 40"):
        models["phi3"].encode(sample("4 " * 45))
