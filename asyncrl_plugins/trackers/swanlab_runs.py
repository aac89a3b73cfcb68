"""SwanLab: online where there is a key, else offline in `<run_dir>/swanlab`, to be sent by `swanlab sync`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import swanlab  # pyright: ignore[reportMissingImports]  # an extra

from asyncrl.telemetry.tracker import Sample, TrackedRun
from asyncrl_plugins.trackers.plugin import SwanLabConfig
from asyncrl_plugins.trackers.shown import TEXTS, OnceShown, kept_name, rows

FOLDER = "swanlab"
ID_FILE = "swanlab-id"
QUIET: dict[str, Any] = {
    "interactive": False,
    "terminal": {"proxy_type": "none"},
    "probe": dict.fromkeys(("monitor", "git", "requirements", "runtime"), False),
}
"""Nothing is asked, and what the process prints, its command line, its packages and its load stay here."""


class SwanLabTracker(OnceShown):
    def __init__(self, run: TrackedRun, settings: SwanLabConfig):
        self._last_recorded = run.last_recorded
        os.environ.setdefault("SWANLAB_LOG_DIR", str((run.run_path / FOLDER).absolute()))
        found = swanlab.Settings()
        is_chosen = found.api_key or "mode" in found.model_fields_set
        self._run = swanlab.init(
            project=settings.project,
            name=str(run.run_path),
            id=kept_name(run.run_path / ID_FILE),
            resume="allow",
            mode=found.mode if is_chosen else "offline",
            config=dict(run.config),
            settings=swanlab.Settings(**QUIET),
        )

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(values, step=step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        if step <= self._last_recorded:
            return
        table = swanlab.echarts.Table()
        table.add(list(TEXTS), [[row[name] for name in TEXTS] for row in rows(step, samples)])
        shown = [
            swanlab.Image(picture, caption=f"{sample.record.get('row_id')}, image {place}")
            for sample in samples
            for place, picture in enumerate(sample.pictures())
        ]
        self._run.log({"samples": table, **({"sample_images": shown} if shown else {})}, step=step)

    def close(self) -> None:
        self._run.finish()
