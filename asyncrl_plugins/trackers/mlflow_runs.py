"""MLflow: a run on the server of MLFLOW_TRACKING_URI, else in a database in `<run_dir>/mlflow`."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence

import yaml

from asyncrl.telemetry.tracker import SAMPLES_EVERY_STEPS, Sample, TrackedRun
from asyncrl_plugins.trackers.plugin import MlflowConfig
from asyncrl_plugins.trackers.shown import TEXTS, OnceShown, flat, kept_name, rows

FOLDER = "mlflow"
ID_FILE = "mlflow-id"
MOST_PARAMS = 100
"""Parameters of one call, as MLflow bounds them."""
TABLE_STEPS = 100 * SAMPLES_EVERY_STEPS
"""Last step whose samples are shown as a table: a tag names all tables of a run, and has room for about 140. Samples of
later steps are files of the same form. A table that grows is none: pandas would read its texts back as numbers."""
_REFUSED = re.compile(r"[^\w\-. :/]")


class MlflowTracker(OnceShown):
    def __init__(self, run: TrackedRun, settings: MlflowConfig):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # of its users to its makers; read at the import
        import mlflow  # pyright: ignore[reportMissingImports]  # an extra
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._metric, self._param = Metric, Param
        self._last_recorded = run.last_recorded
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            folder = run.run_path.absolute() / FOLDER
            if not (run.run_path / ID_FILE).exists():  # a process that ends as MLflow makes its tables leaves some
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)
            uri, artifacts = f"sqlite:///{folder}/mlflow.db", (folder / "artifacts").as_uri()
        self._client = mlflow.MlflowClient(uri)
        self._id = kept_name(run.run_path / ID_FILE, lambda: self._create(run, settings.experiment, artifacts))
        self._client.update_run(self._id, status="RUNNING")
        self._client.log_text(self._id, yaml.safe_dump(dict(run.config), sort_keys=False), "config.yaml")

    def _create(self, run: TrackedRun, experiment: str, artifacts: str | None) -> str:
        """Make the run, with its settings, which MLflow never changes. Returns its id."""
        there = self._client.get_experiment_by_name(experiment)
        number = there.experiment_id if there else self._client.create_experiment(experiment, artifacts)
        made = self._client.create_run(number, run_name=str(run.run_path)).info.run_id
        params = [self._param(name, str(value)) for name, value in flat(run.config)]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(made, params=params[start : start + MOST_PARAMS])
        return made

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        if step <= self._last_recorded:
            return
        table, file = rows(step, samples), f"samples/step-{step:06d}.json"
        if step <= TABLE_STEPS:
            self._client.log_table(self._id, {name: [row[name] for row in table] for name in TEXTS}, file)
        else:
            data = {"columns": TEXTS, "data": [[row[name] for name in TEXTS] for row in table]}
            self._client.log_text(self._id, json.dumps(data), file)
        for number, sample in enumerate(samples):
            for place, shown in enumerate(sample.pictures()):
                self._client.log_image(self._id, shown, key=f"samples/{number}/{place}", step=step)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(_REFUSED.sub("_", name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)
