"""Pieces of a run in the shapes that trackers show: its name over resumes, its settings, its samples as a table."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image

from asyncrl.telemetry.tracker import Sample

COLUMNS = ("step", "row", "image", "prompt", "answer", "completion", "reward", "status")
"""Columns of a table of samples, which has a row for each completion."""
TEXTS = tuple(name for name in COLUMNS if name != "image")
"""Columns of a table in a tracker whose tables hold no images."""


class OnceShown:
    """A tracker that shows each step once: those that a resumed run makes again from its journal are the same."""

    _last_recorded: int

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._last_recorded:
            self._log(step, metrics)

    def evaluation(self, step: int, results: Mapping[str, float]) -> None:
        self._log(step, {f"held_out/{name}": value for name, value in results.items()})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        raise NotImplementedError


def rows(step: int, samples: Sequence[Sample], image: Callable[[Image], Any] = lambda _: None) -> list[dict[str, Any]]:
    """The table's rows, by column. `image` makes the tracker's own of a group's first picture; without a picture the
    cell is None."""
    found: list[dict[str, Any]] = []
    for sample in samples:
        record, pictures = sample.record, sample.pictures()[:1]
        group = {"step": step, "row": record.get("row_id"), "image": next(map(image, pictures), None)}
        group |= {name: record.get(name) for name in ("prompt", "answer")}
        for completion in record.get("completions", ()):
            own = {name: completion.get(name) for name in ("reward", "status")}
            found.append({**group, "completion": completion.get("text"), **own})
    return found


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `section.key` and its value, lists as text."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, bool | int | float | str) else str(value)


def kept_name(file: Path, make: Callable[[], str] = lambda: uuid.uuid4().hex[:12]) -> str:
    """The name in the tracker that all processes of a run share: what `make` made for the first of them."""
    if not file.exists():
        file.write_text(make(), encoding="utf-8")
    return file.read_text(encoding="utf-8")
