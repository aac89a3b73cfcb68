"""FrozenLake's recipe, played as `asyncrl env` plays it: maps that can be solved and are held out, in 3 x 3 tokens."""

from __future__ import annotations

import asyncio
import io
import runpy
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
