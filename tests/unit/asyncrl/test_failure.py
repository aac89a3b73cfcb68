"""Why a run stopped is saved on a full disk, too, and told by the launcher."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.errors import LearnerLeftError, UserError
from asyncrl.launch.processes import Service
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
from asyncrl.run_folder.full_disk import describe_full_disk, is_disk_full
from asyncrl.tools.panel.run_snapshot import RunSnapshot
from tests.rigs.small_runs import save_failure


def a_failure(kind: Kind = "bad_state", reason: str = "the loss is nan") -> Failure:
    return Failure("learner", kind, reason, 0.0)


def test_the_reason_is_saved_on_a_disk_that_is_full(tmp_path: Path) -> None:
    """No new block is needed: the room that was taken is filled in place and renamed."""
    with ReservedFailureFile(tmp_path / FAILURE_FILE) as room:
        (taken,) = tmp_path.iterdir()
        before = (taken.stat().st_ino, taken.stat().st_blocks)
        assert room.save(a_failure("disk_full", "\N{EURO SIGN}" * 5000))
        after = (tmp_path / FAILURE_FILE).stat()
        assert (after.st_ino, after.st_blocks) == before
    saved = read_failure(tmp_path)
    assert saved is not None
    assert saved.reason == "\N{EURO SIGN}" * 1500
    assert os.listdir(tmp_path) == [FAILURE_FILE]


def test_a_mistake_of_the_user_is_one_though_a_full_disk_led_to_it(tmp_path: Path) -> None:
    mistake = UserError("make room")
    mistake.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    found = failure_of(mistake, "learner", tmp_path)
    assert found is not None
    assert (found.kind, found.reason) == ("user_error", "make room")
    assert failure_of(RuntimeError("unforeseen"), "learner", tmp_path) is None
    assert failure_of(LearnerLeftError("No space left on device, it said"), "rollout_server", tmp_path) is None


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


@pytest.fixture
def ended(tmp_path: Path) -> Callable[..., Service]:
    """A service that has ended with a code, and has a log."""

    def end(code: int, log: str) -> Service:
        service = Service("learner", [sys.executable, "-c", f"import sys; sys.exit({code})"], tmp_path / "x.log", {})
        service.start()
        assert service.process is not None
        service.process.wait(timeout=10)
        service.log.write_text(log)
        return service

    return end


@pytest.mark.parametrize("saved", ["now", "earlier", ""])
def test_the_launcher_prints_the_reason(
    make_config: Callable[..., RunConfig],
    ended: Callable[..., Service],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    saved: str,
) -> None:
    """From failure.json, or from the log where that could not be written, or is of an earlier attempt."""
    config = make_config()
    config.run_path.mkdir()
    since = time.time()
    if saved:
        reason, when = ("the loss is nan", since + 1) if saved == "now" else ("of before", since - 1)
        save_failure(config.run_path, reason=reason, time=when)
    failed = ended(3, "loading\nerror: the loss is nan\n")
    assert report(config, Outcome(3, failed=failed), RunSnapshot(config.run_path, since=since)) == 3
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "error: the loss is nan"
    assert len(printed) == (2 if saved == "now" else 1)
    if saved == "now":
        assert str(config.run_path / FAILURE_FILE) in printed[1]


@pytest.mark.parametrize(
    ("outcome", "log", "says"),
    [
        ({"code": 3}, "stopped: the di", r"error: learner ended with code 3; its log does not say why \([0-9,.]+ MiB"),
        ({"code": 1, "gave_up": True}, "ValueError: why", r"ended with code 1 once more after 5 restarts .*: why"),
    ],
)
def test_without_a_reason_the_launcher_prints_the_end_of_the_log(
    make_config: Callable[..., RunConfig],
    ended: Callable[..., Service],
    capsys: pytest.CaptureFixture[str],
    outcome: dict[str, Any],
    log: str,
    says: str,
) -> None:
    config = make_config()
    failed = ended(outcome["code"], log)
    assert report(config, Outcome(**outcome, failed=failed), RunSnapshot(config.run_path)) == outcome["code"]
    printed = capsys.readouterr().err
    assert re.search(f"(?s){says}", printed)
    assert printed.rstrip("\n").endswith(log)


def test_an_interrupted_run_says_whether_it_can_be_continued(
    make_config: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, server = make_config(), Service("rollout_server", ["true"], tmp_path / "x.log", {})
    config.run_path.mkdir()
    assert report(config, Outcome(130), RunSnapshot(config.run_path)) == 130
    (config.run_path / "journal.sqlite").touch()
    assert report(config, Outcome(130, failed=server), RunSnapshot(config.run_path)) == 130
    first, second = capsys.readouterr().out.splitlines()
    assert first == "interrupted before it had begun"
    assert second == "rollout_server was told to stop, and the run with it; the same command with --resume continues"
