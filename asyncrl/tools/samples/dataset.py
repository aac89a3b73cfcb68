"""The rows that a run was made of, opened for the first one that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config.data import DataConfig
from asyncrl.errors import UserError

if TYPE_CHECKING:
    from asyncrl.data.dataset import RowSource
    from asyncrl.data.order import DataOrder
    from asyncrl.data.prompts import PromptRenderer, RenderedPrompt


class RunRows:
    """What cannot be read is None or missing, and `problem` says why."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]):
        """`config` is the content of the run's config.yaml; empty if there is none."""
        self._data = DataConfig.model_validate(config["data"]) if config else None
        self._seed = config["trainer"]["seed"] if config else 0
        self.problem = "" if config else f"{run_dir} has no config.yaml that names the data set"

    def blobs(self, row_id: str) -> dict[str, bytes]:
        """Encoded images and frames of a row, by hash."""
        if self._opened is None:
            return {}
        rows, _, _ = self._opened
        found: dict[str, bytes] = {}
        for row in rows.places_of(row_id):
            rendered = self.prompt(row)
            found |= rendered.blobs if rendered else {}
        return found

    def row_at(self, position: int) -> int | None:
        """The row at a place in the data order."""
        if self._opened is None or self._data is None:
            return None
        if self._data.filter_overlong_prompts:
            self.problem = "which row it was is not known: data.filter_overlong_prompts has left some out"
            return None
        return self._opened[1].row_at(position)

    def prompt(self, row: int) -> RenderedPrompt | None:
        if self._opened is None:
            return None
        rows, _, renderer = self._opened
        try:
            return renderer.render(rows[row], rows.row_id(row))
        except (UserError, OSError) as problem:
            self.problem = f"its row cannot be read: {problem}"
            return None

    @cached_property
    def _opened(self) -> tuple[RowSource, DataOrder, PromptRenderer] | None:
        if self._data is None:
            return None
        from asyncrl.data.dataset import open_train
        from asyncrl.data.order import DataOrder
        from asyncrl.data.prompts import PromptRenderer

        try:
            rows = open_train(self._data)
            return rows, DataOrder(len(rows), self._seed, self._data.shuffle), PromptRenderer(self._data)
        except (UserError, OSError) as problem:
            self.problem = f"the data set of config.yaml cannot be opened in {Path.cwd()}: {problem}"
            return None
