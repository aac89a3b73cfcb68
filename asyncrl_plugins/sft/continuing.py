"""Continuation of a supervised run: its newest checkpoint, and what must be as it was."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError, pasted
from asyncrl.run_folder.contents import EXPORT_FOLDER
from asyncrl_plugins.sft.rows import DemonstrationRows
from asyncrl_plugins.sft.settings import settings_of
from asyncrl_plugins.sft.trainer import TOKENS, Saved
from learner.loop.checkpoint import newest_checkpoint, read_state
from learner.loop.resume import DATE

logger = logging.getLogger(__name__)

ROWS = "usable training rows"


def find_saved(run_path: Path) -> Saved | None:
    """The newest checkpoint, verified; None where there is none: the run begins again. Raises BadStateError where it is
    damaged, UserError where a run without checkpoints is finished."""
    folder = newest_checkpoint(run_path)
    if folder:
        return Saved(folder, read_state(folder))
    if (run_path / EXPORT_FOLDER).is_dir():
        raise UserError(
            f"--resume: the run in {run_path} is finished ({EXPORT_FOLDER}), and has no checkpoint to go on from "
            f"(sft.save_freq). Train on in a new run: model.path={pasted(run_path / EXPORT_FOLDER)}"
        )
    logger.warning("%s has no checkpoint yet: the run begins again", run_path)
    return None


def recorded_settings(config: RunConfig, rows: DemonstrationRows) -> dict[str, Any]:
    """Settings that decide the rows of each step, for the checkpoint, and the day that prompts tell."""
    return {
        ROWS: rows.survey.fingerprint("index", "prompt", "rest"),
        "sft.rows_per_step": settings_of(config).rows_per_step,
        "trainer.seed": config.trainer.seed,
        "data.shuffle": config.data.shuffle,
        DATE: config.model.template_date,
    }


def refuse_changes(saved: Saved, now: dict[str, Any]) -> None:
    """Raise UserError naming what is not what it was when the checkpoint was written."""
    before = {name: value for name, value in saved.settings.items() if name != TOKENS}
    changes = [f"{name} was {value} and is {now.get(name)}" for name, value in before.items() if now.get(name) != value]
    if changes:
        raise UserError(
            f"--resume: {saved.folder} is of other settings or rows: {'; '.join(changes)}. Put them back, or begin a "
            "new run from its model"
        )
