"""The reason why a run stopped is saved on a full disk, too, and told by the launcher."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, LearnerLeftError, UserError, WaitTimeoutError
from asyncrl.journal.full_disk import describe_full_disk, is_disk_full
from asyncrl.launch.display import RunProgress
from asyncrl.launch.processes import ServiceProcess
from asyncrl.launch.supervisor import Outcome
from asyncrl.launch.train import report
from asyncrl.run_folder.failure import (
    FAILURE_FILE,
    Failure,
    Kind,
    ReservedFailureFile,
    failure_of,
    read_failure,
)
from tests.rigs.small_runs import save_failure


def test_the_reason_is_saved_on_a_disk_that_is_full(tmp_path: Path) -> None:
    """No new block is needed: the room that was taken is filled in place and renamed."""
    with ReservedFailureFile(tmp_path / FAILURE_FILE) as room:
        (taken,) = tmp_path.iterdir()
        before = (taken.stat().st_ino, taken.stat().st_blocks)
        assert room.save(Failure("learner", "disk_full", "\N{EURO SIGN}" * 5000, 0.0))
        after = (tmp_path / FAILURE_FILE).stat()
        assert (after.st_ino, after.st_blocks) == before
    saved = read_failure(tmp_path)
    assert saved is not None
    assert saved.reason == "\N{EURO SIGN}" * 1500
    assert os.listdir(tmp_path) == [FAILURE_FILE]


FULL = OSError(errno.ENOSPC, "No space left on device")
MISTAKE = UserError("make room")
MISTAKE.__cause__ = FULL


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WaitTimeoutError("w"), "timed_out"),
        (BadStateError("b"), "bad_state"),
        (FULL, "disk_full"),
        (MISTAKE, "user_error"),
        (RuntimeError("unforeseen"), None),
        (LearnerLeftError("No space left on device, it said"), None),
    ],
)
def test_failures_have_kinds(tmp_path: Path, error: Exception, kind: Kind | None) -> None:
    found = failure_of(error, "learner", tmp_path)
    assert (found.kind if found else None) == kind


@pytest.mark.parametrize("content", ["{", "[]", '{"reason": "x"}'])
def test_a_damaged_file_is_no_failure_of_ours(tmp_path: Path, content: str) -> None:
    (tmp_path / FAILURE_FILE).write_text(content)
    assert read_failure(tmp_path) is None


def test_only_a_full_disk_is_taken_for_one() -> None:
    wrapped = RuntimeError("saving failed")
    wrapped.__cause__ = ValueError("inner")
    wrapped.__cause__.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert is_disk_full(wrapped)
    for other in (OSError(errno.EACCES, "Permission denied"), sqlite3.OperationalError("database is locked")):
        assert not is_disk_full(other)


def test_the_full_disk_is_that_of_the_file_that_was_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    problem = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "elsewhere" / "weights"))
    assert f"the disk of {tmp_path / 'elsewhere'} is full" in describe_full_disk(problem, tmp_path)
    problem = OSError(errno.ENOSPC, "No space left on device", "/nowhere/at/all")
    assert f"the disk of {tmp_path} is full" in describe_full_disk(problem, tmp_path)


@pytest.mark.parametrize(
    ("outcome", "saved_ago_s", "log", "says"),
    [
        (
            Outcome(3),
            -1,
            "error: of the log",
            r"error: the loss is nan\nlearner stopped the run; saved in .*json",
        ),
        (Outcome(3), 1, "loading\nerror: of the log", "^error: of the log\n$"),
        (Outcome(3), None, "stopped: the di", r"ended with code 3; its log does not say why \([0-9,.]+ MiB.*\nstopped"),
        (
            Outcome(1, gave_up=True),
            None,
            "ValueError: why",
            r"code 1 once more after 5 restarts .*:\nValueError: why",
        ),
    ],
)
def test_the_launcher_prints_the_reason_or_else_the_end_of_the_log(
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    outcome: Outcome,
    saved_ago_s: float | None,
    log: str,
    says: str,
) -> None:
    config, since = make_config(), time.time()
    config.run_path.mkdir()
    if saved_ago_s is not None:
        save_failure(config.run_path, time=since - saved_ago_s)
    service = ServiceProcess(
        "learner", [sys.executable, "-c", f"raise SystemExit({outcome.code})"], tmp_path / "x.log", {}
    )
    service.start()
    assert service.process is not None
    service.process.wait(timeout=10)
    service.log.write_text(log)
    ended = replace(outcome, failed=service)
    assert report(config, ended, RunProgress(config.run_path, since=since)) == outcome.code
    assert re.search(says, capsys.readouterr().err, re.DOTALL)


def test_a_finished_run_says_how_many_of_its_steps_had_no_score(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config()
    config.run_path.mkdir()
    run = RunProgress(config.run_path, status={"unscored": "environment_exception: no map"})
    run.steps = [{"step": 1, "rows/error": 4.0}, {"step": 2, "rows/error": 3.0, "rows/truncated": 1.0}]
    assert report(config, Outcome(0), run) == 0
    assert re.search("of 1 of the last 2 steps .* environment_exception: no map", capsys.readouterr().out)


@pytest.mark.parametrize(("taught", "fires"), [(0.0, True), (1.0, False)])
def test_a_finished_run_says_that_it_has_learned_nothing(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str], taught: float, fires: bool
) -> None:
    """With the usual causes; one group of 24 that had spread is enough."""
    config = make_config()
    config.run_path.mkdir()
    run = RunProgress(config.run_path)
    run.steps = [
        {"step": n, "groups": 8.0, "zero_variance_groups": 8.0, "teaching_groups": taught if n == 2 else 0.0}
        for n in range(1, 4)
    ]
    assert report(config, Outcome(0), run) == 0
    said = re.search(r"warning: The run learns nothing .*samples\.jsonl.*stop tokens", capsys.readouterr().out)
    assert bool(said) == fires


@pytest.mark.parametrize(
    ("marks", "says"),
    [
        ((0, 0, 0), "held-out accuracy 0.100 -> 0.300 over 16 rows\n"),
        ((0, 1, 1), "held-out accuracy 0.200 -> 0.300 over 16 rows\nrewards or held-out rows changed after step 0"),
        ((0, 1, 2), "held-out accuracy 0.300 over 16 rows\nrewards or held-out rows changed after step 4"),
    ],
)
def test_a_finished_run_compares_evaluations_of_one_reward(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str], marks: tuple[int, ...], says: str
) -> None:
    config = make_config()
    config.run_path.mkdir()
    made = [{"step": 4 * n, "accuracy": (n + 1) / 10, "rows": 16, "scoring_changes": m} for n, m in enumerate(marks)]
    assert report(config, Outcome(0), RunProgress(config.run_path, evaluations=made)) == 0
    assert says in capsys.readouterr().out


def test_a_finished_run_says_how_many_held_out_rows_it_has_trained_on(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config()
    config.run_path.mkdir()
    run = RunProgress(config.run_path, status={"held_out_trained": 3}, evaluations=[{"accuracy": 1.0, "rows": 16}])
    assert report(config, Outcome(0), run) == 0
    assert "held-out accuracy 1.000 over 16 rows, of which 3 are trained on, too" in capsys.readouterr().out
