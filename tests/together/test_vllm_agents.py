"""The agent demo in small with the real vLLM on a CPU, by the command that a user types: two turns with a picture of
the tool between them, in two processes side by side, and taking turns on one device."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.demo.model import main as make_model
from asyncrl.environments.recording import images_of
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.database import JournalReader
from asyncrl.launch.ports import free_port
from asyncrl_plugins.sft.run import SupervisedRun
from protocol.messages import TrajectoryRecord, TrajectoryStatus
from tests.plugins.vllm.vllm_rig import NEEDS_VLLM, fork_cores
from tests.rigs.small_runs import logs
from tests.rigs.tiny import ROOT
from tests.rigs.two_processes import start_command, with_ports, write_config
from tests.system.test_end_to_end import lines

pytestmark = NEEDS_VLLM
DEMO = ROOT / "examples" / "zoom_digit"
STEPS, PROMPTS, GROUP = 3, 4, 4
GAP = 1e-3
"""Largest difference of a log-prob between vLLM and the learner, tokens behind a tool's picture included."""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the demo's data, and a warm start in `sft/export` that writes calls and answers."""
    folder = tmp_path_factory.mktemp("agent")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DEMO))
        demo = importlib.import_module("demo")
        demo.make_data(folder / "data", 1, 256, 32, 4)
        make_model(["--out", f"{folder}/model", "--seed", "1", *demo.MODEL])
    names = {"run_dir": "sft", "model.path": "model", "data.train_files.0": "data/sft.parquet"}
    words = [f"{key}={folder}/{name}" for key, name in names.items()]
    SupervisedRun(
        load_config(
            DEMO / "sft.yaml",
            [*words, "sft.steps=120", "sft.rows_per_step=32", "sft.optim.lr_warmup_steps=10", "model.dtype=float32"],
        )
    ).run()
    return folder


def agent_run(warm: Path, run: Path, *words: str) -> RunConfig:
    names = {
        "model.path": "sft/export",
        "data.train_files.0": "data/rl.parquet",
        "data.val_files.0": "data/eval.parquet",
    }
    return load_config(
        DEMO / "grpo.yaml",
        [
            f"run_dir={run}",
            *(f"{key}={warm}/{name}" for key, name in names.items()),
            "rollout.engine=vllm",
            f"batch.prompts_per_step={PROMPTS}",
            f"batch.group_size={GROUP}",
            f"trainer.max_steps={STEPS}",
            "evaluation.every_steps=2",
            *words,
        ],
    )


def check_run(run: Path, *, is_on_policy: bool) -> None:
    """Every turn was trained on what vLLM sampled, behind pictures that the environment showed; held-out rows too."""
    steps = lines(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3]
    stale = [step["staleness/max"] > 0 for step in steps]
    assert not (any(stale) if is_on_policy else stale[0])
    for step in steps:
        assert step["ledger_residual"] == step["rows/error"] == step["rows/timed_out"] == 0
        if step["staleness/max"] == 0:
            assert 0 <= step["logprob_diff_max"] < GAP
    evaluations = lines(run / "evaluations.jsonl")
    assert [(one["step"], one["rows"], one["errors"]) for one in evaluations] == [(0, 4, 0), (2, 4, 0), (3, 4, 0)]
    records = recorded(run)
    assert len(records) == STEPS * PROMPTS * GROUP
    looked = [record for record in records if len(record.turns) == 2]
    assert len(looked) > len(records) / 2, "the warm start begins with a look"
    assert sum(len(images_of(record.turns[0].observation)) for record in looked) > len(looked) / 2


def recorded(run: Path) -> Sequence[TrajectoryRecord]:
    with closing(JournalReader(run / JOURNAL_FILE)) as journal:
        records = [record for ticket_id in journal.kept() for record in journal.group(ticket_id).trajectories]
    assert {record.status for record in records} <= {TrajectoryStatus.FINISHED, TrajectoryStatus.TRUNCATED}
    return records


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_agent_demo_trains_through_vllm(warm: Path, tmp_path: Path, mode: str) -> None:
    run = tmp_path / "run"
    words = ["trainer.mode=sync", "learner.max_staleness=0"] if mode == "sync" else []
    config = with_ports(agent_run(warm, run, *words), free_port)
    fork_cores(config)
    file = write_config(config, tmp_path / "config")
    train: Any = start_command("train", str(file), log=tmp_path / "out", of_this=True)
    try:
        deadline = time.monotonic() + 300
        while train.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert train.poll() == 0, (tmp_path / "out").read_text()[-3000:] + logs(run / "logs")
    finally:
        if train.poll() is None:
            train.terminate()
            train.wait(timeout=30)
    check_run(run, is_on_policy=mode == "sync")
