"""`asyncrl eval`: the configured decoding, and its scores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import RewardConfig
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import evaluation_scores
from asyncrl_plugins.evaluation import plain_scores as module
from asyncrl_plugins.evaluation.plain_scores import evaluate, scores_line


def test_a_share_of_right_completions_is_called_pass_at_k_and_a_graded_component_by_its_mean() -> None:
    scores = evaluation_scores([[(1.0, 2.0), (0.0, 1.0)], [(0.0, 0.0), None], [None, None], [(1.0, 3.0), (1.0, 3.0)]])
    assert scores_line(scores, 2, "right").startswith(
        "pass@1 0.6000 ± 0.2887 (standard error)   pass@2 0.6667   reward"
    )
    graded = evaluation_scores([[(1.0, 2.0), (0.5, 1.0)], [(0.0, 0.0), None]])
    assert scores_line(graded, 2, "close").startswith(
        "mean close 0.5000 ± 0.3750 (standard error)   best of 2 0.5000  "
    )
    assert scores_line(graded, 1, "").startswith("mean reward 0.5000 ± 0.3750 (standard error)   reward 1.0000")


def test_the_configured_temperature_and_group_size_are_used(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"max_val_rows": 4, "max_response_length": 8}
    config = make_config(data=data)
    sampled = make_config(data=data, evaluation={"temperature": 1.0, "group_size": 3})
    score = module._score
    seen: list[list[str]] = []

    async def watched(reward: RewardConfig, size: int, samples: Sequence[RewardSample]) -> object:
        seen.append([sample.completion for sample in samples])
        return await score(reward, size, samples)

    monkeypatch.setattr(module, "_score", watched)
    evaluate(config, Path(config.model.path))
    evaluate(sampled, Path(config.model.path), prefix="answer")
    evaluate(sampled, Path(config.model.path), prefix="answer")
    greedy, first, again = seen
    assert len(greedy) == 4
    assert len(first) == 12
    assert len(set(first[:3])) > 1, "three different completions of the first row"
    assert first == again, "the same seed"
    assert all(text.startswith("answer") for text in first)


def test_a_completion_ends_at_every_stop_token_of_training(
    make_config: Callable[..., RunConfig], tiny_model: Path, tmp_path: Path
) -> None:
    """generation_config.json names each token: the first that is sampled ends a completion."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(343))}))
    samples = module.complete_held_out(make_config(data={"max_val_rows": 2}), folder)
    assert [(sample.finish_reason, sample.num_tokens) for sample in samples] == [("stop", 1)] * 2


@pytest.mark.parametrize("eos", ["kept", "missing"])
def test_a_tokenizer_without_padding_scores_the_same(
    make_config: Callable[..., RunConfig], tiny_model: Path, tmp_path: Path, eos: str
) -> None:
    """Prompts of unequal length are padded with any token, which attention leaves out; Llama 3 names none."""
    config = make_config(data={"max_val_rows": 4, "max_response_length": 4})
    wanted = [sample.completion for sample in module.complete_held_out(config, tiny_model)]
    shutil.copytree(tiny_model, folder := tmp_path / "model")
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        described = json.loads((folder / name).read_text())
        dropped = ["pad_token", "pad_token_id", *(["eos_token"] if eos == "missing" else [])]
        for part in (described, described.get("text_config", {})):
            for key in dropped:
                part.pop(key, None)
        (folder / name).write_text(json.dumps(described))
    assert [sample.completion for sample in module.complete_held_out(config, folder)] == wanted
