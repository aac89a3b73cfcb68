"""Rewards of length and repetition: the reference's values, and how they enter the sum."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from asyncrl.config.sections import RewardConfig
from asyncrl.errors import UserError
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score
from asyncrl.rewards.scorer import RewardScorer
from asyncrl.rewards.spec import check_rewards
from asyncrl_plugins.shaping.rewards import (
    cosine_length,
    diversity,
    ngram_repetition,
    relative_length,
    stop_properly,
)
from tests.rigs.reward_pools import run_pool
from tests.rigs.tiny import ROOT

VECTORS = json.loads((ROOT / "tests" / "rigs" / "vectors.json").read_text())


def of_length(num_tokens: int, max_tokens: int = 1000, **fields: Any) -> RewardSample:
    return RewardSample(completion="", num_tokens=num_tokens, max_tokens=max_tokens, **fields)


def test_the_reference_values() -> None:
    assert ngram_repetition(RewardSample("a b c A b c a")) == pytest.approx(VECTORS["ngram"]["a"], abs=1e-6)
    assert ngram_repetition(RewardSample("a b")) == VECTORS["ngram"]["b"]
    lengths = {"0": 0, "half": 500, "full": 1000}
    for name, value in VECTORS["cosine_len"].items():
        kind, _, length = name.partition("_")
        shaped = cosine_length(of_length(lengths[length]), float(kind == "correct"))
        assert shaped == pytest.approx(value, abs=1e-6), name
    assert cosine_length(of_length(5000), 1.0) == 0.5, "also beyond the limit"


def test_a_cut_completion_gets_its_part_or_a_score_of_its_own() -> None:
    cut, whole = of_length(10, finish_reason="length"), of_length(10)
    given = {0.0: 0.0, 0.5: 0.4, -1.0: -1.0}
    assert {c: stop_properly(cut, 0.8, coefficient=c) for c in given} == given
    assert {stop_properly(whole, 0.8, coefficient=c) for c in given} == {0.8}


def test_group_shaping_compares_completions() -> None:
    group = [of_length(10), of_length(20), of_length(10), of_length(20), of_length(15)]
    shaped = relative_length(group, [1.0, 1.0, 0.0, 0.0, None], coefficient=2.0)
    assert shaped == [2.0, 0.0, 0.0, -1.0, 0.0]
    assert relative_length(group[:1], [1.0]) == [1.0], "all equally long: nothing is added"
    texts = [RewardSample(text) for text in ("a b", "a b", "c d")]
    assert diversity(texts, n=1) == [0.5, 0.5, 1.0]
    assert diversity(texts, n=5) == [0.5, 0.5, 1.0], "short ones as a whole"
    assert diversity(texts[:1]) == [0.0]


RIGHT = {"function": "exact_match", "name": "right"}


def reward_config(*functions: dict[str, Any]) -> RewardConfig:
    return RewardConfig.model_validate({"functions": functions, "workers": 1})


def test_a_shaped_component_is_shown_and_its_shaping_counts_in_its_place() -> None:
    config = reward_config(
        RIGHT,
        {"function": "cosine_length", "shapes": "right", "weight": 2.0},
        {"function": "ngram_repetition", "weight": 0.5},
        {"function": "stop_properly", "shapes": "sum", "kwargs": {"coefficient": -4.0}},
        {"function": "soft_overlong", "weight": 3.0, "kwargs": {"buffer": 50}},
    )
    assert config.weights == {
        "right": 0.0,
        "cosine_length": 0.0,
        "ngram_repetition": 0.0,
        "stop_properly": 1.0,
        "soft_overlong": 3.0,
    }

    async def scenario(pool: RewardScorer) -> list[Score]:
        def sample(length: int, **fields: Any) -> RewardSample:
            return RewardSample("a a a a", answer="a a a a", num_tokens=length, max_tokens=100, **fields)

        return [
            await pool.score(sample(50)),
            await pool.score(sample(100, finish_reason="length")),
            await pool.score(RewardSample("b", answer="b")),
        ]

    whole, cut, unknown = run_pool(config, scenario)
    assert whole.components == {
        "right": 1.0,
        "cosine_length": 0.75,
        "ngram_repetition": -0.5,
        "stop_properly": 2.0 * 0.75 - 0.5 * 0.5,
        "soft_overlong": 0.0,
    }
    assert whole.reward == 1.25
    assert (cut.components["right"], cut.components["stop_properly"], cut.reward) == (1.0, -4.0, -7.0)
    assert (unknown.status, unknown.error_kind) == ("error", "reward_exception")
    assert "'cosine_length': ValueError: row : the limit of length is not known" in unknown.error_message


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([{"function": "cosine_length"}], "wants the score of another component. Add `shapes`"),
        ([{"function": "diversity"}], "compares the completions of a group. Add `group: true`"),
    ],
)
def test_a_function_that_does_not_fit_its_entry_is_refused(functions: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_rewards(reward_config(*functions))


PAGE = (ROOT / "asyncrl_plugins" / "shaping" / "README.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S))
def test_the_pages_snippets_are_accepted(block: str) -> None:
    check_rewards(RewardConfig.model_validate(yaml.safe_load(block)["reward"]))
