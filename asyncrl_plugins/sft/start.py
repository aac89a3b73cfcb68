"""Folders that a supervised run may begin or continue in."""

from __future__ import annotations

from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.run_folder.contents import is_resumable
from asyncrl.telemetry.recorder import STATUS_FILE


def check_start(run_path: Path, *, resume: bool) -> None:
    """Raise UserError where a new run would begin in another supervised run, or with `resume` there is none."""
    is_there = (run_path / STATUS_FILE).is_file() and not is_resumable(run_path)
    if resume and not is_there:
        other = ", but one of asyncrl train, which asyncrl train CONFIG --resume continues" * is_resumable(run_path)
        raise UserError(
            f"--resume: there is no supervised run in {run_path}{other}. Start without --resume, or set another "
            "run_dir=..."
        )
    if is_there and not resume:
        raise UserError(
            f"{run_path} holds a supervised run. Continue it with --resume (asyncrl sft CONFIG --resume), or set "
            "another run_dir=..."
        )
