"""Weights & Biases: online where there is a key, else offline in `<run_dir>/wandb`, to be sent by `wandb sync`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from asyncrl.telemetry import tracker
from asyncrl.telemetry.tracker import Sample, TrackedRun
from asyncrl_plugins.trackers.plugin import WandbConfig
from asyncrl_plugins.trackers.shown import COLUMNS, OnceShown, kept_name, rows

ID_FILE = "wandb-id"
logging.getLogger("wandb").setLevel(logging.WARNING)


class WandbTracker(OnceShown):
    def __init__(self, run: TrackedRun, settings: WandbConfig):
        self._last_recorded = run.last_recorded
        # Pictures of an offline run wait here: with the run, and not in a home that a container may not have.
        os.environ.setdefault("WANDB_DATA_DIR", str((run.run_path / "wandb").absolute()))
        mode = os.environ.get("WANDB_MODE")
        if not mode:
            mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
        self._run = wandb.init(
            project=settings.project,
            name=str(run.run_path),
            id=kept_name(run.run_path / ID_FILE),
            resume="allow",
            dir=str(run.run_path),
            mode=mode,  # pyright: ignore[reportArgumentType]  # what W&B does not know it refuses itself
            config=dict(run.config),
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                finish_timeout=tracker.CLOSE_S,
                finish_timeout_raises=True,
            ),
        )

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        if step <= self._last_recorded:
            return
        data: list[Any] = [[row[name] for name in COLUMNS] for row in rows(step, samples, wandb.Image)]
        self._log(step, {"samples": wandb.Table(columns=list(COLUMNS), data=data)})

    def _log(self, step: int, values: Mapping[str, object]) -> None:
        """Log, raising a step that W&B would reject after a resume (it is below W&B's own) to W&B's."""
        self._run.log({**values, "step": step}, step=max(step, self._run.step))

    def close(self) -> None:
        self._run.finish()
