"""FrozenLake's recipe: maps that can be solved and are held out; its section plays them in 3 x 3 tokens."""

from __future__ import annotations

import asyncio
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from asyncrl.config.load import load_config
from asyncrl.environments.interface import Start
from asyncrl_plugins.evaluation import play
from tests.rigs.tiny import ROOT

pytest.importorskip("gymnasium", reason="the package gymnasium is not installed (the extra `gymnasium`)")
pytest.importorskip("pygame", reason="pygame, which draws the lake, is not installed (the extra `gymnasium`)")
FOLDER = ROOT / "examples" / "frozen_lake"


def test_a_shortest_way_earns_the_reward_in_pictures_of_the_recipes_size() -> None:
    recipe = runpy.run_path(str(FOLDER / "prepare.py"))
    parts = recipe["split"]()
    maps = parts["rl"] + parts["eval"]
    assert len(set(maps)) == len(maps) > 2000, "none is in both parts"
    assert recipe["shortest"](("SHG", "HFF", "FFF")) == []
    section = load_config(FOLDER / "gigpo.yaml").environment
    loaded = play.open_environment(section, unit=14)
    for desc in maps[:5]:
        seen: list[Any] = []
        look = lambda kind, part, seen=seen: seen.append(part)  # noqa: E731
        start = Start({"desc": list(desc)}, seed=1, config=loaded.config)
        words = recipe["shortest"](desc)
        played = asyncio.run(play.play(loaded, section, start, iter(words), look))
        assert (played.end, sum(played.rewards), len(played.rewards)) == ("done", 1.0, len(words))
        pictures = [Image.open(io.BytesIO(part)) for part in seen if isinstance(part, bytes)]
        assert {picture.size for picture in pictures} == {(42, 42)}
        cells = [recipe["place"](desc, "S")]
        for word in words[:-1]:
            cells.append(recipe["moved"](cells[-1], word))
        drawn = recipe["drawn"](desc)
        expected = [drawn[cell].tobytes() for cell in cells]
        assert [picture.convert("RGB").tobytes() for picture in pictures] == expected, "as in the warm start"


def test_the_warm_start_goes_straight_on_maps_of_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--out", str(tmp_path), "--moves", "64"])
    recipe = runpy.run_path(str(FOLDER / "prepare.py"), run_name="__main__")
    training = set(recipe["split"]()["rl"])
    rows = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert len(rows) == 64
    for number, row in enumerate(rows):
        signs, _, cell = Path(row["images"][-1]).stem.partition("-")
        desc = tuple(signs[first : first + 3] for first in (0, 3, 6))
        assert desc in training
        assert len(row["images"]) == sum(message["content"].count("<image>") for message in row["prompt"])
        if number < 56:
            assert row["target"] in recipe["straight"](desc, (int(cell[0]), int(cell[1])))
    assert all(len(row["images"]) == 1 for row in rows[:40])
    assert any(len(row["images"]) > 2 for row in rows[40:])

    around = [tuple(json.loads(line)["desc"]) for line in (tmp_path / "around.jsonl").read_text().splitlines()]
    assert around
    assert set(around) < set(recipe["split"]()["eval"])
    for desc in around:
        cells = {recipe["place"](desc, "S")}
        while cells:
            cells = {recipe["moved"](cell, word) for cell in cells for word in recipe["straight"](desc, cell)}
            assert all(desc[row][column] != "G" for row, column in cells), "no straight way"
            cells = {(row, column) for row, column in cells if desc[row][column] != "H"}
