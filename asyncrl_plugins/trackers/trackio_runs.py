"""trackio: a project in `<run_dir>/trackio`, or where TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.telemetry.tracker import Sample, TrackedRun
from asyncrl_plugins.trackers.plugin import TrackioConfig
from asyncrl_plugins.trackers.shown import COLUMNS, OnceShown, kept_name, rows

FOLDER = "trackio"
NAME_FILE = "trackio-name"


class TrackioTracker(OnceShown):
    def __init__(self, run: TrackedRun, settings: TrackioConfig):
        # trackio reads it as it is imported.
        os.environ.setdefault("TRACKIO_DIR", str((run.run_path / FOLDER).absolute()))
        import trackio  # pyright: ignore[reportMissingImports]  # an extra

        self._last_recorded = run.last_recorded
        self._trackio = trackio
        name = kept_name(run.run_path / NAME_FILE)
        self._run = trackio.init(
            project=settings.project,
            name=f"{run.run_path.absolute().name}-{name}",  # a folder of pictures has this name: no path
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        if step > self._last_recorded:
            data = [[row[name] for name in COLUMNS] for row in rows(step, samples, self._trackio.Image)]
            self._run.log({"samples": self._trackio.Table(columns=list(COLUMNS), data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()
