"""The recipes of configs/tasks: each is a word over a file that names a model, on rows of the columns of its data."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.config.load import find_overlay, load_config, shipped_overlays
from asyncrl.errors import UserError
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.spec import load_reward
from tests.plugins.tasks.test_visual_agents import AGENTS
from tests.rigs.tiny import ROOT

FIGURE = {"images": ["figure.png"]}
PICTURE = {"image": "figure.png"}
STEP = {"image_path": "figure.png", "problem": "Question: how high is it?", "type": "pre_answer"}
BOX = "[{'Position': [0, 0, 10, 10], 'Confidence': 1.0}]"
CLICK = "[{'action': 'click', 'point': [500, 50], 'input_text': 'no input text'}]"
RECIPES: dict[str, tuple[dict[str, Any], str]] = {
    "geo3k": ({**FIGURE, "problem": "<image>Find x.", "answer": "60"}, "So \\boxed{60}"),
    "clevr_count": ({**FIGURE, "problem": "How many balls?", "answer": "<answer> 3 </answer>"}, "<answer>3</answer>"),
    "grounding": ({**PICTURE, "problem": "the ball", "solution": [0, 0, 500, 500]}, "<answer>[0,0,500,500]</answer>"),
    "grounding_fractions": (
        {**PICTURE, "problem": "the ball", "solution": [0, 0, 500, 500]},
        "<answer>[0, 0, 0.5, 0.5]</answer>",
    ),
    "detection": (
        {**PICTURE, "problem": "Find all balls.", "solution": f"<answer>{BOX}</answer>"},
        f"<answer>{BOX}</answer>",
    ),
    "mat_search": ({**STEP, "solution": "<think>t</think><search>a tower</search>"}, "<search>tower</search>"),
    "mat_code": ({**STEP, "solution": "<think>t</think><answer>330</answer>"}, "<answer>330</answer>"),
    "gui_step": (
        {
            **PICTURE,
            "instruction": "Open the menu.",
            "history": "click [1, 2]",
            "gt_action": "click",
            "gt_bbox": [0.4, 0.0, 0.6, 0.1],
            "gt_input_text": "no input text",
        },
        f"<answer>{CLICK}</answer>",
    ),
    "we_math": ({**PICTURE, "question": "Which?", "option": "A. 1; B. 2", "answer": "B"}, "<answer>B</answer>"),
}
NEEDS_MATH_VERIFY = ("geo3k", "we_math")


def test_there_are_rows_for_each() -> None:
    assert {*RECIPES, *AGENTS} == shipped_overlays("tasks").keys()
    assert {file.parent for file in shipped_overlays("tasks").values()} == {(ROOT / "configs" / "tasks").resolve()}


def test_without_the_plug_in_a_word_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "descriptions", lambda group: {})
    shipped_overlays.cache_clear()
    with pytest.raises(UserError, match=r"override 'geo3k' has no `=`.*Tasks are plug-ins\. .*asyncrl\.tasks"):
        find_overlay("geo3k")
    shipped_overlays.cache_clear()


def test_each_recipe_renders_its_rows_and_gives_a_right_completion_a_reward_of_1(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(f"run_dir: {tmp_path / 'run'}\nmodel: {{path: {tiny_model}}}\nreward: {{workers: 1}}\n")
    Image.new("RGB", (28, 28)).save(tmp_path / "figure.png")
    for name, (row, right) in RECIPES.items():
        if name in NEEDS_MATH_VERIFY and find_spec("math_verify") is None:
            continue
        rows = tmp_path / f"{name}.json"
        rows.write_text(json.dumps([row] * 4))
        words = [name, f"data.train_files=[{rows}]", "data.val_files=[]", f"data.image_dir={tmp_path}"]
        words += ["data.max_prompt_length=1900", "data.max_response_length=64"]
        assert main(["train", str(base), *words, "--dry-run"]) == 0, name
        config = load_config(base, words)
        asked = row.get(config.data.prompt_key, "").removeprefix("<image>")
        assert asked in capsys.readouterr().out, name
        answer = row[config.data.answer_key]
        sample = RewardSample(completion=f"<think>t</think>{right}", answer=answer, columns=row)
        reward = 0.0
        for one in config.reward.functions:
            value = load_reward(one.function)(sample, **one.kwargs)
            reward += one.weight * (value[one.name] if isinstance(value, dict) else value)
        assert reward == pytest.approx(1.0), name
