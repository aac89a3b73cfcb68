"""FrozenLake's recipe: its warm start goes straight, on maps of training alone."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from asyncrl.telemetry.jsonl import read_lines
from tests.rigs.tiny import ROOT

pytest.importorskip("gymnasium", reason="the package gymnasium is not installed (the extra `gymnasium`)")
pytest.importorskip("pygame", reason="pygame, which draws the lake, is not installed (the extra `gymnasium`)")
FOLDER = ROOT / "examples" / "frozen_lake"


def test_the_warm_start_goes_straight_on_maps_of_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--out", str(tmp_path), "--moves", "64"])
    recipe = runpy.run_path(str(FOLDER / "prepare.py"), run_name="__main__")
    training = set(recipe["split"]()["rl"])
    rows = read_lines(tmp_path / "sft.jsonl")
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
