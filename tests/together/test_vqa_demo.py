"""`asyncrl demo vqa`: the real language model and benchmark, two steps of training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rigs.two_processes import start_command
from tests.system.test_demo import DRAWN_PORTS

FEW = ("batch.prompts_per_step=2", "data.max_val_rows=4", "batch.group_size=2")


@pytest.mark.slow
def test_the_demo_of_pictures_from_its_packages_to_a_checked_export(tmp_path: Path) -> None:
    folder, log = tmp_path / "vqa", tmp_path / "log"
    command = start_command("demo", "vqa", "--quick", "--folder", str(folder), *FEW, *DRAWN_PORTS, log=log)
    assert command.wait(timeout=600) == 0, log.read_text()
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["held_out"]) == ["0", "1", "2"]
    assert list(summary["seconds"]) == ["data", "model", "compose", "grpo", "check"]
    shown = json.loads((folder / "then_and_now.json").read_text())
    assert all((folder / row["images"][0]).read_bytes()[:4] == b"\x89PNG" for row in shown)
    # The start reads the picture: words that a model without its weights would not write.
    assert sum(row["then"].count("Answer: ") == 1 for row in shown) > len(shown) / 2, shown
    assert not (folder / "parts").exists(), "gigabytes of parts are not kept"
