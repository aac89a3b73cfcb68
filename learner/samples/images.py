"""Images of prompts, by content hash: from the run directory, else from the data set that the run was made of."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import UserError
from asyncrl.telemetry.recorder import IMAGES_FOLDER
from learner.samples.model import SampleImage

if TYPE_CHECKING:
    from asyncrl.config.data import DataConfig
    from asyncrl.data.dataset import RowSource
    from asyncrl.data.prompts import PromptRenderer


class SampleImages:
    """The data set is opened for the first image that is not in the run directory."""

    def __init__(self, run_dir: Path, config: DataConfig | None):
        self._folder = run_dir / IMAGES_FOLDER
        self._config = config
        self._problem = "" if config else f"{run_dir} has no config.yaml that names the data set"

    def find(self, digest: str, row_id: str, frames: int = 0) -> SampleImage:
        for path in self._folder.glob(f"{digest}.*"):
            return SampleImage(digest, path.read_bytes(), frames=frames)
        data = None if not row_id else self._of_row(row_id).get(digest)
        problem = "" if data is not None else self._why_not(row_id)
        return SampleImage(digest, data, problem, frames)

    def _of_row(self, row_id: str) -> dict[str, bytes]:
        """Encoded images and frames by hash; empty where the row cannot be read."""
        opened = self._opened
        if opened is None:
            return {}
        rows, renderer = opened
        found: dict[str, bytes] = {}
        try:
            for index in rows.places_of(row_id):
                found |= renderer.render(rows[index], row_id).blobs
        except (UserError, OSError) as problem:
            self._problem = f"its row cannot be read: {problem}"
        return found

    @cached_property
    def _opened(self) -> tuple[RowSource, PromptRenderer] | None:
        if self._config is None:
            return None
        from asyncrl.data.dataset import open_train
        from asyncrl.data.prompts import PromptRenderer

        try:
            return open_train(self._config), PromptRenderer(self._config)
        except UserError as problem:
            self._problem = f"the data set of config.yaml cannot be opened from {Path.cwd()}: {problem}"
            return None

    def _why_not(self, row_id: str) -> str:
        if not row_id:
            return "it is not in the run directory, and the row is not known before the step is trained"
        return self._problem or f"row {row_id} has other images now: the data set has changed"
