"""A run as its folder has it: metrics, samples, and the model that came of it."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl import plugins
from asyncrl.errors import UserError
from asyncrl.run_folder.contents import EXPORT_FOLDER, policy_folder
from asyncrl.telemetry.jsonl import read_records
from asyncrl.telemetry.recorder import CONFIG_FILE, EVALUATIONS_FILE, METRICS_FILE, SAMPLES_FILE, read_status

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig


def load(run_dir: str | Path) -> Run:
    """A run that has begun, here or elsewhere. Raises UserError where there is none."""
    run = Run(Path(run_dir))
    if not (run.folder / CONFIG_FILE).is_file():
        raise UserError(f"there is no run in {run.folder}: it has no {CONFIG_FILE}")
    return run


class Run:
    """Each property reads the folder anew, so that a run under way can be looked at, too."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __repr__(self) -> str:
        scores = [found["accuracy"] for found in self.evaluations if found.get("accuracy") is not None]
        learnt = f", held-out accuracy {scores[0]:.3f} -> {scores[-1]:.3f}" if scores else ""
        status = self.status
        return f"Run({str(self.folder)!r}: {status.get('phase', 'not begun')}, step {status.get('step', 0)}{learnt})"

    @cached_property
    def config(self) -> RunConfig:
        """The configuration that the run has resolved, with every key. Raises UserError."""
        from asyncrl.config.load import load_config

        return load_config(self.folder / CONFIG_FILE)

    @property
    def status(self) -> dict[str, Any]:
        """Phase, step and counts, as status.json has them; empty before the run has written any."""
        return read_status(self.folder) or {}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A dict for each step, as `pandas.DataFrame` takes them."""
        return list(self._records(METRICS_FILE))

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """A dict for each evaluation of the held-out rows, as `pandas.DataFrame` takes them."""
        return list(self._records(EVALUATIONS_FILE))

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yield a dict for each completion by step: its row, `text`, `reward`, `rewards` and `status` among others."""
        for group in self._records(SAMPLES_FILE):
            row = {key: value for key, value in group.items() if key != "completions"}
            yield from ({**row, **completion} for completion in group["completions"])

    def best(self, number: int = 5) -> list[dict[str, Any]]:
        """The samples of the highest rewards, the newest first where they are equal."""
        scored = [(place, one) for place, one in enumerate(self.samples()) if one.get("reward") is not None]
        return [one for _, one in heapq.nlargest(number, scored, key=lambda item: (item[1]["reward"], item[0]))]

    def _records(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield what a file has; nothing before the run has written it."""
        with suppress(FileNotFoundError), (self.folder / name).open("rb") as file:
            yield from filter(None, read_records(file))

    @property
    def model(self) -> Path:
        """Folder of the trained model or adapter: the end product, else the newest checkpoint's. Raises UserError."""
        export = self.folder / EXPORT_FOLDER
        return export if export.is_dir() else policy_folder(self.folder, None)

    def export(self, target: str | Path, *, step: int | None = None, merged: bool | None = None) -> Path:
        """Write the model of the newest checkpoint, or of a step, as a new folder. `merged`: an adapter merged into its
        base, or (False) by itself. Raises UserError."""
        from learner.loop.policy_export import export_policy

        export_policy(self.folder, policy_folder(self.folder, step), Path(target), merged=merged)
        return Path(target)

    def evaluate(self, *overrides: str, model: str | Path | None = None) -> list[dict[str, Any]]:
        """Score the run's model, or another one, on the held-out rows: a dict for each completion with `completion`,
        `reward` and `components`. `overrides` are those of the command line. Raises UserError."""
        if "eval" not in plugins.installed("commands"):
            raise UserError(f"scores of a model are a plug-in's. {plugins.what_to_install('commands')}")
        from tempfile import TemporaryDirectory

        from asyncrl.cli import run_command

        with TemporaryDirectory() as folder:
            file = Path(folder) / "scored.jsonl"
            given = ["--model", str(model or self.model), "--out", str(file)]
            run_command(["eval", str(self.folder / CONFIG_FILE), *given, *overrides])
            return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
