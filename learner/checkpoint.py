"""Checkpoints: model, optimiser, random state, data position and policy version in one folder, whole or absent."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from asyncrl.errors import UserError
from asyncrl.models.export import export_model
from learner.engines.base import TrainEngine

MODEL_FOLDER = "model"
STATE_FILE = "state.json"
RANDOM_FILE = "random.pt"


@dataclass(frozen=True)
class LearnerState:
    """Everything but tensors that a resumed run continues from."""

    step: int
    version: int
    architecture: str
    ledger: dict[str, Any]
    run_id: str
    settings: dict[str, int]
    """What decides which ticket is which; a resumed run must have the same."""


def checkpoint_folder(run_path: Path, step: int) -> Path:
    return run_path / "checkpoints" / f"step-{step:06d}"


def save_checkpoint(run_path: Path, engine: TrainEngine, processor: Any, state: LearnerState, keep: int) -> Path:
    """Write the step's checkpoint and remove all but the newest `keep`. Its model folder is a Hugging Face folder."""
    folder = checkpoint_folder(run_path, state.step)
    building = folder.with_name(f".{folder.name}.building-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    export_model(engine.unwrap_model(), processor, building / MODEL_FOLDER)
    engine.save(building)
    torch.save(torch.get_rng_state(), building / RANDOM_FILE)
    (building / STATE_FILE).write_text(json.dumps(asdict(state), indent=2))
    _flush(building)
    shutil.rmtree(folder, ignore_errors=True)
    building.rename(folder)
    for old in list_checkpoints(run_path)[:-keep]:
        shutil.rmtree(old)
    return folder


def list_checkpoints(run_path: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in (run_path / "checkpoints").glob("step-*") if (path / STATE_FILE).is_file())


def newest_checkpoint(run_path: Path) -> Path:
    found = list_checkpoints(run_path)
    if not found:
        raise UserError(
            f"--resume: there is no checkpoint in {run_path / 'checkpoints'}. Start without --resume in another "
            "run_dir, and set trainer.save_freq to have checkpoints during the run"
        )
    return found[-1]


def read_state(folder: Path) -> LearnerState:
    return LearnerState(**json.loads((folder / STATE_FILE).read_text()))


def check_settings(folder: Path, state: LearnerState, settings: dict[str, int]) -> None:
    """Raise UserError naming the keys that a resumed run may not change."""
    changed = [
        f"{key} was {state.settings.get(key)}, is {value}"
        for key, value in settings.items()
        if state.settings.get(key) != value
    ]
    if changed:
        raise UserError(
            f"--resume from {folder}: {'; '.join(changed)}. Resume with the same values, or start a new run from the "
            f"checkpoint's model: model.path={folder / MODEL_FOLDER}"
        )


def restore_engine(folder: Path, engine: TrainEngine, state: LearnerState, architecture: str) -> None:
    """Optimiser and random state; the model was loaded from the checkpoint's model folder."""
    if state.architecture != architecture:
        raise UserError(
            f"{folder} is a checkpoint of another model (fingerprint {state.architecture}, this one has "
            f"{architecture}). Resume with the run's own config.yaml"
        )
    engine.load(folder)
    torch.set_rng_state(torch.load(folder / RANDOM_FILE, weights_only=True))


def _flush(folder: Path) -> None:
    """The files are on disk before the folder gets its name."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
