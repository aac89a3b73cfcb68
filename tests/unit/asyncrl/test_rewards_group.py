"""Rewards that see all completions of a prompt: how they are called, and how they fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.sections import RewardConfig
from asyncrl.errors import UserError
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score
from asyncrl.rewards.scorer import RewardScorer
from tests.rigs.reward_pools import run_pool

FUNCTIONS = """
import os, time

def one(sample):
    if sample.completion == "bad":
        raise ValueError("a bad one")
    return len(sample.completion)

def ranks(samples, top=1):
    assert len({sample.prompt for sample in samples}) == 1
    order = sorted(samples, key=lambda sample: sample.num_tokens)
    return [top - order.index(sample) for sample in samples]

def trl(completions, level, answer, **kwargs):
    assert len(level) == len(answer) == len(completions)
    return [float(len(set(completions)))] * len(completions)

def above(completions, score):
    known = [s for s in score if s is not None]
    return [0.0 if s is None else s - sum(known) / len(known) for s in score]

def parts(samples):
    return [{"a": i, "b": -i} for i, _ in enumerate(samples)]

def doubled(sample, score):
    return 2 * score

def fails(samples, how):
    if how == "hang":
        time.sleep(100)
    elif how == "die":
        os._exit(3)
    elif how == "few":
        return [1.0]
    elif how == "one_nan":
        return [1.0, float("nan"), None]
    raise KeyError("x")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "of_groups.py"
    path.write_text(FUNCTIONS)
    return path


def score_group(file: Path, texts: list[str], *entries: dict[str, Any], **settings: Any) -> list[Score]:
    functions = [{**entry, "function": f"{file}:{entry['function']}"} for entry in entries]
    config = RewardConfig.model_validate({"functions": functions, "workers": 2, **settings})

    async def scenario(pool: RewardScorer) -> list[Score]:
        group = pool.group(len(texts))
        scoring: list[asyncio.Task[Score]] = []
        for index, text in reversed(list(enumerate(texts))):  # they finish in any order
            sample = RewardSample(text, prompt="q", answer="4", columns={"level": 2}, num_tokens=len(text))
            scoring.insert(0, asyncio.create_task(group.score(index, sample)))
            await asyncio.sleep(0)
        return await asyncio.gather(*scoring)

    return run_pool(config, scenario)


def test_a_group_function_is_called_once_with_all_completions(file: Path) -> None:
    scores = score_group(
        file,
        ["aa", "b", "b"],
        {"function": "one", "weight": 0.0},
        {"function": "ranks", "group": True, "kwargs": {"top": 3}},
        {"function": "doubled", "shapes": "ranks"},
        {"function": "trl", "group": True},
        {"function": "parts", "name": "a", "group": True},
        {"function": "parts", "name": "b", "group": True},
    )
    assert [score.status for score in scores] == ["ok"] * 3
    assert scores[0].components == {"one": 2, "ranks": 1, "doubled": 2, "trl": 2, "a": 0, "b": 0}
    assert scores[2].components == {"one": 1, "ranks": 3, "doubled": 6, "trl": 2, "a": 2, "b": -2}
    assert [score.reward for score in scores] == [4.0, 8.0, 8.0], "what is shaped does not count"


def test_a_failed_completion_is_seen_without_a_score_and_stays_failed(file: Path) -> None:
    above = {"function": "above", "group": True, "shapes": "one"}
    scores = score_group(file, ["bad", "aaa", "a"], {"function": "one"}, above, {"function": "ranks", "group": True})
    assert (scores[0].error_kind, scores[0].reward) == ("reward_exception", None)
    assert "a bad one" in scores[0].error_message
    assert [score.components for score in scores[1:]] == [
        {"one": 3, "above": 1, "ranks": -1},
        {"one": 1, "above": -1, "ranks": 1},
    ]


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("raise", "reward_exception", "'fails': KeyError: 'x' (of_groups.py:"),
        ("few", "reward_exception", "expected a list of 3 rewards, one per completion, got [1.0]"),
        ("die", "reward_crash", "'fails' lost its worker: it exited with code 3"),
        ("hang", "reward_timeout", "'fails' was not done after 0.4 s"),
    ],
)
def test_a_group_function_that_fails_is_a_status_of_all_rows(file: Path, how: str, kind: str, message: str) -> None:
    fails = {"function": "fails", "group": True, "kwargs": {"how": how}}
    failed, *others = score_group(file, ["bad", "b", "c"], {"function": "one"}, fails, timeout_s=0.4)
    assert "a bad one" in failed.error_message, "the first failure is kept"
    for score in others:
        assert (score.error_kind, score.reward, score.components) == (kind, None, {})
        assert message in score.error_message


def test_a_bad_number_is_its_own_rows(file: Path) -> None:
    scores = score_group(file, ["a", "b", "c"], {"function": "fails", "group": True, "kwargs": {"how": "one_nan"}})
    assert [score.error_kind for score in scores] == ["", "reward_nan", "reward_type"]
    assert scores[0].reward == 1.0


def test_a_group_function_without_its_arguments_is_refused(file: Path) -> None:
    with pytest.raises(UserError, match=r"missing a required (keyword-only )?argument: 'how'"):
        score_group(file, ["a"], {"function": "fails", "group": True})
