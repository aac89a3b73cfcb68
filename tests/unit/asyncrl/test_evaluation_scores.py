"""`asyncrl eval`: the configured decoding, and its scores."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import RewardConfig
from asyncrl.demo import scoring as module
from asyncrl.demo.scoring import evaluate, scores_line
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import evaluation_scores


def test_completions_of_a_row_are_one_observation_and_those_without_a_score_are_counted() -> None:
    rows = [[(1.0, 2.0), (0.0, 1.0)], [(0.0, 0.0), None], [None, None], [(1.0, 3.0), (1.0, 3.0)]]
    scores = evaluation_scores(rows)
    assert scores.accuracy == pytest.approx(3 / 5)
    assert scores.best == pytest.approx(2 / 3), "rows with a right completion, of rows with a score"
    assert scores.reward == pytest.approx(9 / 5)
    assert scores.accuracy_error == pytest.approx(0.5 / math.sqrt(3)), "standard deviation of 0.5, 0, 1 over three rows"
    assert (scores.rows, scores.errors) == (4, 3)
    assert scores_line(scores, 2, "right").startswith(
        "pass@1 0.6000 ± 0.2887 (standard error)   pass@2 0.6667   reward"
    )
    graded = evaluation_scores([[(1.0, 2.0), (0.5, 1.0)], [(0.0, 0.0), None]])
    assert scores_line(graded, 2, "close").startswith(
        "mean close 0.5000 ± 0.3750 (standard error)   best of 2 0.5000  "
    )
    assert scores_line(graded, 1, "").startswith("mean reward 0.5000 ± 0.3750 (standard error)   reward 1.0000")
    assert math.isnan(evaluation_scores([[None]]).accuracy)
    assert math.isnan(evaluation_scores([[(1.0, 1.0)], [None]]).accuracy_error), "one row has no spread"


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
