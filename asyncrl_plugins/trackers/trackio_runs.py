"""trackio: a project in `<run_dir>/trackio`, or where TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from asyncrl.telemetry.tracker import Sample, TrackedRun
from asyncrl_plugins.trackers.plugin import TrackioConfig
from asyncrl_plugins.trackers.shown import COLUMNS, kept_name, rows

FOLDER = "trackio"
NAME_FILE = "trackio-name"


class TrackioTracker:
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

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._last_recorded:  # steps made again from the journal are the same
            self._run.log(dict(metrics), step=step)

    def evaluation(self, step: int, results: Mapping[str, float]) -> None:
        self._run.log({f"held_out/{name}": value for name, value in results.items()}, step=step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        if step > self._last_recorded:
            data = [[row[name] for name in COLUMNS] for row in rows(step, samples, self._trackio.Image)]
            self._run.log({"samples": self._trackio.Table(columns=list(COLUMNS), data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()
