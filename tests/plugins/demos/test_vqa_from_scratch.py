"""The start of the demo of pictures, made from nothing as `FROM_SCRATCH=1 make demo` makes it."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from asyncrl_plugins.demos import easy_vqa, smollm2, start, vqa


def test_all_stages_of_a_start_lead_to_its_three_files(tmp_path: Path) -> None:
    """Whatever dtype this machine supervises in: the update is of the merged weights."""
    easy_vqa.write_rows(tmp_path / "data", seed=1)
    smollm2.main([str(tmp_path / "parts" / "smollm2")])
    vqa.train_start(tmp_path, tmp_path / "made", quick=True)
    assert {file.name for file in (tmp_path / "made").iterdir()} == {start.TOWER, start.CONNECTOR, start.UPDATE}
    update = load_file(tmp_path / "made" / start.UPDATE)
    assert any(factor.abs().max() > 0 for factor in update.values())
