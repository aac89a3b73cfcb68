"""A run whose filters drop most groups, whole and killed again and again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.config.schema import RunConfig
from asyncrl.journal import JOURNAL_FILE
from asyncrl.telemetry.jsonl import read_lines
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import run_both
from tests.system.test_resume import assert_same_run, run_killed

ROWS, EPOCHS = 16, 3
REWARD = """
def teaches(sample):
    row = int(sample.row_id.rpartition(":")[2])
    return float(row % 4 == 1) if row % 4 < 2 else float(len(sample.completion) % 2)
"""
"""A quarter of the rows is impossible and a quarter trivial."""


def check_filtered_run(make_config: Callable[..., RunConfig], folder: Path, **algorithm: Any) -> None:
    """Check that its epochs end with every position accounted for, and that it has the same bits when it is killed.
    `algorithm`: more settings."""
    (folder / "reward.py").write_text(REWARD)
    config = make_config(
        data={"max_train_rows": ROWS, "max_response_length": 16},
        algorithm={"filters": ["zero_variance"], **algorithm},
        reward={"functions": [{"function": f"{folder / 'reward.py'}:teaches"}], "workers": 1},
        rollout={"engine": "scripted", "engine_args": {"length_sigma": 0.5}},
        trainer={"max_steps": 0, "total_epochs": EPOCHS, "samples_per_step": 4, "save_freq": 2},
        network={"timeout_s": 5.0},
    )
    whole, killed = folder / "whole", folder / "killed"
    assert run_both(config.model_copy(update={"run_dir": str(whole)}), whole) == (0, 0), logs(whole)
    places = ("group.journaled:2", "step.trained:2")
    run_killed(config.model_copy(update={"run_dir": str(killed)}), killed, places)
    assert_same_run(killed, whole, config)
    assert account(killed) == account(whole)

    consumed, filtered, counters = account(whole)
    assert not {position for position, _ in consumed} & {position for position, _ in filtered}
    passed = counters.get("skipped", 0) + ROWS * EPOCHS - counters["next_position"]
    assert len(consumed) + len(filtered) + passed == ROWS * EPOCHS, (
        "every position was trained, filtered or passed over"
    )
    assert len(filtered) >= ROWS // 2
    lines = read_lines(whole / "metrics.jsonl")
    assert all(line["zero_variance_groups"] == line["ledger_residual"] == 0 for line in lines)
    assert lines[-1]["dropped/zero_variance"] == len(filtered)
    status = json.loads((whole / "status.json").read_text())
    assert (status["phase"], status["step"]) == ("finished", len(lines))
    assert status["total_steps"] == len(lines) < ROWS * EPOCHS // 4, "the run ended with its data"
    assert "the data is used up at step" in (whole / "learner.log").read_text()


def account(run: Path) -> tuple[list[tuple[int, int]], list[tuple[int, str]], dict[str, int]]:
    """(position, step) of the trained groups, (position, reason) of the filtered ones, and the ledger's counters."""
    with sqlite3.connect(run / JOURNAL_FILE) as db:
        return (
            db.execute("SELECT position, step FROM consumption ORDER BY position").fetchall(),
            db.execute("SELECT position, reason FROM filtered ORDER BY position").fetchall(),
            dict(db.execute("SELECT name, count FROM ledger").fetchall()),
        )
