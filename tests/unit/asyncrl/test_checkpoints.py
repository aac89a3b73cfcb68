"""Folders of a run that are checkpoints, and the newest of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from asyncrl.cli import main
from asyncrl.run_folder.contents import MODEL_FOLDER, checkpoint_folder
from learner.loop.checkpoint import STATE_FILE, complete_checkpoints, newest_checkpoint


def made_up_checkpoint(run: Path, step: int) -> Path:
    folder = checkpoint_folder(run, step)
    (folder / MODEL_FOLDER).mkdir(parents=True)
    (folder / MODEL_FOLDER / "config.json").write_text(f"of step {step}")
    (folder / STATE_FILE).touch()
    return folder


def test_a_million_steps_are_more_than_one_less(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    folders = {step: made_up_checkpoint(tmp_path, step) for step in (999_999, 20, 1_000_000, 1_000_001)}
    (folders[1_000_001] / STATE_FILE).unlink()  # it is not complete
    assert list(complete_checkpoints(tmp_path)) == [20, 999_999, 1_000_000]
    assert newest_checkpoint(tmp_path) == folders[1_000_000]


def test_a_copy_that_somebody_put_beside_a_checkpoint_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = tmp_path / "run", made_up_checkpoint(tmp_path / "run", 20)
    for name in ("step-000020-backup", "step-000030.old", "step-30", ".step-000040.building-7"):
        shutil.copytree(folder, folder.with_name(name))
    assert complete_checkpoints(run) == {20: folder}

    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "config.json").read_text() == "of step 20"
    assert main(["export", str(run), str(tmp_path / "other"), "--checkpoint", "30"]) == 2
    assert f"there is no checkpoint of step 30: {run} has those of [20]" in capsys.readouterr().err
