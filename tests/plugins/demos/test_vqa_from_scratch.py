"""The start of the demo of pictures, made from nothing as `FROM_SCRATCH=1 make demo` makes it."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from asyncrl.demo.choice import DemoRequest
from asyncrl_plugins.demos import start, vqa


def test_all_stages_of_a_start_lead_to_a_model(tmp_path: Path) -> None:
    """Whatever dtype this machine supervises in: the update is of the merged weights."""
    vqa.prepare(tmp_path, DemoRequest(from_scratch=True, quick=True))
    assert {file.name for file in (tmp_path / "made").iterdir()} == {start.TOWER, start.CONNECTOR, start.UPDATE}
    update = load_file(tmp_path / "made" / start.UPDATE)
    assert any(factor.abs().max() > 0 for factor in update.values())
    assert (tmp_path / "warm_start" / "config.json").is_file()
