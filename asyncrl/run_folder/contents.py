"""Allowed starts in a run directory: new run, resume, or refusal; and the configuration saved there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from asyncrl.errors import UserError, pasted
from asyncrl.journal import JOURNAL_FILE
from asyncrl.run_folder.failure import FAILURE_FILE, RESERVED_FILE, refuse_bad_state
from asyncrl.run_folder.lock import LAUNCHER_LOCK, LEARNER_LOCK
from asyncrl.telemetry.jsonl import write_atomically
from asyncrl.telemetry.recorder import CONFIG_FILE, is_finished, read_status

CHECKPOINTS = "checkpoints"
MODEL_FOLDER = "model"
ADAPTER_FOLDER = "adapter"
"""A checkpoint has a model or, if the run trains an adapter, an adapter."""
EXPORT_FOLDER = "export"
"""End product of a run."""
_NAME = re.compile(r"step-(\d{6,})")


def export_advice(run_path: Path, *, merged: bool = False) -> str:
    """Commands that turn a run's newest checkpoint into a model to start from; `merged` with its adapter."""
    return f"asyncrl export {pasted(run_path)} TARGET{' --merged' * merged}, then model.path=TARGET"


def checkpoint_folder(run_path: Path, step: int) -> Path:
    return run_path / CHECKPOINTS / f"step-{step:06d}"


def checkpoint_folders(run_path: Path) -> dict[int, Path]:
    """Find the checkpoints, oldest first. A folder with any other name, such as a copy beside them, is ignored."""
    named = ((_NAME.fullmatch(path.name), path) for path in (run_path / CHECKPOINTS).glob("step-*"))
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def find_checkpoint(run_path: Path, step: int | None) -> Path:
    """The checkpoint of a step, or the newest one. Raises UserError."""
    checkpoints = checkpoint_folders(run_path)
    if not checkpoints:
        raise UserError(f"there is no checkpoint in {run_path / CHECKPOINTS}")
    step = max(checkpoints) if step is None else step
    if step not in checkpoints:
        raise UserError(f"there is no checkpoint of step {step}: {run_path} has those of {sorted(checkpoints)}")
    return checkpoints[step]


def policy_folder(run_path: Path, step: int | None) -> Path:
    """Folder with the model or the adapter of a step, or of the newest checkpoint; of a supervised run
    without checkpoints its export. Raises UserError."""
    if step is None and (run_path / EXPORT_FOLDER).is_dir() and not checkpoint_folders(run_path):
        return run_path / EXPORT_FOLDER
    checkpoint = find_checkpoint(run_path, step)
    adapter = checkpoint / ADAPTER_FOLDER
    return adapter if adapter.is_dir() else checkpoint / MODEL_FOLDER


CANDIDATE_FILE = ".config.candidate.yaml"
"""The configuration that a launched run's services read; the learner writes config.yaml when it accepts this. It
belongs to the launcher that has the run directory to itself, and goes with it."""
INPUTS_FOLDER = "inputs"
"""Functions and rows that a run was given by Python (`asyncrl.train`), as files."""
_NO_RUN = (LAUNCHER_LOCK, LEARNER_LOCK, CANDIDATE_FILE, "logs", INPUTS_FOLDER, FAILURE_FILE, RESERVED_FILE)
"""Files that a run leaves which has not begun."""


def save_config(run_path: Path, resolved: str, name: str = CONFIG_FILE) -> Path:
    """Write the resolved configuration, for --resume and for tools of this user: it may have secrets. Raises OSError
    where it cannot be written."""
    file, text = run_path / name, resolved.encode()
    if not file.is_file() or file.read_bytes() != text:
        run_path.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text, mode=0o600)
    return file


def check_run_dir(path: Path, *, resume: bool) -> None:
    """A new run needs an empty or absent directory, a resumed one its journal in it."""
    if path.exists() and not path.is_dir():
        raise UserError(f"run_dir {path} is a file. Set another run_dir=...")
    in_use = path.exists() and any(file.name not in _NO_RUN for file in path.iterdir())
    resumable = is_resumable(path)
    if resume and not resumable:
        fix = "Remove it or set another run_dir=..." if in_use else "Start without --resume"
        raise UserError(f"--resume: there is no {JOURNAL_FILE} in {path}. {fix}")
    if in_use and not resume:
        advice = "Continue it with --resume, or" if resumable else "There is no run in it to --resume: remove it, or"
        raise UserError(f"run_dir {path} exists and is not empty. {advice} set another run_dir=...")


def is_resumable(run_path: Path) -> bool:
    """True if the directory has a journal."""
    return os.path.isfile(run_path / JOURNAL_FILE)  # false, too, where nothing may be looked at


def is_to_resume(run_path: Path, max_steps: int, file: Path, *, resume: bool, unattended: bool) -> bool | None:
    """True if a start of the configuration `file` continues the run: as `resume` says, or for an unattended start as
    the directory does. None where an unattended start finds that the run is finished, and has said so."""
    if not unattended:
        return resume
    if resume:
        raise UserError("--unattended decides by itself whether to --resume: give one of the two")
    attempt = next_attempt(run_path)
    if attempt == "nothing":
        print(_describe_finished(run_path, max_steps, file))
        return None
    return attempt == "continue"


def next_attempt(run_path: Path) -> Literal["begin", "continue", "nothing"]:
    """Choose begin, continue (after a crash, an interruption or a full disk) or nothing for an unattended start.

    Raises BadStateError where the run stopped in bad state: another attempt would meet the same, or hide it; UserError
    where that cannot be read.
    """
    refuse_bad_state(run_path)
    if is_finished(run_path):
        return "nothing"
    return "continue" if is_resumable(run_path) else "begin"


def _describe_finished(run_path: Path, max_steps: int, file: Path) -> str:
    """Say that there is nothing to do. A finished run is not continued by a machine, whatever `file` says."""
    text, step = f"the run in {run_path} is finished", read_status(run_path).get("step")
    if isinstance(step, int) and max_steps > step:
        text += (
            f", at step {step}, and trainer.max_steps is {max_steps}. To continue it: "
            f"asyncrl learn {pasted(file)} --resume, with the same settings"
        )
    return text
