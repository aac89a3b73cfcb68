"""Cache of surveys for the next start, in a folder of the user's cache.

A file belongs to rows, processor and the settings that decide what a row becomes, all of them in its name. It counts as
long as the image files that the rows name are of the same size and age. Any of the files may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config.sections import DataConfig
from asyncrl.data.dataset import RowSource
from asyncrl.data.prompts import template_text
from asyncrl.processing.processor import PromptProcessor
from asyncrl.telemetry.jsonl import write_atomically

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "ASYNCRL_CACHE"
WORTHWHILE_S = 1.0
"""A survey that took less is not kept."""
_FORMAT = 5
_OF_THE_RUN = (
    *("train_files", "val_files", "max_train_rows", "max_val_rows"),  # of the rows themselves
    *("shuffle", "on_bad_row", "max_prompt_length", "max_response_length"),
)
"""Settings that do not change what a row becomes; the last one matters where targets are checked."""


class RowFacts(NamedTuple):
    """Remembered facts of a row."""

    tokens: int
    """Length of the prompt, images and videos included."""
    media_tokens: int
    prompt: str
    """Digest, equal for two rows whose prompts, images included, are the same to the model."""
    rest: str
    """Digest of answer, columns and target."""
    has_answer: bool
    """False where the answer is missing or null."""
    has_target: bool
    """False where the text in `data.target_key` is missing or empty."""


@dataclass
class SurveyCache:
    file: Path | None
    """None where the rows cannot be told from others, so that nothing is remembered."""
    media_keys: tuple[str, str] = ("images", "videos")
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Size in bytes and time of change in ns of the image files that rows name."""

    @classmethod
    def of(
        cls, rows: RowSource, processor: PromptProcessor, config: DataConfig, max_message_mib: int | None
    ) -> SurveyCache:
        """A survey looks whether a message of `max_message_mib` holds a row, or at targets, where this is None."""
        checked = max_message_mib is None
        media_keys = (config.image_key, config.video_key)
        source = rows.fingerprint
        if source is None:
            return cls(None, media_keys)
        left_out = set(_OF_THE_RUN[:-1] if checked else _OF_THE_RUN)
        template = template_text(config.format_prompt)
        described = {
            "format": _FORMAT,
            "rows": source,
            "settings": config.model_dump(mode="json", exclude=left_out),
            "template": template,
            "processor": [processor.fingerprint, processor.family, processor.placeholder_ids, processor.sees_images],
            "day": processor.template.day if processor.template.writes_date else "",
            "versions": [version(name) for name in ("transformers", "tokenizers", "pillow")],
            "targets": checked,
            "message": max_message_mib,
        }
        name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]
        return cls(cache_folder() / "rows" / f"{name}.json", media_keys)

    def load(self) -> list[RowFacts | None] | None:
        """Return what is remembered: facts of each row, None for rows to look at. None where nothing is."""
        if self.file is None or not self.file.is_file():
            return None
        try:
            kept = json.loads(self.file.read_bytes())
            self.files = {path: (size, changed) for path, (size, changed) in kept["files"].items()}
            facts = [None if row is None else RowFacts(*row) for row in kept["rows"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s cannot be used (%s): the rows are measured again", self.file, error)
            self.files = {}
            return None
        if any(_state(path) != state for path, state in self.files.items()):
            logger.info("image files have changed since the rows were measured: they are measured again")
            self.files = {}
            return None
        logger.info("%d of %d rows were measured before: %s", len(facts) - facts.count(None), len(facts), self.file)
        return facts

    def note_files(self, row: Any) -> None:
        """Note the image files that a row names."""
        if self.file is None or not isinstance(row, Mapping):
            return
        for key in self.media_keys:
            for path in _paths(row.get(key)):
                if path not in self.files and (state := _state(path)) is not None:
                    self.files[path] = state

    def save(self, facts: Sequence[RowFacts | None], seconds: float) -> None:
        """Remember a survey that took so long. A folder that cannot be written costs the next start that time."""
        if self.file is None or seconds < WORTHWHILE_S:
            return
        kept = {"files": self.files, "rows": facts}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file, json.dumps(kept).encode(), durable=False)
        except OSError as error:
            logger.warning(
                "what was measured of the rows cannot be kept: %s (another folder: %s)", error, FOLDER_VARIABLE
            )
        else:
            logger.info("measured in %.0f s; remembered in %s", seconds, self.file)


def cache_folder() -> Path:
    """$ASYNCRL_CACHE, else the folder asyncrl in the user's cache ($XDG_CACHE_HOME or ~/.cache)."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "asyncrl"


def _paths(value: Any) -> Iterator[str]:
    """Find the file names in a cell of images or videos. `RowSource` has made them absolute."""
    if isinstance(value, str):
        if value.startswith(os.sep) and len(value) < 4096:
            yield value
    elif isinstance(value, Mapping):
        if value.get("bytes") is None:
            yield from _paths(value.get("path"))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _paths(one)


def _state(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_size, found.st_mtime_ns
