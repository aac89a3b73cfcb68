"""Images of prompts, by content hash: from the run directory, else from the data set that the run was made of."""

from __future__ import annotations

from pathlib import Path

from asyncrl.data.images import content_hash
from asyncrl.journal.sample_rows import PromptText
from asyncrl.telemetry.recorder import IMAGES_FOLDER
from asyncrl.tools.samples.dataset import RunRows
from asyncrl.tools.samples.model import SampleImage


class SampleImages:
    def __init__(self, run_dir: Path, rows: RunRows):
        self._folder = run_dir / IMAGES_FOLDER
        self._rows = rows

    def of(self, prompt: PromptText) -> tuple[SampleImage, ...]:
        """Its images, then the first frames of its videos."""
        wanted = [*((digest, 0) for digest in prompt.images), *prompt.videos]
        found = {digest: data for digest, _ in wanted if (data := self._stored(digest)) is not None}
        if prompt.row_id and any(digest not in found for digest, _ in wanted):
            found |= self._rows.blobs(prompt.row_id)
        return tuple(
            SampleImage(digest, found.get(digest), "" if digest in found else self._why_not(prompt), frames)
            for digest, frames in wanted
        )

    def _stored(self, digest: str) -> bytes | None:
        for path in self._folder.glob(f"{digest}.*") if digest else ():
            if content_hash(data := path.read_bytes()) == digest:
                return data
        return None

    def _why_not(self, prompt: PromptText) -> str:
        changed = f"row {prompt.row_id} has other images now: the data set has changed"
        return self._rows.problem or (changed if prompt.row_id else "it is not known which row it belongs to")
