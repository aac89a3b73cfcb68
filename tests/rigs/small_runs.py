"""Runs of a few steps that are to go wrong, and what they leave behind."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from asyncrl.config.schema import RunConfig
from asyncrl.journal import JOURNAL_FILE
from asyncrl.run_folder.failure import FAILURE_FILE, Failure, Kind, ReservedFailureFile, read_failure

STEPS, PER_STEP = 3, 4


def failure_of(run: Path) -> Failure:
    failure = read_failure(run)
    assert failure is not None, logs(run)
    return failure


def save_failure(
    run: Path, kind: Kind = "bad_state", *, reason: str = "the loss is nan", time: float = 0.0, service: str = "learner"
) -> Failure:
    """Save a failure as the learner does that holds the run."""
    failure = Failure(service, kind, reason, time)
    with ReservedFailureFile(run / FAILURE_FILE) as room:
        assert room.save(failure)
    return failure


def logs(folder: Path, *, whole: bool = False) -> str:
    """The ends of all of them, or all of all."""
    return "\n".join(path.read_text()[0 if whole else -3000 :] for path in sorted(folder.glob("*.log")))


def small(make_config: Callable[..., RunConfig], **sections: dict[str, Any]) -> RunConfig:
    """A run of three steps whose micro-batch is the whole batch."""
    base: dict[str, dict[str, Any]] = {
        "data": {"val_files": []},
        "batch": {"tokens_per_microbatch": 8192},
        "trainer": {"max_steps": STEPS, "samples_per_step": PER_STEP},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return make_config(**base)


def assert_every_prompt_trained_once(run: Path, steps: int = STEPS, *, per_step: int = PER_STEP) -> None:
    with closing(sqlite3.connect(run / JOURNAL_FILE)) as db:
        rows = db.execute("SELECT position, step FROM consumption ORDER BY position").fetchall()
    assert [position for position, _ in rows] == list(range(steps * per_step))
    assert sorted(step for _, step in rows) == sorted(list(range(1, steps + 1)) * per_step)
