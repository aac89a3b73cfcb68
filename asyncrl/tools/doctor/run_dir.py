"""Is the run directory free and writable?"""

from __future__ import annotations

import tempfile
from pathlib import Path

from asyncrl.config.schema import RunConfig
from asyncrl.errors import RunTakenError, UserError
from asyncrl.launch.train import check_run_dir, is_resumable
from asyncrl.run_folder.lock import refuse_busy
from asyncrl.tools.doctor.findings import Finding, Findings, split_fix


def find_run_dir(config: RunConfig) -> Findings[None]:
    path = config.run_path
    folder = nearest_folder(path)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b" ")
            file.flush()
    except OSError as error:
        value = f"nothing can be written in {folder}: {error.strerror}"
        yield Finding("run_dir", value, "problem", "set run_dir to a folder that you may write, on a disk with room")
        return
    try:
        refuse_busy(path)
    except RunTakenError as error:
        value, fix = split_fix(str(error))
        yield Finding("run_dir", value, "problem", fix)
        return
    try:
        check_run_dir(config, resume=False)
    except UserError as error:
        value, fix = split_fix(str(error).removeprefix("run_dir "))
        yield Finding("run_dir", value, "warning" if is_resumable(path) else "problem", fix)
    else:
        yield Finding("run_dir", f"{path} is free, and {folder} can be written")


def nearest_folder(path: Path) -> Path:
    """The path, or what there is above it."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
