"""Checkpoints are written while training goes on: with the bits of their step, whole or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten

from asyncrl.config.schema import RunConfig
from asyncrl.run_folder.contents import MODEL_FOLDER
from asyncrl.telemetry.jsonl import read_lines
from learner.loop.checkpoint import CHECKSUMS_FILE, STATE_FILE, complete_checkpoints
from learner.training.engine import ENGINE_FILE
from tests.rigs.small_disks import needs_mount, small_disks
from tests.rigs.small_runs import assert_every_prompt_trained_once, failure_of, logs, small
from tests.rigs.two_processes import start, with_ports, write_config
from tests.rigs.waiting import exit_codes, wait_until
from tests.system.test_end_to_end import lines
from tests.system.test_resume import assert_same_run, resume_config

pytestmark = pytest.mark.slow
MakeConfig = Callable[..., RunConfig]


def test_training_goes_on_while_a_checkpoint_is_written(make_config: MakeConfig, tmp_path: Path) -> None:
    """The files are those of a learner that waits for them."""
    runs: dict[bool, Path] = {}
    for save_async in (False, True):
        run = runs[save_async] = tmp_path / f"async {save_async}"
        config = resume_config(make_config, run)
        trainer = {"save_async": save_async, "save_freq": 5, "save_limit": 9}
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update=trainer)})
        file = write_config(with_ports(config), run)
        learner = start("learner", file, slow_at="checkpoint.writing:5" if save_async else "")
        assert exit_codes([learner, start("rollout_server", file)]) == [0, 0], logs(run)
    assert_same_run(runs[True], runs[False], config)
    for step in (5, 7):
        assert_same_files(*(run / f"checkpoints/step-{step:06}" for run in runs.values()))
    *_, sixth, seventh = read_lines(runs[True] / "metrics.jsonl")
    assert sixth["checkpoint/blocked_s"] < 1
    assert not any("checkpoint/write_s" in line for line in (sixth, seventh)), "it was being written until after step 7"
    *_, sixth, seventh = read_lines(runs[False] / "metrics.jsonl")
    assert sixth["checkpoint/blocked_s"] >= sixth["checkpoint/write_s"] > 0


def assert_same_files(one: Path, other: Path) -> None:
    """All but the one that names the run; of the optimiser's, whose bytes tell what was copied, each number."""
    mine, theirs = (json.loads((checkpoint / CHECKSUMS_FILE).read_text()) for checkpoint in (one, other))
    for name in mine.keys() | theirs.keys():
        if name == ENGINE_FILE:
            (mine_in, spec), (theirs_in, other_spec) = (
                tree_flatten(torch.load(folder / name, weights_only=True)) for folder in (one, other)
            )
            assert spec == other_spec
            assert sum(isinstance(value, torch.Tensor) for value in mine_in) > 100, "moments and steps"
            for value, its in zip(mine_in, theirs_in, strict=True):
                assert torch.equal(value, its) if isinstance(value, torch.Tensor) else value == its
        elif name != STATE_FILE:
            assert mine[name] == theirs[name], name
    assert f"{MODEL_FOLDER}/model.safetensors" in mine


def test_killed_while_a_checkpoint_is_written_a_run_resumes_from_the_one_before(
    make_config: MakeConfig, tmp_path: Path, on_policy: Path
) -> None:
    run = tmp_path / "killed"
    config = resume_config(make_config, run)
    file = write_config(with_ports(config), run)
    server = start("rollout_server", file)
    try:
        assert start("learner", file, crash_at="checkpoint.renamed:1").wait(timeout=120) == -9, logs(run)
        assert list(complete_checkpoints(run)) == [3]
        # The checkpoint of step 6 is being written when step 7 has been trained.
        learner = start("learner", file, "--resume", slow_at="checkpoint.writing:100")
        half = ".step-000006.building-*/model/config.json"
        wait_until(lambda: any((run / "checkpoints").glob(half)), "half of a checkpoint", run)
        wait_until(lambda: len(lines(run / "metrics.jsonl")) >= 7, "step 7", run)
        learner.kill()
        learner.wait(timeout=20)
        assert list(complete_checkpoints(run)) == [3]
        assert list((run / "checkpoints").glob(half)), "half of it was there"
        last = start("learner", file, "--resume")
        assert [last.wait(timeout=120), server.wait(timeout=60)] == [0, 0], logs(run)
    finally:
        server.kill()
    assert re.search(r"making steps 4 to [7-9] again, from the journal", (run / "learner.log").read_text())
    assert_same_run(run, on_policy, config)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000003", "step-000007"]


@needs_mount
def test_a_disk_without_room_for_a_checkpoint_stops_the_run_with_the_reason(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """The disk has room for all else. Nothing of the checkpoint is left, and with room the run continues."""
    run = tmp_path / "run"
    config = small(make_config, trainer={"save_freq": 1})
    config = config.model_copy(update={"run_dir": str(run)})
    logs_in, kept = tmp_path / "logs", tmp_path / "kept"
    file = write_config(with_ports(config), logs_in)
    disks = small_disks(logs_in, {str(run / "checkpoints"): "200k"}, str(kept))
    assert exit_codes([start("learner", file, first=disks), start("rollout_server", file)]) == [3, 4], logs(logs_in)
    failure = failure_of(run)
    assert failure.kind == "disk_full"
    assert "the checkpoint of step 1 could not be written" in failure.reason
    assert not list((run / "checkpoints").iterdir())
    assert exit_codes([start("learner", file, "--resume"), start("rollout_server", file)]) == [0, 0], logs(logs_in)
    assert_every_prompt_trained_once(run)
