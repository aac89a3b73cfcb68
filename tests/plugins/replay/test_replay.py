"""`asyncrl replay`: the steps of a run come out again as they were, and what is not the same is found."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config.load import dump_config, load_config
from asyncrl.config.schema import RunConfig
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.run_inputs import recorded_updates
from asyncrl.journal.writer import Journal
from asyncrl_plugins.replay import replay
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import run_both
from tests.system.test_end_to_end import lines

pytestmark = pytest.mark.slow


@pytest.fixture
def run(finished_run: Path) -> Iterator[Path]:
    """The shared run; replay sets the threads of the recorded step."""
    threads = torch.get_num_threads()
    yield finished_run
    torch.set_num_threads(threads)


def content(folder: Path) -> dict[str, tuple[int, str]]:
    """Return time and hash of every file."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(f): (f.stat().st_mtime_ns, hashlib.sha256(f.read_bytes()).hexdigest()) for f in files}


def test_every_step_is_the_same_bit_for_bit_and_the_run_is_not_touched(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run)
    for step, beginning in ((3, "the initial model"), (4, "the initial model"), (5, "the checkpoint of step 4")):
        check_equal(run, step, beginning, capsys)
    assert content(run) == before


def test_steps_of_an_adapter_are_the_same(
    make_config: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    config = make_config(
        model={"lora": {"rank": 4}, "freeze_vision_tower": True},
        learner={"max_staleness": 1},
        algorithm={"kl_loss_coef": 1e-2},
        data={"val_files": []},
        trainer={"max_steps": 3, "samples_per_step": 0, "save_freq": 2},
    )
    assert run_both(config, tmp_path / "run") == (0, 0), logs(tmp_path / "run")
    check_equal(tmp_path / "run", 3, "the checkpoint of step 2", capsys)


def check_equal(run: Path, step: int, beginning: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(run), "--step", str(step)]) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert f"from {beginning}" in printed
    assert "differs" not in printed
    assert ("tensors are equal, bit for bit" in printed) == (run / "checkpoints" / f"step-{step:06}").exists()
    for name in ("loss", "grad_norm", "ess", "reward/mean", "staleness/bound"):
        assert f"\n{name} " in printed


def test_a_difference_of_a_setting_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(run), "--step", "4", "learner.optim.lr=0.002"]) == 1
    said = capsys.readouterr().out
    assert "steps between: 1 to 3; 1, 2, 3 differ" in said
    (loss,) = [line for line in said.splitlines() if line.startswith("loss ")]
    assert loss.endswith("differs")
    assert "largest difference" in said


def test_each_step_is_made_by_the_settings_that_were_recorded_for_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings have changed after the checkpoint of step 4: config.yaml has the new ones."""
    copy = shutil.copytree(run, tmp_path / "copy")
    with closing(Journal(copy / JOURNAL_FILE, saved_step=5)) as journal:
        began = recorded_updates(journal)[0].settings
        changed = {**began, "learner.optim.lr": 0.002, "algorithm.clip_ratio_high": 0.5}
        journal.set_meta(**{"update.1": json.dumps([4, changed])})
    text = (copy / "config.yaml").read_text()
    own = load_config(copy / "config.yaml", ["learner.optim.lr=0.002", "algorithm.clip_ratio_high=0.5"])
    (copy / "config.yaml").write_text(dump_config(own))
    check_equal(copy, 4, "the initial model", capsys)
    (copy / "config.yaml").write_text(text)
    assert replay.main([str(copy), "--step", "5"]) == 1, "it was not made by what is recorded here"
    assert "largest difference" in capsys.readouterr().out
    shutil.rmtree(copy / "checkpoints" / "step-000004")
    assert replay.main([str(copy), "--step", "5"]) == 2
    assert "settings have changed after step 4, whose checkpoint is not there any more" in capsys.readouterr().err


def test_a_difference_of_a_recorded_number_is_found(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    records = lines(run / "metrics.jsonl")
    records[2]["grad_norm"] = float(np.nextafter(records[2]["grad_norm"], 9))
    (copy / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert replay.main([str(copy), "--step", "3"]) == 1
    differing = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("differs")]
    assert differing == ["grad_norm"]


def test_a_difference_of_a_weight_is_found(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints" / "step-000005")
    shutil.copytree(copy / "checkpoints" / "step-000004", copy / "checkpoints" / "step-000005")
    assert replay.main([str(copy), "--step", "5"]) == 1
    said = capsys.readouterr().out
    assert "largest difference" in said
    assert not [line for line in said.splitlines() if line.startswith("loss ") and line.endswith("differs")]


def test_another_initial_model_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = run / "checkpoints" / "step-000004" / "model"
    assert replay.main([str(run), "--step", "1", f"model.path={other}"]) == 2
    assert "began with another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "was"),
    [("batch.prompts_per_step=2", "4"), ("batch.group_size=2", "4"), ("trainer.seed=99", "")],
)
def test_a_setting_that_the_recorded_step_was_made_with_is_refused_by_name(
    run: Path, capsys: pytest.CaptureFixture[str], override: str, was: str
) -> None:
    assert replay.main([str(run), "--step", "3", override]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {override} cannot be tried on a step of the journal")
    assert f"sampled with {was}" in said
    if was:
        name = override.partition("=")[0]
        assert replay.main([str(run), "--step", "1", f"{name}={was}"]) == 0, "the same value is no other"


def test_what_is_not_there_is_refused_with_what_is(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    assert replay.main([str(copy), "--step", "6"]) == 2
    assert "the run has not trained it, " in (said := capsys.readouterr().err)
    assert "The newest that can is 5" in said
    with closing(sqlite3.connect(copy / JOURNAL_FILE)) as db, db:
        db.execute("DELETE FROM groups WHERE ticket_id IN (SELECT ticket_id FROM consumption WHERE step = 2)")
    assert replay.main([str(copy), "--step", "3"]) == 2
    said = capsys.readouterr().err
    assert "groups of a step since step 0 are not kept any more" in said
    assert "The newest that can is 5" in said
    assert replay.main([str(tmp_path), "--step", "3"]) == 2
    assert "there is no journal.sqlite" in capsys.readouterr().err
